"""Attention for the training passes: over rows that lie one behind the other, without padding between them.

What costs most of a pass, the products of tokens and weights, then has real tokens only, and rows of very different
lengths share one pass. Attention alone needs rows side by side: it takes them in tiles of rows of similar length,
padded on the right, where causal attention never looks from a real token.

On a CPU under autocast to bfloat16, attention stays in float32 besides. torch's fused CPU attention is slow in bfloat16
for sequences of some hundred tokens, above all backward: at 70 tokens it takes two and a half times as long as in
float32 (docs/performance.md), which is more exact too.

Entered into transformers' registry of attention functions under a name of its own; for whoever calls the model without
`rows` it is transformers' "sdpa" unchanged. Legend: R rows, L padded length, T tokens of all rows, H heads, D width of
a head.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

NAME = "threepo_sdpa"
LONGEST = 512
"""Tokens up to which float32 is the faster one under autocast on a CPU."""
TILE_PADDING = 1 / 3
"""Padding of a tile, at most, beside its real tokens."""
SMALL_TILE = 512
"""Tokens, padding included, up to which a tile takes rows of any lengths: one more tile would cost as much."""
_WINDOWS = ("sliding_window", "attention_chunk_size")
"""What models and their configurations call the most tokens that one token sees."""


@dataclass(frozen=True)
class Tile:
    """Rows that attention takes side by side."""

    begin: int
    """Of its tokens among all."""
    end: int
    rows: int
    longest: int
    places: torch.Tensor | None
    """Where each of its tokens stands in [rows * longest]; None where there is no padding."""


class PackedRows:
    """Rows one behind the other: what a model needs to know of them."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        """Rows of so many tokens each, at least one; best in the order of their lengths."""
        counts = torch.tensor(lengths)
        starts = counts.cumsum(0) - counts
        tokens = torch.arange(int(counts.sum())) - starts.repeat_interleave(counts)
        self.position_ids = tokens.unsqueeze(0).to(device)
        """[1, T], from 0 in every row."""
        self.tiles = [_tile(lengths[a:b], int(starts[a]), device) for a, b in _tiled(lengths)]

    def attend(
        self, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **settings: Any
    ) -> torch.Tensor:
        """[1, T, H, D] from query [1, H, T, D], key and value [1, Hkv, T, D]; every token sees its own row only."""
        tokens = [x[0].transpose(0, 1) for x in (query, key, value)]
        window = settings.get("sliding_window") or 0
        outputs = []
        for tile in self.tiles:
            q, k, v = (_spread(x, tile).transpose(1, 2) for x in tokens)
            mask = _windowed(tile.longest, window, query.device) if 0 < window < tile.longest else None
            outputs.append(_gather(_sdpa(module, q, k, v, mask, **settings), tile))
        return torch.cat(outputs).unsqueeze(0)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    rows: PackedRows | None = None,
    **settings: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' `sdpa_attention_forward`: [R, L, H, D] from query [R, H, L, D], key and value [R, Hkv, L, D].

    With `rows`, see `PackedRows.attend`; they come from the caller of the model, and the mask says nothing.
    """
    if rows is not None:
        return rows.attend(module, query, key, value, **settings), None
    return _sdpa(module, query, key, value, attention_mask, **settings), None


def run_packed(model: Any, input_ids: torch.Tensor, rows: PackedRows) -> Any:
    """The output of a model, for which `takes_packed_rows` is true, on tokens [T] of packed rows."""
    # A mask of four dimensions is handed on as it is: transformers makes none of its own, which would be [T, T].
    handed_on = torch.empty(1, 1, 1, 0, dtype=torch.bool, device=input_ids.device)
    return model(
        input_ids=input_ids.unsqueeze(0),
        position_ids=rows.position_ids,
        attention_mask=handed_on,
        use_cache=False,
        rows=rows,
    )


