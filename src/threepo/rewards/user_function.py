"""A user's own reward function: found by name, checked before the run, called the way TRL calls reward functions.

    def reward(prompts, completions, answer, **columns):
        return [float(c.strip() == a) for c, a in zip(completions, answer)]

`prompts` and `completions` are texts (or lists of chat messages, where the prompts are), `completion_ids` the tokens;
every other argument is a column of the data, its values as the file has them. The result is one number for each
completion; None means that the function could not judge it.
"""

import importlib
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from threepo.errors import UserError
from threepo.types import Completion, Problem, Verdict

SUPPLIED = ("prompts", "completions", "completion_ids")
"""Arguments that every function can have, next to the columns of the data, and to `answer` where there is one."""


class UserFunction:
    """A `Grader` by the function that a recipe names as `module:function`. What goes wrong in it is a `UserError`."""

    def __init__(self, name: str, correct_from: float, known: Sequence[Problem]) -> None:
        """`known` are problems with the columns of the data."""
        self._name = name
        self._correct_from = correct_from
        self._function = _import(name)
        try:
            self._parameters: Mapping[str, inspect.Parameter] = inspect.signature(self._function).parameters
        except (TypeError, ValueError) as error:  # some built-in functions have no signature
            raise UserError(f"reward.function = {name!r}: has no readable signature; wrap it in a function") from error
        available = (*SUPPLIED, *_columns(known))
        for parameter in self._parameters.values():
            variadic = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
            supplied = parameter.name in available and parameter.kind is not parameter.POSITIONAL_ONLY
            if not variadic and not supplied and parameter.default is parameter.empty:
                raise UserError(
                    f"reward.function = {name!r}: needs the argument {parameter.name!r}; available by name are "
                    f"{', '.join(available)}"
                )

    def __call__(self, completions: Sequence[Completion]) -> list[Verdict]:
        """A verdict for each completion."""
        arguments = _arguments(completions)
        if not any(p.kind is p.VAR_KEYWORD for p in self._parameters.values()):
            arguments = {name: arguments[name] for name in self._parameters if name in arguments}
        try:
            values = self._function(**arguments)
        except (Exception, SystemExit) as error:  # it is the user's code, and may raise anything
            raise UserError(f"reward.function {self._name}: raised {_described(error)}") from error
        try:
            count = None if isinstance(values, (str, bytes, Mapping, Set)) else len(values)
        except TypeError:  # a number, a generator, an array without dimensions
            count = None
        if count != len(completions):
            got = type(values).__name__ if count is None else f"{count} values"
            raise UserError(
                f"reward.function {self._name}: returned {got} for {len(completions)} completions; return a list of "
                f"one number each"
            )
        return [self._verdict(value) for value in values]

    def _verdict(self, value: Any) -> Verdict:
        if value is None:
            return Verdict(correct=False, status="error", answer=None, reward=0.0)
        try:
            reward = math.nan if isinstance(value, (str, bytes)) else float(value)
        except (TypeError, ValueError, RuntimeError):  # torch raises the last for a tensor of several numbers
            reward = math.nan
        if not math.isfinite(reward):
            raise UserError(
                f"reward.function {self._name}: returned {value!r}; return a finite number, or None where it cannot "
                f"judge"
            )
        correct = reward >= self._correct_from
        return Verdict(correct=correct, status="right" if correct else "wrong", answer=None, reward=reward)


def _arguments(completions: Sequence[Completion]) -> dict[str, list[Any]]:
    problems = [completion.problem for completion in completions]
    arguments: dict[str, list[Any]] = {
        "prompts": [p.prompt if isinstance(p.prompt, str) else [dict(m) for m in p.prompt] for p in problems],
        "completions": [
            c.text if isinstance(c.problem.prompt, str) else [{"role": "assistant", "content": c.text}]
            for c in completions
        ],
        "completion_ids": [list(completion.tokens) for completion in completions],
    }
    return arguments | _columns(problems)


def _columns(problems: Sequence[Problem]) -> dict[str, list[Any]]:
    """The problems' columns by name, and their reference answers, which the data may have under another name."""
    columns: dict[str, list[Any]] = {}
    if any(problem.answer for problem in problems):
        columns["answer"] = [problem.answer for problem in problems]
    for name in dict.fromkeys(name for problem in problems for name in problem.columns):
        columns[name] = [problem.columns.get(name) for problem in problems]
    return columns


def _import(name: str) -> Callable[..., Any]:
    module_name, function_name = _split(name)
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # most reward files are next to the data
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # importing runs the user's code, which may raise anything
        if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}."):
            reason = f"no module {module_name!r} in {here} or the environment"
        else:
            reason = f"importing {module_name!r} raised {_described(error)}"
        raise UserError(f"reward.function = {name!r}: {reason}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        reason = f"{function_name!r} of module {module_name!r} is {'missing' if function is None else 'not a function'}"
        raise UserError(f"reward.function = {name!r}: {reason}")
    if inspect.iscoroutinefunction(function):
        raise UserError(f"reward.function = {name!r}: is a coroutine; write it without async")
    return function  # type: ignore[no-any-return]


def _split(name: str) -> tuple[str, str]:
    module, _, function = name.partition(":")
    path = Path(module)
    if path.suffix == ".py" or "/" in module:
        folder = f" and run in {path.parent}" if path.parent != Path() else ""
        raise UserError(
            f"reward.function = {name!r}: names a file, and not a module; write "
            f"'{path.name.removesuffix('.py')}:{function or 'function'}'{folder}"
        )
    if not function.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        raise UserError(f"reward.function = {name!r}: must be 'module:function', in names of Python")
    return module, function


def _described(error: BaseException) -> str:
    """An exception in one line, with its place in the user's file."""
    if isinstance(error, SyntaxError):
        message, places = error.msg, [(error.filename, error.lineno)]
    else:
        frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
        frames = [frame for frame in frames if frame[0] != __file__ and "importlib" not in frame[0]]
        message, places = str(error), [frame for frame in frames if frame[0] == frames[0][0]]
    line = " ".join(message.split())[:300]
    place = f" ({places[-1][0]}:{places[-1][1]})" if places else ""
    return f"{type(error).__name__}{': ' if line else ''}{line}{place}"
