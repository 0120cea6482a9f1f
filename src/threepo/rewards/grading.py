"""Graders of completions: the verifier of a task, one of the built-in graders, or a user's own reward function.

To add a built-in grader, write it in a file of its own and add a line to `GRADERS`.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from threepo.config import RewardConfig
from threepo.config.records import require
from threepo.errors import UserError
from threepo.rewards.code import CodeGrader
from threepo.rewards.code_tests import lacks_tests
from threepo.rewards.math import MathGrader
from threepo.rewards.user_function import UserFunction, number_verdict
from threepo.types import Completion, OwnReward, Problem, Verdict, exact_match
from threepo.user_code import find_object

Grader = Callable[[Sequence[Completion]], list[Verdict]]
"""Judges completions; returns a verdict for each, in their order."""
Verify = Callable[[Problem, str], Verdict]
"""A task's own verifier: judges the text of a completion."""
Verifier = Verify | OwnReward | str
"""A data source's own verifier, or the name of one of `GRADERS`."""


class GraderKind(NamedTuple):
    """A kind of grader."""

    build: Callable[[RewardConfig, Sequence[Problem]], Grader]
    """Makes a grader from the settings and the problems that are known."""
    lack: Callable[[Problem], str] = lambda problem: ""
    """Names what a problem lacks to be graded, and the setting that may help; empty if it lacks nothing."""
    scorings: tuple[str, ...] = ()
    """Values of `reward.scoring` that it knows in addition to `binary`."""
    pays_numbers: bool = False
    """True if it pays any number, of which `reward.correct_from` says which are right."""


def lacks_answer(problem: Problem) -> str:
    """Why a grader that needs a reference answer cannot grade a problem; empty if it can."""
    raw = problem.columns.get("answer")
    is_table = isinstance(raw, dict) or (isinstance(raw, list) and len(raw) == 1)  # of others, the text may be meant
    if is_table and problem.answer == str(raw):
        return f"has a {type(raw).__name__} as its answer, {problem.answer[:40]}; it must be text or a number"
    if problem.answer.strip():
        return ""
    columns = ", ".join(map(repr, problem.columns)) or "none"
    return f"has no answer, which reward.function needs; its columns are {columns}; set data.answer_column"


def _text_grader(verify: Verify) -> Grader:
    return lambda completions: [verify(completion.problem, completion.text) for completion in completions]


def _paid_by_environments(settings: RewardConfig, known: Sequence[Problem]) -> Grader:
    def grade(completions: Sequence[Completion]) -> list[Verdict]:
        if any(completion.episode is None for completion in completions):
            raise UserError("reward.function = 'environment': there are no episodes; set environment.factory")
        rewards = [c.episode.reward for c in completions if c.episode and c.episode.reward is not None]
        if unpaid := len(completions) - len(rewards):
            reason = "pays nothing, as its class has no `step`; name another reward, such as 'exact'"
            if rewards:
                reason = f"has not paid for {unpaid} of {len(completions)} episodes; let `end` return Turn() for these"
            raise UserError(f"reward.function = 'environment': the environment {reason}")
        return [number_verdict(reward, settings.correct_from) for reward in rewards]

    return grade


def _number_grader(reward: OwnReward, correct_from: float) -> Grader:
    return lambda completions: [number_verdict(number, correct_from) for number in reward.function(completions)]


GRADERS = {
    "exact": GraderKind(lambda *_: _text_grader(exact_match), lacks_answer),
    "math": GraderKind(lambda settings, _: MathGrader(settings), lacks_answer, ("format_penalty",)),
    "code": GraderKind(lambda settings, _: CodeGrader(settings), lacks_tests, ("passed_share",)),
    "environment": GraderKind(_paid_by_environments, pays_numbers=True),
}
"""Graders that `reward.function` and a data source can name."""


def load_grader(
    settings: RewardConfig, verifier: Verifier | None, known: Sequence[Problem], *, rows: bool = False
) -> Grader:
    """The grader that `reward.function` names; `verifier` is the data source's own, if it has one.

    `known` are problems to be graded: `UserError` if one of them lacks what the grader needs. `rows`: they are rows
    that `data.broken_rows` can leave out.
    """
    skip = ", or leave such rows out with data.broken_rows = 'skip'" if rows else ""
    lack = what_lacks(settings, verifier)
    for problem in known:
        if reason := lack(problem):
            raise UserError(f"{problem.label}: {reason}, fix the data{skip}")
    graders = [kind.build(settings, known) for kind in _kinds(settings, verifier)]

    def grade_by_all(completions: Sequence[Completion]) -> list[Verdict]:
        verdicts = zip(*(grader(completions) for grader in graders), strict=True)
        return [_sum_verdict(settings, one) for one in verdicts]

    return graders[0] if isinstance(settings.function, str) else grade_by_all


