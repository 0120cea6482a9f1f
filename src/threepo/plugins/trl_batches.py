"""Batches of TRL: rows of one draw in each micro-batch, and advantages with the weights of a correction."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from threepo.config.method import Correction
from threepo.objectives.corrections import correct

Batch = dict[str, torch.Tensor]
"""TRL's record of generated rows: tensors [rows, ...], and numbers."""


class Counts(NamedTuple):
    """Sums over rows of what a correction keeps, which may be added up over processes."""

    kept_tokens: float
    tokens: float
    kept_rows: float
    """Rows with any token that is kept."""
    rows: float
    """Rows with any token."""
    kl: float
    """Divergence from the policy that wrote the tokens, in nats, summed over tokens."""
    kept_shares: float
    """The share of a row's tokens that is kept, summed over rows."""


def split_by_draw(batches: Sequence[Batch]) -> list[Batch]:
    """The rows of all micro-batches, in as many micro-batches of one draw each."""
    count = len(batches)
    rows = {name: torch.cat([b[name] for b in batches]) if x.ndim else x for name, x in batches[0].items()}
    order = rows["draw"].argsort(stable=True)
    chunks = {name: x[order].chunk(count) if x.ndim else [x] * count for name, x in rows.items()}
    return [{name: chunk[i] for name, chunk in chunks.items()} for i in range(count)]


def correct_advantages(
    batch: Batch, behaviour: torch.Tensor, at_gradient: torch.Tensor, settings: Correction
) -> torch.Tensor:
    """Multiply advantages by the correction's weights; returns the numbers of `Counts`, [6].

    `behaviour` and `at_gradient` [rows, tokens]: log-probs when a token was drawn, and where its gradient is taken.
    """
    tokens = batch["completion_mask"].bool()
    new, old = at_gradient[tokens], behaviour[tokens]
    correction = correct(new, old, tokens.nonzero()[:, 0], len(tokens), settings)
    weights, kept = torch.zeros_like(behaviour), torch.zeros_like(tokens)
    weights[tokens], kept[tokens] = correction.weights, correction.kept
    batch["advantages"] = batch["advantages"][:, None] * weights
    d = (new - old).double()
    shares = kept.sum(dim=1) / tokens.sum(dim=1).clamp(min=1)
    kept_rows, rows, kl = kept.any(dim=1).sum(), tokens.any(dim=1).sum(), (d.exp() - 1 - d).sum()
    return torch.stack([x.double() for x in (kept.sum(), tokens.sum(), kept_rows, rows, kl, shares.sum())])
