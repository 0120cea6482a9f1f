"""Sharded tensors: which elements of a whole parameter a rank holds, and sums over all shards."""

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from threepo.posterior.operations import WHOLE, Region


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of a tensor: the tensor itself, unless it is a DTensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_spread(tensor: torch.Tensor) -> bool:
    """True if ranks hold parts of the tensor."""
    return isinstance(tensor, DTensor)


def device_of(tensor: torch.Tensor) -> torch.device:
    """Device on which to compute with a parameter: its own, unless FSDP2 keeps its shards in CPU memory."""
    here = local(tensor).device
    if isinstance(tensor, DTensor) and here.type != tensor.device_mesh.device_type:
        return torch.device(tensor.device_mesh.device_type)
    return here


def drop_gathered_copies(model: torch.nn.Module) -> None:
    """Reshard FSDP2 modules that a forward pass left gathered: their copies would miss what is written into shards."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def like_parameter(tensor: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """A tensor of the parameter's shape, whole on every rank or sharded otherwise, sharded as the parameter is."""
    if not isinstance(p, DTensor):
        return tensor
    if not isinstance(tensor, DTensor):
        spread = distribute_tensor(tensor.to(device_of(p)), p.device_mesh, p.placements, src_data_rank=None)
        return spread.to(p.device)
    return tensor if tensor.placements == p.placements else tensor.redistribute(p.device_mesh, p.placements)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor, on every rank and its device; a collective if it is spread over ranks."""
    if not isinstance(tensor, DTensor):
        return tensor
    there: Any = tensor.to(device_of(tensor))
    return there.full_tensor()  # type: ignore[no-any-return]


def sum_over_shards(values: Iterable[tuple[torch.Tensor, torch.Tensor]], squared: bool = False) -> float:
    """Sum, in float64, of 0-dim numbers (or their squares), each with its parameter: a rank holds its shard's number.

    A collective where parameters are sharded: every rank must call.
    """
    found: dict[Any, list[torch.Tensor]] = defaultdict(list)
    for tensor, value in values:
        # Replicas hold the same number, which counts once.
        found[_sharding(tensor) if isinstance(tensor, DTensor) else value.device].append(value)
    result = 0.0
    for key, some in found.items():
        numbers = torch.stack(some)
        numbers = numbers.to(torch.float32 if numbers.device.type == "mps" else torch.float64)
        total = (numbers.square() if squared else numbers).sum()
        if isinstance(key, tuple):
            mesh, dims = key
            _all_reduce(total, mesh, dims)
            replicas = (dim for dim in range(mesh.ndim) if dim not in dims)
            # Sums of two replicas may round differently, and replicas must not drift apart.
            _all_reduce(total, mesh, replicas, op=torch.distributed.ReduceOp.MAX)
        result += float(total)
    return result


SAMPLE = 4096
"""Elements read per parameter, about: evenly spaced, the same ones every time."""


def sampled(values: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    """An even subsample of flat whole tensors, float32 and on the CPU.

    `values` are parameters, each with the tensor to read, which is spread as the parameter is. One collective for all
    that are sharded alike: every rank must call, and all get the numbers of one process with the whole tensors.
    """
    found: list[torch.Tensor] = []
    spread: dict[Any, list[torch.Tensor]] = defaultdict(list)
    for p, tensor in values:
        here, every = local(tensor.detach()).contiguous().view(-1), _stride(p)
        if not isinstance(p, DTensor):
            found.append(here[::every].to("cpu", torch.float32, copy=True))
            continue
        indices = torch.arange(0, p.numel(), every, device=here.device)
        sample = torch.zeros(len(indices), device=here.device)
        for (start, row, stride), part in held_parts(p, here):
            columns = (indices - start) % stride
            at = (indices - start) // stride * row + columns
            ours = (indices >= start) & (columns < row) & (at < len(part))
            sample[ours] = part[at[ours]].float()
        spread[_sharding(p)].append(sample)
        found.append(sample)
    for sharding, samples in spread.items():
        together = torch.cat(samples)
        _all_reduce(together, *sharding)  # an element is on one rank of those dimensions, and 0 on the others
        torch._foreach_copy_(samples, torch.split(together, [len(sample) for sample in samples]))
    return [sample.cpu() for sample in found]


def _stride(p: torch.Tensor) -> int:
    """About SAMPLE elements of all columns: a stride that shares a factor with the row's length would miss some."""
    stride = max(1, p.numel() // SAMPLE)
    while p.ndim > 1 and math.gcd(stride, p.shape[-1]) > 1:
        stride -= 1
    return stride


def _sharding(tensor: DTensor) -> tuple[Any, tuple[int, ...]]:
    """The mesh of a DTensor, and the dimensions of it that shard; along the others there are replicas."""
    sharded = tuple(dim for dim, p in enumerate(tensor.placements) if not p.is_replicate())
    return tensor.device_mesh, sharded


def _all_reduce(tensor: torch.Tensor, mesh: Any, dims: Iterable[int], **options: Any) -> None:
    there = tensor.to(mesh.device_type)
    for dim in dims:
        torch.distributed.all_reduce(there, group=mesh.get_group(dim), **options)
    tensor.copy_(there)


def all_ranks_agree(here: bool, tensors: Iterable[torch.Tensor]) -> bool:
    """True if something holds on every rank that DTensors among these are spread over; a collective if any is."""
    for mesh in dict.fromkeys(t.device_mesh for t in tensors if isinstance(t, DTensor)):
        failed = torch.tensor(0.0 if here else 1.0, device=mesh.device_type)
        _all_reduce(failed, mesh, range(mesh.ndim), op=torch.distributed.ReduceOp.MAX)
        here = not failed.item()
    return here


def held_regions(p: torch.Tensor) -> list[Region]:
    """The regions of the flat whole parameter that this rank holds, of equal size, in the order of its local elements.

    There is one region, unless several dimensions are cut, or nothing is held.
    """
    if not isinstance(p, DTensor):
        return [WHOLE] if p.numel() else []
    shape, offset = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)
    return _box(tuple(p.shape), tuple(shape), tuple(offset))


def held_parts(p: torch.Tensor, flat: torch.Tensor) -> list[tuple[Region, torch.Tensor]]:
    """`held_regions`, each with its elements of `flat`, this rank's elements of the parameter."""
    regions = held_regions(p)
    return list(zip(regions, flat.chunk(len(regions)), strict=True)) if regions else []


def _box(whole: tuple[int, ...], part: tuple[int, ...], offset: tuple[int, ...]) -> list[Region]:
    """The box of shape `part` at `offset` in a row-major tensor of shape `whole`, in as few regions as possible.

    They have the same number of elements, and come in the order of the box's own elements. For example, columns 2 and 3
    of a tensor of shape (4, 6) are one region: rows of 2 elements that begin 6 apart.
    """
    if math.prod(part) == 0:
        return []
    strides = [math.prod(whole[d + 1 :]) for d in range(len(whole))]
    starts = [sum(o * s for o, s in zip(offset, strides, strict=True))]
    # A row covers the last dimension that is cut, and those after it. If only the first or none is cut, all is one row.
    last = max((d for d in range(len(whole)) if part[d] != whole[d]), default=0)
    # A region covers the dimensions before it that are whole, and one that is cut; the others give more regions.
    first = max((d for d in range(last) if part[d] != whole[d]), default=0)
    rows = (math.prod(part[last:]), strides[last - 1]) if last else ()
    for dim in range(first):
        starts = [begin + i * strides[dim] for begin in starts for i in range(part[dim])]
    return [Region(begin, *rows) for begin in starts]
