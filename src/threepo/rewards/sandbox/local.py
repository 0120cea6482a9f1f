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
import select
import signal
import subprocess
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from contextlib import suppress
from types import CodeType
from typing import Any, cast

from threepo.config import SandboxConfig
from threepo.rewards.sandbox import execution, harness
from threepo.rewards.sandbox.interface import Ending, Job, Outcome

FILES_LIMIT = 64 << 20
"""Bytes that the program's own files may take, besides its input."""
DESCRIPTORS = 64
THREADS = 64
WALL_FACTOR = 3
"""Wall-clock seconds for each second of processor time: the machine may be busy."""
START_LIMIT_S = 60.0
SLICE_S = 0.25
"""Waiting is counted in slices, not read from a clock: nothing is late because this process was suspended."""

START = (
    "import marshal, sys\n"
    "names = {'__name__': 'harness'}\n"
    "codes, settings = marshal.loads(sys.stdin.buffer.read(int(sys.argv.pop())))\n"
    "for code in codes: exec(code, names)\n"
    "names['Harness'](settings).main()\n"
)
PYTHON_FLAGS = ("-P", "-S", "-s", "-B", "-X", "utf8", "-c", START)
ENVIRONMENT = {"PYTHONHASHSEED": "0"}
"""Nothing of ours; and the order of a program's sets is the same whenever it is judged."""


class LocalSandbox(ABC):
    """Runs programs; how Python is started for them, each subclass says."""

    advice: str
    drop_root = False
    """Whether the harness starts as root and must give that up."""
    filters = (b"", b"")
    """System calls that the harness and the program may make (`seccomp`); empty: all."""

    def __init__(self, settings: SandboxConfig) -> None:
        self.workers = settings.workers or cores()
        self._settings = settings
        self._wall_s = WALL_FACTOR * settings.timeout_s

    @abstractmethod
    def start(self, python: Sequence[str], folder: str, room: int) -> "subprocess.Popen[bytes]":
        """Start Python by `spawn` with these arguments; its files may take `room` bytes.

        `folder` is an empty directory that is removed at the end.
        """

    def run(self, job: Job) -> Generator[Outcome, None, None]:
        """The outcome of each case, run when it is asked for."""
        cases = [case.encode("utf-8", "surrogatepass") for case in job.cases]
        room = FILES_LIMIT + max(map(len, cases))
        first = marshal.dumps((_harness(), self._for_harness(room)))
        with (
            tempfile.TemporaryDirectory(prefix="threepo-program-", ignore_cleanup_errors=True) as folder,
            self.start([*PYTHON_FLAGS, str(len(first))], folder, room) as process,
        ):
            try:
                yield from self._outcomes(_Link(process, first), job, cases)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

    def _outcomes(self, link: "_Link", job: Job, cases: list[bytes]) -> Generator[Outcome, None, None]:
        if link.receive(START_LIMIT_S) != b"ready":
            yield from [Outcome("sandbox error", message=link.last_words())] * len(cases)
            return
        link.send(marshal.dumps({name: getattr(job, name) for name in ("kind", "prefix", "program", "entry")}))
        if link.receive(self._wall_s) != b"compiled":
            yield from [Outcome("compile error")] * len(cases)
            return
        for done, case in enumerate(cases):
            mark = secrets.token_hex(execution.MARK_BYTES // 2).encode() if job.kind == "script" else b""
            link.send(mark + case)
            output = bytearray()
            while (message := link.receive(self._wall_s + START_LIMIT_S)).startswith(b"+"):
                output += message[1:]
            if not message:
                yield from [Outcome("sandbox error", message="its harness ended or hung")] * (len(cases) - done)
                return
            if message == b"ok" and mark and output != mark:
                message = b"runtime error"
            yield Outcome(cast(Ending, message.decode()), output.decode("utf-8", "replace"))

    def _for_harness(self, room: int) -> dict[str, Any]:
        limits = {
            "RLIMIT_AS": self._settings.memory_mib << 20,
            "RLIMIT_FSIZE": room,
            "RLIMIT_NOFILE": DESCRIPTORS,
            "RLIMIT_CORE": 0,
        }
        if self.filters[1] and _counts_by_namespace():
            limits["RLIMIT_NPROC"] = THREADS
        return {
            "limits": limits,
            "cpu_s": self._settings.timeout_s,
            "wall_s": self._wall_s,
            "drop_root": self.drop_root,
            "filters": self.filters,
        }


class Unconfined(LocalSandbox):
    """Starts programs as they are: they can do what the user can do, with the user's files and network."""

    advice = "check that Python starts here"

    def start(self, python: Sequence[str], folder: str, room: int) -> "subprocess.Popen[bytes]":
        """Start this interpreter in the folder."""
        return spawn([sys.executable, *python], cwd=folder, env=ENVIRONMENT)


def spawn(command: Sequence[str], **options: Any) -> "subprocess.Popen[bytes]":
    """Start a command in a session of its own: Ctrl-C is for threepo, and one signal ends all of it."""
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, bufsize=0, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True, **options
    )


class _Link:
    """Messages to and from the harness, each with its length in front."""

    def __init__(self, process: "subprocess.Popen[bytes]", first: bytes) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._to, self._from = process, process.stdin.fileno(), process.stdout.fileno()
        self._poll = select.poll()
        self._poll.register(self._from, select.POLLIN)
        with suppress(BrokenPipeError):
            execution.write(self._to, first)

    def send(self, message: bytes) -> None:
        """Send a message; `receive` tells whether the harness is there."""
        with suppress(BrokenPipeError):
            execution.write(self._to, len(message).to_bytes(8, "big") + message)

    def receive(self, patience_s: float) -> bytes:
        """The next message; empty where none comes any more, or not in time."""
        return self._read(int.from_bytes(self._read(8, patience_s), "big"), patience_s)

    def _read(self, size: int, patience_s: float) -> bytes:
        data = bytearray()
        while len(data) < size:
            if not self._poll.poll(SLICE_S * 1000):
                patience_s -= SLICE_S
                if patience_s < 0:
                    return b""
            elif part := os.read(self._from, size - len(data)):
                data += part
            else:
                return b""
        return bytes(data)

    def last_words(self) -> str:
        """What a sandbox that did not start has said."""
        assert self._process.stderr is not None
        os.killpg(self._process.pid, signal.SIGKILL)
        return " ".join(self._process.stderr.read().decode("utf-8", "replace").split())


@functools.cache
def _harness() -> tuple[CodeType, ...]:
    """What runs inside."""
    return tuple(compile(inspect.getsource(part), part.__name__, "exec", optimize=2) for part in (execution, harness))


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


@functools.cache
def _counts_by_namespace() -> bool:
    """Whether the kernel counts processes for each user namespace; before 5.14 it would count the user's others."""
    return tuple(int(part) for part in re.findall(r"\d+", os.uname().release)[:2]) >= (5, 14)
