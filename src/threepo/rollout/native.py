"""The compiled attention of one new token per row (decode_attention.c), in as many threads as torch uses.

Optional, as all compiled parts: without it `serves` is False, and cache.py does the same in torch, some times slower.
"""

import ctypes
from pathlib import Path

import torch

from threepo.compiled import load_library, together

LANES = 16
"""Tokens whose keys lie side by side in memory."""
_VERSION = 2
_DTYPES = (torch.float32, torch.bfloat16)
_MOST_WIDTH = 256
_SERIAL = 1 << 16
"""Cached elements below which a second thread costs more than it brings."""


class _Attention(ctypes.Structure):
    _fields_ = (
        *(
            (name, ctypes.c_int64)
            for name in ("rows", "heads", "key_heads", "key_width", "value_width", "capacity", "window")
        ),
        *(
            (name, ctypes.c_void_p)
            for name in ("query", "key", "value", "key_cache", "value_cache", "out", "lengths", "places")
        ),
        ("next", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("bfloat16", ctypes.c_int32),
        ("failed", ctypes.c_int32),
    )


_library = load_library(Path(__file__).with_name("_decode_attention.so"), "threepo_decode_attention_version", _VERSION)
if _library is not None:
    _library.threepo_decode_attention_work.argtypes = (ctypes.c_void_p,)
    _library.threepo_decode_attention_work.restype = None


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
    places: torch.Tensor,
    scale: float,
    window: int,
) -> torch.Tensor:
    """Put new keys and values [B, K, 1, D] into the cache, and attend to it with queries [B, H, 1, D].

    Args:
        q, k, v: of one token a row.
        keys: [places, K, T / 16, D, 16], values: [places, K, T, D].
        lengths: [B] int64, tokens of each row in the cache before this one.
        places: [B] int64, which memory of the cache is its own.
        scale: factor of the scores.
        window: keys that a token sees, its own included; 0: all.

    Returns [B, 1, H, D].
    """
    assert _library is not None
    q, k, v, lengths, places = q.contiguous(), k.contiguous(), v.contiguous(), lengths.contiguous(), places.contiguous()
    batch, heads = q.shape[:2]
    out = q.new_empty(batch, 1, heads, v.shape[-1])
    job = _Attention(
        rows=batch,
        heads=heads,
        key_heads=k.shape[1],
        key_width=k.shape[-1],
        value_width=v.shape[-1],
        capacity=values.shape[-2],
        window=window,
        query=q.data_ptr(),
        key=k.data_ptr(),
        value=v.data_ptr(),
        key_cache=keys.data_ptr(),
        value_cache=values.data_ptr(),
        out=out.data_ptr(),
        lengths=lengths.data_ptr(),
        places=places.data_ptr(),
        scale=scale,
        bfloat16=q.dtype == torch.bfloat16,
    )
    elements = int(lengths.sum()) * k.shape[1] * k.shape[-1]
    together(_library.threepo_decode_attention_work, job, torch.get_num_threads() if elements > _SERIAL else 1)
    if job.failed:
        raise MemoryError("no memory for the scores of attention")
    return out
