"""Code inside the sandbox: runs a program on one case (`run`); locally, a harness starts it for each case.

This module is sent to a SandboxFusion server (`on_server`) and into the local sandbox (`Harness`). So it imports
nothing of threepo, and few modules: every import delays every program.

The harness and its parent send messages with their length in front. The parent sends the order and the cases; the
harness sends `ready` and `compiled`, and for each case its output, in messages that begin with `+`, and its ending.
Each case runs in a process forked from the harness, which cannot reach the parent. That process asks for the case of a
function or a script when the program's top level has run. When a script has come to its end, it asks again; the harness
makes a random mark, which must come back as the last thing that the process writes. So there is no mark in memory or
files while the program runs, and nothing of the program runs after its tests.

NOT covered: what a program does to tests that run in its own process, because one process has no secrets from itself.
docs/rewards.md lists these forgeries, and the forms of tests that have none.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` takes longer to import than most programs to run
import _sitebuiltins
import atexit
import builtins
import gc
import os
import resource
import select
import sys
from os import _exit, close, fstat, pread, read
from os import write as write_some
from sys import exit as leave
from types import CodeType, ModuleType

# What runs after the program is bound before it: it may replace exec, compile or os.write.
__builtins__ = vars(builtins).copy()  # type: ignore[assignment]
TYPE_CHECKING = False  # the module `typing` takes longer to import than Python takes to start
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

    Table = dict[str, Any]

MEMORY, WRONG, NO_PYTHON = 86, 87, 88
"""Exit statuses: out of memory, a failed assertion of the tests, a program that does not compile. A program that ends
with one of them on purpose only fails in another way."""
MARK_BYTES = 32
NOBODY = 65534
STACK = 64 << 20
PR_SET_SECCOMP = 22
OUTPUT_LIMIT = 16 << 20
"""Bytes that a case may write; what writes more is stopped."""
TICK_S = 0.25
"""Time is counted in ticks of a timer and not read from a clock: suspending the machine makes no program late."""


def compile_code(code: str, name: str) -> CodeType:
    """The code without the future statements of this module; `SyntaxError` for anything that is not Python."""
    try:
        return compile(code, name, "exec", 0, True)
    except (ValueError, RecursionError, MemoryError, OverflowError) as error:
        raise SyntaxError(str(error)) from None


def new_module(kind: str) -> Table:
    """The names of a new, importable module for the program; it is `__main__` for `stdin` only."""
    name = "__main__" if kind == "stdin" else "solution"
    sys.modules[name] = module = ModuleType(name)
    module.__builtins__ = builtins  # type: ignore[attr-defined]  # not our copy
    return vars(module)


def run(
    order: Table, names: Table, codes: list[CodeType], take: Callable[[], bytes], prove: Callable[[], None], answer: int
) -> NoReturn:
    """Run the program, then the case that `take` returns, and end the process.

    `prove` reports that a script has come to its end. `answer` is the descriptor for what a function returns.
    """
    kind, status = order["kind"], 0
    try:
        for code in codes:
            exec(code, names)
        if kind == "call":
            write(answer, _returned(names, order["entry"], take()))
        elif kind == "script":
            _test(names, take())
            prove()
    except BaseException as error:
        status = MEMORY if isinstance(error, MemoryError) else 1
        if kind != "stdin":
            _exit(status)  # here, where the error still holds the program's objects, so no `__del__` of them runs
        if isinstance(error, SystemExit):
            status = error.code  # type: ignore[assignment]
    if kind != "stdin":
        _exit(0)
    for step in (  # what Python does at its end; the kernel frees the rest faster
        lambda: sys.modules["threading"]._shutdown(),  # waits for threads
        lambda: atexit._run_exitfuncs(),
        lambda: sys.stdout.flush(),
        names.clear,  # writes out files that were left open
        lambda: sys.__stdout__.flush(),  # type: ignore[union-attr]
    ):
        try:
            step()  # type: ignore[no-untyped-call]
        except BaseException:
            continue  # no threads, or an error of the program, which at its end changes no exit status in Python either
    _exit(status & 255 if isinstance(status, int) else int(status is not None))


def _returned(names: Table, entry: str, case: bytes) -> bytes:
    """The JSON of what the program's function returns."""
    import json

    sys.set_int_max_str_digits(0)
    owner = names.get("Solution")  # goes first: the prefix may have imported a function with the name of the method
    function = getattr(owner(), entry) if hasattr(owner, entry) else names[entry]  # type: ignore[misc]
    return json.dumps(function(*json.loads(case)), default=list).encode()


