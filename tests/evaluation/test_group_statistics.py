"""The law of groups that are shared by draws, and its estimates: by enumeration, by simulation and by hand."""

import math
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from threepo.evaluation.statistics import (
    Outcomes,
    dead_interval,
    dead_share,
    intraclass,
    mean_rate,
    predictable_draws,
    rate_ratio,
)

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
    found = dead_interval(Outcomes(rates, 16), G, draws)
    chances = generator.beta(0.3, 2.7, (40_000, draws))
    dead = (generator.binomial(G // draws, chances).sum(axis=1) == 0).mean()
    error = math.sqrt(dead * (1 - dead) / 40_000) + (found.high - found.low) / 4
    assert abs(found.value - dead) < 4 * error
    assert error < 0.02, "else the test says nothing"


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_sharing_a_group_rescues_it_but_not_beyond_the_mean_of_the_chances(chances: list[float]) -> None:
    """E[(1 - p)^(G/N)]^N falls with N, down to (1 - mu)^G at N = G."""
    outcomes = Outcomes(np.array([chances]), 0)
    law = [float(outcomes.wrong(G // n).mean()) ** n for n in (1, 2, 4, 8)]
    assert all(later <= earlier + 1e-12 for earlier, later in pairwise(law))
    assert law[-1] == pytest.approx((1 - outcomes.mu) ** G, abs=1e-12)


def test_numbers_of_the_planning_note() -> None:
    """mu = 1 %, G = 16: 0.851 at N = G; 0.870 at N = 4 with an intraclass correlation of 0.1 (Beta chances)."""
    rates = np.random.default_rng(0).beta(0.09, 8.91, (1, 400_000))
    law = [float(Outcomes(rates, 0).wrong(16 // n).mean()) ** n for n in (4, 16)]
    assert law == pytest.approx([0.870, 0.851], abs=0.002)
    assert intraclass(Outcomes(rates[:, :4000], 0)).value == pytest.approx(0.1, abs=0.02)


def test_correlation_by_hand() -> None:
    nothing = intraclass(Outcomes(np.array([[0.0, 1.0, 0.0, 1.0]]), 8))
    assert nothing.value == pytest.approx(1.0), "a draw solves all or nothing"
    same = intraclass(Outcomes(np.full((2, 6), 0.5), 5))
    assert same.value == pytest.approx(-1 / 4), "draws are more alike than chance: -1 / (R - 1)"
    assert math.isnan(intraclass(Outcomes(np.zeros((2, 6)), 5)).value)


def test_correlation_is_found_in_simulated_outcomes_and_none_where_there_is_none() -> None:
    generator = np.random.default_rng(0)
    chances = generator.beta(1, 3, (4, 400))  # correlation 1 / (1 + 1 + 3)
    found = intraclass(Outcomes(generator.binomial(16, chances) / 16, 16))
    assert found.low < 0.2 < found.high
    assert found.high - found.low < 0.1
    none = intraclass(Outcomes(generator.binomial(16, 0.25, (4, 400)) / 16, 16))
    assert none.low < 0 < none.high
    assert none.high < 0.02


def test_intervals_of_the_ratio_cover_it() -> None:
    """100 probes of 64 draws whose mean chance is three times the mean policy's; 95 % intervals should miss about 5."""
    generator = np.random.default_rng(0)
    missed = 0
    for seed in range(100):
        draws = generator.beta(0.6, 9.4, (1, 64)) * np.ones((8, 1))
        mean = Outcomes(generator.binomial(1024, 0.02, (8, 1)) / 1024, 1024)
        found = rate_ratio(Outcomes(generator.binomial(16, draws) / 16, 16), mean, seed)
        missed += not found.low <= 3 <= found.high
    assert missed <= 15


def test_no_success_leaves_bounds_and_no_estimate() -> None:
    some, none = Outcomes(np.full((4, 16), 0.25), 8), Outcomes(np.zeros((4, 16)), 8)
    mean, never = Outcomes(np.full((4, 1), 0.01), 1000), Outcomes(np.zeros((4, 1)), 1000)
    assert mean_rate(none).high == pytest.approx(1 - 0.05 ** (1 / 16)), "three in sixteen draws, as they go together"
    assert mean_rate(never).high == pytest.approx(3 / 4000, rel=0.01)
    unknown = rate_ratio(some, never)
    assert unknown.value == unknown.high == math.inf
    assert 0.25 * 4000 / 4 < unknown.low < 0.25 * 4000
    assert rate_ratio(none, mean).value == rate_ratio(none, mean).low == 0
    assert rate_ratio(none, mean).high == pytest.approx(mean_rate(none).high / 0.01)
    assert rate_ratio(none, never).low == 0


def test_what_can_be_predicted_from_so_many_draws_and_rollouts() -> None:
    assert predictable_draws(Outcomes(np.zeros((1, 64)), 16), 16) == [1, 2, 4, 8, 16]
    assert predictable_draws(Outcomes(np.zeros((1, 8)), 4), 16) == [4, 8]
    assert predictable_draws(Outcomes(np.zeros((1, 64)), 0), 12) == [1, 2, 4, 12]
