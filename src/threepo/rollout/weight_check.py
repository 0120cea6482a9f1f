"""Check that an engine computes with the weights it got: log-probs of a fixed prompt, there and in the trainer.

Every weight takes part in the log-probs of the prompt, except the embeddings of other tokens. rollout/bit_sums.py
compares the weights themselves, where they can be read.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from threepo.errors import UserError
from threepo.types import Draw

if TYPE_CHECKING:
    from threepo.models.policy import Policy

LENGTH = 129
"""Tokens of the fixed prompt, a block of vLLM's prefix cache on a CPU and one more; fewer in a shorter context."""
FOLLOWING = 16
"""Tokens whose log-probs after the prompt are compared; vLLM shows at most 20."""
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Largest mean difference in log-prob (nats). With the model of tests/rollout/faults.py on a CPU, equal weights differ
by 3e-7 in float32 and 0.0045 in bfloat16 (root mean square)."""
MARGIN = 2.0
"""Other weights are considered if their log-probs are so many times as far away as rounding."""
BETTER = math.log(1e6)
"""Log of the likelihood ratio from which log-probs are said to fit other weights."""
UNUSUAL, KNOWN_AFTER, FOLLOWING_KNOWN_AFTER = 6.0, 5, 20
"""Differences so many times as large as rounding are an error, once so many checks have shown how large that is."""
FOLLOWING_TOLERANCE = 5.0
"""The tolerance for log-probs of tokens that follow the prompt is so many times as large."""
REMEMBERED = 20
"""Checks over which the size of rounding is averaged, about."""
FINEST = 1e-6
"""Least rounding that is assumed (nats)."""
CAUSES = (
    "Either this vLLM reloads this model wrongly (use another version, or engine.kind = 'local'), or it computes too "
    "coarsely (set engine.dtype = 'float32')"
)
Values = Sequence[float] | torch.Tensor


class Logprobs(NamedTuple):
    """Log-probs by which weights are known, as an engine or the trainer has them for a prompt of T tokens."""

    prompt: Values
    """Log-probs of the prompt's tokens but the first, [T - 1]."""
    following: Values
    """Log-probs of the prompt's `followers`, if they came after it. An engine generates to get them, so it reads its
    prefix cache; for the others it does not."""


def fixed_prompt(policy: "Policy", room: int) -> tuple[int, ...]:
    """The fixed prompt, at most `room` tokens, spread over the vocabulary so that they differ."""
    return spread_tokens(policy.model.get_input_embeddings().weight.shape[0], min(LENGTH, room))


def spread_tokens(vocabulary: int, count: int) -> tuple[int, ...]:
    """Choose so many tokens, spread over a vocabulary of this size."""
    return tuple(int(vocabulary * (0.6180339887498949 * i % 1.0)) for i in range(1, count + 1))


def followers(prompt: Sequence[int]) -> Sequence[int]:
    """The tokens whose log-probs after the prompt are compared: fewer than a small vocabulary has, as vLLM needs."""
    return prompt[: min(FOLLOWING, max(prompt))]


def expected_logprobs(
    model: Any, weights: Mapping[str, torch.Tensor], tokens: Sequence[int], device: torch.device
) -> Logprobs:
    """The log-probs (float32, CPU) that a model has under `weights`, computed on `device`.

    The model itself does not change. `weights` has tensors for its parameters; the forward pass runs in their dtype.
    """
    prompt, following = all_logprobs(model, weights, tokens, device)
    return Logprobs(prompt, following[torch.tensor(followers(tokens))])


