"""Statistics of seeds of a study, rollouts of two runs, and draws of a probe.

Tests, intervals and distributions are scipy's, except the test of signs (evaluation/statistics.py). What is written
here, scipy lacks: Holm's adjustment, the power of the t-test far from zero, resamples of problems and draws at once,
and the law of groups that draws share.

Legend: n seeds, d paired differences, T values of a curve, F figures, P problems or pairs of groups, D draws,
R rollouts of a draw on a problem, G rollouts of a group, N draws that share a group, B resamples.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean, median

import numpy as np
import scipy

from threepo.evaluation.statistics import ENDS, LEVEL, Interval, all_equal, sign_flip_p, standard_error

POWER = 0.8
PAIR_RESAMPLES, DRAW_RESAMPLES = 2000, 1000
_QUANTILES = 2000
_AT_ONCE = 50
"""Resamples of pairs in memory at the same time."""


def t_interval(values: Sequence[float]) -> Interval:
    """Mean of n values with its t interval; one value, or equal values, have none."""
    if all_equal(values):
        return Interval(float(np.mean(values)))
    half = standard_error(values) * float(scipy.stats.t.ppf(ENDS[1], len(values) - 1))
    return Interval.around(float(np.mean(values)), half)


def welch_interval(values: Sequence[float], others: Sequence[float]) -> Interval:
    """Mean of the values minus the others' with Welch's t interval; one value alone or equal values have none."""
    difference = fmean(values) - fmean(others)
    if min(len(values), len(others)) < 2 or (all_equal(values) and all_equal(others)):
        return Interval(difference)
    parts = [(standard_error(x) ** 2, len(x) - 1) for x in (values, others)]
    variance = sum(part for part, _ in parts)
    freedom = variance**2 / sum(part**2 / n for part, n in parts)
    return Interval.around(difference, math.sqrt(variance) * float(scipy.stats.t.ppf(ENDS[1], freedom)))


def paired_t_p(differences: Sequence[float]) -> float:
    """Two-sided p of the paired t-test; where all d are the same, t has no scale, and their signs decide."""
    if len(differences) < 2:
        return 1.0
    if all_equal(differences):
        return sign_flip_p(differences)
    return float(scipy.stats.ttest_1samp(differences, 0.0).pvalue)


def holm(ps: Sequence[float]) -> list[float]:
    """p-values adjusted by Holm's method: the chance of any false claim among them stays at the level."""
    order = np.argsort(ps, kind="stable")
    scaled = np.asarray(ps)[order] * np.arange(len(ps), 0, -1)
    adjusted = np.empty(len(ps))
    adjusted[order] = np.minimum(np.maximum.accumulate(scaled), 1.0)
    return adjusted.tolist()


def power(effect: float, n: int, level: float = 1 - LEVEL) -> float:
    """Chance that the two-sided paired t-test finds a true difference of `effect` standard deviations of d.

    The mean over what the estimated deviation may be: scipy's noncentral t is NaN far out.
    """
    centre, critical = effect * math.sqrt(n), scipy.stats.t.isf(level / 2, n - 1)
    chances = (np.arange(_QUANTILES) + 0.5) / _QUANTILES
    edge = critical * np.sqrt(scipy.stats.chi2.ppf(chances, n - 1) / (n - 1))
    return float(np.mean(scipy.stats.norm.cdf(centre - edge) + scipy.stats.norm.cdf(-centre - edge)))


@cache
def detectable_effect(n: int, level: float = 1 - LEVEL) -> float:
    """The smallest true difference, in standard deviations of d, that is found with a chance of 80 %."""
    most = 10 * float(scipy.stats.t.isf(level / 2, n - 1)) / math.sqrt(n)
    return float(scipy.optimize.brentq(lambda effect: power(effect, n, level) - POWER, 0.0, most))


@dataclass(frozen=True)
class PairedDifference:
    """A method's difference to the baseline, over the n seeds that both have; NaN where n is too small."""

    n: int
    difference: float
    low: float
    """Ends of the paired t interval."""
    high: float
    p: float
    """p-value of the paired t-test, before any adjustment."""
    p_adjusted: float
    """`p` after Holm's adjustment among all methods of the family."""
    p_sign_flip: float
    """p-value of the randomisation test, before any adjustment."""
    p_sign_flip_adjusted: float
    """`p_sign_flip`, adjusted like `p_adjusted`."""
    detectable: float
    """The smallest true difference that this n finds with a chance of 80 % at the level 5 % / methods, Holm's first."""

    @property
    def verdict(self) -> str:
        """`better`, `worse`, or `undecided`: whether the adjusted p is below 5 %, and on which side."""
        if self.p_adjusted >= 1 - LEVEL:
            return "undecided"
        return "better" if self.difference > 0 else "worse"


