"""Runs operations on whole parameters: finds what lies on this rank, and gives it to the fastest kernels there are.

Compiled C on a CPU (native.py), Triton on CUDA (triton_kernels.py), plain torch (torch_kernels.py) everywhere else. The
choice changes the time, not a bit of the numbers. Parameters may be plain tensors of any memory layout, or DTensors;
the other tensors of an operation have the parameter's shape and placement. Small parameters are handed over together.
"""

import importlib
import importlib.util
from collections.abc import Iterable
from functools import cache
from types import ModuleType
from typing import Any

import torch

from threepo.posterior import native, torch_kernels
from threepo.posterior.layout import is_dtensor, local, pieces
from threepo.posterior.noise import noise_key
from threepo.posterior.operations import AddNoiseTimes, Normal, Operation, Perturb, Region, Update
from threepo.types import Draw

BATCH = 1 << 20
"""Elements that are handed over together, about: enough for every core, few enough that what they were made from (a
gradient, a copy) is freed soon."""
_WRITTEN: dict[type, tuple[str, ...]] = {
    Perturb: ("out",),
    AddNoiseTimes: ("second",),
    Update: ("mean", "out", "hessian", "momentum"),
}


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


def read(tensor: torch.Tensor) -> torch.Tensor:
    """The local elements of a tensor, flat and in logical order, for reading."""
    return local(tensor.detach()).contiguous().view(-1)


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
        self.clipped: list[torch.Tensor] = []
        self._kernels: Any = None
        self._waiting: list[tuple[int, Operation]] = []
        """With the place in `clipped` that the result is added to."""
        self._elements = 0
        self._written: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Local tensors, and the contiguous form of each that operations write into."""

    def add(self, operation: Operation) -> None:
        given = {name: value for name, value in operation._asdict().items() if isinstance(value, torch.Tensor)}
        parameter = given["mean"] if "mean" in given else given["grad"]
        _check(parameter, given)
        dense = {name: local(tensor).contiguous() for name, tensor in given.items() if name != "out"}
        if "out" in given:
            own = local(given["out"])
            # It is only written, so a contiguous form of it needs no content.
            made = own if own.is_contiguous() else torch.empty(own.shape, dtype=own.dtype, device=own.device)
            dense["out"] = dense["mean"] if given["out"] is parameter else made
        kernels, index = backend(*dense.values()), len(self.clipped)
        for piece in pieces(parameter):
            if kernels is not self._kernels or self._elements + piece.elements > BATCH:
                self.flush()
            self._kernels = kernels
            self._elements += piece.elements
            part: Any = {n: t if piece.local is None else t.view(-1)[piece.local] for n, t in dense.items()}
            self._waiting.append((index, operation._replace(**part, region=piece.region)))
        if isinstance(operation, Update):
            self.clipped.append(torch.zeros((), dtype=torch.int64, device=dense["mean"].device))
        self._written += [(local(given[n]), dense[n]) for n in _WRITTEN[type(operation)] if n in given]

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


def _check(parameter: torch.Tensor, given: dict[str, torch.Tensor]) -> None:
    """The compiled kernels take addresses, so nobody after this would notice."""
    for name, tensor in given.items():
        if tensor.shape != parameter.shape or (
            (is_dtensor(parameter) or is_dtensor(tensor)) and local(tensor).shape != local(parameter).shape
        ):
            raise RuntimeError(
                f"shapes differ: {list(parameter.shape)} and {list(tensor.shape)}, here or in their shards"
            )
        if name in ("hessian", "momentum", "second") and tensor.dtype != torch.float32:
            raise RuntimeError(f"IVON's state is float32, this is {tensor.dtype}")


def normal(draw: Draw, name: str, start: int, stop: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Noise of the elements [start, stop) of the flattened parameter `name` under `draw`: float32, [stop - start]."""
    assert 0 <= start <= stop, f"elements [{start}, {stop}) do not exist"
    out = torch.empty(stop - start, dtype=torch.float32, device=device)
    backend(out).run([Normal(out, noise_key(draw, name), Region(start))])
    return out
