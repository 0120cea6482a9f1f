"""Intervals and tests of paired differences between two models, over problems or seeds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import scipy  # loads scipy.stats at its first use, so a training never does

LEVEL = 0.95
ENDS = ((1 - LEVEL) / 2, (1 + LEVEL) / 2)
"""The quantiles at the ends of an interval."""
RESAMPLES = 4000
FEW = 6
"""Pairs that must differ for a test of signs to be able to fall below 5 %; intervals of fewer are too short."""
EXACT_UP_TO = 14
"""For at most this many differences, all 2^n choices of signs are tried; for more, `FLIPS` random ones."""
FLIPS, _AT_ONCE = 20_000, 1000


@dataclass(frozen=True)
class Interval:
    """An estimate with its 95 % interval; the ends are NaN where they are unknown, infinite where there is no bound."""

    value: float
    low: float = math.nan
    high: float = math.nan

    @classmethod
    def of(cls, value: float, resampled: np.ndarray) -> "Interval":
        """The estimate with percentiles of its bootstrap samples."""
        low, high = np.quantile(resampled, ENDS)
        return cls(value, float(low), float(high))

    @classmethod
    def around(cls, value: float, half: float) -> "Interval":
        """The estimate plus and minus `half`; NaN: unknown."""
        return cls(value, value - half, value + half)


def standard_error(values: Sequence[float] | np.ndarray) -> float:
    """Standard error of the mean of values as a sample; NaN for a single one."""
    return float(np.std(values, ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan


def normal_interval(value: float, error: float) -> Interval:
    """An estimate with the interval of a normal distribution; `error`: its standard error, or NaN."""
    return Interval.around(value, 1.96 * error)


def bootstrap_interval(samples: Sequence[Sequence[float]], seed: int = 0) -> Interval:
    """The unweighted mean of the samples' means with its percentile bootstrap interval, each resampled by itself.

    The ends are NaN if a sample has a single value.
    """

    def mean_of_means(*drawn: np.ndarray, axis: int) -> np.ndarray:
        return np.asarray(np.mean([sample.mean(axis) for sample in drawn], axis=0))

    value = float(np.mean([np.mean(sample) for sample in samples]))
    if min(map(len, samples)) < 2:
        return Interval(value)
    if all(all_equal(sample) for sample in samples):
        return Interval(value, value, value)
    found = scipy.stats.bootstrap(
        samples, mean_of_means, n_resamples=RESAMPLES, confidence_level=LEVEL, method="percentile", rng=seed
    )
    ends = found.confidence_interval
    return Interval(value, float(ends.low), float(ends.high))


def all_equal(values: Sequence[float]) -> bool:
    """True if values differ by rounding at most, so that their spread says nothing."""
    return bool(np.ptp(values) <= 1e-12 * np.max(np.abs(values)))


def sign_flip_p(differences: Sequence[float], seed: int = 0) -> float:
    """Two-sided p of a randomisation test: how often |sum of d| is as large if the sign of each d is random.

    It assumes symmetry and nothing else. Exact for up to `EXACT_UP_TO` differences that are not 0.
    """
    d = np.array([difference for difference in differences if difference])
    if len(d) < 2:
        return 1.0
    d /= np.abs(d).max()

    def distances(signs: np.ndarray) -> np.ndarray:
        return np.asarray(np.abs((signs * d).sum(axis=-1)).round(9))  # sums may differ in their last bits

    seen = distances(np.ones(len(d)))
    if len(d) <= EXACT_UP_TO:
        return float(np.mean(distances(np.array(list(product((-1.0, 1.0), repeat=len(d))))) >= seen))
    generator = np.random.default_rng(seed)
    flips = (generator.choice((-1.0, 1.0), (_AT_ONCE, len(d))) for _ in range(FLIPS // _AT_ONCE))
    as_far = sum(int(np.sum(distances(signs) >= seen)) for signs in flips)
    return (as_far + 1) / (FLIPS + 1)  # those seen are one of the choices
