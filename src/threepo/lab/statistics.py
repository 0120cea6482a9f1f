"""Estimators of the exploration analysis: groups of unequal size, pairs of completions, and bootstrap intervals.

Legend: G completions of a problem at a step, F figures, P pairs of groups, k completions that are compared.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from threepo.evaluation.scores import pass_at_k

RESAMPLES = 2000
_AT_ONCE = 2**21
"""Numbers of a chunk of resamples, to bound the memory."""


@cache
def count_chances(n: int, c: int, k: int) -> np.ndarray:
    """Chances that a random k of n completions hold 0, 1, ..., k of c marked ones: hypergeometric, float64 [k + 1].

    With k = n, all of it is on c. So a figure of a bigger group is exactly its mean over all subsets of k.
    """
    marked = [math.comb(c, x) * math.comb(n - c, k - x) / math.comb(n, k) for x in range(k + 1)]
    return np.array(marked)


def fewer(first: np.ndarray, second: np.ndarray) -> tuple[float, float, float]:
    """Chances that the second of two independent counts is smaller, larger, and the same: win, loss, tie."""
    joint = np.outer(first, second)  # [first count, second count]
    return float(np.tril(joint, -1).sum()), float(np.triu(joint, 1).sum()), float(np.trace(joint))


def distinct(answers: Sequence[str | None], k: int) -> float:
    """Mean number of distinct answers over all subsets of k completions; None is no answer, and not counted."""
    found = [answer for answer in answers if answer is not None]
    return sum(pass_at_k(len(answers), found.count(answer), k) for answer in set(found))


@dataclass(frozen=True)
class PairMeans:
    """Means over pairs of a group's completions; NaN where it has no such pair."""

    all: float
    same_draw: float
    """Pairs that the same weights wrote."""
    other_draw: float
    """Pairs that two draws wrote."""


def pair_means(values: np.ndarray, draws: Sequence[int]) -> PairMeans:
    """Means of a symmetric [G, G] matrix over the pairs of completions, whose draws are numbered."""
    upper = np.triu_indices(len(draws), 1)
    pairs, same = values[upper], np.equal.outer(draws, draws)[upper]
    means = [float(chosen.mean()) if len(chosen) else math.nan for chosen in (pairs, pairs[same], pairs[~same])]
    return PairMeans(*means)


def distances(texts: Sequence[np.ndarray]) -> np.ndarray:
    """1 - cosine of the token counts of every two texts: [G, G]. A text without tokens is like none, at 1."""
    tokens, numbers = np.unique(np.concatenate(texts), return_inverse=True)
    parts = np.split(numbers, np.cumsum([len(text) for text in texts])[:-1])
    counts = np.stack([np.bincount(part, minlength=len(tokens)) for part in parts]).astype(float)
    units = counts / np.maximum(np.linalg.norm(counts, axis=1, keepdims=True), 1)
    return np.asarray(1 - units @ units.T)


@dataclass(frozen=True)
class Estimates:
    """F figures with 95 % intervals; NaN where a figure is not defined."""

    values: np.ndarray
    low: np.ndarray
    high: np.ndarray


def estimates(numerators: np.ndarray, denominators: np.ndarray, seed: int = 0) -> Estimates:
    """Sums over P pairs of numerators, [F, P], over those of denominators, with percentile bootstrap over pairs.

    A figure whose denominators are all NaN is the sum of its numerators. All figures see the same resamples.
    """
    both = np.concatenate([numerators, denominators]).T  # [P, 2 F]
    size = len(both)
    generator = np.random.default_rng(seed)
    chunk = max(1, _AT_ONCE // size)
    counts = [min(chunk, RESAMPLES - start) for start in range(0, RESAMPLES, chunk)]
    # A resample of P pairs says how often each pair is in it.
    sums = [generator.multinomial(size, np.full(size, 1 / size), size=count) @ both for count in counts]
    total = np.isnan(denominators).all(axis=1)

    def quotient(found: np.ndarray) -> np.ndarray:
        above, below = np.split(found, 2, axis=-1)
        return np.asarray(above / np.where(total, 1, below))

    with np.errstate(divide="ignore", invalid="ignore"):
        values, resampled = quotient(both.sum(axis=0)), quotient(np.concatenate(sums))
    low, high = np.full((2, len(values)), np.nan)
    known = np.isfinite(resampled).any(axis=0)
    low[known], high[known] = np.nanquantile(resampled[:, known], (0.025, 0.975), axis=0)
    return Estimates(values, low, high)