def what_lacks(settings: RewardConfig, verifier: Verifier | None) -> Callable[[Problem], str]:
    """Returns a function that says what a problem lacks to be graded, or nothing (see `GraderKind.lack`)."""
    kinds = _kinds(settings, verifier)
    return lambda problem: next(filter(None, (kind.lack(problem) for kind in kinds)), "")


def refuse_ignored(settings: RewardConfig, verifiers: Iterable[Verifier | None]) -> None:
    """Raise `UserError` for settings that the graders of all these verifiers would ignore."""
    kinds = [kind for verifier in verifiers for kind in _kinds(settings, verifier)]
    scorings = dict.fromkeys(["binary", *(scoring for kind in kinds for scoring in kind.scorings)])
    fix = f"this reward knows {' and '.join(map(repr, scorings))} only"
    require(settings.scoring in scorings, "reward.scoring", settings.scoring, fix)
    numbers = len(settings.names) > 1 or any(kind.pays_numbers for kind in kinds)
    fix = "is read for reward functions of your own, lists and environments only; remove it"
    require(numbers or settings.correct_from == 1, "reward.correct_from", settings.correct_from, fix)


def refuse_missing(settings: RewardConfig) -> None:
    """Raise `UserError` for a name in `reward.function` that is no grader, and of no function that can be imported."""
    for name in settings.names:
        if ":" in name:
            find_object(name, "reward.function")
        elif name != "task":
            _kind(name)


def attach_verdicts(grader: Grader, completions: Sequence[Completion]) -> list[Completion]:
    """The completions with their verdicts; an episode whose environment failed is not graded, but an error."""
    error = Verdict(correct=False, status="error", answer=None, reward=0.0, detail="environment failed")
    judged = [completion for completion in completions if not completion.failed]
    graded = iter(grader(judged) if judged else ())
    return [replace(c, verdict=error if c.failed else next(graded)) for c in completions]


def _kinds(settings: RewardConfig, verifier: Verifier | None) -> list[GraderKind]:
    """The kind of grader of each name in `reward.function`; for `task`, the data source's own."""
    return [_kind(verifier if name == "task" else name) for name in settings.names]


def _kind(verifier: Verifier | None) -> GraderKind:
    choices = f"{', '.join(map(repr, GRADERS))} or your own 'module:function'"
    if verifier is None:
        raise UserError(f"reward.function = 'task': a data file has no verifier of its own; set it to {choices}")
    if isinstance(verifier, OwnReward):
        return GraderKind(lambda settings, _: _number_grader(verifier, settings.correct_from), pays_numbers=True)
    if not isinstance(verifier, str):
        return GraderKind(lambda *_: _text_grader(verifier))
    if ":" in verifier:
        return GraderKind(
            lambda settings, known: UserFunction(verifier, settings.correct_from, known), pays_numbers=True
        )
    if verifier not in GRADERS:
        raise UserError(f"reward.function = {verifier!r}: set it to 'task', {choices}")
    return GRADERS[verifier]


def _sum_verdict(settings: RewardConfig, verdicts: Sequence[Verdict]) -> Verdict:
    """The weighted sum of several rewards; as in TRL, one that cannot judge a completion has no say in it."""
    rewards = [math.nan if verdict.status == "error" else verdict.reward for verdict in verdicts]
    parts = tuple(zip(settings.names, rewards, strict=True))
    if all(verdict.status == "error" for verdict in verdicts):
        return replace(verdicts[0], parts=parts)
    weights = settings.weights or [1.0] * len(verdicts)
    total = math.fsum(w * v.reward for w, v in zip(weights, verdicts, strict=True) if v.status != "error")
    judged = number_verdict(total, settings.correct_from)
    # The answer is shown by the first of them that looks for one.
    reader = next((v for v in verdicts if v.answer is not None or v.status == "no_answer"), verdicts[0])
    unread = reader.status == "no_answer" and not judged.correct
    status = reader.status if unread else judged.status
    return replace(reader, correct=judged.correct, status=status, reward=total, parts=parts)
