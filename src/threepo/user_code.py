"""A user's own functions and classes: found by name, with errors that name the setting and the user's line."""

import dis
import importlib
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, NoneType
from typing import Any

from threepo.errors import UserError
from threepo.files import json_digest
from threepo.run_folder import folder_of_run

FROM_PYTHON = "<python>"
"""Stands for the module of a function that was passed to threepo as an object, and that no name can import."""
_objects: ContextVar[Mapping[str, Callable[..., Any]]] = ContextVar("objects")
"""Functions passed as objects, by name, of this thread: another run may have a function of the same name."""
_KINDS = {
    "reward.function": ("module:function", "rewards.py in the current directory is the module rewards"),
    "environment.factory": ("module:Class", "envs.py in the current directory is the module envs"),
    "environment.settings": ("module:function", "envs.py in the current directory is the module envs"),
}
"""By setting, what its value looks like, and an example."""


@contextmanager
def functions_from_python(functions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Within the body these names, which begin with `FROM_PYTHON:`, mean these functions."""
    before = _objects.set({**_objects.get({}), **functions})
    try:
        yield
    finally:
        _objects.reset(before)


def find_object(name: str, setting: str) -> Callable[..., Any]:
    """Import the function `module:name` from the working directory or the environment; `UserError` without one."""

    def error(reason: str) -> UserError:
        return UserError(f"{setting} = {name!r}: {reason}")

    if function := _objects.get({}).get(name):
        return function
    module_name, _, own_name = name.partition(":")
    if module_name == FROM_PYTHON:
        fix = "give it again, as threepo.train(resume=RUN, reward=...), or in threepo.evaluate"
        raise error(f"is an object of Python that no name can import; {fix}; for `threepo eval`, name another")
    form, example = _KINDS[setting]
    parts = (*module_name.split("."), own_name)
    if not all(part.isidentifier() for part in parts) or module_name.endswith(".py"):
        raise error(f"must be {form!r}; {example}")
    here = str(Path.cwd())
    run = folder_of_run(Path.cwd())
    if run:
        fix = "no code is imported from one; start elsewhere, with the module there if you trust it"
        raise error(f"the current directory is in the run folder {run}, and {fix}")
    if here not in sys.path:
        sys.path.insert(0, here)  # most reward files are next to the data
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as cause:  # importing runs the user's code, which may raise anything
        if isinstance(cause, ModuleNotFoundError) and f"{module_name}.".startswith(f"{cause.name}."):
            raise error(f"no module {module_name!r} in {here} or the environment") from cause
        raise error(f"importing {module_name!r} raised {described(cause)}") from cause
    found = getattr(module, own_name, None)
    if not callable(found):
        raise error(f"module {module_name!r} has no {form.partition(':')[2].lower()} {own_name!r}")
    return found  # type: ignore[no-any-return]


def own_code(config: Any) -> dict[str, str]:
    """Digests of the user's reward functions and environment, by words for messages.

    Of what a name imports, they are of its file; of an object of Python, of what it does (`_told`).
    """
    environment, digests = config.environment, {}
    for names, setting in ((config.reward.names, "reward.function"), environment.own_names):
        for name in names:
            if ":" in name:
                found, module = find_object(name, setting), sys.modules.get(name.partition(":")[0])
                file = getattr(module, "__file__", None)
                told = Path(file).read_bytes().hex() if file else _told(found, _module_of(found), set())
                digests[f"code of {name}"] = json_digest(told)
    return digests


def _module_of(value: Any) -> str:
    while isinstance(value, partial):
        value = value.func
    return str(getattr(value, "__module__", ""))


def _told(value: Any, module: str, known: set[int], hidden: frozenset[str] = frozenset()) -> Any:
    """Return what a value does, as nested lists of texts: of a function its instructions, what it holds and reads.

    Functions and objects of another module than `module` are told by name, collections that can change by their type,
    and a counter that a function assigns to not at all: a reward may remember what it has seen. `known` has what need
    not be told again, `hidden` the attributes of an object that its caller assigns to.
    """
    if isinstance(value, re.Pattern):
        return [repr(value.pattern), value.flags]
    if isinstance(value, (str, bytes, int, float, NoneType)):
        return repr(value)
    if isinstance(value, (tuple, frozenset)):
        parts = [_told(part, module, known) for part in value]
        return parts if isinstance(value, tuple) else sorted(map(str, parts))
    if isinstance(value, CodeType):  # without the name and lines of its file, which change when a cell runs again
        arguments = value.co_varnames[: value.co_argcount + value.co_kwonlyargcount]
        return [value.co_code.hex(), value.co_names, arguments, [_told(c, module, known) for c in value.co_consts]]
    if isinstance(value, partial):
        return [_told(part, module, known) for part in (value.func, value.args, *value.keywords.items())]
    if isinstance(value, MethodType):
        return [
            _told(value.__func__, module, known),
            _told(value.__self__, module, known, _assigned(value.__func__)[1]),
        ]
    if id(value) in known or getattr(value, "__module__", "") != module:
        return f"{type(value)} {getattr(value, '__qualname__', '')}"
    known.add(id(value))
    if isinstance(value, FunctionType):
        changed, held = _assigned(value)[0], zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        parts = [part for name, cell in held if name not in changed for part in _contents(cell)]
        parts += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).items(), value.__code__]
        read = sorted(_found(value.__code__, "LOAD_GLOBAL", "LOAD_NAME") - changed)
        parts += [value.__globals__[name] for name in read if name in value.__globals__]
    else:  # an object, or a cache around a function
        bases = [vars(base) for base in reversed(type(value).__mro__) if base.__module__ == module]
        of_class = {
            name: part for base in bases for name, part in base.items() if name not in ("__doc__", "__module__")
        }
        hidden |= _assigned(of_class.get("__call__"))[1]
        own = sorted({**of_class, **getattr(value, "__dict__", {})}.items())
        parts = [getattr(value, "__wrapped__", None)]
        parts += [(name, _function(part)) for name, part in own if name not in hidden]
    return [_told(part, module, known) for part in parts]


def _function(part: Any) -> Any:
    """The function of a method of any kind, or of a property; all else as it is."""
    wrapped = isinstance(part, (staticmethod, classmethod, property))
    return getattr(part, "__func__", getattr(part, "fget", part)) if wrapped else part


def _contents(cell: CellType) -> list[Any]:
    """The value that a cell holds; none if the name that it stands for is not assigned yet."""
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


def _found(code: CodeType, *operations: str) -> frozenset[str]:
    """The names with which a function, or a function in it, does one of these operations."""
    names = frozenset(str(one.argval) for one in dis.get_instructions(code) if one.opname in operations)
    return names.union(*(_found(inner, *operations) for inner in code.co_consts if isinstance(inner, CodeType)))


def _assigned(function: Any) -> tuple[frozenset[str], frozenset[str]]:
    """The names outside of it, and the attributes, that a function assigns to."""
    if not isinstance(function, FunctionType):
        return frozenset(), frozenset()
    return _found(function.__code__, "STORE_GLOBAL", "STORE_DEREF"), _found(function.__code__, "STORE_ATTR")


def described(error: BaseException) -> str:
    """An exception in one line, with the user's file and line."""
    message = " ".join(str(error).split())[:300]
    ours = str(Path(__file__).parent)
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(ours) and "importlib" not in frame.filename
    ]
    own = [frame for frame in frames if frame.filename == frames[0].filename]
    place = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""  # a SyntaxError's message has its file and line
    return ": ".join(filter(None, (type(error).__name__, message))) + place
