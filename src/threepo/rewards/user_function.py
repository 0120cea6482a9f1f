"""A user's own reward function: found by name, checked before the run, called the way TRL calls reward functions."""

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence, Set, Sized
from pathlib import Path
from types import TracebackType
from typing import Any

from threepo.errors import UserError
from threepo.types import Problem

SUPPLIED = ("prompts", "completions", "completion_ids")
"""Arguments that every function can ask for; the columns of the data are others, and `answer` where there is one."""


class UserFunction:
    """A function named `module:function` in a recipe. Whatever it does wrong becomes a `UserError` with its name."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._function = _import(name)
        self._parameters: Mapping[str, inspect.Parameter] = _signature(name, self._function)

    def check(self, known: Sequence[Problem]) -> None:
        """Raise `UserError` if the function asks for what neither threepo nor a column of the data supplies."""
        available = (*SUPPLIED, *_columns(known))
        for parameter in self._parameters.values():
            if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                continue
            if parameter.default is parameter.empty and (
                parameter.kind is parameter.POSITIONAL_ONLY or parameter.name not in available
            ):
                raise UserError(
                    f"reward.function = {self._name!r}: asks for the argument {parameter.name!r}; what it can have, "
                    f"by name, is {', '.join(available)}"
                )

    def __call__(
        self, problems: Sequence[Problem], texts: Sequence[str], tokens: Sequence[Sequence[int]]
    ) -> Sequence[Any]:
        """What the function returns for these completions: one value each."""
        arguments = self._arguments(problems, texts, tokens)
        try:
            values = self._function(**arguments)
            if inspect.iscoroutine(values):
                values.close()
                raise UserError(f"reward.function {self._name}: is a coroutine; write it without async")
            return self._checked(values, len(texts))
        except UserError:
            raise
        except (Exception, SystemExit) as error:  # it is the user's, and may raise anything
            raise UserError(f"reward.function {self._name}: raised {_described(error, self._file())}") from error

    def _checked(self, values: Any, count: int) -> list[Any]:
        unordered = isinstance(values, (str, bytes, Mapping, Set))
        listed = None if unordered or not isinstance(values, Sized) or not isinstance(values, Iterable) else values
        try:
            found = None if listed is None else len(listed)
        except TypeError:  # an array without dimensions
            found = None
        if listed is None or found != count:
            got = f"{found} values" if found is not None else type(values).__name__
            raise UserError(
                f"reward.function {self._name}: returned {got} for {count} completions; return a list of one number "
                f"each"
            )
        return list(listed)

    def _arguments(
        self, problems: Sequence[Problem], texts: Sequence[str], tokens: Sequence[Sequence[int]]
    ) -> dict[str, Any]:
        arguments: dict[str, list[Any]] = {
            "prompts": [p.prompt if isinstance(p.prompt, str) else [dict(m) for m in p.prompt] for p in problems],
            "completions": [
                text if isinstance(problem.prompt, str) else [{"role": "assistant", "content": text}]
                for problem, text in zip(problems, texts, strict=True)
            ],
            "completion_ids": [list(ids) for ids in tokens],
        }
        arguments |= _columns(problems)
        if any(p.kind is p.VAR_KEYWORD for p in self._parameters.values()):
            return arguments
        return {name: arguments[name] for name in self._parameters if name in arguments}

    def _file(self) -> str:
        code = getattr(inspect.unwrap(self._function), "__code__", None)
        return code.co_filename if code else ""


def _columns(problems: Sequence[Problem]) -> dict[str, list[Any]]:
    """The problems' columns, by name; the reference answer is one even where the source does not say so."""
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
        sys.path.insert(0, here)  # a reward file beside the data is the common case
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # importing runs the user's code, which may raise anything
        parents = {".".join(module_name.split(".")[:n]) for n in range(1, module_name.count(".") + 2)}
        if isinstance(error, ModuleNotFoundError) and error.name in parents:
            raise UserError(
                f"reward.function = {name!r}: no module {module_name!r} in {here} or the environment"
            ) from error
        raise UserError(
            f"reward.function = {name!r}: importing {module_name!r} raised {_described(error, '')}"
        ) from error
    function = getattr(module, function_name, None)
    if function is None:
        raise UserError(f"reward.function = {name!r}: module {module_name!r} has no {function_name!r}")
    if not callable(function):
        raise UserError(f"reward.function = {name!r}: is not a function")
    if inspect.iscoroutinefunction(function):
        raise UserError(f"reward.function = {name!r}: is a coroutine; write it without async")
    return function  # type: ignore[no-any-return]


def _split(name: str) -> tuple[str, str]:
    module, _, function = name.partition(":")
    path = Path(module)
    if module.endswith(".py") or "/" in module:
        where = f" and run in {path.parent}" if path.parent != Path() else ""
        raise UserError(
            f"reward.function = {name!r}: names a file, and not a module; write "
            f"'{path.name.removesuffix('.py')}:{function or 'function'}'{where}"
        )
    if not function.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        raise UserError(f"reward.function = {name!r}: must be 'task', 'exact' or 'module:function'")
    return module, function


def _signature(name: str, function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError) as error:  # some built-in functions have none
        raise UserError(f"reward.function = {name!r}: does not tell its arguments; wrap it in a function") from error


def _described(error: BaseException, file: str) -> str:
    """An exception in one line, with the place: the last one in `file`, or else where it was raised."""
    if isinstance(error, SyntaxError):
        place: tuple[str | None, int | None] | None = (error.filename, error.lineno)
        message = error.msg
    else:
        place, message = _place(error.__traceback__, file), str(error)
    line = " ".join(message.split())[:300]
    where = f" ({place[0]}:{place[1]})" if place else ""
    return f"{type(error).__name__}{': ' if line else ''}{line}{where}"


def _place(trace: TracebackType | None, file: str) -> tuple[str, int | None] | None:
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(trace)]
    frames = [frame for frame in frames if not frame[0].startswith("<frozen importlib")]
    frames = [frame for frame in frames if frame[0] == file] or frames
    return frames[-1] if frames else None
