"""Keys and values of the rows that are being decoded, and the attention over them.

Every row has a slot with its own length, so rows of any lengths stand side by side without padding between their
tokens, and a slot whose row has finished takes the next one. The layout puts the slots in front, so the first so many
slots of all draws are one piece of memory: rows that are left over after others have finished are moved there.

Legend: N draws, S slots of each draw, W slots in use, B = N * W rows, H heads, K heads of keys and values, D width of
a head, T tokens, L positions of a prompt.
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
    """[S, N, K, T, D]; blocked (see `RowCache`): [S, N, K, T / 16, D, 16]."""
    values: torch.Tensor
    """[S, N, K, T, D]."""
    blocked: bool
    """Whether keys lie as the compiled kernel reads them: 16 tokens side by side."""


def room_for(tokens: int) -> int:
    """Tokens that a slot has memory for when it is to hold so many: whole blocks."""
    return -(-tokens // LANES) * LANES


class RowCache:
    """The memory of N times S rows of at most `capacity` tokens."""

    def __init__(self, draws: int, slots: int, capacity: int) -> None:
        self.draws, self.slots = draws, slots
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
            rows = (self.slots, self.draws, heads)
            self.layers[index] = _Layer(
                make(*rows, *tokens, dtype=k.dtype, device=k.device),
                make(*rows, self.capacity, v.shape[-1], dtype=v.dtype, device=v.device),
                blocked,
            )
        return self.layers[index]

    def move(self, draws: Sequence[int], sources: Sequence[int], targets: Sequence[int], tokens: int) -> None:
        """Copy the first `tokens` tokens of some rows from their slots to others of the same draw."""
        for layer in self.layers.values():
            blocks = -(-tokens // LANES) if layer.blocked else tokens
            layer.keys[targets, draws, :, :blocks] = layer.keys[sources, draws, :, :blocks]
            layer.values[targets, draws, :, :tokens] = layer.values[sources, draws, :, :tokens]


@dataclass(frozen=True)
class Prefill:
    """Read prompts, every different one of a draw once, into the slots of all its rows."""

    cache: RowCache
    sources: Sequence[int]
    """For each row that starts: which prompt of the pass it has."""
    slots: Sequence[int]
    draws: Sequence[int]

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
        layer.values[self.slots, self.draws, :, :length] = v[self.sources]
        if layer.blocked:
            blocks = -(-length // LANES)
            k = F.pad(k, (0, 0, 0, blocks * LANES - length))
            k = k.view(*k.shape[:2], blocks, LANES, -1).transpose(-1, -2)
            layer.keys[self.slots, self.draws, :, :blocks] = k[self.sources]
        else:
            layer.keys[self.slots, self.draws, :, :length] = k[self.sources]


@dataclass(frozen=True)
class Decode:
    """Take one more token of every row into the cache, and attend to all that the row has by then."""

    cache: RowCache
    lengths: torch.Tensor
    """[N, W] tokens of each row in the cache before this one."""
    longest: int
    """The largest of them."""

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int
    ) -> torch.Tensor:
        """See `Pass`; L is 1."""
        memory = self.cache.layer(layer, k, v)
        if memory.blocked:
            return native.attend(q, k, v, memory.keys, memory.values, self.lengths, scale, window)
        return self._attend_in_torch(memory, q, k, v, scale, window)

    def _attend_in_torch(
        self, memory: _Layer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int
    ) -> torch.Tensor:
        draws, width = self.lengths.shape
        heads, tokens = k.shape[1], self.longest + 1

        def by_slot(x: torch.Tensor) -> torch.Tensor:
            """[B, heads, 1, D] to [W, N, heads, D]."""
            return x.reshape(draws, width, x.shape[1], -1).transpose(0, 1)

        lengths = self.lengths.t()
        slots = torch.arange(width, device=q.device).unsqueeze(1)
        places = (slots, torch.arange(draws, device=q.device), slice(None), lengths)
        memory.keys[places], memory.values[places] = by_slot(k), by_slot(v)
        distance = lengths.unsqueeze(-1) - torch.arange(tokens, device=q.device)
        seen = (distance >= 0) & (distance < window) if window else distance >= 0
        # Heads that share keys become positions of one query; draws become heads. So memory is read where it lies.
        queries = by_slot(q).reshape(width, draws * heads, -1, q.shape[-1])
        out = F.scaled_dot_product_attention(
            queries,
            memory.keys[:width, :, :, :tokens].flatten(1, 2),
            memory.values[:width, :, :, :tokens].flatten(1, 2),
            attn_mask=seen.repeat_interleave(heads, dim=1).unsqueeze(2),
            scale=scale,
        )
        out = out.view(width, draws, q.shape[1], -1).transpose(0, 1)
        return out.reshape(draws * width, 1, q.shape[1], -1)
