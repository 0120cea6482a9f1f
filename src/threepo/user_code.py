"""A user's own functions and classes: found by name, with errors that name the setting and the user's line."""

import dis
import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import is_dataclass
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from threepo.config.records import Named, flat, is_own, to_dict
from threepo.errors import UserError
from threepo.files import json_digest
from threepo.run_folder import folder_of_run

FROM_PYTHON = "<python>"
"""Stands for the module of a function that was passed to threepo as an object, and that no name can import."""
_OWN = (
    "reward.function",
    "method.advantage.rule",
    "method.correction.kind",
    "objective.loss",
    "optimizer.kind",
    "engine.kind",
    "ess_schedule.kind",
    "arms.choice",
    "noise.structure",
    "run.trackers",
)
"""Settings that can name a user's own code, besides the environment's."""
_objects: ContextVar[Mapping[str, Callable[..., Any]]] = ContextVar("objects")
"""Functions passed as objects, by name, of this thread: another run may have a function of the same name."""


@contextmanager
def functions_from_python(functions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Within the body these names, which begin with `FROM_PYTHON:`, mean these functions."""
    before = _objects.set({**_objects.get({}), **functions})
    try:
        yield
    finally:
        _objects.reset(before)


def find_object(name: str, setting: str) -> Callable[..., Any]:
    """Import a function or class, `module:name`, from the working directory or the environment; `UserError` if none."""

    def error(reason: str) -> UserError:
        return UserError(f"{setting} = {name!r}: {reason}")

    if function := _objects.get({}).get(name):
        return function
    module_name, _, own_name = name.partition(":")
    if module_name == FROM_PYTHON:
        fix = "give it again, as threepo.train(resume=RUN, reward=...), or in threepo.evaluate"
        raise error(f"is an object of Python that no name can import; {fix}; for `threepo eval`, name another")
    parts = (*module_name.split("."), own_name)
    if not all(part.isidentifier() for part in parts) or module_name.endswith(".py"):
        raise error("must be 'module:name'; mine.py in the current directory is the module mine")
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
    found: Any = getattr(module, own_name, None)
    if not (callable(found) or is_dataclass(found)):  # such as a `TokenLoss`
        raise error(f"module {module_name!r} has no function or class {own_name!r}")
    return found  # type: ignore[no-any-return]


def find_named(table: Mapping[str, Named], name: str, setting: str) -> Any:
    """Import the code that a setting names: a row of its table, or a user's own `module:name`."""
    return find_object(name, setting) if is_own(name) else table[name].load()


def own_names(config: Any) -> list[tuple[str, str]]:
    """The names of the user's code in a configuration, `module:name`, each with its setting or record."""
    settings: dict[str, Any] = dict(flat(to_dict(config)))
    named = {setting: settings.get(setting, ()) for setting in _OWN}
    if "environment.factory" in settings:
        played, setting = config.environment.own_names
        named[setting] = played
    lists = {setting: [value] if isinstance(value, str) else value for setting, value in named.items()}
    found = [(name, setting) for setting, names in lists.items() for name in names if is_own(name)]
    coded = {"objective.loss": "objective", "optimizer.kind": "optimizer", "engine.kind": "engine"}
    codes = [(getattr(config, coded[setting]).code, f"{name}.code") for name, setting in found if setting in coded]
    return found + codes


def own_code(config: Any) -> dict[str, str]:
    """Digests of the user's code, by words for messages.

    What a name imports is known by its file; an object of Python by its instructions and what they read.
    """
    digests = {}
    for name, setting in own_names(config):
        found, module = find_object(name, setting), sys.modules.get(name.partition(":")[0])
        file = getattr(module, "__file__", None)
        known = Path(file).read_bytes().hex() if file else _code_and_values(found)
        digests[f"code of {name}"] = json_digest(known)
    return digests


def _code_and_values(function: Any) -> list[Any]:
    """The instructions of a function, or of an object's `__call__`, and the values that they use.

    Values are numbers and texts among the function's defaults, a partial's arguments, an object's attributes and the
    variables that the function names, and the instructions of functions among these. What the function assigns to is
    left out, because it may count its calls.
    """
    if isinstance(function, partial):
        given = dict(enumerate(function.args)) | function.keywords
        return [*_code_and_values(function.func), _plain(given)]
    owner = getattr(function, "__self__", function)
    values = {**vars(type(owner)), **getattr(owner, "__dict__", {})}
    function = inspect.unwrap(function if inspect.isroutine(function) else type(function).__call__)
    function = getattr(function, "__func__", function)
    if not inspect.isfunction(function):
        return [function.__qualname__, _plain(values)]
    codes = list(_codes(function.__code__))
    named = {name: function.__globals__.get(name) for code in codes for name in code.co_names}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # the name is not assigned yet
            named[name] = cell.cell_contents
    defaults = {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}
    values = named | values | defaults
    for step in (step for code in codes for step in dis.get_instructions(code)):
        if step.opname in ("STORE_ATTR", "STORE_DEREF", "STORE_GLOBAL"):
            values.pop(step.argval, None)
    return [_instructions(function), _plain(values)]


def _codes(code: CodeType) -> Iterator[CodeType]:
    """The code of a function, and of functions in it, as which some versions of Python have comprehensions."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _instructions(function: FunctionType) -> list[str]:
    """A function's instructions and constants as texts, which do not depend on its place in a file or notebook."""
    codes = list(_codes(function.__code__))
    constants = [constant for code in codes for constant in code.co_consts if not isinstance(constant, CodeType)]
    told = [sorted(map(repr, each)) if isinstance(each, frozenset) else each for each in constants]
    return [repr((code.co_code, code.co_names, code.co_varnames)) for code in codes] + [repr(told)]


def _plain(values: Mapping[Any, Any]) -> list[str]:
    """The numbers, texts and functions among named values, as texts; all others, such as lists, are left out."""
    found = {name: value for name, value in values.items() if not str(name).startswith("__")}
    functions = {name: _instructions(value) for name, value in found.items() if inspect.isfunction(value)}
    plain = {name: value for name, value in found.items() if isinstance(value, (str, int, float))}
    return sorted(f"{name} = {value!r}" for name, value in (functions | plain).items())


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
