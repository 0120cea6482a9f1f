"""What the compiled CPU kernels share: how a library is loaded, and how its work is spread over torch's threads.

The libraries are compiled when the package is built (hatch_build.py) and are optional: without a C compiler there, the
same is done in torch, only slower.
"""

import ctypes
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from threepo.errors import ThreepoWarning


def load_library(path: Path, version_function: str, version: int) -> ctypes.CDLL | None:
    """The library at `path`, or None where it was not compiled, or from another version of its source."""
    if not path.is_file():
        return None
    library = ctypes.CDLL(str(path))
    if not hasattr(library, version_function) or getattr(library, version_function)() != version:
        warnings.warn(
            f"{path} was compiled from another version of its source; install threepo again",
            ThreepoWarning,
            stacklevel=3,
        )
        return None
    return library


def _find_openmp() -> Any:
    """`GOMP_parallel` of the OpenMP library that torch runs on; None if torch has another one, or none."""
    with_torch = sorted((Path(torch.__file__).parent / "lib").glob("lib*omp*"))
    for path in (*map(str, with_torch), "libgomp.so.1"):
        try:
            return ctypes.CDLL(path, mode=os.RTLD_NOLOAD).GOMP_parallel  # none that is not in use already
        except (OSError, AttributeError):
            continue
    return None


_openmp = _find_openmp()
if _openmp is not None:
    _openmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    _openmp.restype = None
_pool: ThreadPoolExecutor | None = None


def _forget_threads() -> None:
    global _openmp, _pool
    _openmp = _pool = None


os.register_at_fork(after_in_child=_forget_threads)  # none survives, and a team without its threads waits forever


def together(work: Any, job: ctypes.Structure, threads: int) -> None:
    """Call a library's `void work(job)` in so many threads, which share out the job among themselves.

    They are those of torch's own team where that can be had: awake between two operations, they begin within
    microseconds, and no second team competes for the cores.
    """
    if threads <= 1:
        work(ctypes.byref(job))
    elif _openmp is not None:
        _openmp(work, ctypes.byref(job), threads, 0)
    else:
        in_threads(threads, lambda: work(ctypes.byref(job)))


def in_threads(threads: int, work: Callable[[], object]) -> None:
    """Call work() in so many threads at a time, this one among them, and return when all are done."""
    global _pool
    pool = _pool
    if pool is None or pool._max_workers < threads - 1:
        pool = _pool = ThreadPoolExecutor(threads - 1, "threepo-kernels")
    others: list[Future[object]] = []
    with _interrupts_wait():  # nobody may write into a tensor that was given back
        try:
            for _ in range(threads - 1):
                others.append(pool.submit(work))  # noqa: PERF401 - an error loses none
            work()
        finally:
            wait(others)
    for other in others:
        other.result()


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Ctrl-C in the body takes effect at its end, as it does in C code; no thread but the main one is interrupted."""
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            handler(*came[0])
