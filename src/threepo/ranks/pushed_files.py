"""The files by which ranks tell inference servers of the weights (posterior/draw_file.py), all in one folder.

All ranks write a full push together, each its own shards, into one file. Of a push of changes each writes a file of its
own, since only it knows how many of its elements have changed. No name comes twice: a disk of several nodes may
remember what a name stood for. Files are deleted when a full push replaces them: by then, servers have read them all.
"""

import uuid
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import torch
from safetensors.torch import save_file

from threepo.files import disk_errors, lock
from threepo.posterior.draw_file import Round
from threepo.posterior.policy_optimizer import Weights
from threepo.posterior.shards import held_parts, local
from threepo.ranks.files import another_writes, save_tensors
from threepo.ranks.world import World

_NAME = "threepo-push-{}.safetensors"
"""Name of the files that are deleted; nothing else in the folder is touched."""
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class PushedFiles:
    """The pushes of one run, of which every `full_every`-th is full at least, in a folder that it locks.

    A push is also full if changes would take more room than it, together with those since the last full push.
    """

    def __init__(self, folder: Path, full_every: int, world: World) -> None:
        self._folder, self._full_every, self._world = folder, full_every, world
        self._known: dict[str, torch.Tensor] = {}
        """Elements of every tensor, flat, as servers have them: those that this rank writes."""
        self.full = folder
        """The last full push."""
        self.changes: list[Sequence[Path]] = []
        """The files of every push of changes since."""
        self._since = 0
        """Their bytes."""
        folder_lock = world.only_first(lambda: _lock_folder(folder), others=None)
        self.close = weakref.finalize(self, _close, folder, folder_lock)

    @property
    def rounded(self) -> bool:
        """True if tensors are rounded, since some pushes have changes alone."""
        return self._full_every > 1

    @property
    def version(self) -> str:
        """A name for the last push, which no other has."""
        return (self.changes[-1][0] if self.changes else self.full).stem

    def push(self, tensors: Weights, metadata: Mapping[str, str], roundings: Mapping[str, Round]) -> int:
        """Write what servers do not know. All ranks call; returns the bytes that they have written together.

        Unless all pushes are full, tensors are rounded by their `roundings`.
        """
        if not self.rounded:
            self._push_all(tensors, metadata)
            return sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors.values())
        own = {name: self._own(tensor, roundings.get(name)) for name, tensor in tensors.items()}
        whole = sum(tensor.numel() * own[name].dtype.itemsize for name, tensor in tensors.items())
        size = None
        if own.keys() == self._known.keys() and len(self.changes) + 1 < self._full_every:
            size = self._push_changes(tensors, own, metadata, whole - self._since)
        if size is None:
            self._push_all(tensors, metadata, own)
            size = whole
        self._known = own
        return size

    def _own(self, tensor: torch.Tensor, rounding: Round | None) -> torch.Tensor:
        """The elements that this rank writes, on the CPU and not shared with the model; none if another rank does."""
        value = local(rounding(tensor).bfloat16() if rounding else tensor.detach()).to("cpu", copy=True)
        return value.contiguous().view(-1)[: 0 if another_writes(tensor, self._world) else None]

    def _push_all(self, tensors: Weights, metadata: Mapping[str, str], own: Weights | None = None) -> None:
        self._known = {}  # until all is written
        self._world.on_first(lambda: _remove_weights(self._folder))
        self.full, self.changes, self._since = self._folder / _NAME.format(self._new_name()), [], 0
        save_tensors(self.full, tensors, self._world, metadata, own)

    def _push_changes(self, tensors: Weights, own: Weights, metadata: Mapping[str, str], most: int) -> int | None:
        """Bytes of the changes; None, and nothing written, if they are over `most`."""
        contents: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            places, values = _changes(tensor, own[name], self._known[name])
            if len(places):
                contents |= {f"at {name}": places, f"to {name}": values}
        here = sum(tensor.numel() * tensor.dtype.itemsize for tensor in contents.values())
        size = sum(self._world.gather(here))
        if size > most:
            return None
        path = self._folder / _NAME.format(f"{self._new_name()}-{self._world.rank}")
        with self._world.together(), disk_errors(path):
            save_file(contents, path, dict(metadata) if self._world.rank == 0 else None)
        self.changes.append(self._world.gather(path))
        self._since += size
        return size

    def _new_name(self) -> str:
        return self._world.on_first(lambda: uuid.uuid4().hex)


def _changes(tensor: torch.Tensor, own: torch.Tensor, known: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Places in the flat whole tensor, and values, of this rank's elements whose bits differ from those in `known`."""
    bits = _BITS[own.dtype.itemsize]
    differing = own.view(bits) != known.view(bits)
    places = [torch.empty(0, dtype=torch.int64)]
    for (start, row, stride), part in held_parts(tensor, differing) if len(own) else ():
        at = part.nonzero().view(-1)
        places.append(start + at // row * stride + at % row)
    fits = tensor.numel() < 1 << 31
    return torch.cat(places).to(torch.int32 if fits else torch.int64), own[differing]


def _lock_folder(folder: Path) -> IO[bytes]:
    """Make and lock the folder, and delete the files of a run that was killed."""
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    folder_lock = lock(folder / "threepo-push.lock")
    _remove_weights(folder)
    return folder_lock


def _remove_weights(folder: Path) -> None:
    for path in folder.glob(_NAME.format("*")):
        path.unlink()


def _close(folder: Path, folder_lock: IO[bytes] | None) -> None:
    if folder_lock:
        _remove_weights(folder)
        folder_lock.close()
