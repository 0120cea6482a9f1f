"""Attention over packed rows: rows one after another, without padding between them.

Most of a pass is products of tokens and weights. With packed rows these see real tokens only, and rows of very
different lengths share one pass. In 16 bits on a GPU, attention takes them as they are, by torch's kernel for rows of
any lengths (not yet run on a GPU). Elsewhere it needs rows side by side, in tiles of rows of similar length, padded on
the right, where causal attention from a real token never looks.

On a CPU under autocast to bfloat16, attention stays in float32. torch's fused CPU attention is slow in bfloat16 for
sequences of a few hundred tokens, most of all in the backward pass: at 70 tokens it takes two and a half times as long
as in float32 (docs/log.md), which is also more exact.

The function is registered with transformers under its own name. Without `rows` it is transformers' "sdpa", but for that
and for heads that share keys (`repeats_heads`).
Legend: R rows, L padded length, T tokens of all rows, H heads, D width of a head.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cached_property
from inspect import signature
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

try:
    from torch.nn.attention import varlen
except ImportError:
    varlen = None  # type: ignore[assignment]

varlen_attn: Any = getattr(varlen, "varlen_attn", None)
NAME = "threepo_sdpa"
LONGEST = 512
"""Tokens up to which float32 is faster under autocast on a CPU."""
TILE_PADDING = 1 / 3
"""Largest share of padding in a tile, relative to its real tokens."""
SMALL_TILE = 512
"""Tokens, padding included, up to which a tile takes rows of any lengths: another tile would cost as much."""
ENDLESS = 1 << 30
"""Positions of a model that names no end."""
_SHARES_KEYS = bool(varlen_attn) and "enable_gqa" in signature(varlen_attn).parameters
"""True if torch's attention for rows of any lengths has heads that share keys, as from 2.12 on."""
_WINDOWS = ("sliding_window", "attention_chunk_size")
"""Attributes of models and configurations with the number of tokens that one token sees."""


class Tile:
    """Consecutive rows that attention computes side by side; the first token is token `begin` of all T."""

    def __init__(self, lengths: Sequence[int], begin: int, device: torch.device) -> None:
        self.begin, self.end = begin, begin + sum(lengths)
        self.rows, self.longest = len(lengths), max(lengths)
        self.slots = padded_slots(lengths, device) if sum(lengths) < self.rows * self.longest else None
        """Index of each of its tokens in [rows * longest]; None where there is no padding."""

    def spread(self, x: Tensor) -> Tensor:
        """The tile's tokens of [T, H, D] as [R, L, H, D], with zeros as padding."""
        x = x[self.begin : self.end]
        if self.slots is not None:
            x = x.new_zeros(self.rows * self.longest, *x.shape[1:]).index_copy(0, self.slots, x)
        return x.reshape(self.rows, self.longest, *x.shape[1:])

    def gather(self, x: Tensor) -> Tensor:
        """The real tokens of [R, L, H, D], one row after another."""
        x = x.flatten(0, 1)
        return x if self.slots is None else x.index_select(0, self.slots)


