"""Whether an engine holds the weights it was given: log-probs of a fixed prompt, there and in the trainer.

A comparison of the weights themselves would prove little. vLLM fuses and repacks them after loading, so the tensors
that its kernels read are not those that can be read back; the failure that was seen (an output head that kept its old
weights) was in just such a packed copy. What the model computes cannot be wrong in secret: every weight but the
embeddings of other tokens takes part in the log-probs of the probe.

Log-probs that agree say little where old and new weights are close, as they are from one training step to the next.
So an engine begins with a rehearsal: before its first weights it is given `scrambled` ones, far from all others. A
tensor that a push does not reach then keeps those, and the probe is far off.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch

from threepo.errors import UserError
from threepo.models.policy import Policy

LENGTH = 32
"""Tokens of the probe; fewer where the model's context is shorter."""
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Largest mean difference in log-prob (nats). Seen on a CPU with the models of tests/rollout/test_vllm.py: between
equal weights 4e-7 in float32 and 0.011 in bfloat16; with any one tensor left as the rehearsal had it, over 0.3."""
_GOLDEN = 0.6180339887498949


def probe_tokens(policy: Policy, room: int) -> tuple[int, ...]:
    """The fixed prompt, at most `room` tokens: spread over the vocabulary, so that its tokens differ."""
    vocabulary = policy.model.get_input_embeddings().weight.shape[0]
    return tuple(int(vocabulary * (_GOLDEN * (i + 1) % 1.0)) for i in range(min(LENGTH, room)))


@torch.no_grad()
def expected_logprobs(policy: Policy, weights: Mapping[str, torch.Tensor], tokens: Sequence[int]) -> torch.Tensor:
    """Log-probs [len(tokens) - 1] (float32, CPU) of tokens 1, 2, ... by the trainer's model under `weights`.

    The model itself, its weights and their gradients are left alone. `weights`: a tensor for every parameter, in the
    engine's dtype; the pass runs in that dtype.
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


def scrambled(weights: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor far from what it is, one at a time: 3 (1 - x), reversed along the last dimension.

    Norms, which are about 1, come near 0; biases, which are about 0, become 3; matrices are of another order.
    """
    for name, value in weights.items():
        yield name, 3 - 3 * value.flip(-1) if value.is_floating_point() and value.dim() else value
