"""Processes for work that may hang, use too much memory or crash: a time limit for each item, and a memory limit.

    pool = WorkerPool("threepo.rewards.algebra:judge", timeout_s=10, memory_mib=1024)
    outcomes = pool.map([(r"\\\\frac{2}{4}", "0.5"), ("9^{9^{9^9}}", "1")])

An item that exceeds a limit or ends its process costs only itself. Processes start when they are needed, do not import
the caller's main module, ignore Ctrl-C, and end with the process that owns them, even if that is killed. The function
is trusted, the items are data: this is no sandbox for programs.
"""

import fcntl
import os
import pkgutil
import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from threepo.errors import UserError

SPARE_MIB = 64
"""Memory that must remain for the items when a process has started."""
MEMORY_STATUS = 77
"""Exit status of a process that ran out of memory."""


class Outcome(NamedTuple):
    """What an item returned, or why it returned nothing."""

    value: Any = None
    failure: str = ""
    """Empty, or the reason: `time-out`, `memory`, `killed by SIGSEGV`, `RecursionError: ...`."""


class WorkerPool:
    """Up to `workers` processes (0: one for each core) that call the function `module:name` with each item's parts.

    Threads that share a pool take turns.
    """

    def __init__(self, function: str, *, timeout_s: float, memory_mib: int, workers: int = 0) -> None:
        size = workers or len(os.sched_getaffinity(0))
        self._workers = [_Worker(function, timeout_s, memory_mib) for _ in range(size)]
        self._lock = threading.Lock()
        weakref.finalize(self, _end, self._workers)

    def close(self) -> None:
        """End the processes. They also end when the pool is collected."""
        _end(self._workers)

    def map(self, items: Sequence[Sequence[Any]]) -> list[Outcome]:
        """The outcome of each item, in their order. `UserError` if the memory limit is too small to start."""
        idle = list(self._workers)

        def run(item: Sequence[Any]) -> Outcome:
            worker = idle.pop()
            try:
                return worker.run(item)
            finally:
                idle.append(worker)

        # The processes inherit the signal mask of the threads.
        threads = ThreadPoolExecutor(
            len(idle), initializer=signal.pthread_sigmask, initargs=(signal.SIG_BLOCK, {signal.SIGINT})
        )
        with self._lock, threads:
            try:
                return list(threads.map(run, items))
            except BaseException:  # such as Ctrl-C: nobody wants the items that are still running
                self.close()
                raise


class _Worker:
    """A process, started for its first item and again for the next item after it ended. A fork starts its own."""

    def __init__(self, function: str, timeout_s: float, memory_mib: int) -> None:
        self._function, self._timeout, self._memory = function, timeout_s, memory_mib
        self._owner = 0
        self._process: subprocess.Popen[bytes]
        self._link: Connection

    def run(self, item: Sequence[Any]) -> Outcome:
        if self._owner != os.getpid() or self._process.poll() is not None:
            self._start()
        try:
            self._link.send(item)
            if self._link.poll(self._timeout):
                return self._link.recv()  # type: ignore[no-any-return]
        except (EOFError, OSError):  # the process has ended
            status = self._process.wait()
            reason = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
            return Outcome(failure="memory" if status == MEMORY_STATUS else reason)
        self.end()
        return Outcome(failure="time-out")

    def end(self) -> None:
        if self._owner == os.getpid():
            self._process.kill()
            self._process.wait()

    def _start(self) -> None:
        self._link, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", "from threepo.workers import _serve; _serve()"],
                stdin=theirs.fileno(),
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        self._owner = os.getpid()
        try:
            self._link.send((self._function, self._memory))
            refusal = self._link.recv()
        except (EOFError, OSError):
            raise RuntimeError(f"the process for {self._function} ended before its first item") from None
        if refusal:
            raise UserError(refusal)


def _end(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        worker.end()


def _serve() -> None:
    """What a process does: import the function, set the memory limit, and call the function with each item.

    While an item runs, the kernel ends the process by SIGIO as soon as the owner has gone, whatever Python is doing.
    (PR_SET_PDEATHSIG would already act when the owner's thread that started the process ends.)
    """
    link = Connection(0)
    name, memory_mib = link.recv()
    function = pkgutil.resolve_name(name)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    needed = pages * resource.getpagesize() // 2**20 + SPARE_MIB
    if needed > memory_mib:
        link.send(f"reward.memory_mib = {memory_mib}: is too small for {name}; set it to {needed} or more")
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory_mib * 2**20, memory_mib * 2**20))
    null = os.open(os.devnull, os.O_WRONLY)  # for what libraries print
    os.dup2(null, 1)
    os.dup2(null, 2)
    fcntl.fcntl(0, fcntl.F_SETOWN, os.getpid())
    link.send("")
    while True:
        item = link.recv()
        fcntl.fcntl(0, fcntl.F_SETFL, os.O_ASYNC)
        if link.poll():  # the owner sends nothing now, so it has gone
            return
        try:
            outcome = Outcome(function(*item))
        except MemoryError:
            os._exit(MEMORY_STATUS)  # the heap is in pieces
        except (Exception, SystemExit) as error:
            outcome = Outcome(failure=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
        fcntl.fcntl(0, fcntl.F_SETFL, 0)
        link.send(outcome)
