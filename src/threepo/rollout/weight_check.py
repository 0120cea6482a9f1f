"""Check that an engine computes with the weights it got: log-probs of a fixed prompt, there and in the trainer.

Every weight takes part in the log-probs of the prompt, except the embeddings of other tokens. rollout/bit_sums.py
compares the weights themselves, where they can be read.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from threepo.errors import UserError
from threepo.types import Draw, Purpose

LENGTH = 129
"""Tokens of the fixed prompt, a block of vLLM's prefix cache on a CPU and one more; fewer in a shorter context."""
FOLLOWING = 16
"""Tokens whose log-probs after the prompt are compared; vLLM shows at most 20."""
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Largest mean difference in log-prob (nats). With the model of tests/rollout/faults.py on a CPU, equal weights differ
by 3e-7 in float32 and 0.0045 in bfloat16 (root mean square)."""
MARGIN = 2.0
"""Other weights are considered if their log-probs are so many times as far away as rounding."""
GUESS = 5.0
"""Until a check has shown how large rounding is, it is taken for the tolerance divided by this."""
BETTER = math.log(1e6)
"""Log of the likelihood ratio from which log-probs are said to fit other weights."""
UNUSUAL, KNOWN_AFTER, FOLLOWING_KNOWN_AFTER = 6.0, 5, 20
"""Differences so many times as large as rounding are an error, once so many checks have shown how large that is."""
PROBED = "probe"
"""The kind of a probe's draws. Their noise has many sizes, so the rounding of one does not show that of the next."""
FOLLOWING_TOLERANCE = 5.0
"""The tolerance for log-probs of tokens that follow the prompt is so many times as large."""
REMEMBERED = 20
"""Checks over which the size of rounding is averaged, about."""
FINEST = 1e-6
"""Least rounding that is assumed (nats)."""
Values = Sequence[float] | torch.Tensor
Others = Mapping[str, Values]
"""Log-probs of the prompt under other weights, by the names of these."""


class Logprobs(NamedTuple):
    """Log-probs by which weights are known, as an engine or the trainer has them for a prompt of T tokens."""

    prompt: Values
    """Log-probs of the prompt's tokens but the first, [T - 1]."""
    following: Values
    """Log-probs of the prompt's `followers`, if they came after it. An engine generates to get them, so it reads its
    prefix cache; for the others it does not."""


def fixed_prompt(vocabulary: int, *rooms: int | None, length: int = LENGTH, after: int = 1) -> tuple[int, ...]:
    """The fixed prompt: `length` tokens, spread over a vocabulary of this size so that they differ, or fewer.

    Each of `rooms` is the longest row, in tokens, in which the prompt must leave space for so many tokens `after` it;
    None or 0: there is no limit.
    """
    count = min([length, *(room - after for room in rooms if room)])
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
    known_after: float = KNOWN_AFTER
    """Checks after which its size counts as known."""

    @property
    def size(self) -> float:
        """Root mean square of the differences, at least `FINEST`."""
        return max(math.sqrt(self.square), FINEST)

    def learn(self, square: float) -> None:
        """Take a mean squared difference into the average, which a single large one changes little."""
        self.checks += 1
        if self.checks > 1:
            square = min(square, 4 * max(self.square, FINEST**2))
        self.square += (square - self.square) / min(self.checks, REMEMBERED)


Allowed = tuple[float, Rounding]
"""The largest mean difference of log-probs (nats), and rounding; once its size is known, that is a limit as well."""


