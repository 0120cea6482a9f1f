"""The compiled attention of one new token per row (decode_attention.c), in as many threads as torch uses.

Optional, as all compiled parts: without it `serves` is False, and cache.py does the same in torch, some times slower.
"""

import ctypes
from pathlib import Path

import torch

from threepo.compiled import in_threads, load_library

LANES = 16
"""Tokens whose keys lie side by side in memory."""
_VERSION = 1
_DTYPES = (torch.float32, torch.bfloat16)
_MOST_WIDTH = 256
_SERIAL = 1 << 18
"""Cached elements below which a second thread costs more than it brings."""


class _Shape(ctypes.Structure):
    _fields_ = (
        *(
            (name, ctypes.c_int64)
            for name in ("draws", "width", "heads", "key_heads", "key_width", "value_width", "capacity", "window")
        ),
        ("scale", ctypes.c_float),
        ("bfloat16", ctypes.c_int32),
    )


_library = load_library(Path(__file__).with_name("_decode_attention.so"), "threepo_decode_attention_version", _VERSION)
if _library is not None:
    _library.threepo_decode_attention.argtypes = (
        *(ctypes.c_int64, ctypes.c_int64),
        *(ctypes.c_void_p,) * 7,
        ctypes.POINTER(_Shape),
    )


def serves(k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether the library can attend to keys and values like these [B, K, L, D]."""
    return (
        _library is not None
        and k.device.type == "cpu"
        and k.dtype in _DTYPES
        and v.dtype == k.dtype
        and all(x.shape[-1] % LANES == 0 and x.shape[-1] <= _MOST_WIDTH for x in (k, v))
    )


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    window: int,
) -> torch.Tensor:
    """Put new keys and values [B, K, 1, D] into the cache, and attend to it with queries [B, H, 1, D].

    Args:
        q, k, v: of one token a row; rows are ordered by draw, then slot.
        keys: [S, N, K, T / 16, D, 16], values: [S, N, K, T, D].
        lengths: [N, W] int64, tokens of each row in the cache before this one.
        scale: factor of the scores.
        window: keys that a token sees, its own included; 0: all.

    Returns [B, 1, H, D].
    """
    assert _library is not None
    library = _library
    q, k, v, lengths = q.contiguous(), k.contiguous(), v.contiguous(), lengths.contiguous()
    batch, heads = q.shape[:2]
    out = q.new_empty(batch, 1, heads, v.shape[-1])
    shape = _Shape(
        draws=lengths.shape[0],
        width=lengths.shape[1],
        heads=heads,
        key_heads=k.shape[1],
        key_width=k.shape[-1],
        value_width=v.shape[-1],
        capacity=values.shape[3],
        window=window,
        scale=scale,
        bfloat16=q.dtype == torch.bfloat16,
    )
    addresses = [x.data_ptr() for x in (q, k, v, keys, values, lengths, out)]

    def work(first: int, count: int) -> int:
        failed: int = library.threepo_decode_attention(first, count, *addresses, shape)
        return failed

    elements = int(lengths.sum()) * k.shape[1] * k.shape[-1]
    if in_threads(batch, 1, work, serial=elements < _SERIAL):
        raise MemoryError("no memory for the scores of attention")
    return out
