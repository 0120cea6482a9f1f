"""Programs on this machine: starts the harness, in bubblewrap or unconfined, and hands it one case after the other.

The harness sets the limits of a program and ends it in time. From here comes what it cannot do: ending the harness with
everything that it has started, and not waiting for ever should it hang.
"""

import functools
import inspect
import marshal
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from types import CodeType
from typing import Any, cast

from threepo.config import SandboxConfig
from threepo.rewards.sandbox import execution, harness
from threepo.rewards.sandbox.execution import MARK_BYTES
from threepo.rewards.sandbox.interface import Ending, Job, Outcome, TestKind

FILES_LIMIT = 64 << 20
"""Bytes that the program's own files may take, besides its input."""
DESCRIPTORS = THREADS = 64
WALL_FACTOR = 3
"""Wall-clock seconds for each second of processor time: the machine may be busy."""
MARGIN_S = 30
"""How much longer to wait for the harness itself."""
END_LIMIT_S = 5.0

START = """
import marshal, sys
read, names = sys.stdin.buffer.read, {"__name__": "harness"}
codes, order = marshal.loads(read(int.from_bytes(read(4), "big")))
for code in codes: exec(code, names)
names["Harness"](order).main()
"""
PYTHON_ARGUMENTS = ("-P", "-S", "-s", "-B", "-X", "utf8", "-c", START)
ENVIRONMENT = {"PYTHONHASHSEED": "0"}
"""Nothing of ours; and the order of a program's sets is the same whenever it is judged."""


class LocalSandbox(ABC):
    """Runs programs; each subclass starts Python for them in its own way."""

    advice: str
    drop_root = False
    """Whether the harness starts as root and must give that up."""
    filters = (b"", b"")
    """Filters of system calls for the harness and for the program; empty: all calls are allowed."""

    def __init__(self, settings: SandboxConfig) -> None:
        self.workers = settings.workers or cores()
        self._settings = settings

    @abstractmethod
    def start(self, link: int, folder: str, room: int) -> "subprocess.Popen[bytes]":
        """Start Python by `spawn` with `PYTHON_ARGUMENTS`; its files may take `room` bytes.

        `folder` is an empty directory that is removed at the end.
        """

    def run(self, job: Job) -> Generator[Outcome, None, None]:
        """The outcome of each case, run when it is asked for."""
        cases = [case.encode("utf-8", "surrogatepass") for case in job.cases]
        room = FILES_LIMIT + max(map(len, cases))
        ours, theirs = Pipe()
        with ours, tempfile.TemporaryDirectory(prefix="threepo-program-", ignore_cleanup_errors=True) as folder:
            with theirs:
                process = self.start(theirs.fileno(), folder, room)
            with process:
                try:
                    inside = _Harness(process, ours, WALL_FACTOR * self._settings.timeout_s + MARGIN_S)
                    yield from inside.run(job.kind, cases, marshal.dumps((_inside(), self._order(job, room))))
                finally:
                    ours.close()  # which ends the harness
                    _end(process)

    def _order(self, job: Job, room: int) -> dict[str, Any]:
        """What the harness is told; nothing of the cases."""
        limits = {"AS": self._settings.memory_mib << 20, "FSIZE": room, "NOFILE": DESCRIPTORS, "CORE": 0}
        if self.filters[1] and _counts_by_namespace():
            limits["NPROC"] = THREADS
        times = {"cpu_s": self._settings.timeout_s, "wall_s": WALL_FACTOR * self._settings.timeout_s}
        program = {name: getattr(job, name) for name in ("kind", "prefix", "program", "entry")}
        return {**program, **times, "limits": limits, "drop_root": self.drop_root, "filters": self.filters}


class Unconfined(LocalSandbox):
    """Starts programs as they are: they can do what the user can do, with the user's files and network."""

    advice = "check that Python starts here"

    def start(self, link: int, folder: str, room: int) -> "subprocess.Popen[bytes]":
        """Start this interpreter in the folder."""
        return spawn([sys.executable, *PYTHON_ARGUMENTS], link, cwd=folder, env=ENVIRONMENT)


def spawn(command: Sequence[str], link: int, **options: Any) -> "subprocess.Popen[bytes]":
    """Start a command whose standard input and output are `link`, in a session of its own: Ctrl-C is for threepo."""
    return subprocess.Popen(command, stdin=link, stdout=link, stderr=subprocess.PIPE, start_new_session=True, **options)


class _Harness:
    """The harness, as seen from here."""

    def __init__(self, process: "subprocess.Popen[bytes]", link: Connection, patience_s: float) -> None:
        self._process, self._link, self._patience_s = process, link, patience_s

    def run(self, kind: TestKind, cases: list[bytes], order: bytes) -> Generator[Outcome, None, None]:
        """The outcome of each case."""
        if self._ask(order) != b"ready":
            assert self._process.stderr is not None
            said = " ".join(self._process.stderr.read().decode("utf-8", "replace").split())
            yield from [Outcome("sandbox error", message=said)] * len(cases)
        elif self._ask() != b"compiled":
            yield from [Outcome("compile error")] * len(cases)
        else:
            yield from (self._case(kind, case) for case in cases)

    def _case(self, kind: TestKind, case: bytes) -> Outcome:
        mark = secrets.token_hex(MARK_BYTES // 2).encode() if kind == "script" else b""
        answer, output = self._ask(mark + case), bytearray()
        while answer.startswith(b"+"):
            output += answer[1:]
            answer = self._ask()
        if not answer:
            return Outcome("sandbox error", message="its harness ended or hung")
        if answer == b"ok" and mark and output != mark:
            return Outcome("runtime error")
        return Outcome(cast(Ending, answer.decode()), output.decode("utf-8", "replace"))

    def _ask(self, message: bytes | None = None) -> bytes:
        """What the harness says next, after a message if there is one; empty if it ended, or hung and was ended."""
        with suppress(EOFError, OSError):
            if message is not None:
                self._link.send_bytes(message)
            # Seconds are counted, not read from a clock: nobody is late because this machine was suspended.
            if any(self._link.poll(1) for _ in range(int(self._patience_s))):
                return self._link.recv_bytes()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        return b""


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End everything at the latest now; bubblewrap gets time to end by itself, else nobody reaps the harness."""
    assert process.stderr is not None
    wait([process.stderr], END_LIMIT_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


@functools.cache
def _inside() -> tuple[CodeType, ...]:
    return tuple(compile(inspect.getsource(part), part.__name__, "exec", optimize=2) for part in (execution, harness))


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


@functools.cache
def _counts_by_namespace() -> bool:
    """Whether the kernel counts processes for each user namespace; before 5.14 it would count the user's others."""
    return tuple(int(part) for part in re.findall(r"\d+", os.uname().release)[:2]) >= (5, 14)
