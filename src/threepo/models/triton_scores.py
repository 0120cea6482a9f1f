"""Log-probs, entropy and self-certainty of tokens from their logits, in Triton: one reading forward, one back.

torch makes half a dozen float32 tensors of the size of the logits on the way, and reads and writes each of them; here
a program keeps three running sums of one token's row. The numbers are those of `logprobs.plain_scores` to rounding:
tests/models/triton_scores_interpreted.py holds them against float64. Operators of torch, so that tensors without memory
can pass through them. K tokens, V vocabulary.
"""

# Triton reads annotations as its own, so the kernels have none of ours.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import math
from typing import Any

import torch
import triton
import triton.language as tl

BLOCK = 4096
"""Logits at a time."""
_OPTIONS = {"block": BLOCK, "num_warps": 8, "enable_fp_fusion": False}
"""Of every launch. Fused, the largest logit would not cancel itself: it is the rounded product, x * inverse is not."""
_LOWEST = tl.constexpr(-3e38)  # finite: no difference of two is NaN
_jit: Any = triton.jit


@_jit
def _forward(logits, targets, inverse, logprobs, entropy, certainty, top, log_sum, vocabulary, block: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    logits += token * vocabulary
    # With x - most and its exponential e: the sums of e and of e * (x - most), where `most` is the largest x so far.
    most = tl.full((), _LOWEST, tl.float32)
    mass, moment, total = tl.zeros_like(most), tl.zeros_like(most), tl.zeros_like(most)
    for start in range(0, vocabulary, block):
        at = start + tl.arange(0, block)
        x = tl.load(logits + at, mask=at < vocabulary, other=0.0).to(tl.float32) * inverse
        higher = tl.maximum(most, tl.max(tl.where(at < vocabulary, x, _LOWEST)))
        shrunk, lowered = tl.exp(most - higher), most - higher
        moment = shrunk * (moment + lowered * mass)
        distance = x - higher
        e = tl.where(at < vocabulary, tl.exp(distance), 0.0)
        mass = shrunk * mass + tl.sum(e)
        moment += tl.sum(tl.where(e > 0, e * distance, 0.0))  # not 0 * inf, of a token that cannot be
        total += tl.sum(x)
        most = higher
    log_mass = tl.log(mass)
    chosen = tl.load(logits + tl.load(targets + token)).to(tl.float32) * inverse
    tl.store(logprobs + token, chosen - most - log_mass)
    tl.store(entropy + token, log_mass - moment / mass)
    tl.store(certainty + token, log_mass + most - total / vocabulary)
    tl.store(top + token, most)
    tl.store(log_sum + token, log_mass)


@_jit
def _backward(
    grad, logits, targets, inverse, entropy, top, log_sum, grad_logprobs, grad_entropy, vocabulary,
    block: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    logits += token * vocabulary
    grad += token * vocabulary
    target, h = tl.load(targets + token), tl.load(entropy + token)
    to_logprob, to_entropy = tl.load(grad_logprobs + token), tl.load(grad_entropy + token)
    most, log_mass = tl.load(top + token), tl.load(log_sum + token)
    for start in range(0, vocabulary, block):
        at = start + tl.arange(0, block)
        x = tl.load(logits + at, mask=at < vocabulary, other=0.0).to(tl.float32) * inverse
        logprob = x - most - log_mass
        p = tl.exp(logprob)
        moved = tl.where(p > 0, -p * (to_logprob + to_entropy * (logprob + h)), 0.0)
        moved = tl.where(at == target, moved + to_logprob, moved) * inverse
        tl.store(grad + at, moved.to(grad.dtype.element_ty), mask=at < vocabulary)


@torch.library.custom_op("threepo::token_scores", mutates_args=())
def token_scores(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> list[torch.Tensor]:
    """[K] each, float32, for logits [K, V] / temperature: log-prob of the target, entropy, self-certainty, and more.

    What follows is for the backward pass: the largest logit, and the logarithm of the sum of exponentials below it.
    """
    logits = logits.contiguous()
    out = [torch.empty(len(logits), dtype=torch.float32, device=logits.device) for _ in range(5)]
    vocabulary = logits.shape[1]
    with torch.cuda.device_of(logits):
        _forward[(len(logits),)](logits, targets, 1 / temperature, *out, vocabulary, **_OPTIONS)
    out[2].sub_(math.log(vocabulary))
    return out


@torch.library.custom_op("threepo::token_scores_backward", mutates_args=())
def _gradient(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float, kept: list[torch.Tensor], grads: list[torch.Tensor]
) -> torch.Tensor:
    """The gradient of logits; `kept` are the entropy and what follows it above, `grads` of log-prob and entropy."""
    logits = logits.contiguous()
    out, vocabulary = torch.empty_like(logits), logits.shape[1]
    with torch.cuda.device_of(logits):
        _backward[(len(logits),)](out, logits, targets, 1 / temperature, *kept, *grads, vocabulary, **_OPTIONS)
    return out


@token_scores.register_fake
def _(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> list[torch.Tensor]:
    return [logits.new_empty(len(logits), dtype=torch.float32) for _ in range(5)]


@_gradient.register_fake
def _(logits: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(logits)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    logits, targets, ctx.temperature = inputs
    ctx.save_for_backward(logits, targets, output[1], output[3], output[4])


def _back(ctx: Any, grads: list[torch.Tensor]) -> tuple[torch.Tensor, None, None]:
    logits, targets, *kept = ctx.saved_tensors
    needed = [grad.contiguous() for grad in grads[:2]]
    return _gradient(logits, targets, ctx.temperature, kept, needed), None, None


token_scores.register_autograd(_back, setup_context=_keep)
