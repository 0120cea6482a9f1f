"""From completions to verdicts: the verifier of a task, one of the built-in graders, or a user's own reward function.

To add a built-in grader, write a class with the methods of `BuiltIn` and add it to `GRADERS`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from threepo.answers import exact_match, lacks_answer
from threepo.config import RewardConfig
from threepo.errors import UserError
from threepo.rewards.code import CodeGrader
from threepo.rewards.math import MathGrader
from threepo.rewards.user_function import UserFunction
from threepo.types import Completion, Problem, Verdict, VerifierName

Verify = Callable[[Problem, str], Verdict]
"""A task's own verifier: judges the text of a completion."""


class Grader(Protocol):
    """Judges completions."""

    def __call__(self, completions: Sequence[Completion]) -> list[Verdict]:
        """A verdict for each completion."""


class BuiltIn(Grader, Protocol):
    """A grader that `reward.function` can name."""

    def __init__(self, settings: RewardConfig) -> None: ...

    @staticmethod
    def lack(problem: Problem) -> str:
        """What a problem lacks to be graded, and which setting may help; empty for nothing."""


class ExactGrader:
    """Compares the final answer with the reference as text."""

    def __init__(self, settings: RewardConfig) -> None:
        pass

    def __call__(self, completions: Sequence[Completion]) -> list[Verdict]:
        """A verdict for each completion."""
        return [exact_match(completion.problem, completion.text) for completion in completions]

    @staticmethod
    def lack(problem: Problem) -> str:
        """See `BuiltIn.lack`."""
        return lacks_answer(problem, "exact")


GRADERS: dict[str, type[BuiltIn]] = {"exact": ExactGrader, "math": MathGrader, "code": CodeGrader}
"""What `reward.function` and a data source can name."""


def load_grader(
    settings: RewardConfig, verifier: Verify | VerifierName | None, known: Sequence[Problem], *, rows: bool = False
) -> Grader:
    """The grader that `reward.function` names; `verifier` is the data source's own, if it has one.

    `known` are problems to be graded: `UserError` if one of them lacks what the grader needs. `rows`: they are rows
    that `data.broken_rows` can leave out.
    """
    for problem in known:
        if reason := lack(settings, verifier, problem):
            skip = ", or leave such rows out with data.broken_rows = 'skip'" if rows else ""
            raise UserError(f"{problem.label}: {reason}, fix the data{skip}")
    function = _function(settings, verifier)
    if callable(function):
        return lambda completions: [function(completion.problem, completion.text) for completion in completions]
    if function in GRADERS:
        return GRADERS[function](settings)
    return UserFunction(function, settings.correct_from, known)


def lack(settings: RewardConfig, verifier: Verify | VerifierName | None, problem: Problem) -> str:
    """What `load_grader` would refuse a problem for; empty for nothing."""
    function = _function(settings, verifier)
    return GRADERS[function].lack(problem) if isinstance(function, str) and function in GRADERS else ""


def graded(grader: Grader, completions: Sequence[Completion]) -> list[Completion]:
    """The completions with their verdicts."""
    return [replace(c, verdict=verdict) for c, verdict in zip(completions, grader(completions), strict=True)]


def _function(settings: RewardConfig, verifier: Verify | VerifierName | None) -> Verify | str:
    """The recipe's function, or the data source's own where the recipe leaves it to that."""
    choices = f"{', '.join(map(repr, GRADERS))} or your own 'module:function'"
    if settings.function == "task" and verifier is None:
        raise UserError(f"reward.function = 'task': a data file has no verifier of its own; set it to {choices}")
    if settings.function not in ("task", *GRADERS) and ":" not in settings.function:
        raise UserError(f"reward.function = {settings.function!r}: set it to 'task', {choices}")
    return verifier if settings.function == "task" and verifier is not None else settings.function