def _test(names: Table, case: bytes) -> None:
    """Run tests after the program, with its names; returns if they come to their end."""
    names["__name__"], sys.modules["__main__"] = "__main__", sys.modules["solution"]  # as unittest.main needs it
    sys.exit = leave  # by which tests may fail
    sys.set_int_max_str_digits(0)
    tests = compile_code(case.decode(), "<tests>")
    if b"unittest" in case:
        _let_unittest_return()
    try:
        exec(tests, names)
    except AssertionError:
        _exit(WRONG)


def _let_unittest_return() -> None:
    """Make `unittest.main` return after success and raise AssertionError after a failure, where it would end Python."""
    import unittest

    run: Any = unittest.main

    def main(*arguments: Any, exit: bool = True, **settings: Any) -> Any:
        program = run(*arguments, exit=False, **settings)
        if exit and not program.result.wasSuccessful():
            raise AssertionError
        return program

    unittest.main = main  # type: ignore[assignment]


def write(file: int, data: bytes) -> None:
    """Write all of it."""
    view = memoryview(data)
    while view:
        view = view[write_some(file, view) :]


def on_server(submission: dict[str, str], answer_file: str) -> NoReturn:
    """Run a submission without a harness: its case is standard input, and the answer goes to a file."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (OUTPUT_LIMIT, OUTPUT_LIMIT))
    answer, case, null = os.open(answer_file, os.O_WRONLY | os.O_CREAT), os.dup(0), os.open(os.devnull, os.O_RDWR)
    os.dup2(answer if submission["kind"] == "stdin" else null, 1)
    if submission["kind"] != "stdin":
        os.dup2(null, 0)
    try:
        codes = [compile_code(submission[part], f"<{part}>") for part in ("prefix", "program")]
    except SyntaxError:
        os._exit(NO_PYTHON)
    with os.fdopen(case, "rb") as file:
        mark = file.read(MARK_BYTES if submission["kind"] == "script" else 0)
        run(submission, new_module(submission["kind"]), codes, file.read, lambda: write(answer, mark), answer)


class Harness:
    """Runs the program of an order; ends when the parent has gone."""

    def __init__(self, order: Table) -> None:
        os.closerange(3, 4096)  # bubblewrap may leave files open
        self._order, self._kind = order, order["kind"]
        self._pid, self._waited = 0, 0.0
        if order["drop_root"]:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
        hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
        stack = STACK if hard == resource.RLIM_INFINITY else min(STACK, hard)
        resource.setrlimit(resource.RLIMIT_STACK, (stack, hard))
        for name, most in order["limits"].items():
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))
        _load_filter(order["filters"][0])
        self._link, null = os.dup(0), os.open(os.devnull, os.O_RDWR)
        self._input = os.fdopen(self._link, "rb")
        self._poll = select.poll()
        self._poll.register(self._link, 0)  # reports only that the parent has gone
        for file in (0, 1, 2):  # standard error reported errors until now
            os.dup2(null, file)
        os.close(null)
        for name in ("exit", "quit"):  # which the module `site` makes, slowly
            setattr(builtins, name, _sitebuiltins.Quitter(name, "Ctrl-D (i.e. EOF)"))
        _signal.signal(_signal.SIGALRM, self._tick)
        _signal.setitimer(_signal.ITIMER_REAL, TICK_S, TICK_S)

    def main(self) -> None:
        """Run cases until the parent sends no more."""
        self._tell(b"ready")
        try:
            prefix, program = (compile_code(self._order[part], f"<{part}>") for part in ("prefix", "program"))
        except SyntaxError:
            return
        names = new_module(self._kind)
        try:
            exec(prefix, names)  # once for all cases: published prefixes import twenty modules
        except BaseException as error:
            names["error"], program = error, compile_code("raise error", "<prefix>")
        if self._kind == "call":
            import json  # noqa: F401 - once for all cases
        self._tell(b"compiled")
        gc.freeze()  # else every case would copy what its first collection looks at
        while True:
            self._tell(self._case(names, program).encode())

    def _receive(self, file: int) -> None:
        """Write the parent's next message into a file; end where there is none."""
        size = self._input.read(4) or os._exit(0)
        write(file, self._input.read(int.from_bytes(size, "big")))
        os.lseek(file, 0, os.SEEK_SET)

    def _tell(self, message: bytes) -> None:
        write(self._link, len(message).to_bytes(4, "big") + message)

    def _tick(self, *_: object) -> None:
        """End the program if it is late; end everything if the parent has gone."""
        self._waited += TICK_S
        gone = bool(self._poll.poll(0))
        try:
            if self._pid and (gone or self._waited > self._order["wall_s"]):
                os.kill(self._pid, _signal.SIGKILL)
        except ProcessLookupError:
            pass  # it has ended a moment ago
        if gone:
            os._exit(0)

    def _case(self, names: Table, program: CodeType) -> str:
        """Run the next case; returns its ending."""
        file = os.open(".case", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.unlink(".case")
        if self._kind == "stdin":
            self._receive(file)
        (up, answer), (down, go) = os.pipe(), os.pipe()
        pid = os.fork()
        if not pid:
            try:
                for end in (self._link, up, go):
                    os.close(end)
                run(self._order, names, [program], *self._as_program(file, answer, down), answer)
            finally:
                _exit(1)
        self._pid, self._waited = pid, 0.0
        os.close(answer)
        if self._kind != "stdin":
            os.read(up, 1)  # comes when the program's own code has run, or ends with the program
            self._receive(file)
            write(go, b"?")  # this process keeps the end `down` too, so it can write although the program has ended
        mark = b""
        if self._kind == "script":
            os.read(up, 1)  # comes when the tests have run
            mark = os.urandom(MARK_BYTES)
            write(go, mark)
        written, last = self._pass_on(up, silent=bool(mark))
        _, status, usage = os.wait4(pid, 0)
        self._pid = 0
        for end in (up, down, go, file):
            os.close(end)
        if written > OUTPUT_LIMIT:
            return "wrong"
        code = os.waitstatus_to_exitcode(status)
        # Only time limits kill: the kernel's of processor time, which it counts more coarsely, and `_tick`'s.
        if code == -_signal.SIGKILL or usage.ru_utime + usage.ru_stime > self._order["cpu_s"]:
            return "time-out"
        if code == 0 and mark not in (b"", last):
            return "runtime error"
        return {0: "ok", MEMORY: "memory", WRONG: "wrong"}.get(code, "runtime error")

    def _pass_on(self, up: int, silent: bool) -> tuple[int, bytes]:
        """Pass on what the program's process writes, unless `silent`; returns how much it is, and its last part."""
        written, part = 0, b""
        while more := os.read(up, 1 << 16):
            part = more
            if not silent:
                self._tell(b"+" + part)
            written += len(part)
            if written > OUTPUT_LIMIT:
                os.kill(self._pid, _signal.SIGKILL)
        return written, part

    def _as_program(self, file: int, answer: int, down: int) -> tuple[Callable[[], bytes], Callable[[], None]]:
        """Set the limits of the program's process; returns `take` and `prove` of `run`."""
        if self._kind == "stdin":
            os.dup2(file, 0)
            os.dup2(answer, 1)
            os.closerange(3, 64)
        _signal.signal(_signal.SIGALRM, _signal.SIG_DFL)
        seconds = -int(-self._order["cpu_s"] // 1)
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))  # the hard limit kills, whatever a program ignores
        _load_filter(self._order["filters"][1])

        def take() -> bytes:
            write(answer, b"?")
            read(down, 1)  # comes when the case is in the file
            case = pread(file, fstat(file).st_size, 0)
            close(file)
            return case

        def prove() -> None:
            write(answer, b"!")
            write(answer, read(down, MARK_BYTES))

        return take, prove


def _load_filter(instructions: bytes) -> None:
    """Load a filter of system calls, if there is one."""
    if instructions:
        import ctypes

        data = ctypes.create_string_buffer(instructions, len(instructions))
        address = ctypes.addressof(data).to_bytes(8, sys.byteorder)
        program = (len(instructions) // 8).to_bytes(2, sys.byteorder) + bytes(6) + address  # struct sock_fprog
        if ctypes.CDLL(None).prctl(PR_SET_SECCOMP, 2, program):
            raise OSError("the kernel refuses a filter of system calls")
