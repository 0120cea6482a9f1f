"""Where the elements that a rank holds lie in the whole parameter; the one place that knows of DTensor."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from threepo.posterior.operations import WHOLE, Region


class Piece(NamedTuple):
    """Elements that follow each other in the flat local tensor, and are one region of the flat whole tensor."""

    local: slice | None
    """Which elements of the flat local tensor; None: all."""
    region: Region
    elements: int


def _dtensor_class() -> Any:
    if not torch.distributed.is_available():
        return ()  # nothing is an instance of it
    from torch.distributed.tensor import DTensor

    return DTensor


_DTensor = _dtensor_class()


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor is spread over ranks."""
    return isinstance(tensor, _DTensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor: the tensor itself, unless it is a DTensor."""
    return tensor.to_local() if isinstance(tensor, _DTensor) else tensor


def drop_gathered_copies(model: torch.nn.Module) -> None:
    """Reshard FSDP2 modules that a forward pass left gathered: their copies do not see what is written into shards."""
    if torch.distributed.is_available():
        from torch.distributed.fsdp import FSDPModule

        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def like_parameter(tensor: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """A tensor of the parameter's shape, whole on every rank or spread in another way, spread as the parameter is."""
    if not is_dtensor(p):
        return tensor
    if not is_dtensor(tensor):
        return _share_of(tensor, p)
    if tensor.placements == p.placements:  # type: ignore[attr-defined]
        return tensor
    return tensor.redistribute(p.device_mesh, p.placements)  # type: ignore[attr-defined, no-any-return]


def _share_of(tensor: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """What lies on this rank of a tensor that is whole on every rank, as a DTensor like `p`."""
    # torch's distribute_tensor would send it from rank 0, and cannot cut a dimension twice into uneven shards.
    flat, here = tensor.to(p.device).contiguous().view(-1), torch.empty_like(local(p), dtype=tensor.dtype)
    for piece in pieces(p):
        start, row, stride = piece.region
        row = min(row, piece.elements)
        found = flat.as_strided((piece.elements // row, row), (stride, 1), flat.storage_offset() + start)
        here.view(-1)[slice(None) if piece.local is None else piece.local] = found.reshape(-1)
    like = {"shape": p.shape, "stride": p.stride()}
    return _DTensor.from_local(here, p.device_mesh, p.placements, **like)  # type: ignore[attr-defined, no-any-return]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor, on every rank; a collective if it is spread over ranks."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def sum_over_shards(values: Iterable[tuple[torch.Tensor, torch.Tensor]], squared: bool = False) -> float:
    """Sum, in float64, of 0-dim numbers (or their squares), each with its parameter: a rank holds its shard's number.

    A collective where parameters are sharded: every rank must call.
    """
    found: dict[Any, list[torch.Tensor]] = defaultdict(list)
    for tensor, value in values:
        # Replicas hold the same number, which counts once.
        found[_sharding(tensor) if is_dtensor(tensor) else value.device].append(value)
    result = 0.0
    for key, some in found.items():
        numbers = torch.stack(some)
        numbers = numbers.to(torch.float32 if numbers.device.type == "mps" else torch.float64)
        total = (numbers.square() if squared else numbers).sum()
        if isinstance(key, tuple):
            _all_reduce(total, *key)
        result += float(total)
    return result


def sampled(
    values: Iterable[tuple[torch.Tensor, torch.Tensor]], every: Callable[[torch.Tensor], int]
) -> list[torch.Tensor]:
    """Every `every(tensor)`-th element of flat whole tensors, given what this rank holds of them in logical order.

    `values` are parameters, which say what lies here, each with the local elements, flat. A collective where parameters
    are sharded: every rank must call, and all get the same numbers, those of one process that holds the whole.
    """
    found, shared = [], defaultdict(list)
    for tensor, here in values:
        indices = torch.arange(0, tensor.numel(), every(tensor), device=here.device)
        if not is_dtensor(tensor):
            found.append(here[indices])
            continue
        sample = torch.zeros(len(indices), dtype=here.dtype, device=here.device)
        for piece in pieces(tensor):
            start, row, stride = piece.region
            columns = (indices - start) % stride
            at = (indices - start) // stride * row + columns
            ours = (indices >= start) & (columns < row) & (at < piece.elements)
            sample[ours] = (here if piece.local is None else here[piece.local])[at[ours]]
        found.append(sample)
        shared[_sharding(tensor)].append(sample)
    for sharding, samples in shared.items():
        together = torch.cat(samples)
        _all_reduce(together, *sharding)  # an element is on one rank of the sharded dimensions, and 0 on the others
        for sample, summed in zip(samples, torch.split(together, [len(s) for s in samples]), strict=True):
            sample.copy_(summed)
    return found


def _sharding(tensor: torch.Tensor) -> tuple[Any, tuple[int, ...]]:
    """The mesh of a DTensor, and the dimensions of it that shard; along the others there are replicas."""
    sharded = tuple(dim for dim, p in enumerate(tensor.placements) if not p.is_replicate())  # type: ignore[attr-defined]
    return tensor.device_mesh, sharded  # type: ignore[attr-defined]


def _all_reduce(tensor: torch.Tensor, mesh: Any, dims: Iterable[int], **options: Any) -> None:
    for dim in dims:
        torch.distributed.all_reduce(tensor, group=mesh.get_group(dim), **options)


def all_ranks_agree(here: bool, tensors: Iterable[torch.Tensor]) -> bool:
    """Whether something holds on every rank that DTensors among these are spread over; a collective if any is."""
    meshes: dict[Any, None] = dict.fromkeys(t.device_mesh for t in tensors if is_dtensor(t))  # type: ignore[attr-defined]
    for mesh in meshes:
        failed = torch.tensor(0.0 if here else 1.0, device=mesh.device_type)
        _all_reduce(failed, mesh, range(mesh.ndim), op=torch.distributed.ReduceOp.MAX)
        here = not failed.item()
    return here


def pieces(tensor: torch.Tensor) -> list[Piece]:
    """What this rank holds of a tensor, in local order: one piece, unless it is cut along several dimensions."""
    if not is_dtensor(tensor):
        return [Piece(None, WHOLE, tensor.numel())] if tensor.numel() else []
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)  # type: ignore[attr-defined]
    return _box(tuple(tensor.shape), tuple(shape), tuple(offset))


def _box(whole: tuple[int, ...], part: tuple[int, ...], offset: tuple[int, ...]) -> list[Piece]:
    """The box of shape `part` at `offset` in a row-major tensor of shape `whole`, in as few pieces as there are."""
    if math.prod(part) == 0:
        return []
    strides = [math.prod(whole[d + 1 :]) for d in range(len(whole))]
    starts = [sum(o * s for o, s in zip(offset, strides, strict=True))]
    # A row: the last dimension that is cut, and those after it. Without one, or if it is the first, all is one row.
    last = max((d for d in range(len(whole)) if part[d] != whole[d]), default=0)
    # Rows: of the dimensions before it as many as are whole, and one that is cut; one index of the others is one piece.
    first = max((d for d in range(last) if part[d] != whole[d]), default=0)
    rows = (math.prod(part[last:]), strides[last - 1]) if last else ()
    count = math.prod(part[first:])
    for dim in range(first):
        starts = [begin + i * strides[dim] for begin in starts for i in range(part[dim])]
    return [Piece(slice(i * count, (i + 1) * count), Region(begin, *rows), count) for i, begin in enumerate(starts)]
