"""From completions to verdicts: the verifier of a task, an exact match, or a user's own reward function.

A user's function is called the way TRL calls reward functions:

    def reward(prompts, completions, answer, **columns):
        return [float(c.strip() == a) for c, a in zip(completions, answer)]

`prompts` and `completions` are texts (or lists of chat messages, where the prompts are), every other argument is a
column of the data, and the result is one number per completion; None means that the function could not judge it.
"""

import importlib
import inspect
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from threepo.answers import exact_match
from threepo.config import RewardConfig
from threepo.errors import UserError
from threepo.types import Problem, Verdict

Verify = Callable[[Problem, str], Verdict]
Grader = Callable[[Sequence[Problem], Sequence[str]], list[Verdict]]


def load_grader(settings: RewardConfig, verify: Verify | None) -> Grader:
    """The grader that `reward.function` names; `verify` is the data source's own verifier, if it has one."""
    if settings.function == "task":
        if verify is None:
            raise UserError(
                "reward.function = 'task': a data file has no verifier of its own; set reward.function to 'exact' or "
                "to your own 'module:function'"
            )
        return _one_by_one(verify)
    if settings.function == "exact":
        return _one_by_one(exact_match)
    return _user_grader(settings)


def _one_by_one(verify: Verify) -> Grader:
    def grade(problems: Sequence[Problem], completions: Sequence[str]) -> list[Verdict]:
        return [verify(problem, completion) for problem, completion in zip(problems, completions, strict=True)]

    return grade


def _user_grader(settings: RewardConfig) -> Grader:
    name = settings.function
    function = _import_function(name)

    def grade(problems: Sequence[Problem], completions: Sequence[str]) -> list[Verdict]:
        values = function(**_arguments(function, problems, completions))
        if not isinstance(values, Sequence) or len(values) != len(completions):
            got = f"{len(values)} values" if isinstance(values, Sequence) else type(values).__name__
            raise UserError(
                f"reward.function {name}: returned {got} for {len(completions)} completions; "
                f"return a list of one number each"
            )
        return [_verdict(name, value, settings.correct_from) for value in values]

    return grade


def _import_function(name: str) -> Callable[..., Any]:
    module_name, colon, function_name = name.partition(":")
    if not colon:
        raise UserError(f"reward.function = {name!r}: must be 'task', 'exact' or 'module:function'")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # a reward file beside the data is the common case
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except ModuleNotFoundError as error:
        if error.name != module_name.partition(".")[0] and error.name != module_name:
            raise  # the user's module is there, and itself imports something that is not
        raise UserError(
            f"reward.function = {name!r}: no module {module_name!r} in {here} or the environment"
        ) from error
    except AttributeError as error:
        raise UserError(f"reward.function = {name!r}: module {module_name!r} has no {function_name!r}") from error
    if not callable(function):
        raise UserError(f"reward.function = {name!r}: is not a function")
    return function  # type: ignore[no-any-return]


def _arguments(
    function: Callable[..., Any], problems: Sequence[Problem], completions: Sequence[str]
) -> dict[str, list[Any]]:
    prompts: list[Any] = [p.prompt if isinstance(p.prompt, str) else [dict(m) for m in p.prompt] for p in problems]
    texts: list[Any] = [
        text if isinstance(problem.prompt, str) else [{"role": "assistant", "content": text}]
        for problem, text in zip(problems, completions, strict=True)
    ]
    arguments = {"prompts": prompts, "completions": texts, "answer": [p.answer for p in problems]}
    for column in dict.fromkeys(key for problem in problems for key in problem.columns):
        arguments[column] = [problem.columns.get(column) for problem in problems]
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return arguments
    return {p.name: arguments[p.name] for p in parameters if p.name in arguments}


def _verdict(name: str, value: Any, correct_from: float) -> Verdict:
    if value is None:
        return Verdict(correct=False, status="error", answer=None, reward=0.0)
    try:
        reward = float(value)
    except (TypeError, ValueError):
        reward = math.nan
    if not math.isfinite(reward):
        raise UserError(
            f"reward.function {name}: returned {value!r}; return a finite number, or None where it cannot judge"
        )
    correct = reward >= correct_from
    return Verdict(correct=correct, status="right" if correct else "wrong", answer=None, reward=reward)
