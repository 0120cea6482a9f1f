"""Rows of tokens as a model reads them: in bundles of about the same size, one row after another."""

from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch

from threepo.types import MicroBatch, Row

AnyRow = TypeVar("AnyRow", bound=Row)

CPU_TOKENS, GPU_TOKENS = 4096, 16384
"""Default token budgets: on a CPU, activations should stay in its caches; on a GPU, its cores should be busy."""


def pack(
    rows: Sequence[AnyRow], token_budget: int, device: torch.device, *, padding: bool = False
) -> Iterator[list[AnyRow]]:
    """Rows in bundles of at most `token_budget` tokens (0: the device's default); a longer single row goes alone.

    `padding`: count every row of a bundle as long as its longest, because the model pads them. Rows are sorted by
    length, then by index, so the result depends on nothing else.
    """
    token_budget = token_budget or (CPU_TOKENS if device.type == "cpu" else GPU_TOKENS)
    bundle: list[AnyRow] = []
    tokens = 0
    for row in sorted(rows, key=lambda row: (len(row.tokens), row.index)):
        length = len(row.tokens)
        tokens = (len(bundle) + 1) * length if padding else tokens + length
        if bundle and tokens > token_budget:
            yield bundle
            bundle, tokens = [], length
        bundle.append(row)
    if bundle:
        yield bundle


def flatten(rows: Sequence[Row], device: torch.device) -> MicroBatch:
    """Rows as the model reads them (see `MicroBatch`)."""
    input_ids: list[int] = []
    positions: list[int] = []
    targets: list[int] = []
    row_of: list[int] = []
    lengths: list[int] = []
    for number, row in enumerate(rows):
        tokens = row.tokens
        for first, end in row.loss_ranges:
            positions += range(len(input_ids) + first - 1, len(input_ids) + end - 1)
            targets += tokens[first:end]
            row_of += [number] * (end - first)
        lengths.append(row.loss_ranges[-1][1] - 1)
        input_ids += tokens[: lengths[-1]]
    ids, *by_loss_token = (torch.tensor(values, device=device) for values in (input_ids, positions, targets, row_of))
    return MicroBatch(ids, tuple(lengths), *by_loss_token)
