"""Safetensors files that all ranks write and read together: each its own shards, so that no rank holds the whole.

They are the files that one process would write, so a checkpoint can be read with any number of ranks, and by any other
tool. PyTorch's distributed checkpoints would write everything twice (shards, then a copy that one rank puts together),
and have no place for the metadata of a posterior.
"""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import safe_open

from threepo.errors import UserError
from threepo.files import disk_errors
from threepo.posterior.layout import box, is_dtensor, is_replica, local, pieces
from threepo.ranks.group import Ranks

_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64", torch.int64: "I64"}


def save_sharded(
    path: Path, tensors: Mapping[str, torch.Tensor], ranks: Ranks, metadata: Mapping[str, str] | None = None
) -> None:
    """Write a new safetensors file. All ranks call, with tensors of the same names, and see the same folder."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    begins, end = {}, 0
    for name, tensor in tensors.items():
        begins[name], end = end, end + tensor.numel() * tensor.dtype.itemsize
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begins[name], end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    with ranks.together(), disk_errors(path):
        if ranks.first:
            with open(path, "wb") as file:
                file.write(len(text).to_bytes(8, "little") + text)
                file.truncate(start + end)
    with ranks.together(), disk_errors(path), open(path, "r+b") as file:
        for name, tensor in tensors.items():
            if is_replica(tensor) if is_dtensor(tensor) else not ranks.first:
                continue
            flat = local(tensor.detach()).cpu().contiguous().view(-1)
            for part, region, elements in pieces(tensor):
                here = flat if part is None else flat[part]
                for i in range(0, elements, region.row):
                    at = region.start + i // region.row * region.stride
                    file.seek(start + begins[name] + at * tensor.dtype.itemsize)
                    file.write(here[i : i + region.row].view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())


@torch.no_grad()
def load_sharded(paths: Iterable[Path], tensors: Mapping[str, torch.Tensor]) -> None:
    """Fill tensors, each rank its own shards, from the safetensors files that hold them; `UserError` if one is missing.

    Values are converted to the dtype of the tensor that they fill. Needs no other rank.
    """
    missing = dict(tensors)
    for path in paths:
        with safe_open(path, framework="pt") as file:
            for name in missing.keys() & set(file.keys()):
                tensor = missing.pop(name)
                found = file.get_slice(name)
                if tuple(found.get_shape()) != tuple(tensor.shape):
                    raise UserError(
                        f"{path}: {name} has shape {found.get_shape()}, not {list(tensor.shape)}; it belongs to "
                        f"another model"
                    )
                local(tensor).copy_(found[box(tensor)] if tensor.ndim else file.get_tensor(name))
    if missing:
        raise UserError(f"{', '.join(map(str, paths))}: no tensor {min(missing)}; it belongs to another model")
