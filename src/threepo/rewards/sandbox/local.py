"""Programs on this machine: starts the harness, in a sandbox or without, and watches over it.

The harness tells on one pipe how each case ended, and the program's output comes on another. What limits a program is
set inside (`harness`); from here come the limits that no process can set itself: of wall-clock time and of output.
"""

import ast
import contextlib
import functools
import inspect
import marshal
import os
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from types import CodeType
from typing import Any, Protocol

from threepo.config import SandboxConfig
from threepo.rewards.sandbox import crossing, harness, remote, scripts, seccomp
from threepo.rewards.sandbox.interface import Ending, Job, Outcome, TestKind

OUTPUT_LIMIT = 16 << 20
"""Bytes of output of one case; what writes more is stopped."""
FILES_LIMIT = 64 << 20
"""Bytes that the program's own files may take, beside its input."""
DESCRIPTORS = 64
THREADS = 64
WALL_FACTOR = 3
"""Wall-clock seconds for each second of processor time: the machine may be busy."""
START_LIMIT_S = 60.0
SLICE_S = 0.25
"""No look at the clock may count for more than a few of these: after a pause of this whole process nobody was late."""

START = (
    "import marshal, sys\n"
    "job, tests, go, control, output, above = map(int, sys.argv[1:])\n"
    "sys.argv[1:] = []\n"
    "job = open(job, 'rb')\n"
    "harness = {'__name__': 'harness'}\n"
    "for code in marshal.load(job): exec(code, harness)\n"
    "harness['main']({**marshal.load(job), 'above': above}, open(tests, 'rb'), go, control, output)\n"
    "harness['os']._exit(0)\n"
)
PYTHON_FLAGS = ("-P", "-S", "-s", "-B", "-X", "utf8", "-c", START)
ENVIRONMENT = {"PYTHONHASHSEED": "0"}
"""Of a program: nothing of ours; and the order of its sets is the same whenever it is judged."""

_ENDINGS: dict[str, Ending] = {
    "ok": "ok",
    "wrong": "wrong",
    "runtime": "runtime error",
    "memory": "memory",
    "time": "time-out",
}


class Launcher(Protocol):
    """Starts the harness; the one thing in which local sandboxes differ."""

    confined: bool
    """Whether it runs behind filters of system calls."""
    drop_root: bool
    """Whether the harness starts as root and must give that up."""

    def start(
        self, arguments: Sequence[str], files: Sequence[int], job: Job
    ) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
        """Run Python with these arguments and open files; the context ends it, and all that it has started.

        One more argument is a number above all files that it starts with: what a program must not have is closed.
        """


class LocalSandbox:
    """Runs programs through a launcher."""

    def __init__(self, settings: SandboxConfig, launcher: Launcher) -> None:
        self.workers = settings.workers or cores()
        self._settings = settings
        self._launcher = launcher

    def run(self, job: Job) -> Generator[Outcome, None, None]:
        """The outcome of each case. One start serves many; where one is cut short, the next cases get another."""
        done = 0
        while done < len(job.cases):
            before = done
            with contextlib.closing(self._run_from(job, done)) as outcomes:
                for outcome in outcomes:
                    done += 1
                    yield outcome
            assert done > before, "every start gives an outcome"

    def _run_from(self, job: Job, first: int) -> Generator[Outcome, None, None]:
        cases = job.cases[first:]
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(2)]
            go, control, output = (stack.enter_context(Pipe()) for _ in range(3))
            inside = [*(file.fileno() for file in files), go.read, control.write, output.write]
            files[0].write(marshal.dumps(_harness(job.kind)) + marshal.dumps(self._description(job, len(cases))))
            files[1].write(marshal.dumps(cases))
            for file in files:
                file.seek(0)
            process = stack.enter_context(self._launcher.start([*PYTHON_FLAGS, *map(str, inside)], inside, job))
            for pipe, end in ((go, go.read), (control, control.write), (output, output.write)):
                pipe.close(end)
            watch = stack.enter_context(_Watch(control.read, output.read))
            yield from self._watched(process, watch, go.write, len(cases))

    def _watched(
        self, process: subprocess.Popen[bytes], watch: "_Watch", go: int, count: int
    ) -> Generator[Outcome, None, None]:
        if watch.line(START_LIMIT_S) != "ready":
            yield from [Outcome("sandbox error", message=_last_words(process))] * count
            return
        patience_s = WALL_FACTOR * self._settings.timeout_s
        if watch.line(patience_s) != "compiled":
            yield from [Outcome("compile error")] * count
            return
        for _ in range(count):
            watch.output.clear()
            with contextlib.suppress(BrokenPipeError):
                os.write(go, b"g")
            line = watch.line(patience_s)
            if line is None:
                yield Outcome("wrong" if watch.flooded else "time-out" if watch.expired else "runtime error")
                return
            yield Outcome(_ENDINGS[line], watch.output.decode("utf-8", "replace"))

    def _description(self, job: Job, cases: int) -> dict[str, Any]:
        """The job as the harness reads it; nothing of what the tests expect is in it."""
        limits = {
            "RLIMIT_AS": self._settings.memory_mib << 20,
            "RLIMIT_FSIZE": FILES_LIMIT + input_bytes(job),
            "RLIMIT_NOFILE": DESCRIPTORS,
            "RLIMIT_CORE": 0,
        }
        if self._launcher.confined and counts_by_namespace():
            limits["RLIMIT_NPROC"] = THREADS
        return {
            "kind": job.kind,
            "program": job.program,
            "prefix": job.prefix,
            "imports": _imported(job.prefix),
            "entry": job.entry,
            "cases": cases,
            "cpu_s": self._settings.timeout_s,
            "limits": limits,
            "drop": self._launcher.drop_root,
            "filter": seccomp.lone() if self._launcher.confined else b"",
            "own_pid": seccomp.OWN_PID.to_bytes(4, sys.byteorder),
        }


