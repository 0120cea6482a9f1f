"""Processes for work that may hang, use too much memory or crash: a time limit for each item, and a memory limit.

    pool = WorkerPool("threepo.rewards.algebra:judge", timeout_s=10, memory_mib=1024)
    outcomes = pool.map([(r"\\\\frac{2}{4}", "0.5"), ("9^{9^{9^9}}", "1")])

The processes are pebble's. An item that exceeds a limit or ends its process costs only itself. Processes start when
they are needed, do not import the caller's main module, and end with the process that owns them, even if that is
killed. The function is trusted, the items are data: this is no sandbox for programs.
"""

import contextlib
import fcntl
import multiprocessing.process
import os
import pkgutil
import resource
import select
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from pebble import ProcessExpired, ProcessPool

from threepo.errors import UserError

SPARE_MIB = 64
"""Memory that a process must have left for its items, once it has started."""
ATTEMPTS = 3
"""Starts in a row that may fail."""
_MEMORY_EXIT = 77
"""Exit status of a process that ran out of memory."""
_starting = threading.Lock()
# multiprocessing and pebble would otherwise end the owner's processes when a child made by os.fork() exits.
os.register_at_fork(after_in_child=multiprocessing.process._children.clear)  # type: ignore[attr-defined]


class Outcome(NamedTuple):
    """What became of an item."""

    value: Any = None
    failure: str = ""
    """Empty, or why there is no value: `time-out`, `memory`, `killed by SIGSEGV`, `RecursionError: ...`."""


class WorkerPool:
    """Up to `workers` processes (0: one for each core) that call the function `module:name` with each item's parts.

    `memory_field` is what the user calls the memory limit. Threads take turns. After a fork the child has a pool of
    its own.
    """

    def __init__(
        self, function: str, *, timeout_s: float, memory_mib: int, workers: int = 0, memory_field: str = "memory_mib"
    ) -> None:
        self._arguments = (function, memory_mib, memory_field)
        self._timeout = timeout_s
        self._most = workers or len(os.sched_getaffinity(0))
        self._disown()

    def _disown(self) -> None:
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._pool: ProcessPool | None = None
        self._size = 0

    def close(self) -> None:
        """End the processes. They also end when the pool is collected, and with the process that owns them."""
        if self._pool is not None and self._owner == os.getpid():
            self._end()
        self._pool = None

    def map(self, items: Sequence[Sequence[Any]]) -> list[Outcome]:
        """The outcome of each item, in their order. `UserError` if the memory limit is too small to start."""
        if self._owner != os.getpid():
            self._disown()
        outcomes: dict[int, Outcome] = {}
        suspects: set[int] = set()
        futile = 0
        with self._lock:
            while len(outcomes) < len(items):
                known = len(outcomes) + len(suspects)
                try:
                    self._collect(items, outcomes, suspects)
                except BaseException:  # such as Ctrl-C: nobody wants the items that are under way
                    self.close()
                    raise
                futile = futile + 1 if len(outcomes) + len(suspects) == known else 0
                if futile == ATTEMPTS:
                    self.close()
                    raise RuntimeError(f"the processes of {self._arguments[0]} end before they begin an item")
        return [outcomes[place] for place in range(len(items))]

    def _collect(self, items: Sequence[Sequence[Any]], outcomes: dict[int, Outcome], suspects: set[int]) -> None:
        """Add the outcomes that are missing, as far as they can be had.

        An item whose process dies is a suspect and has a second attempt: pebble may blame the item before it. When a
        process dies without an item, pebble gives up, and what is left has another attempt too.
        """
        left = [place for place in range(len(items)) if place not in outcomes]
        size = max(self._size, min(len(left), self._most))
        if self._pool is None or not self._pool.active or size > self._size:
            self.close()
            self._size = size
            self._pool = ProcessPool(size, initializer=_prepare, initargs=self._arguments, context=_Context())
            self._end = weakref.finalize(self, _end, self._pool, self._owner)
        futures = {}
        with contextlib.suppress(RuntimeError):  # it has given up
            for place in left:
                futures[place] = self._pool.schedule(_run, items[place], timeout=self._timeout)
            while wait(futures.values(), timeout=1).not_done and self._pool.active:
                pass
        for place, future in futures.items():
            if future.done():
                try:
                    outcomes[place] = future.result()
                except TimeoutError:
                    outcomes[place] = Outcome(failure="time-out")
                except ProcessExpired as error:
                    if place in suspects:
                        outcomes[place] = Outcome(failure=_ending(error.exitcode))
                    suspects.add(place)
                except BrokenProcessPool:
                    pass


def _ending(status: int) -> str:
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return "memory" if status == _MEMORY_EXIT else f"exit status {status}"


def _end(pool: ProcessPool, owner: int) -> None:
    if os.getpid() == owner:  # a fork has a copy of the pool, but not the processes
        pool.stop()  # type: ignore[no-untyped-call]
        pool.join()


class _Process(SpawnProcess):
    def start(self) -> None:
        """Start without the caller's main module, which may be a script without a guard, and deaf to Ctrl-C."""
        with _starting:
            main, mask = sys.modules["__main__"], signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            sys.modules["__main__"] = ModuleType("__main__")
            try:
                super().start()
            finally:
                sys.modules["__main__"] = main
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)


class _Context(SpawnContext):
    Process = _Process


# In a process of the pool

_function: Callable[..., Any]
_unfit = ""


def _prepare(function: str, memory_mib: int, memory_field: str) -> None:
    """Import what the function needs, then set the memory limit."""
    global _function, _unfit
    _function = pkgutil.resolve_name(function)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # pebble's handler waits for the interpreter
    _end_with_owner()
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    needed = pages * resource.getpagesize() // 2**20 + SPARE_MIB
    if needed > memory_mib:
        _unfit = f"{memory_field} = {memory_mib}: is too small for {function}; set it to {needed} or more"
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory_mib * 2**20, memory_mib * 2**20))
    nowhere = os.open(os.devnull, os.O_WRONLY)  # for what libraries print
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


def _end_with_owner() -> None:
    """Have the kernel end this process by SIGIO when its owner ends, whatever Python is doing then.

    Not by PR_SET_PDEATHSIG: that acts when the owner's thread ends that has started the process.
    """
    owner = multiprocessing.process.parent_process()
    assert owner is not None
    fcntl.fcntl(owner.sentinel, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(owner.sentinel, fcntl.F_SETFL, os.O_ASYNC)
    if select.select([owner.sentinel], [], [], 0)[0]:
        sys.exit(1)


def _run(*item: Any) -> Outcome:
    if _unfit:
        raise UserError(_unfit)
    try:
        return Outcome(_function(*item))
    except MemoryError:
        os._exit(_MEMORY_EXIT)  # what is left of the heap is in pieces
    except (Exception, SystemExit) as error:
        return Outcome(failure=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
