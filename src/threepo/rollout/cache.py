"""Keys and values of the rows that are being decoded, and the attention over them.

Every row has a place with its own length, so rows of any lengths stand side by side without padding between their
tokens, and a place whose row has finished takes the next one.

Legend: S places, B rows, H heads, K heads of keys and values, D width of a head, T tokens, L positions of a prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from threepo.errors import UserError
from threepo.rollout import native
from threepo.rollout.native import LANES


class Pass(Protocol):
    """What attention has to do in a forward pass: reading prompts, or one token of every row."""

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int
    ) -> torch.Tensor:
        """Queries [B, H, L, D], keys and values [B, K, L, D] of the pass's tokens to outputs [B, L, H, D]; `window`
        is how many keys a token sees, its own included (0: all)."""


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    rows: Pass | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as the models of transformers call it; `rows` comes from the caller of the model."""
    assert rows is not None, "the model was not called by the engine"
    assert attention_mask is None, "rows know their lengths"
    for name in ("softcap", "s_aux", "position_bias", "sinks"):
        if options.get(name) is not None:
            raise UserError(f"engine.kind = 'local': does not know attention with {name}; use engine.kind = 'vllm'")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    return rows.attend(module.layer_idx, query, key, value, scale, options.get("sliding_window") or 0), None


@dataclass
class _Layer:
    keys: torch.Tensor
    """[S, K, T, D]; blocked: [S, K, T / 16, D, 16]."""
    values: torch.Tensor
    """[S, K, T, D]."""
    blocked: bool
    """Whether keys lie as the compiled kernel reads them: 16 tokens side by side."""


def room_for(tokens: int) -> int:
    """Tokens that a place has memory for when it is to hold so many: whole blocks."""
    return -(-tokens // LANES) * LANES


class RowCache:
    """The memory of S rows of at most `capacity` tokens."""

    def __init__(self, places: int, capacity: int) -> None:
        self.places = places
        self.capacity = room_for(capacity)
        self.layers: dict[int, _Layer] = {}

    def layer(self, index: int, k: torch.Tensor, v: torch.Tensor) -> _Layer:
        """The memory of a layer, made when its first keys [B, K, L, D] and values come."""
        if index not in self.layers:
            heads, width = k.shape[1], k.shape[-1]
            blocked = native.serves(k, v)
            tokens = (self.capacity // LANES, width, LANES) if blocked else (self.capacity, width)
            # Torch multiplies what is masked by zero, so it must be a number; the compiled kernel never uses it.
            make = torch.empty if blocked else torch.zeros
            self.layers[index] = _Layer(
                make(self.places, heads, *tokens, dtype=k.dtype, device=k.device),
                make(self.places, heads, self.capacity, v.shape[-1], dtype=v.dtype, device=v.device),
                blocked,
            )
        return self.layers[index]

    def clear(self, places: Sequence[int]) -> None:
        """Make places ready for other rows: what one of a diverged policy left is no number, times zero neither."""
        for layer in self.layers.values():
            if not layer.blocked:
                layer.keys[places] = 0
                layer.values[places] = 0

    def move(self, sources: Sequence[int], targets: Sequence[int], tokens: int) -> None:
        """Copy the first `tokens` tokens of some rows from their places to others."""
        for layer in self.layers.values():
            blocks = -(-tokens // LANES) if layer.blocked else tokens
            layer.keys[targets, :, :blocks] = layer.keys[sources, :, :blocks]
            layer.values[targets, :, :tokens] = layer.values[sources, :, :tokens]


@dataclass(frozen=True)
class Prefill:
    """Read prompts, every different one of a draw once, into the places of all its rows."""

    cache: RowCache
    sources: Sequence[int]
    """For each row that starts: which prompt of the pass it has."""
    places: Sequence[int]

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int
    ) -> torch.Tensor:
        """See `Pass`. Prompts are padded on the right, where causal attention never looks from a real token."""
        self._keep(self.cache.layer(layer, k, v), k, v)
        mask = None
        if 0 < window < q.shape[2]:
            near = torch.arange(q.shape[2], device=q.device)
            distance = near.unsqueeze(1) - near
            mask = (distance >= 0) & (distance < window)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out.transpose(1, 2)

    def _keep(self, layer: _Layer, k: torch.Tensor, v: torch.Tensor) -> None:
        length = k.shape[2]
        layer.values[self.places, :, :length] = v[self.sources]
        if layer.blocked:
            blocks = -(-length // LANES)
            k = F.pad(k, (0, 0, 0, blocks * LANES - length))
            k = k.view(*k.shape[:2], blocks, LANES, -1).transpose(-1, -2)
            layer.keys[self.places, :, :blocks] = k[self.sources]
        else:
            layer.keys[self.places, :, :length] = k[self.sources]


@dataclass(frozen=True)
class Decode:
    """Take one more token of every row into the cache, and attend to all that the row has by then."""

    cache: RowCache
    lengths: torch.Tensor
    """[B] tokens of each row in the cache before this one."""
    places: torch.Tensor
    """[B] where each row's memory is; together all places below B."""
    longest: int
    """The largest length."""

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int
    ) -> torch.Tensor:
        """See `Pass`; L is 1."""
        memory = self.cache.layer(layer, k, v)
        if memory.blocked:
            return native.attend(q, k, v, memory.keys, memory.values, self.lengths, self.places, scale, window)
        return self._attend_in_torch(memory, q, k, v, scale, window)

    def _attend_in_torch(
        self, memory: _Layer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int
    ) -> torch.Tensor:
        batch, heads, tokens = len(k), k.shape[1], self.longest + 1
        memory.keys[self.places, :, self.lengths] = k[:, :, 0]
        memory.values[self.places, :, self.lengths] = v[:, :, 0]
        order = self.places.argsort()  # so that memory is read where it lies
        lengths = self.lengths[order].unsqueeze(1)
        distance = lengths - torch.arange(tokens, device=q.device)
        seen = (distance >= 0) & (distance < window) if window else distance >= 0
        out = F.scaled_dot_product_attention(
            q[order].view(batch, heads, -1, q.shape[-1]),  # heads that share keys become positions of one query
            memory.keys[:batch, :, :tokens],
            memory.values[:batch, :, :tokens],
            attn_mask=seen.view(batch, 1, 1, tokens),
            scale=scale,
        )
        return torch.empty_like(out).index_copy_(0, order, out).view(batch, 1, q.shape[1], -1)
