"""What the compiled CPU kernels share: how a library is loaded, and how its work is spread over torch's threads.

The libraries are compiled when the package is built (hatch_build.py) and are optional: without a C compiler there, the
same is done in torch, only slower.
"""

import ctypes
import os
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
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


def together(work: Any, job: ctypes.Structure, threads: int) -> None:
    """Call a library's `void work(job)` in so many threads, which share out the job among themselves.

    They are those of torch's own team where that can be had: awake between two operations, they begin within
    microseconds, and no second team competes for the cores.
    """
    if threads == 1:
        work(ctypes.byref(job))
    elif _openmp is not None:
        _openmp(work, ctypes.byref(job), threads, 0)
    else:
        in_threads(threads, 1, lambda first, count: work(ctypes.byref(job)))


_pool: ThreadPoolExecutor | None = None


def _forget_pool() -> None:
    global _pool
    _pool = None


os.register_at_fork(after_in_child=_forget_pool)  # threads do not survive a fork


def in_threads(
    count: int, unit: int, work: Callable[[int, int], int | None], *, at_least: int = 1, serial: bool = False
) -> int:
    """Call work(first, size) over [0, count) in torch's number of threads; returns the sum of the results.

    Pieces are whole `unit`s, but for the last; a thread is added for every `at_least` of the count.
    """
    global _pool
    threads = 1 if serial else min(torch.get_num_threads(), -(-count // max(at_least, unit)))
    if threads <= 1:
        return work(0, count) or 0
    if _pool is None or _pool._max_workers < threads - 1:
        _pool = ThreadPoolExecutor(threads - 1, "threepo-kernels")
    size = -(-count // (threads * unit)) * unit
    others: list[Future[int | None]] = []
    try:
        for first in range(size, count, size):
            others.append(_pool.submit(work, first, min(size, count - first)))  # noqa: PERF401 - interrupts lose none
        total = work(0, size) or 0
    finally:
        _wait_for(others)
    return total + sum(other.result() or 0 for other in others)


def _wait_for(others: list[Future[int | None]]) -> None:
    """Until all are done, however often Ctrl-C is pressed: nobody may write into a tensor that was given back."""
    interrupt: KeyboardInterrupt | None = None
    while not all(other.done() for other in others):
        try:
            wait(others)
        except KeyboardInterrupt as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt
