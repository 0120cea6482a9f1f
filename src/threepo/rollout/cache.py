"""The key-value cache of the rows in a batch, and attention over it.

Every row has a slot of memory and its own length, so rows of different lengths need no padding, and a waiting row can
take the slot of a finished one.

Legend: S slots, B rows, H heads, K heads of keys and values, D width of a head, T tokens, L positions of a prompt.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from threepo.errors import UserError
from threepo.models.attention import repeats_heads, window_mask
from threepo.rollout import decode_attention
from threepo.rollout.decode_attention import LANES


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    rows: "Prefill | Decode | None" = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention [B, L, H, D] as the models of transformers call it; the engine passes `rows` to the model."""
    assert rows is not None, "the model was not called by the engine"
    assert attention_mask is None, "there are no masks: rows have lengths"
    for name in ("softcap", "s_aux", "position_bias", "sinks"):
        if options.get(name) is not None:
            raise UserError(f"engine.kind = 'local': does not support attention with {name}; use engine.kind = 'vllm'")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    return rows.attend(module.layer_idx, query, key, value, scale, options.get("sliding_window") or 0), None


@dataclass
class _Layer:
    keys: Tensor
    """[S, K, T, D]; blocked: [S, K, T / 16, D, 16]."""
    values: Tensor
    """[S, K, T, D]."""
    blocked: bool
    """True if keys lie in the compiled kernel's order, 16 tokens side by side."""


def whole_blocks(tokens: int) -> int:
    """So many tokens, rounded up to whole blocks: what a slot has memory for."""
    return -(-tokens // LANES) * LANES


class RowCache:
    """The memory of S rows of at most `capacity` tokens."""

    def __init__(self, slots: int, capacity: int) -> None:
        self.slots = slots
        self.capacity = whole_blocks(capacity)
        self.layers: dict[int, _Layer] = {}

    def layer(self, index: int, k: Tensor, v: Tensor) -> _Layer:
        """The memory of a layer, allocated when its first keys [B, K, L, D] and values come."""
        if index not in self.layers:
            heads, width = k.shape[1], k.shape[-1]
            blocked = decode_attention.serves(k, v)
            tokens = (self.capacity // LANES, width, LANES) if blocked else (self.capacity, width)
            # Torch multiplies masked values by zero, so they must be numbers; the compiled kernel does not read them.
            make = Tensor.new_empty if blocked else Tensor.new_zeros
            keys, values = (self.slots, heads, *tokens), (self.slots, heads, self.capacity, v.shape[-1])
            self.layers[index] = _Layer(make(k, keys), make(v, values), blocked)
        return self.layers[index]

    def clear(self, slots: Tensor) -> None:
        """Prepare slots for new rows: a diverged policy may leave NaN, and NaN times zero is NaN."""
        for layer in self.layers.values():
            if not layer.blocked:
                layer.keys[slots] = 0
                layer.values[slots] = 0

    def move(self, sources: Tensor, targets: Tensor, tokens: int) -> None:
        """Copy the first `tokens` tokens of some rows from their slots to others."""
        for layer in self.layers.values():
            blocks = whole_blocks(tokens) // LANES if layer.blocked else tokens
            layer.keys[targets, :, :blocks] = layer.keys[sources, :, :blocks]
            layer.values[targets, :, :tokens] = layer.values[sources, :, :tokens]


@dataclass(frozen=True)
class Prefill:
    """A pass that reads each different prompt of a draw once, into the slots of all rows that start with it."""

    cache: RowCache
    sources: Tensor
    """The prompt of each starting row, by its position in the pass."""
    slots: Tensor
    """The slot of each starting row."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
        """Outputs [B, L, H, D] of queries [B, H, L, D] for keys and values [B, K, L, D] of padded prompts.

        Padding is on the right, where causal attention from a real token never looks. `window`: how many keys a token
        sees, its own included (0: all).
        """
        memory, length = self.cache.layer(layer, k, v), k.shape[2]
        memory.values[self.slots, :, :length] = v[self.sources]
        if memory.blocked:
            padded = F.pad(k, (0, 0, 0, whole_blocks(length) - length))
            blocks = padded.view(*k.shape[:2], -1, LANES, k.shape[-1]).transpose(-1, -2)
            memory.keys[self.slots, :, : blocks.shape[2]] = blocks[self.sources]
        else:
            memory.keys[self.slots, :, :length] = k[self.sources]
        mask = window_mask(q.shape[2], window, q.device)
        # With a mask, CUDA's fast kernels know no shared heads; torch would hold all scores in memory.
        if repeats_heads(q, k) or (q.is_cuda and mask is not None):
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out.transpose(1, 2)


@dataclass(frozen=True)
class Decode:
    """A pass that adds one token of every row to the cache, and attends to all tokens of the row."""

    cache: RowCache
    lengths: Tensor
    """[B] tokens of each row in the cache before this one."""
    slots: Tensor
    """[B] the slot of each row, a permutation of 0 to B - 1."""
    longest: int
    """The largest length."""
    _masks: dict[int, Tensor] = field(default_factory=dict)
    """Masks of `seen`, by window."""

    @cached_property
    def order(self) -> Tensor:
        """[B] the row in each slot."""
        return self.slots.argsort()

    def seen(self, window: int) -> Tensor:
        """[B, 1, 1, T], true where the row in a slot sees a token; the same in all layers with this window."""
        if window not in self._masks:
            distance = self.lengths[self.order].unsqueeze(1) - torch.arange(self.longest + 1, device=self.slots.device)
            seen = (distance >= 0) & (distance < window) if window else distance >= 0
            self._masks[window] = seen.view(len(seen), 1, 1, -1)
        return self._masks[window]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
        """Outputs as of `Prefill.attend`, with L = 1."""
        memory = self.cache.layer(layer, k, v)
        if memory.blocked:
            cache = {"keys": memory.keys, "values": memory.values, "lengths": self.lengths, "slots": self.slots}
            return decode_attention.attend(q, k, v, **cache, scale=scale, window=window)
        batch, heads, tokens, order = len(k), k.shape[1], self.longest + 1, self.order
        memory.keys[self.slots, :, self.lengths] = k[:, :, 0]
        memory.values[self.slots, :, self.lengths] = v[:, :, 0]
        out = F.scaled_dot_product_attention(
            q[order].view(batch, heads, -1, q.shape[-1]),  # heads that share keys become positions of one query
            memory.keys[:batch, :, :tokens],
            memory.values[:batch, :, :tokens],
            attn_mask=self.seen(window),
            scale=scale,
        )
        # CUDA's kernels give [B, L, H, D] in another order of memory, which has no view with one position of all heads.
        by_row = torch.empty_like(out, memory_format=torch.contiguous_format).index_copy_(0, order, out)
        return by_row.view(batch, 1, q.shape[1], -1)
