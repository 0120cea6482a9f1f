"""Check that an engine computes with the weights it got: log-probs of a fixed prompt, there and in the trainer.

vLLM fuses and repacks weights after loading, so the tensors that its kernels read cannot be compared with ours. Every
weight takes part in the log-probs of the prompt, except the embeddings of other tokens.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from threepo.errors import UserError
from threepo.models.policy import Policy

LENGTH = 128
"""Tokens of the fixed prompt; fewer where the model's context is shorter."""
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Largest mean difference in log-prob (nats). With the models of tests/rollout/test_vllm.py on a CPU, equal weights
differ by 4e-7 in float32 and 0.011 in bfloat16."""
FALSE_ALARMS = 1e-6
"""Alarms a push while the weights are right, at most, if rounding is as assumed."""
MARGIN = 2.0
"""Rounding is assumed to be so many times what earlier pushes have shown."""
REMEMBERED = 20
"""Pushes over which the size of rounding is averaged, about."""
FINEST = 1e-6
"""Least rounding that is assumed (nats)."""


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


class WeightCheck:
    """A sequential test, after every push, of whether an engine computes with the weights that it was given.

    An engine's log-probs differ from the trainer's by rounding, whose size earlier pushes have shown. If they fit other
    weights better (another draw of this push, a draw of the push before, or none that is known), the likelihood ratio
    R is evidence for these. It adds up over the pushes to one place, E = (E + 1) R, and E above 3 / `FALSE_ALARMS` is
    an alarm: with right weights, one alarm takes at least 1 / `FALSE_ALARMS` pushes on average (the Shiryaev-Roberts
    procedure, as in Shin, Ramdas and Rinaldo, E-detectors, 2022, equation 12). Differences are taken as normal,
    with `MARGIN` times the deviation that was seen; beyond `tolerance` nats on average they are refused in any case.
    """

    def __init__(self, tolerance: float) -> None:
        self._tolerance = tolerance
        self._names: list[str] = []
        self._expected: list[torch.Tensor] = []
        self._earlier: list[torch.Tensor] = []
        self._square, self._pushes = (tolerance / 5) ** 2, 0
        """Mean squared difference by rounding; before the first push it is a guess."""
        self._evidence: dict[tuple[str, int, str], float] = {}
        """log E by place, index of the weights, and explanation."""

    def expect(self, names: Sequence[str], expected: Sequence[torch.Tensor]) -> None:
        """Begin a push of weights with these names, under which the trainer has these log-probs [T] of the prompt."""
        self._earlier, self._expected, self._names = self._expected, list(expected), list(names)

    def check(self, index: int, measured: Sequence[float], place: str = "") -> None:
        """Raise `UserError` unless the log-probs that the engine has at `place` fit the weights of this index."""
        what, expected = self._names[index] + (place and f" on {place}"), self._expected[index]
        if not expected.isfinite().all():
            raise UserError(f"the weights of {what} give log-probs that are not finite: training has diverged")
        found = torch.tensor(measured, dtype=torch.float64)
        difference = (found - expected).abs()
        mean, most = difference.mean().item(), difference.max().item()
        off = f"its log-probs of a fixed prompt are off by {mean:.2g} on average and {most:.2g} at most"
        wrong = f"engine.kind = 'vllm': the engine does not compute with the weights of {what} that it was given"
        if not mean <= self._tolerance:  # also where it is not a number
            raise UserError(
                f"{wrong}: {off} (allowed: engine.vllm.probe_tolerance, {self._tolerance:g}). Either this vLLM reloads "
                f"this model wrongly (use another version, or engine.kind = 'local'), or it computes too coarsely "
                f"(set engine.dtype = 'float32')"
            )
        others = {name: x for name, x in zip(self._names, self._expected, strict=True) if x is not expected}
        own, variance = found - expected, max(MARGIN**2 * self._square, FINEST**2)
        ratios = {
            "another draw of this push": known_ratio(own, [found - x for x in others.values()], variance),
            "a draw of the push before": known_ratio(own, [found - x for x in self._earlier], variance),
            "no weights that this run knows": unknown_ratio(own, variance),
        }
        for explanation, ratio in ratios.items():
            key = place, index, explanation
            self._evidence[key] = math.log1p(math.exp(min(self._evidence.get(key, -math.inf), 700.0))) + ratio
            if self._evidence[key] > math.log(len(ratios) / FALSE_ALARMS):
                fits = explanation
                if fits == "another draw of this push":
                    fits = min(others, key=lambda name: float((found - others[name]).square().sum()))
                seen = f"where rounding has been {math.sqrt(self._square):.2g} (root mean square)"
                raise UserError(f"{wrong}: {off}, {seen}; they fit {fits}. Please report this")
        self._pushes += 1
        square = min(float(difference.square().mean()), 4 * max(self._square, FINEST**2))
        self._square += (square - self._square) / min(self._pushes, REMEMBERED)


def known_ratio(own: torch.Tensor, others: Sequence[torch.Tensor], variance: float) -> float:
    """Log of a likelihood ratio: the engine has one of several other weights, each equally likely, or the right ones.

    `own` and `others` are the differences [T] of its log-probs from those of the right weights and of each other. The
    ratio is 0 without others.
    """
    if not others:
        return -math.inf
    gains = torch.stack([(own.square() - other.square()).sum() for other in others]) / (2 * variance)
    return float(gains.logsumexp(dim=0)) - math.log(len(others))


def unknown_ratio(own: torch.Tensor, variance: float) -> float:
    """Log of a likelihood ratio: the differences `own` [T] have twice their deviation, or this deviation."""
    return float(own.square().sum()) / (2 * variance) * (1 - 1 / 4) - len(own) * math.log(2)
