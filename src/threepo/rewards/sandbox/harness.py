"""The process inside the local sandbox that runs the program anew for each case and says how each ended.

The parent sends this module as compiled code together with `execution`; both run in one namespace. So it imports
nothing of threepo, and few modules. Every message has its length in front. The parent sends the order and then the
cases; the answers are `ready` and `compiled`, and for each case its output, in messages that begin with `+`, and its
ending.

Each case runs in a process forked from this one that has no way to the parent. The harness reads a case of a function
or a script only after that fork, when the program's own top level has run: until then neither the tests nor the mark
that proves their end are in the program's memory.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` takes longer to import than most programs to run
import _sitebuiltins
import builtins
import gc
import os
import resource
import select
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType
    from typing import Any

    from threepo.rewards.sandbox.execution import MEMORY, WRONG, compiled, new_module, run, write

NOBODY = 65534
STACK = 64 << 20
SET_FILTER = 22
"""PR_SET_SECCOMP of Linux's prctl."""
OUTPUT_LIMIT = 16 << 20
"""Bytes that a case may write; what writes more is stopped."""
TICK_S = 0.25
"""Time is counted in ticks of a timer, not read from a clock: nobody is late because the machine was suspended."""


class Harness:
    """Runs the program of an order; ends when the parent has gone."""

    def __init__(self, order: dict[str, Any]) -> None:
        os.closerange(3, 4096)  # bubblewrap may leave files open
        self._order, self._kind = order, order["kind"]
        self._cpu_s, self._wall_s = order["cpu_s"], order["wall_s"]
        self._pid, self._waited = 0, 0.0
        confine(order)
        self._link, null = os.dup(0), os.open(os.devnull, os.O_RDWR)
        self._poll = select.poll()
        self._poll.register(self._link, 0)  # tells only that the parent has gone
        for file in (0, 1, 2):  # the last took what went wrong until now
            os.dup2(null, file)
        os.close(null)
        for name in ("exit", "quit"):  # which the module `site` makes, but takes its time
            setattr(builtins, name, _sitebuiltins.Quitter(name, "Ctrl-D (i.e. EOF)"))
        _signal.signal(_signal.SIGALRM, self._tick)
        _signal.setitimer(_signal.ITIMER_REAL, TICK_S, TICK_S)

    def main(self) -> None:
        """Run cases until the parent sends no more."""
        self._tell(b"ready")
        try:
            prefix, program = (compiled(self._order[part], f"<{part}>") for part in ("prefix", "program"))
        except SyntaxError:
            return
        names = new_module(self._kind)
        try:
            exec(prefix, names)  # once for all cases: published prefixes import twenty modules
        except BaseException as error:
            names["error"], program = error, compiled("raise error", "<prefix>")
        if self._kind == "call":
            import json  # noqa: F401 - once for all cases
        self._tell(b"compiled")
        gc.freeze()  # else every case would copy what its first collection looks at
        while True:
            self._tell(self._case(names, program).encode())

    def _take(self) -> bytes:
        """The parent's next message."""
        return self._read(int.from_bytes(self._read(4), "big"))

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            part = os.read(self._link, size - len(data))
            if not part:
                os._exit(0)
            data += part
        return bytes(data)

    def _tell(self, message: bytes) -> None:
        write(self._link, len(message).to_bytes(4, "big") + message)

    def _tick(self, *_: object) -> None:
        """End the program where it is late or nobody waits for it, and then everything."""
        self._waited += TICK_S
        gone = bool(self._poll.poll(0))
        if self._pid and (gone or self._waited > self._wall_s):
            os.kill(self._pid, _signal.SIGKILL)
        if gone:
            os._exit(0)

    def _case(self, names: dict[str, Any], program: CodeType) -> str:
        """Run the next case; its ending."""
        file = os.open(".case", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.unlink(".case")
        if self._kind == "stdin":
            _fill(file, self._take())
        up, answer = os.pipe()
        down, go = os.pipe()
        pid = os.fork()
        if not pid:
            try:
                for end in (self._link, up, go):
                    os.close(end)
                run(self._kind, names, [program], self._order["entry"], self._as_program(file, answer, down), answer)
            finally:
                os._exit(1)
        self._pid, self._waited = pid, 0.0
        os.close(answer)
        os.close(down)
        if self._kind != "stdin":
            os.read(up, 1)  # comes when the program's own code has run, or ends with the program
            _fill(file, self._take())
        os.close(go)
        written = 0
        while part := os.read(up, 1 << 16):
            self._tell(b"+" + part)
            written += len(part)
            if written > OUTPUT_LIMIT:
                os.kill(pid, _signal.SIGKILL)
        _, status, usage = os.wait4(pid, 0)
        self._pid = 0
        os.close(up)
        os.close(file)
        if written > OUTPUT_LIMIT:
            return "wrong"
        return self._ending(os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime)

    def _ending(self, code: int, spent_s: float) -> str:
        killed = code == -_signal.SIGKILL and (spent_s > self._cpu_s / 2 or self._waited > self._wall_s)
        if killed or spent_s > self._cpu_s:  # where it kills, the kernel counts time more coarsely
            return "time-out"
        return {0: "ok", MEMORY: "memory", WRONG: "wrong"}.get(code, "runtime error")

    def _as_program(self, file: int, answer: int, down: int) -> Callable[[], bytes]:
        """Set what holds in the program's process only; the function by which that gets its case."""
        if self._kind == "stdin":
            os.dup2(file, 0)
            os.dup2(answer, 1)
            for end in (file, answer, down):
                os.close(end)
        _signal.signal(_signal.SIGALRM, _signal.SIG_DFL)
        seconds = -int(-self._cpu_s // 1)
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))  # the hard limit kills, whatever a program ignores
        load_filter(self._order["filters"][1])

        def take() -> bytes:
            os.write(answer, b"?")
            os.read(down, 1)  # ends when the case is in the file
            return os.pread(file, os.fstat(file).st_size, 0)

        return take


def confine(order: dict[str, Any]) -> None:
    """Give up root where the harness has it, and set the limits and the filter that hold for all that follows."""
    if order["drop_root"]:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
    resource.setrlimit(resource.RLIMIT_STACK, (STACK if hard == resource.RLIM_INFINITY else min(STACK, hard), hard))
    for name, value in order["limits"].items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
    load_filter(order["filters"][0])


def load_filter(instructions: bytes) -> None:
    """Load a filter of system calls, if there is one."""
    if instructions:
        import ctypes

        data = ctypes.create_string_buffer(instructions, len(instructions))
        place = ctypes.addressof(data).to_bytes(8, sys.byteorder)
        program = (len(instructions) // 8).to_bytes(2, sys.byteorder) + bytes(6) + place  # struct sock_fprog
        if ctypes.CDLL(None).prctl(SET_FILTER, 2, program):
            raise OSError("the kernel refuses a filter of system calls")


def _fill(file: int, data: bytes) -> None:
    write(file, data)
    os.lseek(file, 0, os.SEEK_SET)
