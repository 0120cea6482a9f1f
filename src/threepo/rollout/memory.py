"""Memory of rollout engines: how much they need, how much is free, and tensors that processes share."""

import math
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from threepo.errors import UserError
from threepo.workers import control_groups, processes_here

GIB = 1 << 30
Layout = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of every tensor, in the order in which they lie."""
_ALIGN = 64
"""Every tensor begins at a multiple of so many bytes."""


def bytes_per_token(config: Any, dtype: torch.dtype) -> int:
    """Bytes of one token's keys and values in all layers of a Hugging Face decoder."""
    text = config.get_text_config()
    layers = text.num_hidden_layers - layers_without_keys(text)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return int(2 * layers * heads * width * dtype.itemsize)


def layers_without_keys(text: Any) -> int:
    """Number of a decoder's layers that keep no keys and values of each token; most keep a state of the whole text."""
    if not hasattr(text, "num_attention_heads"):
        return int(text.num_hidden_layers)
    others = ("linear", "mamba", "conv", "recurrent", "mlp", "moe")
    return sum(any(other in kind for other in others) for kind in getattr(text, "layer_types", None) or ())


def sampling_bytes(vocabulary: int) -> int:
    """Peak memory to sample a row's next token: its logits and up to eight float32 arrays of their size."""
    return 9 * 4 * vocabulary


def available_bytes(device: torch.device) -> int:
    """Free memory of a device, less a tenth for activations; on a CPU within the limits of the control group (v2).

    On a GPU this includes the memory of freed tensors that torch's allocator keeps for new ones. Only Linux says how
    much memory is free; elsewhere half of all memory counts as free.
    """
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int((torch.cuda.mem_get_info(device)[0] + kept) * 0.9)
    if sys.platform != "linux":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    free = _numbers(Path("/proc/meminfo"))["MemAvailable:"] * 1024
    for group in control_groups():
        limit = group / "memory.max"
        if limit.is_file() and (most := limit.read_text().strip()) != "max":
            used = int((group / "memory.current").read_text())
            dropped = _numbers(group / "memory.stat")["inactive_file"]  # files, when memory is short
            free = min(free, max(int(most) - used + dropped, 0))
    return int(free * 0.9)


def own_bytes(device: torch.device) -> int:
    """This process's part of `available_bytes`: the ranks of a machine share its memory, and each has its own GPU."""
    return available_bytes(device) // (1 if device.type == "cuda" else processes_here())


def _numbers(file: Path) -> dict[str, int]:
    """The numbers in a file of lines such as `MemFree: 123 kB`, by the first word."""
    return {words[0]: int(words[1]) for line in file.read_text().splitlines() if (words := line.split())}


def layout_of(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Layout:
    """The layout of copies of these tensors, with floating-point numbers in `dtype`."""
    return {name: (tuple(t.shape), dtype if t.is_floating_point() else t.dtype) for name, t in tensors.items()}


class SharedTensors:
    """Tensors by name in shared memory: new memory, or the memory at the `path` of another process's tensors.

    It is an anonymous file (memfd), which needs no room in /dev/shm and vanishes with a killed process.
    """

    _registered = False

    def __init__(self, layout: Layout, path: str = "") -> None:
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in layout.values()]
        *begins, total = accumulate((-(-size // _ALIGN) * _ALIGN for size in sizes), initial=0)
        self.size = total
        """Bytes of all tensors together."""
        if not path:
            # Checked first, because the kernel would not refuse this memory but kill a process later.
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
        self._memory = torch.from_file(path, shared=True, size=total, dtype=torch.uint8)
        self.tensors: dict[str, torch.Tensor] = {
            name: self._memory[begin : begin + size].view(dtype).view(shape)
            for (name, (shape, dtype)), begin, size in zip(layout.items(), begins, sizes, strict=True)
        }

    def register(self) -> None:
        """Register the memory with CUDA in a process that uses it: a GPU then copies without a buffer in between.

        Keep the tensors until `close`, or until the process ends. Where it fails, a line says so, and copies are
        slower. Not yet run on a GPU.
        """
        cuda: Any = torch.cuda
        if not cuda.is_initialized():
            return
        status = int(cuda.cudart().cudaHostRegister(self._memory.data_ptr(), self.size, 0))
        self._registered = status == 0
        if status:
            print(f"threepo: CUDA did not register shared memory (error {status}); pushes are slower", file=sys.stderr)
            with suppress(RuntimeError):  # the next kernel would raise this error
                torch.ones(1, device="cuda")

    def close(self) -> None:
        """Free memory that was made here; the system keeps it until the other process has ended too."""
        if self._registered:
            torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())  # type: ignore[no-untyped-call]
        self.tensors, self._memory = {}, torch.empty(0)
        os.close(self._descriptor)
