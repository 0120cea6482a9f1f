"""Compiled products of rows with the weights of several policies (stacked_linear.c), in torch's own threads.

Optional, like all compiled kernels: where `serves` is False, ensemble.py uses torch's batched products.

Legend: N draws, R rows in all, P panels of 16 outputs.
"""

import ctypes
from functools import cache
from pathlib import Path

import torch

from threepo.compiled import Library, fields

LANES = 16
"""Outputs in a panel, and 32-bit words that are read together."""
_SLOWER = "rollouts of several draws take 1.2 to 1.5 times as long"
LIBRARY = Library(Path(__file__).with_name("_stacked_linear.so"), version=2, slower=_SLOWER)
_WORD = 4
_SERIAL = 1 << 18
"""Multiplications below which a second thread does not pay."""


class _Product(ctypes.Structure):
    _fields_ = fields(int64="draws inputs outputs", void_p="starts x weights bias y") + fields(
        int64="next", int32="bfloat16 level threads failed"
    )


class _Packing(ctypes.Structure):
    _fields_ = fields(void_p="weights", int64="words panels next", int32="failed")


@cache
def level(dtype: torch.dtype) -> int:
    """Level of processor instructions that the library uses; 0: torch is faster, or the library is missing."""
    if LIBRARY.loaded is None or dtype not in (torch.float32, torch.bfloat16):
        return 0
    return int(LIBRARY.loaded.threepo_stacked_linear_level(dtype == torch.bfloat16))


def serves(inputs: int, dtype: torch.dtype, device: torch.device) -> bool:
    """True if the library multiplies weights with so many inputs, and is faster than torch on this processor."""
    whole = inputs > 0 and inputs * dtype.itemsize % (LANES * _WORD) == 0
    return device.type == "cpu" and whole and level(dtype) != 0


def padded(outputs: int) -> int:
    """So many outputs, rounded up to whole panels: what packed weights have memory for."""
    return -(-outputs // LANES) * LANES


def panels(weights: torch.Tensor) -> torch.Tensor:
    """A view of packed weights [..., P * 16, in]: words [..., P, words of a row, 16] (int32)."""
    words = weights.view(torch.int32)
    return words.view(*words.shape[:-2], -1, words.shape[-1], LANES)


def pack(weights: torch.Tensor) -> None:
    """Reorder contiguous weights [P * 16, in] of one draw in place, as `product` reads them."""
    assert weights.is_contiguous(), weights.stride()
    found = panels(weights)
    work = _Packing(weights=found.data_ptr(), words=found.shape[1], panels=len(found))
    LIBRARY.call("threepo_stacked_linear_pack", work, torch.get_num_threads())
    if work.failed:
        raise MemoryError(f"no memory to pack weights of {weights.shape[1]} inputs")


def product(
    x: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None, outputs: int, starts: torch.Tensor
) -> torch.Tensor:
    """Rows [R, in] times the packed weights [N, P * 16, in] of their draws, plus a bias [N, outputs]: [R, outputs].

    Draw n has the rows `starts[n]` to `starts[n + 1]` (int64 [N + 1]). Sums are float32, in the order of the inputs; a
    row's result does not depend on the other rows, to the last bit.
    """
    assert level(x.dtype), f"no compiled products of {x.dtype} here"
    assert all(other is None or other.dtype == x.dtype for other in (weights, bias)), "rows and weights of two dtypes"
    assert (x.shape[1], len(starts) - 1) == (weights.shape[2], len(weights)), (x.shape, weights.shape, starts.shape)
    x = x.contiguous()
    y = x.new_empty(len(x), outputs)
    threads = torch.get_num_threads() if x.numel() * outputs > _SERIAL else 1
    pointers = (None if tensor is None else tensor.data_ptr() for tensor in (starts, x, weights, bias, y))
    settings = {"bfloat16": x.dtype == torch.bfloat16, "level": level(x.dtype), "threads": threads}
    work = _Product(len(weights), x.shape[1], outputs, *pointers, **settings)
    LIBRARY.call("threepo_stacked_linear_work", work, threads)
    if work.failed:
        raise MemoryError(f"no memory to gather rows of {x.shape[1]} inputs")
    return y
