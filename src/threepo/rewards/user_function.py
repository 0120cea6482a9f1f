"""A user's own reward function: found by name, checked before the run, called the way TRL calls reward functions.

    def reward(prompts, completions, answer, **columns):
        return [float(c.strip() == a) for c, a in zip(completions, answer)]

`prompts` and `completions` are texts (or lists of chat messages, where the prompts are), `completion_ids` the tokens;
every other argument is a column of the data, with its values as the file has them. The function returns one number for
each completion, or None for a completion that it cannot judge.
"""

import inspect
import math
from collections.abc import Sequence
from typing import Any

from threepo.config.reward import SUPPLIED
from threepo.errors import UserError
from threepo.types import Completion, Problem, Verdict
from threepo.user_code import described, find_object


class UserFunction:
    """A `Grader` that calls the function a recipe names as `module:function`; its failures become `UserError`s."""

    def __init__(self, name: str, correct_from: float, known: Sequence[Problem]) -> None:
        """`known` are problems with the columns of the data."""
        self._name, self._correct_from = name, correct_from
        self._function = find_object(name, "reward.function")
        parameters = inspect.signature(self._function).parameters.values()
        self._names = {p.name for p in parameters}
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        available = (*SUPPLIED, *_columns(known))
        for p in parameters:
            optional = p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) or p.default is not p.empty
            if not optional and (p.kind is p.POSITIONAL_ONLY or p.name not in available):
                raise _error(name, f"needs the argument {p.name!r}; available by name are {', '.join(available)}")

    def __call__(self, completions: Sequence[Completion]) -> list[Verdict]:
        """A verdict for each completion."""
        problems = [completion.problem for completion in completions]
        arguments: dict[str, list[Any]] = {
            "prompts": [p.prompt if isinstance(p.prompt, str) else [dict(m) for m in p.prompt] for p in problems],
            "completions": [_answer(completion) for completion in completions],
            "completion_ids": [list(completion.tokens) for completion in completions],
            **_columns(problems),
        }
        try:
            values = self._function(**{k: v for k, v in arguments.items() if self._takes_all or k in self._names})
        except (Exception, SystemExit) as error:  # it is the user's code, and may raise anything
            raise _error(self._name, f"raised {described(error)}") from error
        values = values.tolist() if hasattr(values, "tolist") else values  # an array or a tensor
        if not isinstance(values, (list, tuple)) or len(values) != len(completions):
            got = f"{len(values)} values" if isinstance(values, (list, tuple)) else type(values).__name__
            raise _error(self._name, f"returned {got} for {len(completions)} completions; return one number for each")
        return [self._verdict(value) for value in values]

    def _verdict(self, value: Any) -> Verdict:
        if value is None:
            return Verdict(correct=False, status="error", answer=None, reward=0.0)
        try:
            reward = float(value)
        except (TypeError, ValueError, RuntimeError):  # torch's for a tensor of several numbers
            reward = math.nan
        if not math.isfinite(reward):
            raise _error(self._name, f"returned {value!r}; return a finite number, or None where it cannot judge")
        return number_verdict(reward, self._correct_from)


def _answer(completion: Completion) -> str | list[dict[str, str]]:
    """A completion as reward functions get it: a text, or messages where the prompt is a chat or there are turns."""
    if completion.episode:
        return [{"role": role, "content": text} for role, text in completion.episode.transcript]
    text = completion.text
    return text if isinstance(completion.problem.prompt, str) else [{"role": "assistant", "content": text}]


def number_verdict(reward: float, correct_from: float) -> Verdict:
    """The verdict of a reward that is a number."""
    correct = reward >= correct_from
    return Verdict(correct=correct, status="right" if correct else "wrong", answer=None, reward=reward)


def _error(name: str, reason: str) -> UserError:
    return UserError(f"reward.function = {name!r}: {reason}")


def _columns(problems: Sequence[Problem]) -> dict[str, list[Any]]:
    """The problems' columns by name, and their reference answers, which the data may have under another name."""
    columns: dict[str, list[Any]] = {}
    if any(problem.answer for problem in problems):
        columns["answer"] = [problem.answer for problem in problems]
    for name in dict.fromkeys(name for problem in problems for name in problem.columns):
        columns[name] = [problem.columns.get(name) for problem in problems]
    return columns
