"""The compiled products of rows with the weights of several policies (stacked_linear.c), in torch's own threads.

Optional, as all compiled parts: where `serves` is False, ensemble.py multiplies by torch's batched products.

Legend: N draws, R rows of all, P panels of 16 outputs.
"""

import ctypes
from functools import cache
from pathlib import Path

import torch

from threepo.compiled import Library

LANES = 16
"""Outputs in a panel, and words of 32 bits that are read at a time."""
LIBRARY = Library(
    Path(__file__).with_name("_stacked_linear.so"),
    version=2,
    slower="rollouts in bfloat16 take up to 1.5 times as long",
)
_WORD = 4
_SERIAL = 1 << 18
"""Multiplications below which a second thread costs more than it brings."""
_SERIAL_PACKING = 1 << 14
"""The same, in words to be packed."""


class _Product(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("draws", "inputs", "outputs")),
        *((name, ctypes.c_void_p) for name in ("starts", "x", "weights", "bias", "y")),
        ("next", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("bfloat16", "level", "threads", "failed")),
    )


class _Packing(ctypes.Structure):
    _fields_ = (
        ("weights", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("words", "panels", "next")),
        ("failed", ctypes.c_int32),
    )


@cache
def level(dtype: torch.dtype) -> int:
    """Which instructions of this processor the library multiplies with; 0: none, torch is the better choice."""
    if LIBRARY.loaded is None or dtype not in (torch.float32, torch.bfloat16):
        return 0
    return int(LIBRARY.loaded.threepo_stacked_linear_level(dtype == torch.bfloat16))


def serves(inputs: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the library multiplies weights with so many inputs, and is the better choice on this processor."""
    whole = inputs > 0 and inputs * dtype.itemsize % (LANES * _WORD) == 0
    return device.type == "cpu" and whole and level(dtype) != 0


def padded(outputs: int) -> int:
    """Outputs that packed weights have memory for: whole panels."""
    return -(-outputs // LANES) * LANES


def panels(weights: torch.Tensor) -> torch.Tensor:
    """Packed weights [..., P * 16, in] as what they are: words [..., P, words of a row, 16] (int32)."""
    words = weights.view(torch.int32)
    return words.view(*words.shape[:-2], -1, words.shape[-1], LANES)


def pack(weights: torch.Tensor) -> None:
    """Bring weights [P * 16, in] of one draw into the order that products read, where they are."""
    if not weights.is_contiguous():
        raise RuntimeError(f"weights are packed where they are, in one piece; these have strides {weights.stride()}")
    found = panels(weights)
    work = _Packing(weights=found.data_ptr(), words=found.shape[1], panels=len(found))
    threads = torch.get_num_threads() if found.numel() > _SERIAL_PACKING else 1
    LIBRARY.call("threepo_stacked_linear_pack", work, threads)
    if work.failed:
        raise MemoryError(f"no memory to pack weights of {weights.shape[1]} inputs")


def product(
    x: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None, outputs: int, starts: torch.Tensor
) -> torch.Tensor:
    """Rows [R, in] times the packed weights [N, P * 16, in] of their draws, plus a bias [N, outputs]: [R, outputs].

    Rows `starts[n]` to `starts[n + 1]` (int64 [N + 1]) are those of draw n. Sums are float32, in the order of the
    inputs; a row's result does not depend on what is beside it, to the last bit.
    """
    if not level(x.dtype):
        raise RuntimeError(f"no compiled products of {x.dtype} here; `serves` says so")
    for other in (weights, bias):
        if other is not None and other.dtype != x.dtype:
            raise RuntimeError(f"expected rows and weights of one dtype, got {x.dtype} and {other.dtype}")
    if x.shape[1] != weights.shape[2] or len(starts) != len(weights) + 1:
        raise RuntimeError(
            f"expected rows of {weights.shape[2]} inputs for {len(weights)} draws, got {x.shape[1]} for "
            f"{len(starts) - 1}"
        )
    x = x.contiguous()
    y = x.new_empty(len(x), outputs)
    threads = torch.get_num_threads() if x.numel() * outputs > _SERIAL else 1
    pointers = (None if tensor is None else tensor.data_ptr() for tensor in (starts, x, weights, bias, y))
    work = _Product(
        *(len(weights), x.shape[1], outputs),
        *pointers,
        bfloat16=x.dtype == torch.bfloat16,
        level=level(x.dtype),
        threads=threads,
    )
    LIBRARY.call("threepo_stacked_linear_work", work, threads)
    if work.failed:
        raise MemoryError(f"no memory to gather rows of {x.shape[1]} inputs")
    return y
