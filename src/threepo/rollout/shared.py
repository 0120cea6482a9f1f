"""Named tensors in memory that two processes see: the trainer hands weights to an engine's processes this way.

The memory is an anonymous file (memfd): it needs no room in /dev/shm, and nothing is left behind by a killed process.
"""

import math
import os
from collections.abc import Mapping
from itertools import accumulate

import torch

from threepo.errors import UserError
from threepo.rollout.memory import available_bytes

Layout = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of every tensor, in the order in which they lie."""
_ALIGN = 64
"""Every tensor begins at a multiple of so many bytes."""


def layout_of(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Layout:
    """The layout of copies of these tensors, with floating-point numbers in `dtype`."""
    return {name: (tuple(t.shape), dtype if t.is_floating_point() else t.dtype) for name, t in tensors.items()}


class SharedTensors:
    """Tensors by name in shared memory: new memory, or the memory at the `path` of another process's tensors."""

    def __init__(self, layout: Layout, path: str = "") -> None:
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in layout.values()]
        *begins, total = accumulate((-(-size // _ALIGN) * _ALIGN for size in sizes), initial=0)
        if not path:
            # Checked first: instead of refusing this memory, the kernel would kill a process later.
            available = available_bytes(torch.device("cpu"))
            if total > available:
                raise UserError(
                    f"engine.kind = 'vllm': no memory for a copy of the weights: {total / 1e9:.1f} GB, and "
                    f"{available / 1e9:.1f} GB are left; every draw of a step takes one (method.draws, eval.draws)"
                )
            self._descriptor = os.memfd_create("threepo-weights")
            os.posix_fallocate(self._descriptor, 0, total)  # fails now, and not by a bus error at a later write
            path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        self.path = path
        memory = torch.from_file(path, shared=True, size=total, dtype=torch.uint8)
        self.tensors: dict[str, torch.Tensor] = {
            name: memory[begin : begin + size].view(dtype).view(shape)
            for (name, (shape, dtype)), begin, size in zip(layout.items(), begins, sizes, strict=True)
        }

    def close(self) -> None:
        """Free memory that was made here, as soon as the other process has ended too."""
        self.tensors = {}
        os.close(self._descriptor)
