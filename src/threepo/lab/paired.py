"""Statistics over seeds: intervals, paired comparisons with a baseline, their power, and steps to a target.

Legend: n seeds, d paired differences (method - baseline, of the same seed), m comparisons at once, T values of a curve.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np
from scipy import optimize, stats

LEVEL = 0.95
POWER = 0.8
RESAMPLES = 5000
FEWEST_RESAMPLED = 5
_QUANTILES = 2000
MOST_FLIPS = 14
"""Up to so many seeds all 2^n signs are tried; with more, as many random ones."""


@dataclass(frozen=True)
class Interval:
    """A mean over seeds with its standard error and 95 % interval; one seed has neither."""

    mean: float
    se: float | None = None
    low: float | None = None
    high: float | None = None


def t_interval(values: Sequence[float]) -> Interval:
    """Mean and t interval of n values."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return Interval(mean)
    se = float(stats.sem(values))
    half = se * float(stats.t.ppf((1 + LEVEL) / 2, len(values) - 1))
    return Interval(mean, se, mean - half, mean + half)


def _all_equal(values: Sequence[float]) -> bool:
    """Whether values differ by rounding at most, so that their spread says nothing."""
    return bool(np.ptp(values) <= 1e-12 * np.max(np.abs(values)))


def bootstrap_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """BCa bootstrap interval of the mean of n values, 95 %; None for fewer than five, which say too little of it."""
    if len(values) < FEWEST_RESAMPLED:
        return None
    if _all_equal(values):
        return values[0], values[0]
    found = stats.bootstrap(
        (values,), np.mean, n_resamples=RESAMPLES, confidence_level=LEVEL, rng=np.random.default_rng(0)
    ).confidence_interval
    return float(found.low), float(found.high)


def sign_flip_p(differences: Sequence[float]) -> float:
    """Two-sided p of a randomisation test: how often a mean is as far from 0 if the signs of d are by chance.

    It asks nothing of the distribution but symmetry, and is exact. With n seeds it is 2 / 2^n or more.
    """
    d = np.asarray(differences, dtype=float)
    n = len(d)
    if n <= MOST_FLIPS:
        signs = np.array(list(product((1.0, -1.0), repeat=n)))
    else:
        signs = np.random.default_rng(0).choice((1.0, -1.0), size=(2**MOST_FLIPS, n))
        signs[0] = 1.0  # what was seen is one of them, so p is never 0
    return float(np.mean(np.abs(signs @ d) >= abs(d.sum()) * (1 - 1e-9)))


def paired_p(differences: Sequence[float]) -> float:
    """Two-sided p of the paired t-test; where d is the same for all seeds, t has no scale, and the signs decide."""
    if len(differences) < 2:
        return 1.0
    if _all_equal(differences):
        return sign_flip_p(differences)
    return float(stats.ttest_1samp(differences, 0.0).pvalue)


def holm(ps: Sequence[float]) -> list[float]:
    """p-values adjusted for being m at once (Holm): the chance of any false claim among them stays at the level."""
    order = np.argsort(ps, kind="stable")
    scaled = np.asarray(ps)[order] * np.arange(len(ps), 0, -1)
    adjusted = np.empty(len(ps))
    adjusted[order] = np.minimum(np.maximum.accumulate(scaled), 1.0)
    return adjusted.tolist()


def power(difference: float, deviation: float, n: int, level: float = 1 - LEVEL) -> float:
    """Chance that the two-sided paired t-test finds a true difference; `deviation` is the standard deviation of d."""
    centre, critical = difference / deviation * math.sqrt(n), stats.t.isf(level / 2, n - 1)
    # The mean over what the estimate of `deviation` may be; scipy's noncentral t is NaN far out.
    chances = (np.arange(_QUANTILES) + 0.5) / _QUANTILES
    edge = critical * np.sqrt(stats.chi2.ppf(chances, n - 1) / (n - 1))
    return float(np.mean(stats.norm.cdf(centre - edge) + stats.norm.cdf(-centre - edge)))


def detectable(deviation: float, n: int, level: float = 1 - LEVEL) -> float | None:
    """The smallest true difference that is found with a chance of 80 %; None if nothing is known of d."""
    return None if n < 2 or deviation == 0 else deviation * _detectable(n, level)


@cache
def _detectable(n: int, level: float) -> float:
    """In standard deviations of d."""
    most = 10 * float(stats.t.isf(level / 2, n - 1)) / math.sqrt(n)
    return float(optimize.brentq(lambda difference: power(difference, 1.0, n, level) - POWER, 0.0, most))


@dataclass(frozen=True)
class Comparison:
    """A method against the baseline, over the n seeds that both have."""

    n: int
    difference: float
    low: float | None
    """Ends of the paired t interval."""
    high: float | None
    bootstrap_low: float | None
    bootstrap_high: float | None
    p: float
    """Of the paired t-test, before any adjustment."""
    p_adjusted: float
    """By Holm, among all comparisons of the family."""
    p_sign_flip: float
    """Of the randomisation test, before any adjustment."""
    p_sign_flip_adjusted: float
    """By Holm, like `p_adjusted`."""
    detectable: float | None
    """The smallest true difference that this n finds with a chance of 80 % at the level 5 % / m, Holm's first."""

    @property
    def verdict(self) -> str:
        """`better`, `worse`, or `undecided`: whether the adjusted p is below 5 %, and on which side."""
        if self.p_adjusted >= 1 - LEVEL:
            return "undecided"
        return "better" if self.difference > 0 else "worse"


def compare(families: Sequence[Sequence[float]]) -> list[Comparison]:
    """Comparisons from the paired differences of each: one family, whose p-values are adjusted together."""
    ps, flips = (holm([test(d) for d in families]) for test in (paired_p, sign_flip_p))
    together = zip(families, ps, flips, strict=True)
    return [_comparison(d, p, flips_p, (1 - LEVEL) / len(families)) for d, p, flips_p in together]


def _comparison(d: Sequence[float], adjusted: float, flips_adjusted: float, level: float) -> Comparison:
    t, (bootstrap_low, bootstrap_high) = t_interval(d), bootstrap_interval(d) or (None, None)
    deviation = 0.0 if _all_equal(d) else (t.se or 0.0) * math.sqrt(len(d))
    return Comparison(
        n=len(d),
        difference=t.mean,
        low=t.low,
        high=t.high,
        bootstrap_low=bootstrap_low,
        bootstrap_high=bootstrap_high,
        p=paired_p(d),
        p_adjusted=adjusted,
        p_sign_flip=sign_flip_p(d),
        p_sign_flip_adjusted=flips_adjusted,
        detectable=detectable(deviation, len(d), level),
    )


def smoothed(values: Sequence[float], width: int) -> np.ndarray:
    """Means over the last `width` values: [T - width + 1], so the first belongs to value number width - 1."""
    return np.asarray(np.lib.stride_tricks.sliding_window_view(values, width).mean(axis=1))


def steps_to(steps: Sequence[int], values: Sequence[float], width: int, target: float) -> int | None:
    """Training steps done when the smoothed curve is first at the target or above; None: never."""
    reached = np.flatnonzero(smoothed(values, width) >= target)
    return steps[width - 1 + reached[0]] + 1 if len(reached) else None


def censored_median(reached: Sequence[int | None]) -> float | None:
    """Median of steps, where None is more than any number; None if the median is one of these."""
    ordered = sorted(math.inf if steps is None else steps for steps in reached)
    half = len(ordered) // 2
    median = ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
    return median if math.isfinite(median) else None
