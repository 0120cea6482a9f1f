"""Named tensors in memory that two processes see: how the trainer hands weights to an engine's processes.

The memory is an anonymous file (memfd), so it needs no room in /dev/shm, and nothing is left behind by a process that
is killed.
"""

import math
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from threepo.errors import UserError
from threepo.rollout.memory import available_bytes

_ALIGN = 64
"""Bytes; every tensor begins at a multiple."""


@dataclass(frozen=True)
class Layout:
    """What stands where: the same for every set of weights of one model."""

    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, torch.dtype]

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> "Layout":
        """The layout of these tensors with floating point numbers in `dtype`."""
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        return cls(shapes, {name: dtype if t.is_floating_point() else t.dtype for name, t in tensors.items()})

    def places(self) -> dict[str, tuple[int, int]]:
        """Name: first byte and number of bytes."""
        places, begin = {}, 0
        for name, shape in self.shapes.items():
            size = math.prod(shape) * self.dtypes[name].itemsize
            places[name] = (begin, size)
            begin += -(-size // _ALIGN) * _ALIGN
        return places


class SharedTensors:
    """Tensors by name over shared memory: new memory, or that of a file descriptor another process has sent."""

    def __init__(self, layout: Layout, descriptor: int | None = None) -> None:
        places = layout.places()
        size = max(sum(place) for place in places.values())
        if descriptor is None:
            # Asked before: the kernel would rather end some process than refuse this memory.
            available = available_bytes(torch.device("cpu"))
            if size > available:
                raise UserError(
                    f"engine.kind = 'vllm': no memory for a copy of the weights: {size / 1e9:.1f} GB, and "
                    f"{available / 1e9:.1f} GB are left; every draw of a step takes one (method.draws, eval.draws)"
                )
            descriptor = os.memfd_create("threepo-weights")
            os.posix_fallocate(descriptor, 0, size)  # now, and not by a bus error when it is written
        self.descriptor = descriptor
        self.layout = layout
        memory = torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)
        self.tensors: dict[str, torch.Tensor] = {
            name: memory[begin : begin + count].view(layout.dtypes[name]).view(layout.shapes[name])
            for name, (begin, count) in places.items()
        }

    def close(self) -> None:
        """Give the memory back, as soon as the other process has too."""
        self.tensors = {}
        os.close(self.descriptor)