@functools.lru_cache(maxsize=256)
def _imported(prefix: str) -> tuple[str, ...]:
    """Modules that code imports at its top level; it belongs to the data set, and many problems share it."""
    try:
        statements = ast.parse(prefix).body
    except (SyntaxError, ValueError):
        return ()
    names = [alias.name for node in statements if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in statements if isinstance(node, ast.ImportFrom) and node.module]
    return tuple(dict.fromkeys(names))


class Pipe:
    """Both ends of a pipe; what is still open of it ends with the context."""

    def __init__(self) -> None:
        self.read, self.write = os.pipe()
        self._open = {self.read, self.write}

    def close(self, end: int) -> None:
        self._open.remove(end)
        os.close(end)

    def __enter__(self) -> "Pipe":
        return self

    def __exit__(self, *_: object) -> None:
        for end in list(self._open):
            self.close(end)


class _Watch:
    """Reads what comes out of a sandbox, with patience for so long and memory for so much."""

    def __init__(self, control: int, output: int) -> None:
        self.output = bytearray()
        self.flooded = self.expired = False
        self._control, self._lines, self._output = control, bytearray(), output
        self._selector = selectors.DefaultSelector()
        for file in (control, output):
            os.set_blocking(file, False)
            self._selector.register(file, selectors.EVENT_READ)

    def __enter__(self) -> "_Watch":
        return self

    def __exit__(self, *_: object) -> None:
        self._selector.close()

    def line(self, patience_s: float) -> str | None:
        """The next line of the harness, with `output` all that was written before it; None if none is to come."""
        waited, before = 0.0, time.monotonic()
        while b"\n" not in self._lines:
            self.expired, self.flooded = waited > patience_s, len(self.output) > OUTPUT_LIMIT
            if self.expired or self.flooded:
                return None
            ready = {key.fd for key, _ in self._selector.select(SLICE_S)}
            if self._output in ready:
                self._read_output(1)
            if self._control in ready:
                part = os.read(self._control, 4096)
                if not part:
                    return None
                self._lines += part
            now = time.monotonic()
            waited, before = waited + min(now - before, 4 * SLICE_S), now
        self._read_output(OUTPUT_LIMIT >> 16)
        line, _, self._lines = self._lines.partition(b"\n")
        return line.decode()

    def _read_output(self, parts: int) -> None:
        for _ in range(parts):
            try:
                part = os.read(self._output, 1 << 16)
            except BlockingIOError:
                return
            if not part:
                if self._output in self._selector.get_map():
                    self._selector.unregister(self._output)
                return
            self.output += part


def _last_words(process: subprocess.Popen[bytes]) -> str:
    """What a sandbox that did not start has said."""
    process.kill()
    assert process.stderr is not None
    return " ".join(process.stderr.read(4096).decode("utf-8", "replace").split())


@functools.cache
def _harness(kind: TestKind) -> tuple[CodeType, ...]:
    """What tests of this kind need inside."""
    modules = (crossing, harness, remote, scripts) if kind == "script" else (harness,)
    return tuple(compile(inspect.getsource(module), module.__name__, "exec", optimize=2) for module in modules)


def input_bytes(job: Job) -> int:
    """Bytes of all that a program will read."""
    return sum(map(len, job.cases)) * 4


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


@functools.cache
def counts_by_namespace() -> bool:
    """Whether the kernel counts processes for each user namespace; one before 5.14 would count the user's others."""
    version = tuple(int(part) for part in re.findall(r"\d+", os.uname().release)[:2])
    return sys.platform == "linux" and version >= (5, 14)


class Unconfined:
    """Starts programs as they are: whatever they do is done as the user, with the user's files and network."""

    confined = drop_root = False

    @contextlib.contextmanager
    def start(
        self, arguments: Sequence[str], files: Sequence[int], job: Job
    ) -> Generator[subprocess.Popen[bytes], None, None]:
        """In a directory of its own and a session of its own, which is ended with it."""
        with tempfile.TemporaryDirectory(prefix="threepo-program-") as folder:
            process = subprocess.Popen(
                [sys.executable, *arguments, str(max(files) + 1)],
                pass_fds=files,
                cwd=folder,
                env=ENVIRONMENT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
            try:
                yield process
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                ended(process)


def ended(process: subprocess.Popen[bytes]) -> None:
    """End the process and what stands behind it in this one."""
    process.kill()
    process.wait()
    if process.stderr is not None:
        process.stderr.close()
