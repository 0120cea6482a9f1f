"""Check that an engine computes with the weights it got: log-probs of a fixed prompt, there and in the trainer.

vLLM fuses and repacks weights after loading, so the tensors that its kernels read cannot be compared with ours. Every
weight takes part in the log-probs of the prompt, except the embeddings of other tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from threepo.errors import UserError
from threepo.types import Draw

if TYPE_CHECKING:
    from threepo.models.policy import Policy

LENGTH = 128
"""Tokens of the fixed prompt; fewer where the model's context is shorter."""
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Largest mean difference in log-prob (nats). With the model of tests/rollout/faults.py on a CPU, equal weights differ
by 3e-7 in float32 and 0.0045 in bfloat16 (root mean square)."""
MARGIN = 2.0
"""Other weights are considered if their log-probs are so many times as far away as rounding."""
BETTER = math.log(1e6)
"""Log of the likelihood ratio from which log-probs are said to fit other weights."""
UNUSUAL, KNOWN_AFTER = 6.0, 5
"""Differences so many times as large as rounding are an error, once so many checks have shown how large that is."""
REMEMBERED = 20
"""Checks over which the size of rounding is averaged, about."""
FINEST = 1e-6
"""Least rounding that is assumed (nats)."""


def fixed_prompt(policy: Policy, room: int) -> tuple[int, ...]:
    """The fixed prompt, at most `room` tokens, spread over the vocabulary so that they differ."""
    return spread_tokens(policy.model.get_input_embeddings().weight.shape[0], min(LENGTH, room))


def spread_tokens(vocabulary: int, count: int) -> tuple[int, ...]:
    """As many tokens, spread over a vocabulary of this size."""
    return tuple(int(vocabulary * (0.6180339887498949 * i % 1.0)) for i in range(1, count + 1))


def expected_logprobs(
    model: Any, weights: Mapping[str, torch.Tensor], tokens: Sequence[int], device: torch.device
) -> torch.Tensor:
    """Log-probs [len(tokens) - 1] (float32, CPU) of tokens 1, 2, ... by a model under `weights`, computed on `device`.

    The model itself does not change. `weights` has tensors for its parameters; the forward pass runs in their dtype.
    """
    return all_logprobs(model, weights, tokens, device)[0]


@torch.no_grad()
def all_logprobs(
    model: Any, weights: Mapping[str, torch.Tensor], tokens: Sequence[int], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `expected_logprobs` returns, and the log-probs [V] of the token that would come next."""
    ids = torch.tensor([tokens], device=device)
    on_device = {name: value.to(device) for name, value in weights.items()}
    output = torch.func.functional_call(model, on_device, kwargs={"input_ids": ids, "use_cache": False})
    logprobs = output.logits[0].float().log_softmax(dim=-1)
    return logprobs[:-1].gather(1, ids[0, 1:, None])[:, 0].cpu(), logprobs[-1].cpu()


@dataclass
class Rounding:
    """The size of the differences that rounding makes between an engine's and the trainer's log-probs."""

    square: float
    """Mean squared difference; a guess until the first check."""
    checks: int = 0

    def learn(self, square: float) -> None:
        """Take a mean squared difference into the average, which a single large one changes little."""
        self.checks += 1
        if self.checks > 1:
            square = min(square, 4 * max(self.square, FINEST**2))
        self.square += (square - self.square) / min(self.checks, REMEMBERED)


class WeightCheck:
    """Tells, after every push, whether an engine computes with the weights that it was given.

    Its log-probs of a fixed prompt differ from the trainer's by rounding. An error is raised if they are off by more
    than `tolerance` on average, if they fit other weights far better (another draw of this push, or weights of the push
    before), or if they are off by much more than earlier pushes of such weights were. Weights whose log-probs are
    about as near as rounding are not told apart.
    """

    subject = "engine.kind = 'vllm': the engine"
    setting = "engine.vllm.probe_tolerance"
    known = "pushes before were off by"
    causes = (
        "Either this vLLM reloads this model wrongly (use another version, or engine.kind = 'local'), or it computes "
        "too coarsely (set engine.dtype = 'float32')"
    )

    def __init__(self, tolerance: float) -> None:
        self._tolerance = tolerance
        self._names: list[str] = []
        self._kinds: list[str] = []
        self._expected: list[torch.Tensor] = []
        self._earlier: list[torch.Tensor] = []
        self._rounding: dict[str, Rounding] = {}
        """By kind of weights: the mean, draws, and draws of each arm, since much noise makes rounding larger."""

    def expect(self, draws: Sequence[Draw | None], step: int, expected: Sequence[torch.Tensor]) -> None:
        """Begin a push of draws (None: the mean), under which the trainer has these log-probs [T] of the prompt."""
        self._names = [f"{draw or 'the mean'} at step {step}" for draw in draws]
        self._kinds = [str(draw.arm or "draw") if draw else "mean" for draw in draws]
        self._earlier, self._expected = self._expected, [x.double() for x in expected]

    def check(self, index: int, measured: Sequence[float], place: str = "") -> None:
        """Raise `UserError` unless the log-probs that the engine has at `place` fit the draw of this index."""
        what, expected = self._names[index] + (place and f" on {place}"), self._expected[index]
        if not expected.isfinite().all():
            raise UserError(f"the weights of {what} give log-probs that are not finite: training has diverged")
        found = torch.tensor(measured, dtype=torch.float64)
        difference = (found - expected).abs()
        mean, own = difference.mean().item(), difference.square().mean().item()
        problem = (
            f"{self.subject} does not compute with the weights of {what} that it was given: its log-probs of a fixed "
            f"prompt are off by {mean:.2g} on average and {difference.max().item():.2g} at most"
        )
        rounding = self._rounding.setdefault(self._kinds[index], Rounding((self._tolerance / 5) ** 2))
        usual = max(rounding.square, FINEST**2)
        others = dict(zip(self._names, self._expected, strict=True))
        others |= {f"weights of the push before, number {i}": x for i, x in enumerate(self._earlier)}
        for name, x in others.items():
            fits, apart = (found - x).square().mean().item(), (expected - x).square().mean().item()
            gain = len(found) * (own - fits) / (2 * max(MARGIN**2 * usual, own))  # normal, with the larger deviation
            if apart > MARGIN**2 * usual and gain > BETTER:
                raise UserError(f"{problem}; they fit {name}, which are off by {math.sqrt(fits):.2g}. {self.causes}")
        if not mean <= self._tolerance:  # also where it is not a number
            raise UserError(f"{problem} (allowed: {self.setting}, {self._tolerance:g}). {self.causes}")
        if rounding.checks >= KNOWN_AFTER and own > UNUSUAL**2 * usual:
            seen = f"{math.sqrt(own):.2g} (root mean square), where {self.known} {math.sqrt(usual):.2g}"
            raise UserError(f"{problem}: {seen}. {self.causes}")
        rounding.learn(own)
