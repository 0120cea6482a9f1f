"""Statistics of rollouts about exploration: chances, their differences between draws, and the fate of groups.

For one prompt let p_z be the chance of a right answer under draw z, and mu its mean over draws. G rollouts that N draws
share evenly are all wrong with chance E[(1 - p_z)^(G/N)]^N (method.md 8). Legend: P problems, D draws, R rollouts of a
draw on a problem, G rollouts of a group, N draws that share a group.
"""

import math
from dataclasses import dataclass

import numpy as np

RESAMPLES = 1000
"""Bootstrap samples of draws and problems."""


@dataclass(frozen=True)
class Interval:
    """An estimate with its 95 % interval; infinite where it has no bound."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, value: float, resampled: np.ndarray) -> "Interval":
        """The estimate with percentiles of its bootstrap samples."""
        low, high = np.quantile(resampled, (0.025, 0.975))
        return cls(value, float(low), float(high))


@dataclass(frozen=True)
class Outcomes:
    """Share of each problem that each draw solved. The mean policy is a single draw."""

    rates: np.ndarray
    """[P, D]: shares of R rollouts that were right, or exact chances."""
    rollouts: int
    """R; 0: the rates are exact."""

    @property
    def mu(self) -> float:
        """The mean over problems and draws."""
        return float(self.rates.mean())

    def wrong(self, rollouts: int) -> np.ndarray:
        """[P, D] chances that so many rollouts of a draw are all wrong, without bias: C(R-s, m) / C(R, m)."""
        if not self.rollouts:
            return np.asarray((1 - self.rates) ** rollouts)
        assert rollouts <= self.rollouts, "fewer rollouts than the power"
        left = np.round(self.rollouts * (1 - self.rates))
        factors = [np.maximum(left - i, 0) / (self.rollouts - i) for i in range(rollouts)]
        return np.asarray(np.prod(factors, axis=0))


def resamples(outcomes: Outcomes, seed: int) -> tuple[np.random.Generator, np.ndarray, np.ndarray]:
    """Samples with replacement of problems and of draws, as shares [RESAMPLES, P] and [RESAMPLES, D]; what made them.

    All draws answer the same problems, so both are resampled as wholes.
    """
    generator = np.random.default_rng(seed)
    shares = [generator.multinomial(n, np.full(n, 1 / n), size=RESAMPLES) / n for n in outcomes.rates.shape]
    return generator, shares[0], shares[1]


def mean_rate(outcomes: Outcomes, seed: int = 0) -> Interval:
    """Mu. Without any success, the bound is that of draws that solve all or nothing: their successes come together."""
    if outcomes.mu > 0:
        _, problems, draws = resamples(outcomes, seed)
        return Interval.of(outcomes.mu, np.einsum("bp,pd,bd->b", problems, outcomes.rates, draws))
    trials = outcomes.rates.shape[1] if outcomes.rates.shape[1] > 1 else outcomes.rates.size * outcomes.rollouts
    return Interval(0.0, 0.0, 1 - 0.05 ** (1 / trials))


def ratio(outcomes: Outcomes, mean: Outcomes, seed: int = 0) -> Interval:
    """Mu over the mean policy's rate on the same problems.

    Few successes of the mean policy leave its rate open: it is resampled as Beta(s + 1/2, n - s + 1/2), so a rate of 0
    gives a ratio without an estimate but with a lower bound. A ratio of nothing to nothing says nothing.
    """
    generator, problems, draws = resamples(outcomes, seed)
    above, below = np.einsum("bp,pd,bd->b", problems, outcomes.rates, draws), problems @ mean.rates.mean(axis=1)
    if mean.rollouts:
        trials = mean.rollouts * mean.rates.size
        below = generator.beta(trials * below + 0.5, trials * (1 - below) + 0.5)
    value = outcomes.mu / mean.mu if mean.mu else math.inf
    high = mean_rate(outcomes, seed).high / mean.mu if outcomes.mu == 0 and mean.mu else math.inf
    found = Interval.of(value, above / below)
    return Interval(value, found.low, found.high if outcomes.mu and mean.mu else high)


def dead_share(outcomes: Outcomes, group: int, draws: int) -> float:
    """The chance that all of `group` rollouts, shared evenly by `draws` draws, are wrong; the mean over problems.

    Without bias: the mean over all sets of N different draws among D of the product of their chances.
    """
    wrong, count = outcomes.wrong(group // draws), outcomes.rates.shape[1]
    assert draws <= count, "fewer draws than share the group"
    sums = np.zeros((len(wrong), draws + 1))  # elementary symmetric polynomials
    sums[:, 0] = 1.0
    for column in wrong.T:
        sums[:, 1:] += column[:, None] * sums[:, :-1]
    return float(sums[:, draws].mean() / math.comb(count, draws))


def silent_share(outcomes: Outcomes, group: int, draws: int) -> float:
    """The chance that a step with one group of each problem has no right rollout at all.

    Draws are shared by all groups of a step, so a few lucky ones may solve several groups at once, and others none.
    """
    steps = Outcomes(1 - outcomes.wrong(group // draws).prod(axis=0, keepdims=True), 0)
    return dead_share(steps, draws, draws)


def dead_interval(outcomes: Outcomes, group: int, draws: int, seed: int = 0) -> Interval:
    """`dead_share`, with the spread of its plug-in estimate."""
    _, problems, chosen = resamples(outcomes, seed)
    wrong, value = outcomes.wrong(group // draws), dead_share(outcomes, group, draws)
    plugged = np.einsum("bp,bp->b", problems, (chosen @ wrong.T) ** draws)
    low, high = np.quantile(plugged - (wrong.mean(axis=1) ** draws).mean(), (0.025, 0.975))
    return Interval(value, max(0.0, value + float(low)), min(1.0, value + float(high)))


def shares_of(outcomes: Outcomes, group: int) -> list[int]:
    """The numbers of draws N = 1, 2, 4, ..., G for which the outcomes suffice to predict the share of dead groups."""
    counts = [2**i for i in range(group.bit_length()) if group % 2**i == 0]
    rollouts, draws = outcomes.rollouts or group, outcomes.rates.shape[1]
    return [n for n in sorted({*counts, group}) if group // n <= rollouts and n <= draws]


def intraclass(outcomes: Outcomes, seed: int = 0) -> Interval:
    """The correlation of two rollouts' outcomes on a problem under the same draw, pooled over problems.

    The one-way analysis of variance: (between - within) / (between + (R - 1) within). NaN if all outcomes are equal.
    """
    _, problems, draws = resamples(outcomes, seed)
    number, within_draw = outcomes.rates.shape[1], outcomes.rates * (1 - outcomes.rates)

    def correlation(by_problem: np.ndarray, by_draw: np.ndarray) -> np.ndarray:
        means = by_draw @ outcomes.rates.T
        variance = np.maximum(by_draw @ (outcomes.rates**2).T - means**2, 0) * number / max(number - 1, 1)
        r = outcomes.rollouts
        if r == 0:
            total = ((means * (1 - means)) * by_problem).sum(axis=1)
            return np.asarray((variance * by_problem).sum(axis=1) / np.where(total > 0, total, np.nan))
        between = (r * variance * by_problem).sum(axis=1)
        within = ((by_draw @ within_draw.T) * by_problem).sum(axis=1) * r / max(r - 1, 1)
        below = between + (r - 1) * within
        return np.asarray((between - within) / np.where(below > 0, below, np.nan))

    whole = correlation(*(np.full((1, count), 1 / count) for count in outcomes.rates.shape))
    found = correlation(problems, draws)
    found = found[np.isfinite(found)]
    return Interval.of(float(whole[0]), found) if len(found) else Interval(math.nan, math.nan, math.nan)
