"""Compiled CPU kernels: loads their libraries and shares their work among torch's threads.

hatch_build.py compiles the libraries when the package is built; without them, torch does the same, more slowly.
"""

import ctypes
import os
import sys
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

SERIAL = 1 << 16
"""Number of elements below which a second thread costs more than it saves."""


class Library:
    """A compiled library, loaded at its first use. If it is missing, one line on stderr says so, once.

    Its function `threepo_<name>_version` must return `version`; `name` is the file's, without its underscore. `slower`
    says what is slower without it, and by how much.
    """

    def __init__(self, path: Path, version: int, slower: str) -> None:
        self._path, self._version, self.slower = path, version, slower

    @cached_property
    def loaded(self) -> ctypes.CDLL | None:
        """The library; None if it was not compiled, or was compiled from another version of its source."""
        try:
            library = ctypes.CDLL(str(self._path))
            if getattr(library, f"threepo{self._path.stem}_version", lambda: None)() == self._version:
                return library
            what = "was compiled from another version of its source"
        except OSError:  # such as one that was compiled for another processor
            what = "cannot be loaded" if self._path.is_file() else "is missing"
        fix = "install a C compiler (cc, gcc or clang), then threepo again"
        print(f"threepo: {self._path.name} {what}: {self.slower}, with torch instead; {fix}", file=sys.stderr)
        return None

    def call(self, function: str, argument: ctypes.Structure, threads: int) -> None:
        """Call `void function(argument)` in so many threads, which divide the work among themselves.

        They are torch's own OpenMP team, which starts within microseconds and does not compete with a second team for
        the cores. If torch has no such team, one thread does all the work.
        """
        work = getattr(self.loaded, function)
        if threads <= 1 or _openmp is None or os.getpid() != _PROCESS:
            work(ctypes.byref(argument))
        else:
            _openmp(work, ctypes.byref(argument), threads, 0)


def fields(**names: str) -> tuple[tuple[str, Any], ...]:
    """Fields of a ctypes structure, names by C type: `fields(int64="rows heads", void_p="query")`."""
    return tuple((name, getattr(ctypes, f"c_{kind}")) for kind, of in names.items() for name in of.split())


def _find_openmp() -> Any:
    """`GOMP_parallel` of the OpenMP library that torch runs on; None if torch has another library, or none."""
    with_torch = sorted((Path(torch.__file__).parent / "lib").glob("lib*omp*"))
    for path in (*map(str, with_torch), "libgomp.so.1"):
        with suppress(OSError, AttributeError):  # no such library is in use, or it has no such function
            parallel = ctypes.CDLL(path, mode=os.RTLD_NOLOAD).GOMP_parallel
            parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
            parallel.restype = None
            return parallel
    return None


_openmp = _find_openmp()
_PROCESS = os.getpid()
"""Threads do not survive a fork, so in another process the team would wait for ever."""
