"""Runs operations on whole parameters: finds the elements on this rank and gives them to the fastest kernels there are.

Compiled C on a CPU (native.py), Triton on CUDA (triton_kernels.py), torch (torch_kernels.py) everywhere else and for
noise of low rank: other speeds, the same bits. Parameters may be ordinary tensors of any memory layout, or DTensors;
the other tensors of an operation have the parameter's shape and placement.
"""

import importlib
import importlib.util
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from types import ModuleType
from typing import Any

import torch

from threepo.posterior import native, torch_kernels
from threepo.posterior.noise import LowRank
from threepo.posterior.operations import AddNoiseTimes, Operation, Perturb, Update
from threepo.posterior.shards import by_region, local

_FLOAT32 = ("hessian", "momentum", "second")
_WRITTEN = {Perturb: 1, AddNoiseTimes: 1, Update: 4}
"""How many of a record's tensors are written: the first ones."""


@cache
def _triton_kernels() -> ModuleType | None:
    """Triton comes with CUDA builds of torch."""
    there = importlib.util.find_spec("triton")
    return importlib.import_module("threepo.posterior.triton_kernels") if there else None


def backend(*tensors: torch.Tensor | None) -> Any:
    """The module whose `run` takes operations on these local tensors."""
    if native.takes(*tensors):
        return native
    kernels = _triton_kernels() if all(tensor is None or tensor.is_cuda for tensor in tensors) else None
    return kernels if kernels and kernels.takes(*tensors) else torch_kernels


@torch.no_grad()
def run(operations: Iterable[Operation]) -> list[torch.Tensor]:
    """Do operations of one kind. Returns how many coordinates each Update clipped on this rank, 0-dim int64."""
    clipped: list[torch.Tensor] = []
    parts: dict[Any, list[tuple[int, Operation]]] = defaultdict(list)  # by backend; with the operation's index
    written: list[tuple[torch.Tensor, torch.Tensor]] = []  # local tensors, and the contiguous form of each
    for index, operation in enumerate(operations):
        if isinstance(operation, Update) and isinstance(operation.key, LowRank) and operation.grad.device.type == "cpu":
            operation = _with_noise_times(operation)  # the rest is faster in C; a GPU may lack the memory
        kind: Any = type(operation)
        tensors: Any = operation[: kind._fields.index("key")]
        own: list[Any] = [None if tensor is None else local(tensor) for tensor in tensors]
        for name, tensor in zip(kind._fields, own, strict=False):  # compiled kernels get addresses, so would not notice
            if tensor is not None and tensor.shape != own[0].shape:
                shapes = f"{list(own[0].shape)} and {list(tensor.shape)}"
                raise RuntimeError(f"shapes differ: {shapes}, here or in their shards")
            if tensor is not None and name in _FLOAT32 and tensor.dtype != torch.float32:
                raise RuntimeError(f"IVON's state is float32, this is {tensor.dtype}")
        dense = [None if tensor is None else tensor.contiguous() for tensor in own]
        chosen = torch_kernels if isinstance(operation.key, LowRank) else backend(*dense)
        for region, part in by_region(tensors[0], dense):
            parts[chosen].append((index, kind(*part, *operation[len(part) : -1], region)))
        pairs = zip(own[: _WRITTEN[kind]], dense, strict=False)
        written += [(tensor, copy) for tensor, copy in pairs if tensor is not None and copy is not None]
        if isinstance(operation, Update):
            clipped.append(torch.zeros((), dtype=torch.int64, device=operation.grad.device))
    for kernels, some in parts.items():
        counts = kernels.run([operation for _, operation in some])
        for (index, _), count in zip(some, counts, strict=bool(counts)):
            clipped[index] += count
    for tensor, copy in written:
        if copy is not tensor:
            tensor.copy_(copy)
    # Autograd must know what compiled kernels wrote.
    torch.autograd.graph.increment_version([tensor for tensor, _ in written if not tensor.is_inference()])
    return clipped


def _with_noise_times(update: Update) -> Update:
    """The same step with z * grad made beforehand, so that no noise is left to make: the same bits."""
    second = update.second
    if second is None and update.key is not None and update.scalars.estimator == "price":
        second = torch.zeros_like(update.hessian)
        run([AddNoiseTimes(second, update.grad, update.key)])
    return update._replace(second=second, key=None)
