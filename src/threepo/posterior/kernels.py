"""Runs operations on whole parameters: finds the elements on this rank and gives them to the fastest kernels there are.

Compiled C on a CPU (native.py), Triton on CUDA (triton_kernels.py), torch (torch_kernels.py) everywhere else and for
structured noise: other speeds, the same bits. Parameters may be ordinary tensors of any memory layout, or DTensors; the
other tensors of an operation have the parameter's shape and placement.
"""

import importlib
import importlib.util
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import Any

import torch

from threepo.posterior import native, torch_kernels
from threepo.posterior.operations import WHOLE, Operation, Update
from threepo.posterior.shards import held_regions, local

Tensors = Mapping[str, torch.Tensor]
"""An operation's tensors by the names of its fields, without those that are None."""
_FLOAT32 = ("hessian", "momentum", "second")


@cache
def triton_kernels() -> ModuleType | None:
    """triton_kernels.py; None without Triton, which comes with CUDA builds of torch."""
    there = importlib.util.find_spec("triton")
    return importlib.import_module("threepo.posterior.triton_kernels") if there else None


def backend(*tensors: torch.Tensor | None) -> Any:
    """The module whose `run` takes operations on these local tensors."""
    if native.takes(*tensors):
        return native
    kernels = triton_kernels() if all(tensor is None or tensor.is_cuda for tensor in tensors) else None
    return kernels if kernels and kernels.takes(*tensors) else torch_kernels


@torch.no_grad()
def run(operations: Iterable[Operation]) -> list[torch.Tensor]:
    """Do operations of one kind. Returns how many coordinates each Update clipped on this rank, 0-dim int64."""
    clipped: list[torch.Tensor] = []
    parts: dict[Any, list[tuple[int, Operation]]] = defaultdict(list)  # by backend; with the operation's index
    written: list[tuple[torch.Tensor, torch.Tensor]] = []  # local tensors, and the contiguous form of each
    for index, operation in enumerate(operations):
        if isinstance(operation, Update) and operation.scalars.estimator == "price":
            assert operation.noise or operation.second is not None, "the price estimator needs the draw's noise"
        names = (*operation.WRITTEN, *operation.READ)
        whole = {name: tensor for name in names if (tensor := getattr(operation, name)) is not None}
        dense = {name: local(tensor).contiguous() for name, tensor in whole.items()}
        _check(dense)
        compiled = operation.noise is None or operation.noise.compiled
        chosen = backend(*dense.values()) if compiled else torch_kernels
        for part in _parts(operation, whole, dense):
            parts[chosen].append((index, part))
        written += [(local(whole[name]), dense[name]) for name in operation.WRITTEN if name in whole]
        if isinstance(operation, Update):
            clipped.append(torch.zeros((), dtype=torch.int64, device=operation.grad.device))
    for kernels, some in parts.items():
        counts = kernels.run([part for _, part in some])  # none, unless they are Updates
        for (index, _), count in zip(some, counts, strict=bool(counts)):
            clipped[index] += count
    for tensor, copy in written:
        if copy is not tensor:
            tensor.copy_(copy)
    # Autograd must know what compiled kernels wrote.
    torch.autograd.graph.increment_version([tensor for tensor, _ in written if not tensor.is_inference()])
    return clipped


def _check(tensors: Tensors) -> None:
    """Raise for tensors that differ in shape or have the wrong dtype, which compiled kernels would not notice."""
    shape = next(iter(tensors.values())).shape
    for name, tensor in tensors.items():
        if tensor.shape != shape:
            raise RuntimeError(f"shapes differ: {list(shape)} and {list(tensor.shape)}, here or in their shards")
        if name in _FLOAT32 and tensor.dtype != torch.float32:
            raise RuntimeError(f"IVON's state is float32, this is {tensor.dtype}")


def _parts(operation: Operation, whole: Tensors, dense: Tensors) -> list[Operation]:
    """The operation on each region that this rank holds; `dense` has its contiguous local tensors."""
    regions = held_regions(whole[operation.WRITTEN[0]])
    if regions == [WHOLE] and all(tensor is whole[name] for name, tensor in dense.items()):
        return [operation]
    pieces = {name: tensor.view(-1).chunk(max(len(regions), 1)) for name, tensor in dense.items()}
    parts = []
    for i, region in enumerate(regions):
        tensors: dict[str, Any] = {name: piece[i] for name, piece in pieces.items()}
        parts.append(replace(operation, region=region, **tensors))
    return parts
