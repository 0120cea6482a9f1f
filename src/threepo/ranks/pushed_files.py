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
from threepo.posterior.shards import held_parts, local
from threepo.ranks.files import another_writes, save_tensors
from threepo.ranks.world import World

_NAME = "threepo-push-{}.safetensors"
"""Name of the files that are deleted; nothing else in the folder is touched."""
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_PLACE = 4
"""Bytes of an element's place. Tensors have fewer than 2^31 elements."""
Changes = dict[str, tuple[torch.Tensor, torch.Tensor]]
"""Places in the flat whole tensor, and new values, of a rank's elements."""


class PushedFiles:
    """The pushes of one run, of which every `full_every`-th is full, in a folder that it locks."""

    def __init__(self, folder: Path, full_every: int, world: World) -> None:
        self._folder, self._full_every, self._world = folder, full_every, world
        self._known: dict[str, torch.Tensor] = {}
        """This rank's elements of every tensor, flat, as servers have them."""
        self.full = folder
        """The last full push."""
        self.changes: list[Sequence[Path]] = []
        """The files of every push of changes since."""
        folder_lock = world.only_first(lambda: _lock_folder(folder), others=None)
        self.close = weakref.finalize(self, _close, folder, folder_lock)

    @property
    def version(self) -> str:
        """A name for the last push, which no other has."""
        return (self.changes[-1][0] if self.changes else self.full).stem

    def push(self, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> int:
        """Write what servers do not know. All ranks call; returns the bytes that they have written together."""
        whole = sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors.values())
        size = self._push_changes(tensors, metadata, whole) if self._goes_on(tensors) else None
        if size is None:
            self._push_all(tensors, metadata)
        if self._full_every > 1:
            self._known = {name: _own(tensor) for name, tensor in tensors.items()}
        return whole if size is None else size

    def _goes_on(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """True if servers know all of these tensors, and no full push is due."""
        return tensors.keys() == self._known.keys() and len(self.changes) + 1 < self._full_every

    def _push_all(self, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
        self._world.on_first(lambda: _remove_weights(self._folder))
        self.full, self.changes = self._folder / _NAME.format(self._new_name()), []
        save_tensors(self.full, tensors, self._world, metadata)

    def _push_changes(self, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str], whole: int) -> int | None:
        """Bytes of the changes; None, and nothing written, if a full push of `whole` bytes is smaller."""
        found: Changes = {}
        for name, tensor in tensors.items():
            if not another_writes(tensor, self._world):
                places, values = _changes(tensor, self._known[name])
                if len(places):
                    found[name] = places, values
        own = sum(len(places) * (_PLACE + values.dtype.itemsize) for places, values in found.values())
        if (size := sum(self._world.gather(own))) > whole:
            return None
        path = self._folder / _NAME.format(f"{self._new_name()}-{self._world.rank}")
        with self._world.together(), disk_errors(path):
            contents = {f"at {name}": places for name, (places, _) in found.items()}
            contents |= {f"to {name}": values for name, (_, values) in found.items()}
            save_file(contents, path, dict(metadata) if self._world.rank == 0 else None)
        self.changes.append(self._world.gather(path))
        return size

    def _new_name(self) -> str:
        return self._world.on_first(lambda: uuid.uuid4().hex)


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's elements, flat and on the CPU."""
    return local(tensor).cpu().contiguous().view(-1)


def _changes(tensor: torch.Tensor, known: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Places and values of this rank's elements whose bits differ from those in `known`."""
    own = _own(tensor)
    bits = _BITS[own.dtype.itemsize]
    differing = own.view(bits) != known.view(bits)
    places = [torch.empty(0, dtype=torch.int64)]
    for (start, row, stride), part in held_parts(tensor, differing):
        at = part.nonzero().view(-1)
        places.append(start + at // row * stride + at % row)
    return torch.cat(places).int(), own[differing]


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
