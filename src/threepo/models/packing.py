"""Rows of tokens as a model reads them: in bundles of about the same size, one row after another."""

from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np
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
    ids: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    targets: list[np.ndarray] = []
    before = 0
    for row in rows:
        tokens: np.ndarray = np.asarray(row.tokens)
        counted = np.concatenate([np.arange(first, end) for first, end in row.loss_ranges])
        positions.append(before + counted - 1)
        targets.append(tokens[counted])
        ids.append(tokens[: row.loss_ranges[-1][1] - 1])
        before += len(ids[-1])
    return MicroBatch(
        input_ids=_joined(ids, device),
        row_lengths=tuple(map(len, ids)),
        loss_positions=_joined(positions, device),
        targets=_joined(targets, device),
        row_of=_joined([np.repeat(np.arange(len(rows)), [row.loss_tokens for row in rows])], device),
    )


def _joined(values: Sequence[np.ndarray], device: torch.device) -> torch.Tensor:
    """Integers of rows, one row after another."""
    return torch.from_numpy(np.concatenate(values, dtype=np.int64)).to(device)
