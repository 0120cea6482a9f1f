"""IVON's arithmetic on whole parameters: finds what lies on this rank, and hands it to the fastest kernels there are.

Every function takes the work on any number of parameters, and hands small ones over together.

Compiled C on a CPU (native.py), Triton on CUDA (triton_kernels.py), plain torch (plain.py) everywhere else. Which one
it is changes the time, not a bit of the numbers. Parameters may be plain tensors, of any memory layout, or DTensors;
the Hessian, the momentum and everything else that comes with a parameter have its shape and placement.
"""

import importlib
import importlib.util
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import islice
from types import ModuleType
from typing import Any, TypeVar

import torch

from threepo.posterior import native, plain
from threepo.posterior.layout import is_dtensor, local, pieces
from threepo.posterior.noise import noise_key
from threepo.posterior.operands import AddNoiseTimes, Perturb, Place, Seen, State, Update
from threepo.types import Draw

Job = TypeVar("Job", Perturb, AddNoiseTimes, Update)

BATCH = 1 << 20
"""Elements that are handed over together, about: enough for every core, few enough that what they were made from (a
gradient, a copy) is freed soon."""


@cache
def _triton_kernels() -> ModuleType | None:
    """Triton comes with CUDA builds of torch; where it is missing, plain torch does the work."""
    if importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module("threepo.posterior.triton_kernels")


def backend(*tensors: torch.Tensor | None) -> Any:
    """The module whose kernels take these flat tensors."""
    if native.takes(*tensors):
        return native
    if all(tensor is None or tensor.is_cuda for tensor in tensors):
        kernels = _triton_kernels()
        if kernels is not None and kernels.takes(*tensors):
            return kernels
    return plain


def _check(first: torch.Tensor, others: Sequence[torch.Tensor | None], states: Sequence[torch.Tensor | None]) -> None:
    """The compiled kernels take addresses, so nobody after this would notice."""
    shape, spread = first.shape, is_dtensor(first)
    for other in (*others, *states):
        if other is None or other is first:
            continue
        if other.shape != shape or ((spread or is_dtensor(other)) and local(other).shape != local(first).shape):
            raise RuntimeError(f"shapes differ: {list(shape)} and {list(other.shape)}, here or in their shards")
    for state in states:
        if state is not None and state.dtype != torch.float32:
            raise RuntimeError(f"IVON's state is float32, this is {state.dtype}")


def read(tensor: torch.Tensor) -> torch.Tensor:
    """The local elements of a tensor, flat and in logical order, for reading."""
    return _dense(tensor.detach()).view(-1)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """The local elements of a tensor in logical order: a copy where memory has another (channels-last, a view)."""
    return local(tensor).contiguous()


def _blank(tensor: torch.Tensor) -> torch.Tensor:
    """As `_dense`, for what is written and not read: where memory has another order, nothing is copied into it."""
    own = local(tensor)
    return own if own.is_contiguous() else torch.empty(own.shape, dtype=own.dtype, device=own.device)


class _Batch:
    """Jobs that wait until there are enough of them, or until one comes that other kernels take."""

    def __init__(self, function: str) -> None:
        self._function = function
        self._kernels: Any = None
        self._jobs: list[Any] = []
        self._size = 0
        self._written: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.results: list[torch.Tensor] = []

    def add(self, kernels: Any, job: Job, first: torch.Tensor) -> int:
        """Take in a job on dense tensors, of which `first`, the parameter's own form of one, says what lies here.

        Returns the number of results that there will be.
        """
        found = pieces(first)
        for piece in found:
            if kernels is not self._kernels or self._size + piece.elements > BATCH:
                self.run()
            self._kernels = kernels
            self._size += piece.elements
            self._jobs.append(job if piece.local is None else job.part(piece.local, piece.place))
        return len(found)

    def wrote(self, tensor: torch.Tensor, dense: torch.Tensor) -> None:
        """After all jobs that write into `dense`: what it is the dense form of."""
        self._written.append((local(tensor), dense))

    def run(self) -> None:
        """Do what waits."""
        jobs, written = self._jobs, self._written
        self._jobs, self._written, self._size = [], [], 0
        if jobs:
            self.results += getattr(self._kernels, self._function)(jobs) or ()
        for tensor, dense in written:
            if dense is not tensor:
                tensor.copy_(dense)
        # What compiled kernels wrote, autograd shall know.
        torch.autograd.graph.increment_version([tensor for tensor, _ in written if not tensor.is_inference()])


@torch.no_grad()
def perturb(work: Iterable[Perturb]) -> None:
    """Do all of this work; see Perturb."""
    batch = _Batch("perturb")
    for out, mean, hessian, key, scale, _ in work:
        _check(mean, (out,), (hessian,))
        m, h = _dense(mean), _dense(hessian)
        target = m if out is mean else _blank(out)
        batch.add(backend(m, target, h), Perturb(target, m, h, key, scale), mean)
        batch.wrote(out, target)
    batch.run()


@torch.no_grad()
def add_noise_times(work: Iterable[AddNoiseTimes]) -> None:
    """Do all of this work; see AddNoiseTimes."""
    batch = _Batch("add_noise_times")
    for total, grad, key, _ in work:
        _check(grad, (), (total,))
        t, g = _dense(total), _dense(grad)
        batch.add(backend(t, g), AddNoiseTimes(t, g, key), grad)
        batch.wrote(total, t)
    batch.run()


@torch.no_grad()
def update(work: Iterable[Update]) -> list[torch.Tensor]:
    """Do all of this work; see Update. Returns how many coordinates were clipped on this rank, 0-dim for each."""
    batch, counts, devices = _Batch("update"), [], []
    for state, seen, numbers, _ in work:
        _check(state.mean, (seen.grad, state.copy), (state.hessian, state.momentum, seen.second))
        assert state.copy is None or state.mean.dtype == torch.float32, "a copy is of a mean that is not rounded itself"
        dense = State(*(None if tensor is None else _dense(tensor) for tensor in state))  # type: ignore[arg-type]
        seen = Seen(_dense(seen.grad), None if seen.second is None else _dense(seen.second), seen.key)
        counts.append(batch.add(backend(*dense, seen.grad, seen.second), Update(dense, seen, numbers), state.mean))
        devices.append(dense.mean.device)
        for tensor, written in zip(state, dense, strict=True):
            if tensor is not None and written is not None:
                batch.wrote(tensor, written)
    batch.run()
    results = iter(batch.results)
    return [_total(list(islice(results, count)), device) for count, device in zip(counts, devices, strict=True)]


def _total(counts: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Of the pieces of one parameter, of which a rank may hold none."""
    return counts[0] if len(counts) == 1 else sum(counts, torch.zeros((), dtype=torch.int64, device=device))


def normal(draw: Draw, name: str, start: int, stop: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Noise of the elements [start, stop) of the flattened parameter `name` under `draw`: float32, [stop - start]."""
    assert 0 <= start <= stop, f"elements [{start}, {stop}) do not exist"
    out = torch.empty(stop - start, dtype=torch.float32, device=device)
    backend(out).normal(out, noise_key(draw, name), Place(start))
    return out
