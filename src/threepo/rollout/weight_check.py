"""Check that an engine computes with the weights it got: log-probs of a fixed prompt, there and in the trainer.

vLLM fuses and repacks weights after loading, so the tensors that its kernels read cannot be compared with ours. Every
weight takes part in the log-probs of the prompt, except the embeddings of other tokens.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from threepo.errors import UserError
from threepo.models.policy import Policy

LENGTH = 32
"""Tokens of the fixed prompt; fewer where the model's context is shorter."""
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Largest mean difference in log-prob (nats). With the models of tests/rollout/test_vllm.py on a CPU, equal weights
differ by 4e-7 in float32 and 0.011 in bfloat16."""


def fixed_prompt(policy: Policy, room: int) -> tuple[int, ...]:
    """The fixed prompt, at most `room` tokens, spread over the vocabulary so that they differ."""
    vocabulary = policy.model.get_input_embeddings().weight.shape[0]
    return tuple(int(vocabulary * (0.6180339887498949 * i % 1.0)) for i in range(1, min(LENGTH, room) + 1))


@torch.no_grad()
def expected_logprobs(
    model: Any, weights: Mapping[str, torch.Tensor], tokens: Sequence[int], device: torch.device
) -> torch.Tensor:
    """Log-probs [len(tokens) - 1] (float32, CPU) of tokens 1, 2, ... by a model under `weights`, computed on `device`.

    The model itself does not change. `weights` has tensors for its parameters; the forward pass runs in their dtype.
    """
    ids = torch.tensor([tokens], device=device)
    on_device = {name: value.to(device) for name, value in weights.items()}
    output = torch.func.functional_call(model, on_device, kwargs={"input_ids": ids, "use_cache": False})
    logprobs = output.logits[0, :-1].float().log_softmax(dim=-1)
    return logprobs.gather(1, ids[0, 1:, None])[:, 0].cpu()  # type: ignore[no-any-return]


def check_logprobs(expected: torch.Tensor, measured: Sequence[float], tolerance: float, what: str) -> None:
    """Raise `UserError` unless the log-probs of the prompt agree; `what` names the weights."""
    if not expected.isfinite().all():
        raise UserError(f"the weights of {what} give log-probs that are not finite: training has diverged")
    difference = (torch.tensor(measured) - expected).abs()
    mean, most = difference.mean().item(), difference.max().item()
    if not mean <= tolerance:  # also where it is not a number
        raise UserError(
            f"engine.kind = 'vllm': the engine does not compute with the weights of {what} that it was given: its "
            f"log-probs of a fixed prompt are off by {mean:.2g} on average and {most:.2g} at most (allowed: "
            f"engine.vllm.probe_tolerance, {tolerance:g}). Either this vLLM reloads this model wrongly (use another "
            f"version, or engine.kind = 'local'), or it computes too coarsely (set engine.dtype = 'float32')"
        )
