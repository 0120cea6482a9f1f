"""Log-probs and entropy of tokens from their logits: one reading of them forward, one back.

torch makes half a dozen float32 tensors of the size of the logits on the way, and reads and writes each of them. These
operators are for CUDA; tensors without memory, as the plan of memory has them, pass through them anywhere. They agree
with `logprobs.plain_scores` up to rounding, and leave out logits of -inf. K tokens, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor

from threepo.posterior.kernels import triton_kernels


def serves(device: torch.device) -> bool:
    """True if tensors of this device can be scored so."""
    kernels = triton_kernels() if device.type == "cuda" else None
    return kernels is not None and kernels.available


@torch.library.custom_op("threepo::token_scores", mutates_args=())
def token_scores(logits: Tensor, targets: Tensor, temperature: float) -> list[Tensor]:
    """[K] each, float32, for logits [K, V] / temperature: log-prob of the target, entropy, and more.

    What follows is for the backward pass: the largest logit, and the logarithm of the sum of exponentials below it.
    """
    from threepo.models import triton_scores

    out = [torch.empty(len(logits), dtype=torch.float32, device=logits.device) for _ in range(4)]
    triton_scores.forward(logits.contiguous(), targets.contiguous(), temperature, out)
    return out


@torch.library.custom_op("threepo::token_scores_backward", mutates_args=())
def _gradient(logits: Tensor, targets: Tensor, temperature: float, kept: list[Tensor], grads: list[Tensor]) -> Tensor:
    """The gradient of logits; `kept` are the entropy and what follows it above, `grads` of log-prob and entropy."""
    from threepo.models import triton_scores

    out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    triton_scores.backward(out, logits.contiguous(), targets.contiguous(), temperature, *kept, *grads)
    return out


@token_scores.register_fake
def _(logits: Tensor, targets: Tensor, temperature: float) -> list[Tensor]:
    return [logits.new_empty(len(logits), dtype=torch.float32) for _ in range(4)]


@_gradient.register_fake
def _(logits: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    logits, targets, ctx.temperature = inputs
    ctx.save_for_backward(logits, targets, *output[1:])


def _back(ctx: Any, grads: list[Tensor]) -> tuple[Tensor, None, None]:
    logits, targets, *kept = ctx.saved_tensors
    return _gradient(logits, targets, ctx.temperature, kept, [g.contiguous() for g in grads[:2]]), None, None


token_scores.register_autograd(_back, setup_context=_keep)
