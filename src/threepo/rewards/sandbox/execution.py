"""Runs a program on one case, in a process made for it: in the local sandbox and on a SandboxFusion server alike.

The source of this module is sent there, so it imports nothing of threepo, and few modules: every import delays every
program. The process ends with one of the statuses below or with that of the program; a program that ends with one of
them on purpose only fails its test in another way.
"""

from __future__ import annotations

import atexit
import os
import sys
from types import CodeType, ModuleType

TYPE_CHECKING = False  # the module `typing` takes longer to import than Python takes to start
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any, NoReturn

MEMORY, WRONG, NO_PYTHON = 86, 87, 88
"""Exit statuses: out of memory, a failed assertion of the tests, a program that does not compile."""
MARK_BYTES = 32
"""What a script's case begins with: a random mark, which is the answer of a case that came to its end."""


def compiled(code: str, name: str) -> CodeType:
    """The code without the future statements of this module; `SyntaxError` for anything that is not Python."""
    try:
        return compile(code, name, "exec", 0, True)
    except (ValueError, RecursionError, MemoryError, OverflowError) as error:
        raise SyntaxError(str(error)) from None


def new_module(kind: str) -> dict[str, Any]:
    """The names of the module that the program becomes, which imports find."""
    name = "__main__" if kind == "stdin" else "solution"  # what a program does as a script is not part of its functions
    module = sys.modules[name] = ModuleType(name)
    return module.__dict__


def on_server(job: dict[str, str], answer_file: str, limit: int) -> NoReturn:
    """Run a job where this is the whole program: its case is standard input, and the answer goes to a file."""
    import resource

    answer, case, null = os.open(answer_file, os.O_WRONLY | os.O_CREAT), os.dup(0), os.open(os.devnull, os.O_RDWR)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    if job["kind"] == "stdin":
        os.dup2(answer, 1)
    else:
        os.dup2(null, 0)
        os.dup2(null, 1)
    try:
        codes = [compiled(job[part], f"<{part}>") for part in ("prefix", "program")]
    except SyntaxError:
        os._exit(NO_PYTHON)
    run(job["kind"], new_module(job["kind"]), codes, job["entry"], lambda: open(case, "rb").read(), answer)


def run(
    kind: str,
    names: dict[str, Any],
    codes: Sequence[CodeType],
    entry: str,
    take: Callable[[], bytes],
    answer: int,
) -> NoReturn:
    """Run the program, then its case, which `take` gives, and end the process.

    `answer` is the descriptor for what a function returns, or for a script's mark.
    """
    status: Any = 0
    try:
        for code in codes:
            exec(code, names)
        if kind == "call":
            write(answer, _returned(names, entry, take()))
        elif kind == "script":
            status = _tested(names, take(), answer)
    except SystemExit as end:
        status = end.code if kind == "stdin" else 1
    except MemoryError:
        status = MEMORY
    except BaseException:
        status = 1
    last: list[Callable[[], object]] = [  # what Python does at its end; the kernel takes the rest down faster
        lambda: sys.modules["threading"]._shutdown(),  # waits for threads
        lambda: atexit._run_exitfuncs(),
        lambda: sys.stdout.flush(),
        names.clear,  # writes out files that were left open
        lambda: sys.__stdout__.flush(),  # type: ignore[union-attr]
    ]
    for step in last:
        try:
            step()
        except BaseException:
            continue  # no threads, or whatever the program broke
    os._exit(status & 255 if isinstance(status, int) else int(status is not None))


def _returned(names: dict[str, Any], entry: str, case: bytes) -> bytes:
    """The JSON of what the program's function returns."""
    import json

    sys.set_int_max_str_digits(0)
    owner = names.get("Solution")  # looked at first: the prefix may have imported a function of that name
    function = getattr(owner(), entry) if owner is not None and hasattr(owner, entry) else names[entry]
    return json.dumps(function(*json.loads(case)), default=list).encode()


def _tested(names: dict[str, Any], case: bytes, answer: int) -> int:
    """Run the tests after the program, under the program's names; the status to end with."""
    names["__name__"], sys.modules["__main__"] = "__main__", sys.modules["solution"]  # as unittest.main needs it
    sys.set_int_max_str_digits(0)
    try:
        exec(compiled(case[MARK_BYTES:].decode(), "<tests>"), names)
    except AssertionError:
        return WRONG
    except SystemExit as end:  # unittest.main and some scripts end so, but the program may not end its tests
        frame = end.__traceback__
        while frame is not None:
            if frame.tb_frame.f_code.co_filename == "<program>":
                return 1
            frame = frame.tb_next
        if end.code:
            return WRONG
    write(answer, case[:MARK_BYTES])
    return 0


def write(file: int, data: bytes) -> None:
    """Write all of it."""
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