def paired_differences(families: Sequence[Sequence[float]]) -> list[PairedDifference]:
    """Tests and intervals for the differences of several methods, whose p-values are adjusted together."""
    t_ps, sign_ps = [paired_t_p(d) for d in families], [sign_flip_p(d) for d in families]
    results = []
    for d, p, adjusted, sign_p, sign_adjusted in zip(families, t_ps, holm(t_ps), sign_ps, holm(sign_ps), strict=True):
        detectable = math.nan
        if not all_equal(d):
            detectable = float(np.std(d, ddof=1)) * detectable_effect(len(d), (1 - LEVEL) / len(families))
        mean = t_interval(d)
        estimate = (len(d), mean.value, mean.low, mean.high)
        results.append(PairedDifference(*estimate, p, adjusted, sign_p, sign_adjusted, detectable))
    return results


def running_means(values: Sequence[float], width: int) -> list[float]:
    """Means over the last `width` values: [T]; the first are over as many as there are."""
    return [fmean(values[max(0, end - width) : end]) for end in range(1, len(values) + 1)]


def smoothed(steps: list[int], values: Sequence[float], width: int) -> tuple[list[int], list[float]]:
    """Running means over `width` values, and the steps at which there are as many."""
    return steps[width - 1 :], running_means(values, width)[width - 1 :]


def steps_to(steps: Sequence[int], levels: Sequence[float], target: float) -> int | None:
    """The first of the steps at which the level is at the target or above; None: never."""
    return next((step for step, level in zip(steps, levels, strict=True) if level >= target), None)


def censored_median(reached: Sequence[int | None]) -> float | None:
    """Median of steps, where None is more than any number; None if the median is one of these."""
    middle = median(math.inf if steps is None else steps for steps in reached)
    return middle if math.isfinite(middle) else None


@cache
def count_chances(n: int, c: int, k: int) -> np.ndarray:
    """Chances that a random k of n completions hold 0, 1, ..., k of c marked ones: float64 [k + 1].

    With k = n, all of it is on c. So a figure of a bigger group is exactly its mean over all subsets of k.
    """
    return np.asarray(scipy.stats.hypergeom(n, c, k).pmf(np.arange(k + 1)))


def win_loss_tie(first: np.ndarray, second: np.ndarray) -> tuple[float, float, float]:
    """Chances that the second of two independent counts is smaller, larger, and the same."""
    joint = np.outer(first, second)  # [first count, second count]
    return float(np.tril(joint, -1).sum()), float(np.triu(joint, 1).sum()), float(np.trace(joint))


