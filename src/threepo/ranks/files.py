"""Safetensors files that all ranks write together, each its own shards, so that no rank holds a whole model.

A file does not depend on the number of ranks, so any number of them, and any other tool, can read a checkpoint.
PyTorch's distributed checkpoints would write everything twice (shards, then one rank's copy of the whole), and have no
place for the metadata of a posterior.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType

import torch
from torch.distributed.tensor import DTensor

from threepo.errors import UserError
from threepo.files import atomic_folder, disk_errors
from threepo.models.parts import Parts
from threepo.posterior.shards import held_parts, local
from threepo.ranks.world import World

PAGE = 4096
"""Bytes that a file system may write together."""
_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64", torch.int64: "I64"}


@contextmanager
def shared_folder(path: Path, world: World) -> Iterator[Path]:
    """A folder that all ranks write into and that gets its name once all are done (`files.atomic_folder`)."""
    with ExitStack() as stack:
        folder = world.on_first(lambda: stack.enter_context(atomic_folder(path)))
        with world.together():
            if not folder.is_dir():
                raise UserError(f"run.folder: rank {world.rank} does not see {folder}; all ranks must share its disk")
        yield folder
        with world.together():
            pass  # all have written
        world.on_first(stack.close)  # gives it its name


def save_tensors(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    world: World,
    metadata: Mapping[str, str] | None = None,
    own: Mapping[str, torch.Tensor] | None = None,
    parts: Parts = MappingProxyType({}),
) -> None:
    """Write a new safetensors file. All ranks call, with tensors of the same names, and see the same folder.

    `own`: what to write instead of the elements of each tensor that this rank holds: flat, perhaps in another dtype.
    `parts`: the tensors that the file has in place of one of these.
    """
    dtypes = {name: tensor.dtype for name, tensor in (own or tensors).items()}
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    begins, end = {}, 0
    for name, tensor in tensors.items():
        begins[name] = end
        for part, shape in parts.get(name, [(name, tensor.shape)]):
            begin, end = end, end + math.prod(shape) * dtypes[name].itemsize
            header[part] = {"dtype": _NAMES[dtypes[name]], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % PAGE)  # no rank writes into the page of another one's header
    start = 8 + len(text)

    def write_header() -> None:
        with disk_errors(path), open(path, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(start + end)

    world.on_first(write_header)
    # For writing only: NFS may extend a write to its whole page if it can read the file, and undo what others wrote.
    with world.together(), disk_errors(path), os.fdopen(os.open(path, os.O_WRONLY), "wb") as file:
        for name, tensor in tensors.items():
            if another_writes(tensor, world):
                continue
            flat = own[name] if own else local(tensor.detach()).cpu().contiguous().view(-1)
            for region, held in held_parts(tensor, flat):
                for i in range(0, len(held), region.row):
                    at = region.start + i // region.row * region.stride
                    file.seek(start + begins[name] + at * dtypes[name].itemsize)
                    file.write(held[i : i + region.row].view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())


def another_writes(tensor: torch.Tensor, world: World) -> bool:
    """True if a rank before this one holds the same elements."""
    if not isinstance(tensor, DTensor):
        return world.rank > 0
    coordinates = tensor.device_mesh.get_coordinate() or ()
    return any(p.is_replicate() and at for p, at in zip(tensor.placements, coordinates, strict=True))
