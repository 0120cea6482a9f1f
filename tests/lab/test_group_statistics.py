"""The law of groups that are shared by draws, and its estimates: by enumeration, by simulation and by hand."""

import math
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from threepo.lab.probe_findings import fewest_draws
from threepo.lab.statistics import Outcomes, dead_share, mean_rate, predictable_draws, rate_ratio, silent_share

G = 8


def binomial(n: int, k: int, p: float) -> float:
    return math.comb(n, k) * p**k * (1 - p) ** (n - k)


@pytest.mark.parametrize("draws", [1, 2])
def test_the_dead_share_is_estimated_without_bias(draws: int) -> None:
    """All samples of D = 3 draws, of two kinds, with R = 4 rollouts each: the mean estimate is the law itself."""
    kinds, shares, d, r, group = (0.1, 0.7), (0.6, 0.4), 3, 4, 4
    law = sum(share * (1 - p) ** (group // draws) for p, share in zip(kinds, shares, strict=True)) ** draws
    mean = 0.0
    for counts in product(range(r + 1), repeat=d):
        chance = math.prod(sum(s * binomial(r, c, p) for p, s in zip(kinds, shares, strict=True)) for c in counts)
        mean += chance * dead_share(Outcomes(np.array([counts]) / r, r), group, draws)
    assert mean == pytest.approx(law, rel=1e-12)
    exact = sum(
        math.prod(shares[kinds.index(p)] for p in sample) * dead_share(Outcomes(np.array([sample]), 0), group, draws)
        for sample in product(kinds, repeat=d)
    )
    assert exact == pytest.approx(law, rel=1e-12)


@pytest.mark.parametrize("draws", [1, 2, 4, 8])
def test_the_prediction_holds_in_simulated_groups(draws: int) -> None:
    """Chances of draws from Beta(0.3, 2.7): groups whose draws are new each time, against the estimate from others."""
    generator = np.random.default_rng(draws)
    rates = generator.binomial(16, generator.beta(0.3, 2.7, (1, 4000))) / 16
    found = dead_share(Outcomes(rates, 16), G, draws)
    chances = generator.beta(0.3, 2.7, (40_000, draws))
    dead = (generator.binomial(G // draws, chances).sum(axis=1) == 0).mean()
    assert found == pytest.approx(dead, abs=0.03)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_sharing_a_group_rescues_it_but_not_beyond_the_mean_of_the_chances(chances: list[float]) -> None:
    """E[(1 - p)^(G/N)]^N falls with N, down to (1 - mu)^G at N = G."""
    outcomes = Outcomes(np.array([chances]), 0)
    law = [float(outcomes.wrong(G // n).mean()) ** n for n in (1, 2, 4, 8)]
    assert all(later <= earlier + 1e-12 for earlier, later in pairwise(law))
    assert law[-1] == pytest.approx((1 - outcomes.mu) ** G, abs=1e-12)


def test_numbers_of_the_planning_note() -> None:
    """mu = 1 %, G = 16: 0.851 at N = G; 0.870 at N = 4 with a correlation within draws of 0.1 (Beta chances)."""
    rates = np.random.default_rng(0).beta(0.09, 8.91, (1, 400_000))
    law = [float(Outcomes(rates, 0).wrong(16 // n).mean()) ** n for n in (4, 16)]
    assert law == pytest.approx([0.870, 0.851], abs=0.002)


def test_intervals_of_the_ratio_cover_it() -> None:
    """100 probes of 64 draws whose mean chance is three times the mean policy's; 95 % intervals should miss about 5."""
    generator = np.random.default_rng(0)
    missed, widths = 0, []
    for seed in range(100):
        draws = generator.beta(0.6, 9.4, (1, 64)) * np.ones((8, 1))
        mean = Outcomes(generator.binomial(1024, 0.02, (8, 1)) / 1024, 1024)
        found = rate_ratio(Outcomes(generator.binomial(16, draws) / 16, 16), mean, seed)
        missed += not found.low <= 3 <= found.high
        widths.append(found.high - found.low)
    assert missed <= 15
    # Of 64 draws, of their 128 rollouts each, and of the mean's 8 x 1024: squares of standard errors over the means.
    square = 0.06 * 0.94 / 11 / 64 / 0.06**2 + 0.06 * 0.94 / (64 * 128) / 0.06**2 + 0.02 * 0.98 / 8192 / 0.02**2
    assert np.mean(widths) == pytest.approx(2 * 1.96 * 3 * math.sqrt(square), rel=0.15), "no wider than they must be"


@pytest.mark.parametrize("problems", [1, 3])
def test_intervals_of_a_rate_without_draws_cover_it(problems: int) -> None:
    """The mean policy and temperatures have a single draw, so sampling is all that scatters; 95 % should miss 5."""
    generator = np.random.default_rng(problems)
    missed, widths = 0, []
    for seed in range(100):
        outcomes = Outcomes(generator.binomial(1024, 0.01, (problems, 1)) / 1024, 1024)
        found = mean_rate(outcomes, seed)
        missed += not found.low <= 0.01 <= found.high
        widths.append(found.high - found.low)
    assert missed <= 13
    # Several problems are resampled, and then their rollouts: these count nearly twice.
    wider = math.sqrt(2 - 1 / problems)
    expected = 2 * 1.96 * math.sqrt(0.01 * 0.99 / (1024 * problems))
    assert np.mean(widths) == pytest.approx(wider * expected, rel=0.05)


def test_no_success_leaves_bounds_and_no_estimate() -> None:
    some, none = Outcomes(np.full((4, 16), 0.25), 8), Outcomes(np.zeros((4, 16)), 8)
    mean, never = Outcomes(np.full((4, 1), 0.01), 1000), Outcomes(np.zeros((4, 1)), 1000)
    assert mean_rate(none).high == pytest.approx(1 - 0.05 ** (1 / 16)), "three in sixteen draws, as they go together"
    assert mean_rate(never).high == pytest.approx(3 / 4000, rel=0.01)
    assert mean_rate(Outcomes(np.zeros((4, 1)), 0)).high == 0, "an exact rate"
    unknown = rate_ratio(some, never)
    assert unknown.value == unknown.high == math.inf
    assert 0.25 * 4000 / 4 < unknown.low < 0.25 * 4000
    assert rate_ratio(none, mean).value == rate_ratio(none, mean).low == 0
    assert rate_ratio(none, mean).high == pytest.approx(mean_rate(none).high / 0.01)
    assert rate_ratio(none, never).low == 0


def test_a_step_without_any_success_by_hand() -> None:
    """Two problems, groups of two. One of two draws solves half of both: alone, it fails in 1/4 of a problem's groups,
    so in 1/16 of the steps, and the other draw in all: 17/32. If both share the groups, each problem fails in 1/2.
    """
    lucky = Outcomes(np.array([[0.5, 0.0], [0.5, 0.0]]), 0)
    assert [silent_share(lucky, 2, n) for n in (1, 2)] == pytest.approx([17 / 32, 1 / 4])
    assert [dead_share(lucky, 2, n) for n in (1, 2)] == pytest.approx([5 / 8, 1 / 2])
    assert fewest_draws(lucky, 2) == 2, "15/32 is less than 95 % of 3/4"
    assert fewest_draws(Outcomes(np.full((2, 2), 0.5), 0), 2) == 1, "equal draws gain nothing by sharing"


def test_what_can_be_predicted_from_so_many_draws_and_rollouts() -> None:
    assert predictable_draws(Outcomes(np.zeros((1, 64)), 16), 16) == [1, 2, 4, 8, 16]
    assert predictable_draws(Outcomes(np.zeros((1, 8)), 4), 16) == [4, 8]
    assert predictable_draws(Outcomes(np.zeros((1, 64)), 0), 12) == [1, 2, 4, 12]
