"""From completions to verdicts: the verifier of a task, one of the built-in graders, or a user's own reward function.

To add a built-in grader, write it in a file of its own and add a line to `GRADERS`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from threepo.config import RewardConfig
from threepo.config.records import require
from threepo.errors import UserError
from threepo.rewards.code import CodeGrader, lacks_tests
from threepo.rewards.math import MathGrader
from threepo.rewards.user_function import UserFunction, paid
from threepo.types import Completion, OwnReward, Problem, Verdict, VerifierName, exact_match

Grader = Callable[[Sequence[Completion]], list[Verdict]]
"""Judges completions; a verdict for each, in their order."""
Verify = Callable[[Problem, str], Verdict]
"""A task's own verifier: judges the text of a completion."""
Verifier = Verify | OwnReward | VerifierName
"""What a data source brings: its own, or the name of one of `GRADERS`."""


class Kind(NamedTuple):
    """A kind of grader."""

    build: Callable[[RewardConfig, Sequence[Problem]], Grader]
    """From the settings and the problems that are known."""
    lack: Callable[[Problem], str] = lambda problem: ""
    """What a problem lacks to be graded, and which setting may help; empty for nothing."""
    scorings: tuple[str, ...] = ()
    """Values of `reward.scoring` that it knows besides `binary`."""


def _one_by_one(verify: Verify) -> Grader:
    return lambda completions: [verify(completion.problem, completion.text) for completion in completions]


def _by_number(reward: OwnReward, correct_from: float) -> Grader:
    def grade(completions: Sequence[Completion]) -> list[Verdict]:
        return [paid(number, correct_from) for number in reward.function(completions)]

    return grade


def _weighted(settings: RewardConfig, graders: Sequence[Grader]) -> Grader:
    """The sum of what several pay; as in TRL, one that cannot judge a completion has no say in it."""

    def joined(verdicts: Sequence[Verdict]) -> Verdict:
        paying = [verdict.status != "error" for verdict in verdicts]
        parts = [verdict.reward if pays else math.nan for verdict, pays in zip(verdicts, paying, strict=True)]
        named = tuple(zip(settings.names, parts, strict=True))
        if not any(paying):
            return replace(verdicts[0], parts=named)
        weights = settings.weights or [1.0] * len(parts)
        total = math.fsum(w * part for w, part, pays in zip(weights, parts, paying, strict=True) if pays)
        judged = paid(total, settings.correct_from)
        reader = next((v for v in verdicts if v.answer is not None or v.status == "no_answer"), verdicts[0])
        unread = reader.status == "no_answer" and not judged.correct
        status = reader.status if unread else judged.status
        return replace(reader, correct=judged.correct, status=status, reward=total, parts=named)

    return lambda completions: [joined(v) for v in zip(*(grader(completions) for grader in graders), strict=True)]


def lacks_answer(problem: Problem) -> str:
    """Why a grader that needs a reference answer cannot grade a problem; empty if it can."""
    if problem.answer.strip():
        return ""
    empty = "answer" in problem.columns and not str(problem.columns["answer"] or "").strip()
    others = ", ".join(repr(name) for name in problem.columns if name != "answer" or not empty)
    reason = "has no answer, which reward.function needs" + ("; its answer column is empty" if empty else "")
    fix = f"; its other columns are {others or 'none'}; set data.answer_column"
    return reason + fix if others or not empty else reason


GRADERS = {
    "exact": Kind(lambda *_: _one_by_one(exact_match), lacks_answer),
    "math": Kind(lambda settings, _: MathGrader(settings), lacks_answer, ("format_penalty",)),
    "code": Kind(lambda settings, _: CodeGrader(settings), lacks_tests, ("passed_share",)),
}
"""What `reward.function` and a data source can name."""


def load_grader(
    settings: RewardConfig, verifier: Verifier | None, known: Sequence[Problem], *, rows: bool = False
) -> Grader:
    """The grader that `reward.function` names; `verifier` is the data source's own, if it has one.

    `known` are problems to be graded: `UserError` if one of them lacks what the grader needs. `rows`: they are rows
    that `data.broken_rows` can leave out.
    """
    skip = ", or leave such rows out with data.broken_rows = 'skip'" if rows else ""
    kind = _kind(settings, verifier)
    for problem in known:
        if reason := kind.lack(problem):
            raise UserError(f"{problem.label}: {reason}, fix the data{skip}")
    return kind.build(settings, known)


def refuse_ignored(settings: RewardConfig, verifier: Verifier | None) -> None:
    """Raise `UserError` for settings that the grader would ignore."""
    scorings = ("binary", *_kind(settings, verifier).scorings)
    fix = f"this reward knows {' and '.join(map(repr, scorings))} only"
    require(settings.scoring in scorings, "reward.scoring", settings.scoring, fix)
    own = any(":" in name for name in settings.names) or len(settings.names) > 1
    numbers = own or (settings.function == "task" and isinstance(verifier, OwnReward))
    fix = "is read for reward functions of your own, lists and environments only; remove it"
    require(numbers or settings.correct_from == 1, "reward.correct_from", settings.correct_from, fix)


def lack(settings: RewardConfig, verifier: Verifier | None, problem: Problem) -> str:
    """Reason for which `load_grader` would refuse a problem; empty if there is none."""
    return _kind(settings, verifier).lack(problem)


def graded(grader: Grader, completions: Sequence[Completion]) -> list[Completion]:
    """The completions with their verdicts."""
    return [replace(c, verdict=verdict) for c, verdict in zip(completions, grader(completions), strict=True)]


def _kind(settings: RewardConfig, verifier: Verifier | None) -> Kind:
    """The recipe's kind of grader, or the data source's own where the recipe leaves it to that."""
    if not isinstance(settings.function, str):
        alone = [replace(settings, function=name, weights=()) for name in settings.function]
        kinds = [_kind(one, verifier) for one in alone]
        return Kind(
            lambda _, known: _weighted(settings, [k.build(one, known) for k, one in zip(kinds, alone, strict=True)]),
            lambda problem: next(filter(None, (kind.lack(problem) for kind in kinds)), ""),
            tuple(dict.fromkeys(scoring for kind in kinds for scoring in kind.scorings)),
        )
    choices = f"{', '.join(map(repr, GRADERS))} or your own 'module:function'"
    name = verifier if settings.function == "task" else settings.function
    if name is None:
        raise UserError(f"reward.function = 'task': a data file has no verifier of its own; set it to {choices}")
    if isinstance(name, OwnReward):
        return Kind(lambda settings, _: _by_number(name, settings.correct_from))
    if not isinstance(name, str):
        return Kind(lambda *_: _one_by_one(name))
    if name not in GRADERS and ":" not in name:
        raise UserError(f"reward.function = {name!r}: set it to 'task', {choices}")
    return GRADERS.get(name) or Kind(lambda settings, known: UserFunction(name, settings.correct_from, known))
