"""From completions to verdicts: the verifier of a task, one of the built-in graders, or a user's own reward function.

To add a built-in grader, write it in a file of its own and add a line to `GRADERS`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from threepo.config import RewardConfig
from threepo.config.records import require
from threepo.errors import UserError
from threepo.rewards.code import CodeGrader, lacks_tests
from threepo.rewards.math import MathGrader
from threepo.rewards.user_function import UserFunction
from threepo.types import Completion, Problem, Verdict, VerifierName, exact_match, lacks_answer

Grader = Callable[[Sequence[Completion]], list[Verdict]]
"""Judges completions; a verdict for each, in their order."""
Verify = Callable[[Problem, str], Verdict]
"""A task's own verifier: judges the text of a completion."""


class BuiltIn(NamedTuple):
    """A grader that `reward.function` can name."""

    build: Callable[[RewardConfig], Grader]
    lack: Callable[[Problem], str]
    """What a problem lacks to be graded, and which setting may help; empty for nothing."""
    scorings: tuple[str, ...]
    """Values of `reward.scoring` that it knows besides `binary`."""


def _one_by_one(verify: Verify) -> Grader:
    return lambda completions: [verify(completion.problem, completion.text) for completion in completions]


GRADERS = {
    "exact": BuiltIn(lambda _: _one_by_one(exact_match), lacks_answer, ()),
    "math": BuiltIn(MathGrader, lacks_answer, ("format_penalty",)),
    "code": BuiltIn(CodeGrader, lacks_tests, ("passed_share",)),
}
"""What `reward.function` and a data source can name."""


def load_grader(
    settings: RewardConfig, verifier: Verify | VerifierName | None, known: Sequence[Problem], *, rows: bool = False
) -> Grader:
    """The grader that `reward.function` names; `verifier` is the data source's own, if it has one.

    `known` are problems to be graded: `UserError` if one of them lacks what the grader needs. `rows`: they are rows
    that `data.broken_rows` can leave out.
    """
    skip = ", or leave such rows out with data.broken_rows = 'skip'" if rows else ""
    for problem in known:
        if reason := lack(settings, verifier, problem):
            raise UserError(f"{problem.label}: {reason}, fix the data{skip}")
    function = _function(settings, verifier)
    if callable(function):
        return _one_by_one(function)
    if function in GRADERS:
        return GRADERS[function].build(settings)
    return UserFunction(function, settings.correct_from, known)


def refuse_ignored(settings: RewardConfig, verifier: Verify | VerifierName | None) -> None:
    """Raise `UserError` for settings that the grader would ignore."""
    function = _function(settings, verifier)
    known = GRADERS[function].scorings if isinstance(function, str) and function in GRADERS else ()
    scorings = ("binary", *known)
    fix = f"this reward knows {' and '.join(map(repr, scorings))} only"
    require(settings.scoring in scorings, "reward.scoring", settings.scoring, fix)
    own = isinstance(function, str) and function not in GRADERS
    fix = "is read for reward functions of your own only; remove it"
    require(own or settings.correct_from == 1, "reward.correct_from", settings.correct_from, fix)


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
    if settings.function == "task":
        if verifier is None:
            raise UserError(f"reward.function = 'task': a data file has no verifier of its own; set it to {choices}")
        return verifier
    if settings.function not in GRADERS and ":" not in settings.function:
        raise UserError(f"reward.function = {settings.function!r}: set it to 'task', {choices}")
    return settings.function