class PackedRows:
    """Positions and tiles of packed rows."""

    def __init__(self, row_lengths: Sequence[int], device: torch.device) -> None:
        """`row_lengths` are at least 1 each; sorted lengths give the least padding."""
        self.position_ids = torch.cat([torch.arange(length) for length in row_lengths]).unsqueeze(0).to(device)
        """[1, T], from 0 in every row."""
        self.starts = torch.tensor([0, *accumulate(row_lengths)], dtype=torch.int32).to(device)
        """[R + 1]: the first token of each row, and the number of tokens."""
        self.longest = max(row_lengths)
        self._lengths = row_lengths

    @cached_property
    def tiles(self) -> list[Tile]:
        """The tiles, which are made at the first use: some devices need none."""
        lengths, device = self._lengths, self.starts.device
        starts = [0, *accumulate(lengths)]
        return [Tile(lengths[a:b], starts[a], device) for a, b in _tile_bounds(lengths)]

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **settings: Any) -> Tensor:
        """[1, T, H, D] from query [1, H, T, D], key and value [1, Hkv, T, D]; a token sees only its own row."""
        window = settings.get("sliding_window") or 0
        if taken := for_any_lengths(query, key, value):
            tokens = [x[0].transpose(0, 1) for x in taken]
            where = self.starts, self.starts, self.longest, self.longest
            seen = window - 1, 0  # tokens before and after one's own; -1: all
            out: Tensor = varlen_attn(*tokens, *where, scale=settings.get("scaling"), window_size=seen, enable_gqa=True)
            return out.unsqueeze(0)
        tokens = [x[0].transpose(0, 1) for x in (query, key, value)]
        outputs = []
        for tile in self.tiles:
            q, k, v = (tile.spread(x).transpose(1, 2) for x in tokens)
            mask = window_mask(tile.longest, window, query.device)
            outputs.append(tile.gather(attend(module, q, k, v, mask, **settings)[0]))
        return torch.cat(outputs).unsqueeze(0)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # its shapes differ at every call
def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    rows: PackedRows | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """transformers' `sdpa_attention_forward`: [R, L, H, D] from query [R, H, L, D], key and value [R, Hkv, L, D].

    If the caller of the model passes `rows`, it is `PackedRows.attend`, and the mask is ignored.
    """
    if rows is not None:
        return rows.attend(module, query, key, value, **settings), None
    short = query.device.type == "cpu" and torch.is_autocast_enabled("cpu") and key.shape[2] <= LONGEST
    with torch.autocast("cpu", enabled=False) if short else nullcontext():
        if short:
            query, key, value = query.float(), key.float(), value.float()
        if repeats_heads(query, key):
            groups, scale = query.shape[1] // key.shape[1], settings.get("scaling")
            causal = attention_mask is None and query.shape[2] > 1  # a single token sees all keys before it
            key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
            out = F.scaled_dot_product_attention(
                query, key, value, attn_mask=attention_mask, is_causal=causal, scale=scale
            )
            return out.transpose(1, 2).contiguous(), None
        return sdpa_attention_forward(module, query, key, value, attention_mask, **settings)  # type: ignore[no-any-return]


def under_autocast(*tensors: Tensor) -> list[Tensor]:
    """Tensors in autocast's dtype, if it is on, as it gives them to torch's other attention."""
    device = tensors[0].device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else tensors[0].dtype
    return [x.to(dtype) for x in tensors]


def for_any_lengths(query: Tensor, key: Tensor, value: Tensor) -> list[Tensor] | None:
    """These, [1, heads, T, D], as torch's kernel for rows of any lengths takes them; None if it does not."""
    if not _SHARES_KEYS or not query.is_cuda or query.shape[-1] % 8:  # it pads no heads
        return None
    query, key, value = tensors = under_autocast(query, key, value)
    return tensors if can_use_flash_attention(SDPAParams(query, key, value, None, 0.0, True, True)) else None


def repeats_heads(query: Tensor, key: Tensor) -> bool:
    """True if heads that share keys are given keys of their own: no fused kernel of CUDA shares them in float32.

    Without that, torch would hold the scores of all pairs of tokens.
    """
    shared = query.shape[1] > key.shape[1]
    return query.is_cuda and shared and query.dtype == torch.float32 and not torch.is_autocast_enabled("cuda")


def run_packed(model: Any, input_ids: Tensor, rows: PackedRows) -> Any:
    """The output of a model for tokens [T] of packed rows; `takes_packed_rows` must be true for it."""
    # transformers passes a mask of four dimensions through, and would otherwise make one of [T, T].
    no_mask = torch.empty(1, 1, 1, 0, dtype=torch.bool, device=input_ids.device)
    ids, positions = input_ids.unsqueeze(0), rows.position_ids
    return model(input_ids=ids, position_ids=positions, attention_mask=no_mask, use_cache=False, rows=rows)


