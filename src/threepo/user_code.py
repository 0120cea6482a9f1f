"""A user's own functions and classes: found by name, with errors that name the setting and the user's line."""

import importlib
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType, NoneType
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


def own_code(names: Iterable[str], setting: str) -> dict[str, str]:
    """Digests of what the user's objects of these names do, by words for messages: of their files, or instructions."""
    digests = {}
    for name in names:
        if ":" in name:
            module = name.partition(":")[0]
            found = find_object(name, setting)
            file = getattr(sys.modules.get(module), "__file__", None)
            told = json_digest(Path(file).read_bytes().hex() if file else _instructions(found))
            digests[f"code of {name}"] = told
    return digests


def _instructions(function: Any, known: tuple[Any, ...] = ()) -> list[Any]:
    """What a function does, as nested lists: its instructions, the plain values that it holds or reads, and all this
    of the functions that it wraps or calls, if they are of its module. `known`: functions that need not be told again.
    """
    if isinstance(function, partial):
        return [_instructions(function.func), _plain(function.args), _plain(function.keywords.items())]
    owner = getattr(function, "__self__", function)  # of a method, or an object that can be called
    held = _plain(vars(owner).items()) if hasattr(owner, "__dict__") else []
    function = getattr(function, "__func__", function)
    if not isinstance(function, FunctionType):
        function = getattr(function, "__wrapped__", type(function).__call__)  # of functools' caches, or an object
    if not isinstance(function, FunctionType):
        return [str(function), held]
    code, module, known = function.__code__, function.__globals__, (*known, function)
    values = [cell.cell_contents for cell in function.__closure__ or ()]
    values += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).items()]
    values += [module[name] for name in sorted(_names(code)) if name in module]
    own = (f for f in values if isinstance(f, FunctionType) and f.__module__ == function.__module__)
    return [_compiled(code), _plain(values), held, [_instructions(f, known) for f in own if f not in known]]


def _names(code: CodeType) -> set[str]:
    """The names that a function and the functions in it read."""
    return set(code.co_names).union(*(_names(c) for c in code.co_consts if isinstance(c, CodeType)))


def _compiled(code: CodeType) -> list[Any]:
    """Instructions without the name and the lines of their file, which change when a cell of a notebook runs again."""
    constants = [_compiled(c) if isinstance(c, CodeType) else _plain([c]) for c in code.co_consts]
    return [code.co_code.hex(), code.co_names, constants]


def _plain(values: Iterable[Any]) -> list[str]:
    """Numbers, texts and collections of them, written out; of all else the type, as its text may name an address."""
    texts = []
    for value in values:
        if isinstance(value, (tuple, list)):
            texts.append(f"{_plain(value)}")
        elif isinstance(value, (set, frozenset)):
            texts.append(f"{sorted(_plain(value))}")
        elif isinstance(value, dict):
            texts.append(f"{_plain(value.items())}")
        else:
            texts.append(repr(value) if isinstance(value, (str, bytes, int, float, NoneType)) else str(type(value)))
    return texts


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
