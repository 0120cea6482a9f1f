"""From completions to verdicts: the verifier of a task, an exact match, or a user's own reward function.

A user's function is called the way TRL calls reward functions:

    def reward(prompts, completions, answer, **columns):
        return [float(c.strip() == a) for c, a in zip(completions, answer)]

`prompts` and `completions` are texts (or lists of chat messages, where the prompts are), `completion_ids` the tokens;
every other argument is a column of the data, its values as the file has them. The result is one number per
completion; None means that the function could not judge it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from threepo.answers import exact_match
from threepo.config import RewardConfig
from threepo.errors import UserError
from threepo.rewards.user_function import UserFunction
from threepo.types import Completion, Problem, Verdict, VerifierName

Verify = Callable[[Problem, str], Verdict]


class Grader(Protocol):
    """Judges completions: a verdict for each."""

    def __call__(
        self, problems: Sequence[Problem], texts: Sequence[str], tokens: Sequence[Sequence[int]]
    ) -> list[Verdict]:
        """Each text is a completion of the problem at its place, made of the tokens at its place."""


def load_grader(
    settings: RewardConfig, verifier: Verify | VerifierName | None, known: Sequence[Problem], *, rows: bool = False
) -> Grader:
    """The grader that `reward.function` names; `verifier` is that of the data source, if it has one.

    `known` are problems that it will have to do with: what it lacks of them is said now, and not in the run. `rows`:
    they are rows of a data set that `data.broken_rows` can leave out.
    """
    function = _function(settings, verifier)
    for problem in known:
        if reason := _lack(function, problem):
            skip = ", or leave such rows out with data.broken_rows = 'skip'" if rows else ""
            raise UserError(f"{problem.label}: {reason}, mend the data{skip}")
    if callable(function):
        return _one_by_one(function)
    if function == "exact":
        return _one_by_one(exact_match)
    if function == "math":
        from threepo.rewards.math import MathGrader

        return MathGrader(settings)
    if function == "code":
        from threepo.rewards.code import CodeGrader

        judge = CodeGrader(settings)
        return lambda problems, texts, _: judge([_completion(*pair) for pair in zip(problems, texts, strict=True)])
    return _user_grader(settings, known)


def _completion(problem: Problem, text: str) -> Completion:
    return Completion(problem, (), (), (), text, "stop", None, 0, 0)


def lack(settings: RewardConfig, verifier: Verify | VerifierName | None, problem: Problem) -> str:
    """What `load_grader` would refuse a problem for: no answer, or tests that cannot be read; empty for none."""
    return _lack(_function(settings, verifier), problem)


def graded(grader: Grader, completions: Sequence[Completion]) -> list[Completion]:
    """The completions with their verdicts."""
    verdicts = grader([c.problem for c in completions], [c.text for c in completions], [c.tokens for c in completions])
    return [replace(c, verdict=verdict) for c, verdict in zip(completions, verdicts, strict=True)]


def _function(settings: RewardConfig, verifier: Verify | VerifierName | None) -> Verify | str:
    """The function of the recipe, or that of the task where the recipe leaves it to that."""
    if settings.function != "task":
        return settings.function
    if verifier is None:
        raise UserError(
            "reward.function = 'task': a data file has no verifier of its own; set reward.function to 'exact', "
            "'math', 'code' or to your own 'module:function'"
        )
    return verifier


def _lack(function: Verify | str, problem: Problem) -> str:
    if function in ("exact", "math") and not problem.answer.strip():
        return (
            f"has no answer, and reward.function = {function!r} needs one; its columns beside the prompt are "
            f"{', '.join(map(repr, problem.columns)) or 'none'}; set data.answer_column"
        )
    if function == "code":
        from threepo.rewards.code import tests_of

        try:
            tests_of(problem)
        except ValueError as error:
            return f"{error}; set data.tests_column"
    return ""


def _one_by_one(verify: Verify) -> Grader:
    def grade(problems: Sequence[Problem], texts: Sequence[str], tokens: Sequence[Sequence[int]]) -> list[Verdict]:
        return [verify(problem, text) for problem, text in zip(problems, texts, strict=True)]

    return grade


def _user_grader(settings: RewardConfig, known: Sequence[Problem]) -> Grader:
    function = UserFunction(settings.function)
    function.check(known)

    def grade(problems: Sequence[Problem], texts: Sequence[str], tokens: Sequence[Sequence[int]]) -> list[Verdict]:
        values = function(problems, texts, tokens)
        return [_verdict(settings.function, value, settings.correct_from) for value in values]

    return grade


def _verdict(name: str, value: Any, correct_from: float) -> Verdict:
    if value is None:
        return Verdict(correct=False, status="error", answer=None, reward=0.0)
    try:
        reward = math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, RuntimeError):  # torch raises the last for a tensor of several numbers
        reward = math.nan
    if not math.isfinite(reward):
        raise UserError(
            f"reward.function {name}: returned {value!r}; return a finite number, or None where it cannot judge"
        )
    correct = reward >= correct_from
    return Verdict(correct=correct, status="right" if correct else "wrong", answer=None, reward=reward)
