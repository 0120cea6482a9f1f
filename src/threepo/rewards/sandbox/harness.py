"""The process inside the local sandbox that runs the program anew for each case and says how each ended.

The parent sends this module as compiled code together with `execution`; both run in one namespace. So it imports
nothing of threepo, and few modules. Every message has its length in front. On standard input come the job and the
cases; on standard output go `ready` and `compiled`, then for each case its output, in messages that begin with `+`, and
its ending.

Each case runs in a process forked from this one that has none of these pipes. The harness reads a case of a function or
a script only after that fork, and hands it over when the program's own top level has run: until then neither the tests
nor the mark that proves their end are in the program's memory.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` takes longer to import than most programs to run
import _sitebuiltins
import builtins
import gc
import marshal
import os
import resource
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType
    from typing import Any

    from threepo.rewards.sandbox.execution import MEMORY, WRONG, compiled, new_module, run, write

NOBODY = 65534
STACK = 64 << 20
SET_FILTER, DIE_WITH_PARENT = 22, 1
"""PR_SET_SECCOMP and PR_SET_PDEATHSIG of Linux's prctl."""
OUTPUT_LIMIT = 16 << 20
"""Bytes that a case may write; what writes more is stopped."""
TICK_S = 0.25
"""Time is counted in ticks of a timer, not read from a clock: no program is late because the machine was suspended."""


class Harness:
    """Runs a job; ends when the parent has gone."""

    def __init__(self, settings: dict[str, Any]) -> None:
        os.closerange(3, 4096)  # bubblewrap may leave files open
        self._settings = settings
        self._jobs, self._control = os.dup(0), os.dup(1)
        self._pid, self._waited = 0, 0.0
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)
        confine(settings)
        for name in ("exit", "quit"):  # which the module `site` makes, and takes its time
            setattr(builtins, name, _sitebuiltins.Quitter(name, "Ctrl-D (i.e. EOF)"))
        self._tell(b"ready")
        os.dup2(null, 2)  # until now it took what went wrong
        os.close(null)

    def main(self) -> None:
        """Run the job that the parent sends, until it sends no more cases."""
        job = marshal.loads(self._take())
        try:
            prefix, program = (compiled(job[part], f"<{part}>") for part in ("prefix", "program"))
        except SyntaxError:
            self._tell(b"compile error")
            return
        names = new_module(job["kind"])
        try:
            exec(prefix, names)  # once for all cases: published prefixes import twenty modules
        except BaseException as error:
            names["error"], program = error, compiled("raise error", "<prefix>")
        if job["kind"] == "call":
            import json  # noqa: F401 - once for all cases
        self._tell(b"compiled")
        gc.freeze()  # else every case would copy what its first collection looks at
        _signal.signal(_signal.SIGALRM, self._tick)
        _signal.setitimer(_signal.ITIMER_REAL, TICK_S, TICK_S)
        while True:
            self._tell(self._case(job["kind"], names, program, job["entry"]).encode())

    def _take(self) -> bytes:
        """The parent's next message."""
        return self._read(int.from_bytes(self._read(8), "big"))

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            part = os.read(self._jobs, size - len(data))
            if not part:
                os._exit(0)
            data += part
        return bytes(data)

    def _tell(self, message: bytes) -> None:
        write(self._control, len(message).to_bytes(8, "big") + message)

    def _tick(self, *_: object) -> None:
        self._waited += TICK_S
        if self._pid and self._waited > self._settings["wall_s"]:
            os.kill(self._pid, _signal.SIGKILL)

    def _case(self, kind: str, names: dict[str, Any], program: CodeType, entry: str) -> str:
        """Run the next case; how it ended."""
        file = _nameless_file()
        if kind == "stdin":
            _fill(file, self._take())
        up, answer = os.pipe()
        down, go = os.pipe()
        pid = os.fork()
        if not pid:
            try:
                for end in (self._jobs, self._control, up, go):
                    os.close(end)
                run(kind, names, program, entry, self._as_program(kind, file, answer, down), answer)
            finally:
                os._exit(1)
        self._pid, self._waited = pid, 0.0
        os.close(answer)
        os.close(down)
        if kind != "stdin":
            os.read(up, 1)  # comes when the program's own code has run, or has ended
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
        code, spent_s, limit_s = os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime, self._settings["cpu_s"]
        killed = code == -_signal.SIGKILL
        if written > OUTPUT_LIMIT:
            return "wrong"
        if spent_s > limit_s or (killed and (spent_s > limit_s / 2 or self._waited > self._settings["wall_s"])):
            return "time-out"  # the kernel counts coarsely when it kills
        return {0: "ok", MEMORY: "memory", WRONG: "wrong"}.get(code, "runtime error")

    def _as_program(self, kind: str, file: int, answer: int, down: int) -> Callable[[], bytes]:
        """Set what holds for the program's process only; the function by which that gets its case."""
        if kind == "stdin":
            os.dup2(file, 0)
            os.dup2(answer, 1)
            for end in (file, answer, down):
                os.close(end)
        _signal.signal(_signal.SIGALRM, _signal.SIG_DFL)
        seconds = -int(-self._settings["cpu_s"] // 1)
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))  # past the hard limit the kernel kills at once
        load_filter(self._settings["filters"][1])

        def take() -> bytes:
            os.write(answer, b"?")
            os.read(down, 1)  # ends when the case is in the file
            return os.pread(file, os.fstat(file).st_size, 0)

        return take


def confine(settings: dict[str, Any]) -> None:
    """Give up root where the harness has it, and set the limits and the filter that hold for all that follows."""
    if settings["drop_root"]:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        control_process(DIE_WITH_PARENT, _signal.SIGKILL)  # as bubblewrap asked, but another user starts without
    hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
    resource.setrlimit(resource.RLIMIT_STACK, (STACK if hard == resource.RLIM_INFINITY else min(STACK, hard), hard))
    for name, value in settings["limits"].items():
        resource.setrlimit(getattr(resource, name), (value, value))
    load_filter(settings["filters"][0])


def load_filter(instructions: bytes) -> None:
    """Load a filter of system calls, if there is one."""
    if instructions:
        import ctypes

        data = ctypes.create_string_buffer(instructions, len(instructions))
        place = ctypes.addressof(data).to_bytes(8, sys.byteorder)
        program = (len(instructions) // 8).to_bytes(2, sys.byteorder) + bytes(6) + place  # struct sock_fprog
        control_process(SET_FILTER, 2, program)


def control_process(option: int, *arguments: Any) -> None:
    """Call Linux's prctl."""
    import ctypes

    if ctypes.CDLL(None).prctl(option, *arguments):
        raise OSError(f"prctl {option} failed")


def _nameless_file() -> int:
    file = os.open(".case", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.unlink(".case")
    return file


def _fill(file: int, data: bytes) -> None:
    write(file, data)
    os.lseek(file, 0, os.SEEK_SET)