def register_attention() -> None:
    """Tell transformers of this attention; a model that was switched to it in another process needs that here too.

    Switches cuDNN's attention off in this process: on a GPU it plans anew for every shape, and rows have many lengths.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)


@torch.no_grad()
def takes_packed_rows(model: Any) -> bool:
    """Switch the model to this attention if possible; return whether rows are then independent, found by a trial.

    They are not if tokens also meet outside attention, as in convolutions and recurrent layers, or if the model has
    windows in its masks only and does not pass them to attention. Such models, and models that raise an error in the
    trial, run on padded rows with the same results.
    """
    replaceable = getattr(model, "_supports_attention_backend", False)
    if model.config._attn_implementation not in ("sdpa", NAME) or not replaceable:
        return False
    register_attention()
    model.set_attn_implementation(NAME)
    row = torch.arange(1, 5, device=next(model.parameters()).device)
    rows = PackedRows([4, 4, 4], row.device)
    with _narrow_windows(model):
        try:
            first, second = (run_packed(model, torch.cat([x, row, x]), rows).logits[0, 4:8] for x in (row, row.flip(0)))
        except Exception:  # a model may raise anything at an empty mask or an unknown argument
            model.set_attn_implementation("sdpa")
            return False
        alone = model(input_ids=row.unsqueeze(0), use_cache=False).logits[0]
    size = alone.abs().max()
    return bool((first - second).abs().max() <= 1e-6 * size and (first - alone).abs().max() <= 1e-3 * size)


@contextmanager
def _narrow_windows(model: Any) -> Iterator[None]:
    """Set the model's windows, if it has any, to two tokens, so that a row of four tokens exceeds them."""
    with ExitStack() as restore:
        for holder in (model.config, model.config.get_text_config(), *model.modules()):
            for name in _WINDOWS:
                size = getattr(holder, name, None)
                if isinstance(size, int) and size > 2:
                    restore.callback(setattr, holder, name, size)
                    setattr(holder, name, 2)
        yield


def _tile_bounds(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """First row and one past the last row of each tile."""
    begin, longest, tokens = 0, 0, 0
    for row, length in enumerate(lengths):
        padded = max(longest, length) * (row + 1 - begin)
        if row > begin and padded > SMALL_TILE and padded > (1 + TILE_PADDING) * (tokens + length):
            yield begin, row
            begin, longest, tokens = row, 0, 0
        longest, tokens = max(longest, length), tokens + length
    yield begin, len(lengths)


def padded_slots(lengths: Sequence[int], device: torch.device) -> Tensor:
    """[T]: index of each token in [R * L], if rows of these lengths are padded on the right."""
    longest = max(lengths)
    return torch.cat([torch.arange(length) + row * longest for row, length in enumerate(lengths)]).to(device)


def lasting_positions(config: Any) -> tuple[int, str]:
    """Most tokens of a pass in which positions keep their frequencies, and the rope type that changes them above.

    Above, a row would depend on the other rows of its pass, and cached keys would have other frequencies than new ones.
    """
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    for part in (rope, *(value for value in rope.values() if isinstance(value, dict))):  # some have one by layer type
        kind = part.get("rope_type", "default")
        if kind == "longrope":
            return int(part["original_max_position_embeddings"]), kind
        if "dynamic" in kind:
            return int(getattr(text, "max_position_embeddings", ENDLESS)), kind
    return ENDLESS, ""


def window_mask(length: int, window: int, device: torch.device) -> Tensor | None:
    """[L, L], true where a token sees another: itself and the `window` - 1 before it; None if it sees all before it."""
    if not 0 < window < length:
        return None
    position = torch.arange(length, device=device)
    distance = position.unsqueeze(1) - position
    return (distance >= 0) & (distance < window)
