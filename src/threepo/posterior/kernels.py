"""Runs operations on whole parameters: finds what lies on this rank, and gives it to the fastest kernels there are.

Compiled C on a CPU (native.py), Triton on CUDA (triton_kernels.py), plain torch (torch_kernels.py) everywhere else. The
choice changes the time, not a bit of the numbers. Parameters may be plain tensors of any memory layout, or DTensors;
the other tensors of an operation have the parameter's shape and placement. Small parameters are handed over together.
"""

import importlib
import importlib.util
from collections.abc import Iterable, Sequence
from functools import cache
from types import ModuleType
from typing import Any

import torch

from threepo.posterior import native, torch_kernels
from threepo.posterior.layout import local, pieces
from threepo.posterior.operations import AddNoiseTimes, Operation, Perturb, Update

BATCH = 1 << 20
"""Elements that are handed over together, about: enough for every core, few enough that what they were made from (a
gradient, a copy) is freed soon."""
_FLOAT32 = ("hessian", "momentum", "second")
_WRITTEN = {Perturb: ("out",), AddNoiseTimes: ("second",), Update: ("mean", "out", "hessian", "momentum")}


@cache
def _triton_kernels() -> ModuleType | None:
    """Triton comes with CUDA builds of torch; where it is missing, plain torch does the work."""
    if importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module("threepo.posterior.triton_kernels")


def backend(*tensors: torch.Tensor | None) -> Any:
    """The module whose `run` takes operations on these local tensors."""
    if native.takes(*tensors):
        return native
    if all(tensor is None or tensor.is_cuda for tensor in tensors):
        kernels = _triton_kernels()
        if kernels is not None and kernels.takes(*tensors):
            return kernels
    return torch_kernels


@torch.no_grad()
def run(operations: Iterable[Operation]) -> list[torch.Tensor]:
    """Do operations of one kind. Returns how many coordinates each Update clipped on this rank, 0-dim int64."""
    batch = _Batch()
    for operation in operations:
        batch.add(operation)
    batch.flush()
    return batch.clipped


class _Batch:
    """Operations that wait until there are enough of them, or until one comes that other kernels take."""

    def __init__(self) -> None:
        self.clipped: list[Any] = []
        """By each Update, summed over its pieces."""
        self._kernels: Any = None
        self._waiting: list[tuple[int, Operation]] = []
        """With their place in `clipped`."""
        self._elements = 0
        self._written: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Local tensors, and the contiguous form of each that operations write into."""

    def add(self, operation: Operation) -> None:
        kind: Any = type(operation)
        key = kind._fields.index("key")  # the tensors come before it
        tensors: Any = operation[:key]
        own = [None if tensor is None else local(tensor) for tensor in tensors]
        _check(own, kind._fields)
        dense: list[Any] = [None if tensor is None else tensor.contiguous() for tensor in own]
        parameter = operation.grad if isinstance(operation, AddNoiseTimes) else operation.mean
        kernels, found = backend(*dense), pieces(parameter)
        for piece in found:
            if kernels is not self._kernels or self._elements + piece.elements > BATCH:
                self.flush()
            self._kernels = kernels
            self._elements += piece.elements
            part = dense
            if piece.local is not None:
                part = [None if tensor is None else tensor.view(-1)[piece.local] for tensor in dense]
            self._waiting.append((len(self.clipped), kind(*part, *operation[key:-1], piece.region)))
        if isinstance(operation, Update):  # of which a rank may hold nothing
            self.clipped.append(0 if found else torch.zeros((), dtype=torch.int64, device=operation.grad.device))
        names = zip(kind._fields, own, dense, strict=False)
        self._written += [(tensor, d) for name, tensor, d in names if tensor is not None and name in _WRITTEN[kind]]

    def flush(self) -> None:
        waiting, written = self._waiting, self._written
        self._waiting, self._written, self._elements = [], [], 0
        if waiting:
            clipped = self._kernels.run([operation for _, operation in waiting])
            for (index, _), count in zip(waiting, clipped, strict=bool(clipped)):
                self.clipped[index] += count
        for tensor, dense in written:
            if dense is not tensor:
                tensor.copy_(dense)
        # Autograd must know what compiled kernels wrote.
        torch.autograd.graph.increment_version([tensor for tensor, _ in written if not tensor.is_inference()])


def _check(own: Sequence[torch.Tensor | None], names: Sequence[str]) -> None:
    """The compiled kernels take addresses, so nobody after this would notice."""
    assert own[0] is not None
    shape = own[0].shape
    for name, tensor in zip(names, own, strict=False):
        if tensor is not None and tensor.shape != shape:
            raise RuntimeError(f"shapes differ: {list(shape)} and {list(tensor.shape)}, here or in their shards")
        if tensor is not None and name in _FLOAT32 and tensor.dtype != torch.float32:
            raise RuntimeError(f"IVON's state is float32, this is {tensor.dtype}")
