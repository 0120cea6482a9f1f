"""Check that an engine computes with the weights it was given: log-probs of a fixed prompt, there and in the trainer.

vLLM fuses and repacks weights after loading, so the tensors that its kernels read cannot be compared with ours. (An
output head did keep its old weights in such a packed copy.) Every weight takes part in the log-probs of the probe,
except the embeddings of other tokens.

Log-probs change little in one training step. Therefore an engine starts with weights that are NaN: a tensor that keeps
some of them makes the probe NaN. First every parameter is overwritten in place, which finds tensors that no push
reaches. (vLLM's own initial values are about zero, and would pass for a bias.) Then NaN weights are pushed, which finds
tensors that only the first push reaches. A packed copy that no push reaches keeps the start's values, and differs.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

import torch

from threepo.errors import UserError
from threepo.models.policy import Policy

LENGTH = 32
"""Tokens of the probe; fewer where the model's context is shorter."""
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Largest mean difference in log-prob (nats). Seen on a CPU with the models of tests/rollout/test_vllm.py: between
equal weights 4e-7 in float32 and 0.011 in bfloat16."""
_GOLDEN = 0.6180339887498949


def probe_tokens(policy: Policy, room: int) -> tuple[int, ...]:
    """The fixed prompt, at most `room` tokens: spread over the vocabulary, so that its tokens differ."""
    vocabulary = policy.model.get_input_embeddings().weight.shape[0]
    return tuple(int(vocabulary * (_GOLDEN * (i + 1) % 1.0)) for i in range(min(LENGTH, room)))


@torch.no_grad()
def expected_logprobs(policy: Policy, weights: Mapping[str, torch.Tensor], tokens: Sequence[int]) -> torch.Tensor:
    """Log-probs [len(tokens) - 1] (float32, CPU) of tokens 1, 2, ... by the trainer's model under `weights`.

    The model itself does not change. `weights` has a tensor for every parameter, in the engine's dtype, in which the
    forward pass runs.
    """
    ids = torch.tensor([tokens], device=policy.device)
    on_device = {name: value.to(policy.device) for name, value in weights.items()}
    output = torch.func.functional_call(policy.model, on_device, kwargs={"input_ids": ids, "use_cache": False})
    logprobs = output.logits[0, :-1].float().log_softmax(dim=-1)
    return logprobs.gather(1, ids[0, 1:, None])[:, 0].cpu()  # type: ignore[no-any-return]


def check_probe(expected: torch.Tensor, measured: Sequence[float], tolerance: float, what: str) -> None:
    """Raise `UserError` unless log-probs of the probe agree; `what` names the weights."""
    if not expected.isfinite().all():
        raise UserError(f"the weights of {what} give log-probs that are not finite: training has diverged")
    difference = (torch.tensor(measured) - expected).abs()
    mean, most = difference.mean().item(), difference.max().item()
    if not mean <= tolerance:  # also where it is not a number
        raise UserError(
            f"engine.kind = 'vllm': the engine does not compute with the weights of {what} that it was given: its "
            f"log-probs of a probe are off by {mean:.2g} on average and {most:.2g} at most (allowed: "
            f"engine.vllm.probe_tolerance, {tolerance:g}). Either this vLLM reloads this model wrongly (use another "
            f"version, or engine.kind = 'local'), or it computes too coarsely (engine.dtype = 'float32')"
        )


def all_nan(weights: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors like these, one at a time, in which every floating-point number is NaN."""
    for name, value in weights.items():
        yield name, torch.full_like(value, math.nan) if value.is_floating_point() else value


@torch.no_grad()
def fill_with_nan(model: torch.nn.Module) -> None:
    """Overwrite the floating-point parameters of a model in place."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.fill_(math.nan)
