"""Python processes that can be killed, and a pool of them for work that may hang, use too much memory or crash.

    pool = WorkerPool("threepo.rewards.algebra:judge", timeout_s=10, memory_mib=1024)
    outcomes = pool.map([(r"\\\\frac{2}{4}", "0.5"), ("9^{9^{9^9}}", "1")])

An item that exceeds a limit or ends its process costs only itself. The function is trusted, the items are data: this is
no sandbox for programs.
"""

import fcntl
import math
import os
import pkgutil
import resource
import select
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any, NamedTuple

from threepo.errors import UserError

ENDING_SECONDS = 10.0
"""Seconds that a process may take to end once it has closed its connection or was killed."""
SPARE_MIB = 64
"""Memory that must remain for the items when a process has started."""
MEMORY_STATUS = 77
"""Exit status of a process that ran out of memory."""


def processes_here() -> int:
    """Number of ranks that torchrun has started on this machine; 1 alone."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def allow_open_files() -> int:
    """Raise this process's limit of open files, often 1,024, to what the system allows; returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(soft, 10240) if hard == resource.RLIM_INFINITY else hard  # macOS refuses what it calls unlimited
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most


def control_groups() -> list[Path]:
    """The folders of this process's control group (v2) and of those above it, which limit memory and processors."""
    known = Path("/proc/self/cgroup")
    groups = known.read_text().splitlines() if known.is_file() else []
    path = next((line.removeprefix("0::/") for line in groups if line.startswith("0::/")), "")
    own = Path("/sys/fs/cgroup") / path  # such as a container's, or a batch system's job
    return [own, *own.parents]


def cores() -> int:
    """Processor cores for this process: its share of them, where torchrun has started several on this machine."""
    usable = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    for file in (group / "cpu.max" for group in control_groups()):
        quota, period = file.read_text().split() if file.is_file() else ("max", "1")
        if quota != "max":
            usable = min(usable, math.ceil(int(quota) / int(period)))
    return max(1, usable // processes_here())


class Process:
    """A Python process that runs `program`, which calls `owner` for the other end of `connection`.

    It does not import the caller's main module, and Ctrl-C does not reach it. It ends with its owner, even if that is
    killed, and everything that it has started ends with it.
    """

    def __init__(self, program: str, environment: Mapping[str, str], output: IO[bytes] | None = None) -> None:
        self.connection, theirs = Pipe()
        self._owner = os.getpid()
        self._closing = threading.Lock()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # the process inherits it
        try:
            self._process = subprocess.Popen(
                # -P: a folder in the working directory must not be imported instead of a package of its name.
                [sys.executable, "-P", "-c", program, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            theirs.close()
        self.pid = self._process.pid

    def is_running(self) -> bool:
        """True if it can be used, which a fork of the owner cannot."""
        return self._owner == os.getpid() and not self.connection.closed and self._process.poll() is None

    def ending(self) -> str:
        """Words for the end of a process that closed its connection, such as `killed by SIGSEGV` or `exit status 3`."""
        with suppress(subprocess.TimeoutExpired):
            status = self._process.wait(ENDING_SECONDS)
            return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        return "closed its connection and does not end"

    def close(self) -> None:
        """Kill the process and everything that it has started."""
        if self._owner != os.getpid():
            return  # before the lock, which a fork may find held for ever
        with self._closing:  # whoever stops the pool, and whoever sees that the process has ended
            if self.connection.closed:
                return
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self.ending()  # not for ever: a process that hangs in a driver ends when the driver returns
            self.connection.close()
            assert self._process.stdin
            self._process.stdin.close()


def owner() -> Connection:
    """Connection of a `Process` to its owner. From now on the process ends with the owner.

    The kernel then closes standard input, and SIGIO ends the process's group, even while Python is busy.
    (PR_SET_PDEATHSIG would already act when the owner's thread that started the process ends.)
    """
    fcntl.fcntl(0, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(0, fcntl.F_SETFL, os.O_ASYNC)
    if select.select([0], [], [], 0)[0]:  # the owner has gone already
        sys.exit()
    return Connection(int(sys.argv[1]))


class Outcome(NamedTuple):
    """Result of an item, or the reason why there is none."""

    value: Any = None
    failure: str = ""
    """Empty, or the reason: `time-out`, `memory`, `killed by SIGSEGV`, `RecursionError: ...`."""


class WorkerPool:
    """Up to `workers` processes (0: one for each core) that call the function `module:name` with each item's parts.

    Processes start when they are needed, and again for the next item after they ended; a fork starts its own. Threads
    that share a pool take turns.
    """

    def __init__(self, function: str, *, timeout_s: float, memory_mib: int, workers: int = 0) -> None:
        self._function, self._timeout, self._memory = function, timeout_s, memory_mib
        self._processes: list[Process | None] = [None] * (workers or cores())
        self._idle = list(range(len(self._processes)))
        self._lock = threading.Lock()
        weakref.finalize(self, _close, self._processes)

    def close(self) -> None:
        """End the processes. They also end when the pool is collected."""
        _close(self._processes)

    def map(self, items: Sequence[Sequence[Any]]) -> list[Outcome]:
        """The outcome of each item, in order. `UserError` if the memory limit is too small to start."""
        with self._lock, ThreadPoolExecutor(len(self._processes)) as threads:
            try:
                return list(threads.map(self._run, items))
            except BaseException:  # such as Ctrl-C: stop the items that are still running
                self.close()
                raise

    def _run(self, item: Sequence[Any]) -> Outcome:
        index = self._idle.pop()
        try:
            process = self._processes[index]
            if not process or not process.is_running():
                process = self._processes[index] = self._start()
            try:
                process.connection.send(item)
                if process.connection.poll(self._timeout):
                    return process.connection.recv()  # type: ignore[no-any-return]
                failure = "time-out"
            except (EOFError, OSError):
                failure = process.ending()
            process.close()
            return Outcome(failure="memory" if failure == f"exit status {MEMORY_STATUS}" else failure)
        finally:
            self._idle.append(index)

    def _start(self) -> Process:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        process = Process("from threepo.workers import _serve; _serve()", environment)
        try:
            process.connection.send((self._function, self._memory))
            refusal = process.connection.recv()
        except (EOFError, OSError):
            raise RuntimeError(f"the process for {self._function} ended before its first item") from None
        if refusal:
            raise UserError(refusal)
        return process


def _close(processes: Sequence[Process | None]) -> None:
    for process in filter(None, processes):
        process.close()


def _serve() -> None:
    """Run a worker: import the function, set the memory limit, then call the function with each item."""
    link = owner()
    name, memory_mib = link.recv()
    function = pkgutil.resolve_name(name)
    if sys.platform == "linux":  # macOS does not hold a process to its address space
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        needed = pages * resource.getpagesize() // 2**20 + SPARE_MIB
        if needed > memory_mib:
            link.send(f"reward.memory_mib = {memory_mib}: is too small for {name}; set it to {needed} or more")
            return
        resource.setrlimit(resource.RLIMIT_AS, (memory_mib * 2**20, memory_mib * 2**20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    null = os.open(os.devnull, os.O_WRONLY)  # for what libraries print
    os.dup2(null, 1)
    os.dup2(null, 2)
    link.send("")
    while True:
        item = link.recv()
        try:
            outcome = Outcome(function(*item))
        except MemoryError:
            os._exit(MEMORY_STATUS)  # memory may be inconsistent
        except (Exception, SystemExit) as error:
            outcome = Outcome(failure=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
        link.send(outcome)