class Judge(NamedTuple):
    """Decides by its log-probs whether an engine computes with the weights that it was given, and words the error."""

    engine: str
    """Name of the engine in errors."""
    setting: str
    """Name of the tolerance in errors."""
    causes: str
    """The end of an error about the prompt, with what to do."""
    shown: str = "pushes before were off by"
    """Words that precede the size of rounding in an error."""

    def compare(self, what: str, found: Logprobs, right: Logprobs, others: Others, *allowed: Allowed) -> list[float]:
        """Return the mean squared differences of log-probs; `UserError` if the engine's do not fit the weights `what`.

        `found` are the engine's, `right` the trainer's. `allowed`: the differences that are allowed for the prompt, and
        for the tokens after it; without the second, these are not compared.
        """
        if not torch.as_tensor(right.prompt).isfinite().all():
            raise UserError(f"the weights of {what} give log-probs that are not finite: training has diverged")
        squares = [self._judge(what, "of", found.prompt, right.prompt, others, *allowed[0])]
        if len(allowed) > 1:
            squares.append(self._judge(what, "after", found.following, right.following, {}, *allowed[1]))
        return squares

    def _judge(
        self, what: str, place: str, found: Values, right: Values, others: Others, tolerance: float, rounding: Rounding
    ) -> float:
        """See `compare`; `place` is where the log-probs are, of a fixed prompt or after it."""
        measured, expected = (torch.as_tensor(values, dtype=torch.float64) for values in (found, right))
        difference = (measured - expected).abs()
        mean, square = difference.mean().item(), difference.square().mean().item()
        problem = (
            f"{self.engine} does not compute with the weights of {what} that it was given: its log-probs {place} a "
            f"fixed prompt are off by {mean:.2g} on average and {difference.max().item():.2g} at most"
        )
        causes = self.causes if place == "of" else CACHE
        fitting, near = [], (MARGIN * rounding.size) ** 2
        for name, values in others.items():
            other = torch.as_tensor(values, dtype=torch.float64)
            fits, apart = (measured - other).square().mean().item(), (expected - other).square().mean().item()
            gain = len(other) * (square - fits) / (2 * max(near, square))  # normal, with the larger deviation
            if apart > near and gain > BETTER:
                fitting.append((fits, name))
        if fitting:
            fits, name = min(fitting)
            raise UserError(f"{problem}; they fit {name}, which are off by {math.sqrt(fits):.2g}. {causes}")
        if not mean <= tolerance:  # also where it is not a number
            raise UserError(f"{problem} (allowed by {self.setting}: {tolerance:.3g}). {causes}")
        size = math.sqrt(square)
        if rounding.checks >= rounding.known_after and size > UNUSUAL * rounding.size:
            seen = f"{size:.2g} (root mean square), where {self.shown} {rounding.size:.2g}"
            raise UserError(f"{problem}: {seen}. {causes}")
        return square


OWN = Judge(
    "engine.kind = 'vllm': the engine",
    "engine.vllm.check_tolerance",
    "Either this vLLM reloads this model wrongly (use another version, or engine.kind = 'local'), or it computes too "
    "coarsely (set engine.dtype = 'float32')",
)
"""The judge of threepo's vLLM engines."""
CACHE = (
    "Those of the prompt are right, so its prefix cache holds keys and values of other weights; "
    "each push has to reset it"
)
"""The end of an error about the tokens after the prompt."""


def _kind(draw: Draw | None) -> str:
    """The kind of weights whose rounding is of one size: the mean, draws, or draws of an arm; noise makes it larger."""
    if draw is None:
        return "mean"
    return PROBED if draw.purpose == Purpose.PROBE else str(draw.arm or "draw")


class WeightCheck:
    """Tells, after every push, whether an engine computes with the weights that it was given.

    Its log-probs of a fixed prompt differ from the trainer's by rounding. An error is raised if they are off by more
    than `tolerance` (nats) on average, if they fit other weights far better (another draw of this push, or weights of
    the push before), or if they are off by much more than earlier pushes of such weights were. Weights whose log-probs
    are about as near as rounding are not told apart.
    """

    def __init__(self, tolerance: float, judge: Judge = OWN) -> None:
        self._tolerance, self._judge = tolerance, judge
        self._names, self._kinds = list[str](), list[str]()
        self._expected, self._earlier = list[Logprobs](), list[Logprobs]()
        self._rounding: dict[str, Rounding] = {}
        """Rounding by kind of weights."""

    def expect(self, draws: Sequence[Draw | None], step: int, expected: Sequence[Logprobs]) -> None:
        """Begin a push of draws (None: the mean), under which the trainer has these log-probs."""
        self._names = [f"{draw or 'the mean'} at step {step}" for draw in draws]
        self._kinds = list(map(_kind, draws))
        self._earlier, self._expected = self._expected, list(expected)

    def check(self, index: int, measured: Logprobs, place: str = "") -> None:
        """Raise `UserError` unless the log-probs that the engine has at `place` fit the draw of this index."""
        what, kind = self._names[index], self._kinds[index]
        if place:
            what = f"{what} on {place}"
        known, following_known = (math.inf, math.inf) if kind == PROBED else (KNOWN_AFTER, FOLLOWING_KNOWN_AFTER)
        rounding = self._rounding.setdefault(kind, Rounding((self._tolerance / GUESS) ** 2, known_after=known))
        after = self._rounding.setdefault(f"{kind}, following", Rounding(0.0, known_after=following_known))
        # Errors at one position hang together: their mean varies more, and they do not show which weights they fit.
        usual = replace(after, square=max(rounding.square, after.square))
        others = {name: own.prompt for name, own in zip(self._names, self._expected, strict=True)}
        others |= {f"weights of the push before, number {i}": own.prompt for i, own in enumerate(self._earlier)}
        allowed = (self._tolerance, rounding), (FOLLOWING_TOLERANCE * self._tolerance, usual)
        of_prompt, of_following = self._judge.compare(what, measured, self._expected[index], others, *allowed)
        rounding.learn(of_prompt)
        after.learn(of_following)