@torch.no_grad()
def all_logprobs(
    model: Any, weights: Mapping[str, torch.Tensor], tokens: Sequence[int], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the log-probs [T - 1] of a prompt's tokens but the first, and those [V] of the token after it."""
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


class Allowed(NamedTuple):
    """The differences of log-probs that are allowed."""

    mean: float
    """The largest mean difference (nats)."""
    rounding: float
    """The mean squared difference that rounding makes."""
    known: bool
    """True if enough checks have shown how large rounding is."""
    setting: str
    """Name of the setting of `mean`."""
    shown: str = "pushes before were off by"
    """Words that precede the size of rounding in an error."""


class WeightCheck:
    """Tells, after every push, whether an engine computes with the weights that it was given.

    Its log-probs of a fixed prompt differ from the trainer's by rounding. An error is raised if they are off by more
    than `tolerance` on average, if they fit other weights far better (another draw of this push, or weights of the push
    before), or if they are off by much more than earlier pushes of such weights were. Weights whose log-probs are
    about as near as rounding are not told apart.

    Args:
        tolerance: largest mean difference in log-prob (nats).
        engine: what errors call the engine.
        setting: what errors call the tolerance.
        causes: the end of an error, with what to do.
    """

    def __init__(
        self,
        tolerance: float,
        engine: str = "engine.kind = 'vllm': the engine",
        setting: str = "engine.vllm.probe_tolerance",
        causes: str = CAUSES,
    ) -> None:
        self._tolerance = tolerance
        self._engine, self._setting, self._causes = engine, setting, causes
        self._names: list[str] = []
        self._kinds: list[str] = []
        self._expected: list[Logprobs] = []
        self._earlier: list[Logprobs] = []
        self._rounding: dict[str, Rounding] = {}
        """Rounding by kind of weights: the mean, draws, and draws of each arm, as much noise makes it larger."""

    def expect(self, draws: Sequence[Draw | None], step: int, expected: Sequence[Logprobs]) -> None:
        """Begin a push of draws (None: the mean), under which the trainer has these log-probs."""
        self._names = [f"{draw or 'the mean'} at step {step}" for draw in draws]
        self._kinds = [str(draw.arm or "draw") if draw else "mean" for draw in draws]
        self._earlier, self._expected = self._expected, list(expected)

    def check(self, index: int, measured: Logprobs, place: str = "") -> None:
        """Raise `UserError` unless the log-probs that the engine has at `place` fit the draw of this index."""
        what, kind, expected = self._names[index], self._kinds[index], self._expected[index]
        if place:
            what = f"{what} on {place}"
        if not torch.as_tensor(expected.prompt).isfinite().all():
            raise UserError(f"the weights of {what} give log-probs that are not finite: training has diverged")
        subject = f"{self._engine} does not compute with the weights of {what} that it was given: its log-probs"
        rounding = self._rounding.setdefault(kind, Rounding((self._tolerance / 5) ** 2))
        following = self._rounding.setdefault(f"{kind}, following", Rounding(0.0))

        others = {name: own.prompt for name, own in zip(self._names, self._expected, strict=True)}
        others |= {f"weights of the push before, number {i}": own.prompt for i, own in enumerate(self._earlier)}
        allowed = Allowed(self._tolerance, rounding.square, rounding.checks >= KNOWN_AFTER, self._setting)
        which = f"{subject} of a fixed prompt"
        of_prompt = compare_logprobs(measured.prompt, expected.prompt, others, allowed, which, self._causes)

        # Errors at one position hang together: their mean varies more, and they do not show which weights they fit.
        usual, known = max(rounding.square, following.square), following.checks >= FOLLOWING_KNOWN_AFTER
        allowed = Allowed(FOLLOWING_TOLERANCE * self._tolerance, usual, known, self._setting)
        which = f"{subject} after a fixed prompt"
        causes = "Those of the prompt are right, so its prefix cache holds keys and values of other weights"
        of_following = compare_logprobs(measured.following, expected.following, {}, allowed, which, causes)

        rounding.learn(of_prompt)
        following.learn(of_following)


def compare_logprobs(
    measured: Values, expected: Values, others: Mapping[str, Values], allowed: Allowed, subject: str, causes: str
) -> float:
    """The mean squared difference of log-probs; `UserError` unless they fit.

    `others`: log-probs under other weights, by the names of these.
    """
    found, wanted = (torch.as_tensor(x, dtype=torch.float64) for x in (measured, expected))
    difference = (found - wanted).abs()
    mean, own = difference.mean().item(), difference.square().mean().item()
    problem = f"{subject} are off by {mean:.2g} on average and {difference.max().item():.2g} at most"
    usual = max(allowed.rounding, FINEST**2)
    near = MARGIN**2 * usual
    """Mean squared difference up to which weights are not told apart."""
    fitting = []
    for name, values in others.items():
        x = torch.as_tensor(values, dtype=torch.float64)
        fits, apart = (found - x).square().mean().item(), (wanted - x).square().mean().item()
        gain = len(found) * (own - fits) / (2 * max(near, own))  # normal, with the larger deviation
        if apart > near and gain > BETTER:
            fitting.append((fits, name))
    if fitting:
        fits, name = min(fitting)
        raise UserError(f"{problem}; they fit {name}, which are off by {math.sqrt(fits):.2g}. {causes}")
    if not mean <= allowed.mean:  # also where it is not a number
        raise UserError(f"{problem} (allowed by {allowed.setting}: {allowed.mean:g}). {causes}")
    if allowed.known and own > UNUSUAL**2 * usual:
        seen = f"{math.sqrt(own):.2g} (root mean square), where {allowed.shown} {math.sqrt(usual):.2g}"
        raise UserError(f"{problem}: {seen}. {causes}")
    return own