@torch.no_grad()
def takes_packed_rows(model: Any) -> bool:
    """Have the model use this attention if it can; whether rows then stay apart, found by trying it.

    They do not where tokens also meet outside attention, as in convolutions and recurrent layers: other neighbours
    then change a row. Nor are they scored right where a window is in the model's masks alone, which it does not hand
    to attention otherwise. A model that fails is run on padded rows, with the same results.
    """
    if model.config._attn_implementation not in ("sdpa", NAME) or not getattr(
        model, "_supports_attention_backend", False
    ):
        return False
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)
    row = torch.arange(1, 5, device=next(model.parameters()).device)
    rows = PackedRows([4, 4, 4], row.device)
    with _narrow_windows(model):
        try:
            first, second = (run_packed(model, torch.cat([x, row, x]), rows).logits[0, 4:8] for x in (row, row.flip(0)))
        except Exception:  # whatever a model raises at a mask without content, or at what it does not know
            model.set_attn_implementation("sdpa")
            return False
        alone = model(input_ids=row.unsqueeze(0), use_cache=False).logits[0]
    size = alone.abs().max()
    return bool((first - second).abs().max() <= 1e-6 * size and (first - alone).abs().max() <= 1e-3 * size)


@contextmanager
def _narrow_windows(model: Any) -> Iterator[None]:
    """The model with windows of two tokens where it has any, so that a row of a few tokens meets them."""
    holders = {id(holder): holder for holder in (model.config, model.config.get_text_config(), *model.modules())}
    sizes = [(holder, name, getattr(holder, name, None)) for holder in holders.values() for name in _WINDOWS]
    windows = [(holder, name, size) for holder, name, size in sizes if isinstance(size, int) and size > 2]
    try:
        for holder, name, _ in windows:
            setattr(holder, name, 2)
        yield
    finally:
        for holder, name, size in windows:
            setattr(holder, name, size)


def _sdpa(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    **settings: Any,
) -> torch.Tensor:
    if query.device.type != "cpu" or not torch.is_autocast_enabled("cpu") or key.shape[2] > LONGEST:
        return sdpa_attention_forward(module, query, key, value, mask, **settings)[0]  # type: ignore[no-any-return]
    with torch.autocast("cpu", enabled=False):
        query, key, value = query.float(), key.float(), value.float()
        return sdpa_attention_forward(module, query, key, value, mask, **settings)[0]  # type: ignore[no-any-return]


def _tiled(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """First and last row, the latter not included, of each tile."""
    bounds, begin, longest, tokens = [], 0, 0, 0
    for row, length in enumerate(lengths):
        padded = max(longest, length) * (row + 1 - begin)
        if row > begin and padded > SMALL_TILE and padded > (1 + TILE_PADDING) * (tokens + length):
            bounds.append((begin, row))
            begin, longest, tokens = row, 0, 0
        longest, tokens = max(longest, length), tokens + length
    return [*bounds, (begin, len(lengths))]


def _tile(lengths: Sequence[int], begin: int, device: torch.device) -> Tile:
    longest, tokens = max(lengths), sum(lengths)
    if tokens == longest * len(lengths):
        return Tile(begin, begin + tokens, len(lengths), longest, None)
    real = torch.arange(longest) < torch.tensor(lengths).unsqueeze(1)
    return Tile(begin, begin + tokens, len(lengths), longest, real.flatten().nonzero().squeeze(1).to(device))


def _spread(x: torch.Tensor, tile: Tile) -> torch.Tensor:
    """The tile's tokens of [T, H, D] as [R, L, H, D], zeros where there is none."""
    x = x[tile.begin : tile.end]
    if tile.places is not None:
        x = x.new_zeros(tile.rows * tile.longest, *x.shape[1:]).index_copy(0, tile.places, x)
    return x.reshape(tile.rows, tile.longest, *x.shape[1:])


def _gather(x: torch.Tensor, tile: Tile) -> torch.Tensor:
    """The real tokens of [R, L, H, D], one behind the other."""
    x = x.flatten(0, 1)
    return x if tile.places is None else _Take.apply(x, tile.places)  # type: ignore[no-untyped-call]


class _Take(torch.autograd.Function):
    """`index_select` of different rows: its gradient is a copy, where torch has to add."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(places)
        ctx.rows = len(x)
        return x.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gradient,), (places,) = gradients, ctx.saved_tensors
        return gradient.new_zeros(ctx.rows, *gradient.shape[1:]).index_copy_(0, places, gradient), None


def _windowed(length: int, window: int, device: torch.device) -> torch.Tensor:
    """[L, L], true where a token sees another: itself and the `window` - 1 before it."""
    place = torch.arange(length, device=device)
    distance = place.unsqueeze(1) - place
    return (distance >= 0) & (distance < window)
