"""Compiled attention of one new token per row (decode_attention.c), in torch's own threads.

Optional, like all compiled kernels: where `serves` is False, cache.py does the same in torch, more slowly.
"""

import ctypes
from pathlib import Path

import torch

from threepo.compiled import SERIAL, Library, fields

LANES = 16
"""Tokens whose keys lie side by side in memory."""
LIBRARY = Library(Path(__file__).with_name("_decode_attention.so"), version=2, slower="rollouts take 1.4 times as long")
_DTYPES = (torch.float32, torch.bfloat16)
_MOST_WIDTH = 256


class _Attention(ctypes.Structure):
    _fields_ = fields(
        int64="rows heads key_heads key_width value_width capacity window",
        void_p="query key value key_cache value_cache out lengths slots",
    ) + fields(int64="next", float="scale", int32="bfloat16 failed")


def serves(k: torch.Tensor, v: torch.Tensor) -> bool:
    """True if the library handles keys and values [B, K, L, D] of this device, dtype and width."""
    return (
        k.device.type == "cpu"
        and k.dtype in _DTYPES
        and v.dtype == k.dtype
        and all(x.shape[-1] % LANES == 0 and x.shape[-1] <= _MOST_WIDTH for x in (k, v))
        and LIBRARY.loaded is not None
    )


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    keys: torch.Tensor,
    values: torch.Tensor,
    lengths: torch.Tensor,
    slots: torch.Tensor,
    scale: float,
    window: int,
) -> torch.Tensor:
    """Write new keys and values [B, K, 1, D] into the cache, and return attention over it [B, 1, H, D].

    `q` are queries [B, H, 1, D]; `keys` [S, K, T / 16, D, 16] and `values` [S, K, T, D] are the cache. `lengths` (int64
    [B]) counts each row's tokens in the cache before this one, `slots` (int64 [B]) says where they are. `window`: keys
    that a token sees, its own included (0: all).
    """
    q, k, v, lengths, slots = (x.contiguous() for x in (q, k, v, lengths, slots))
    batch, heads = q.shape[:2]
    out = q.new_empty(batch, 1, heads, v.shape[-1])
    sizes = (batch, heads, k.shape[1], k.shape[-1], v.shape[-1], values.shape[-2], window)
    pointers = (x.data_ptr() for x in (q, k, v, keys, values, out, lengths, slots))
    work = _Attention(*sizes, *pointers, scale=scale, bfloat16=q.dtype == torch.bfloat16)
    elements = int(lengths.sum()) * k.shape[1] * k.shape[-1]
    LIBRARY.call("threepo_decode_attention_work", work, torch.get_num_threads() if elements > SERIAL else 1)
    if work.failed:
        raise MemoryError("no memory for the scores of attention")
    return out
