"""Programs on this machine: starts the harness, unconfined or in bubblewrap, and sends it one case after the other.

The harness sets the limits of a program and ends it in time. This side ends the harness with all that it has started,
also if the harness hangs.
"""

import functools
import inspect
import marshal
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from types import CodeType
from typing import Any, cast

from threepo.config import SandboxConfig
from threepo.rewards.sandbox import Ending, Outcome, Submission, harness
from threepo.workers import cores

FILES_LIMIT = 64 << 20
"""Bytes that the program's files may take, without its input."""
DESCRIPTORS = THREADS = 64
WALL_FACTOR = 3
"""Wall-clock seconds for each second of processor time: the machine may be busy."""
MARGIN_S, END_LIMIT_S = 30, 5
"""Seconds to wait for the harness beyond a program's time, and for its end."""

START = """
import marshal, sys
read, names = sys.stdin.buffer.read, {"__name__": "harness"}
code, order = marshal.loads(read(int.from_bytes(read(4), "big")))
exec(code, names)
names["Harness"](order).main()
"""
PYTHON_ARGUMENTS = ("-P", "-S", "-s", "-B", "-X", "utf8", "-c", START)
ENVIRONMENT = {"PYTHONHASHSEED": "0"}
"""Environment without our variables; the order of a program's sets is the same each time."""

Process = subprocess.Popen[bytes]


class LocalSandbox:
    """Runs programs as ordinary processes, which can do what the user can do, with the user's files and network."""

    advice = "check that Python starts here"
    drop_root = False
    """True if the harness starts as root and must give that up."""
    filters = (b"", b"")
    """Filters of system calls for the harness and for the program; empty: all calls are allowed."""

    def __init__(self, settings: SandboxConfig) -> None:
        self.workers = settings.workers or cores()
        self._cpu_s, self._wall_s = settings.timeout_s, WALL_FACTOR * settings.timeout_s
        self._memory = settings.memory_mib << 20
        self.packages = os.path.abspath(settings.packages) if settings.packages else ""
        fix = "there is no such folder; make it with pip install --target FOLDER NAME ..."
        settings.check("packages", not self.packages or os.path.isdir(self.packages), fix)

    @contextmanager
    def start(self, link: Connection, room: int) -> Iterator[Process]:
        """Start Python by `spawn`; its files may take `room` bytes, and are removed at the end."""
        with tempfile.TemporaryDirectory(prefix="threepo-program-", ignore_cleanup_errors=True) as folder:
            yield spawn([sys.executable, *PYTHON_ARGUMENTS], link, cwd=folder, env=environment(self.packages))

    def run(self, submission: Submission) -> Generator[Outcome, None, None]:
        """See `Sandbox.run`."""
        cases = [case.encode("utf-8", "surrogatepass") for case in submission.cases]
        room = FILES_LIMIT + max(map(len, cases))
        most = {"AS": self._memory, "FSIZE": room, "NOFILE": DESCRIPTORS, "CORE": 0}
        if self.filters[1] and [int(part) for part in re.findall(r"\d+", os.uname().release)[:2]] >= [5, 14]:
            most["NPROC"] = THREADS  # an older kernel would count all processes of the user
        order = vars(replace(submission, cases=())) | {"cpu_s": self._cpu_s, "wall_s": self._wall_s}
        order |= {"limits": most, "drop_root": self.drop_root, "filters": self.filters}
        link, theirs = Pipe()
        with link, self.start(theirs, room) as process, process:
            assert process.stderr is not None
            ask = functools.partial(self._ask, process, link)
            try:
                if ask(marshal.dumps((_harness(), order))) != b"ready":
                    reason = " ".join(process.stderr.read().decode("utf-8", "replace").split())
                    yield from [Outcome("sandbox error", message=reason)] * len(cases)
                elif ask() != b"compiled":
                    yield from [Outcome("compile error")] * len(cases)
                else:
                    yield from (_outcome(ask, case) for case in cases)
            finally:
                link.close()  # which ends the harness
                wait([process.stderr.fileno()], END_LIMIT_S)  # bubblewrap must reap its children first
                _kill(process)

    def _ask(self, process: Process, link: Connection, message: bytes | None = None) -> bytes:
        """The harness's next message, after sending it one if given; empty if it ended, or hung and was killed."""
        with suppress(EOFError, OSError):
            if message is not None:
                link.send_bytes(message)
            if link.poll(self._wall_s + MARGIN_S):
                return link.recv_bytes()
        _kill(process)
        return b""


def environment(packages: str) -> dict[str, str]:
    """All environment variables of a program whose packages are in this folder, if it has any."""
    return ENVIRONMENT | ({"PYTHONPATH": packages, "OPENBLAS_NUM_THREADS": "1"} if packages else {})


def spawn(command: Sequence[str], link: Connection, **options: Any) -> Process:
    """Start a command that takes `link` as standard input and output, in a session that Ctrl-C does not reach."""
    with link:
        options |= {"stdin": link.fileno(), "stdout": link.fileno(), "stderr": subprocess.PIPE}
        return subprocess.Popen(command, start_new_session=True, **options)


def _outcome(ask: Callable[[bytes | None], bytes], case: bytes) -> Outcome:
    answer, output = ask(case), bytearray()
    while answer.startswith(b"+"):
        output += answer[1:]
        answer = ask(None)
    if not answer:
        return Outcome("sandbox error", message="its harness ended or hung")
    return Outcome(cast(Ending, answer.decode()), output.decode("utf-8", "replace"))


def _kill(process: Process) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


@functools.cache
def _harness() -> CodeType:
    return compile(inspect.getsource(harness), "harness", "exec", optimize=2)