def ratio_intervals(numerators: np.ndarray, denominators: np.ndarray) -> list[Interval]:
    """F ratios of sums over P pairs, [F, P] over [F, P], with percentile bootstrap over pairs; NaN where undefined.

    A figure whose denominators are all NaN is the sum of its numerators. All figures see the same resamples. scipy's
    bootstrap gathers every figure for every resample, and one resample without a ratio leaves it without an interval.
    """
    both = np.concatenate([numerators, denominators]).T  # [P, 2 F]
    is_sum = np.isnan(denominators).all(axis=1)
    generator = np.random.default_rng(0)
    shares = np.full(len(both), 1 / len(both))
    # A resample of P pairs says how often each pair is in it.
    drawn = [generator.multinomial(len(both), shares, size=_AT_ONCE) @ both for _ in range(PAIR_RESAMPLES // _AT_ONCE)]

    def quotient(sums: np.ndarray) -> np.ndarray:
        above, below = np.split(sums, 2, axis=-1)
        return np.asarray(above / np.where(is_sum, 1, below))

    with np.errstate(divide="ignore", invalid="ignore"):
        values, resampled = quotient(both.sum(axis=0)), quotient(np.concatenate(drawn))
    defined = [column[np.isfinite(column)] for column in resampled.T]
    return [
        Interval.of(value, column) if len(column) else Interval(value)
        for value, column in zip(values.tolist(), defined, strict=True)
    ]


@dataclass(frozen=True)
class Outcomes:
    """Share of each problem that each draw solved; the mean policy counts as a single draw.

    For one prompt let p_z be the chance of a right answer under draw z, and mu its mean over draws. G rollouts that N
    draws share evenly are all wrong with chance E[(1 - p_z)^(G/N)]^N (method.md 8).
    """

    rates: np.ndarray
    """[P, D]: shares of R rollouts that were right, or exact chances."""
    rollouts: int
    """R; 0: the rates are exact."""

    @property
    def mu(self) -> float:
        """The mean over problems and draws."""
        return float(self.rates.mean())

    def wrong(self, rollouts: int) -> np.ndarray:
        """[P, D] unbiased chances that all of `rollouts` rollouts of a draw are wrong."""
        if not self.rollouts:
            return np.asarray((1 - self.rates) ** rollouts)
        assert rollouts <= self.rollouts, "fewer rollouts than the power"
        right = np.round(self.rollouts * self.rates)
        return np.asarray(scipy.stats.hypergeom.pmf(0, self.rollouts, right, rollouts))


def _resample(outcomes: Outcomes, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Shares of resampled problems [B, P], and mu over them and over resampled draws [B].

    All draws answer the same problems, so both are resampled as wholes. Without several draws, as with a temperature,
    rollouts are resampled.
    """
    problems, draws = (
        generator.multinomial(n, np.full(n, 1 / n), size=DRAW_RESAMPLES) / n for n in outcomes.rates.shape
    )
    mu = np.einsum("bp,pd,bd->b", problems, outcomes.rates, draws)
    return problems, mu if outcomes.rates.shape[1] > 1 else _with_rollouts(mu, outcomes, generator)


def _with_rollouts(rates: np.ndarray, outcomes: Outcomes, generator: np.random.Generator) -> np.ndarray:
    """Rates [B] over all problems and draws, with rollouts resampled: s of n as Beta(s + 1/2, n - s + 1/2).

    With several problems, resampling them has counted the luck of rollouts once already: intervals are then up to 1.4
    times too long. Without it they would have no length where nothing was right.
    """
    trials = outcomes.rollouts * outcomes.rates.size  # 0: the rates are exact
    return generator.beta(trials * rates + 0.5, trials * (1 - rates) + 0.5) if trials else rates


def mean_rate(outcomes: Outcomes, seed: int = 0) -> Interval:
    """mu with its interval. Without any success, the bound is for draws that solve everything or nothing."""
    if outcomes.mu > 0:
        return Interval.of(outcomes.mu, _resample(outcomes, np.random.default_rng(seed))[1])
    draws = outcomes.rates.shape[1]
    trials = draws if draws > 1 else outcomes.rates.size * outcomes.rollouts  # 0: the rate is exact
    return Interval(0.0, 0.0, 1 - 0.05 ** (1 / trials) if trials else 0.0)


def rate_ratio(outcomes: Outcomes, mean: Outcomes, seed: int = 0) -> Interval:
    """mu over the mean policy's rate on the same problems.

    Few successes of the mean policy leave its rate open, so its rollouts are resampled, too: a rate of 0 gives a ratio
    without an estimate but with a lower bound. A ratio of nothing to nothing says nothing.
    """
    generator = np.random.default_rng(seed)
    problems, above = _resample(outcomes, generator)
    below = _with_rollouts(problems @ mean.rates.mean(axis=1), mean, generator)
    found = Interval.of(outcomes.mu / mean.mu if mean.mu else math.inf, above / below)
    if not mean.mu:
        return Interval(found.value, found.low, math.inf)
    return found if outcomes.mu else Interval(found.value, found.low, mean_rate(outcomes, seed).high / mean.mu)


def dead_share(outcomes: Outcomes, group: int, draws: int) -> float:
    """The chance that all of `group` rollouts, shared evenly by `draws` draws, are wrong; the mean over problems.

    Unbiased: the mean over all sets of N different draws among D of the product of their chances.
    """
    wrong, count = outcomes.wrong(group // draws), outcomes.rates.shape[1]
    assert draws <= count, "fewer draws than share the group"
    sums = [np.poly(-chances)[draws] for chances in wrong]  # elementary symmetric polynomials
    return float(np.mean(sums) / math.comb(count, draws))


def silent_share(outcomes: Outcomes, group: int, draws: int) -> float:
    """The chance that a step with one group of each problem has no right rollout at all.

    Draws are shared by all groups of a step, so a few lucky ones may solve several groups at once, and others none.
    """
    steps = Outcomes(1 - outcomes.wrong(group // draws).prod(axis=0, keepdims=True), 0)
    return dead_share(steps, draws, draws)


def predictable_draws(outcomes: Outcomes, group: int) -> list[int]:
    """The numbers of draws N = 1, 2, 4, ..., G for which the outcomes suffice to predict the share of dead groups."""
    counts = [2**i for i in range(group.bit_length()) if group % 2**i == 0]
    rollouts, draws = outcomes.rollouts or group, outcomes.rates.shape[1]
    return [n for n in sorted({*counts, group}) if group // n <= rollouts and n <= draws]
