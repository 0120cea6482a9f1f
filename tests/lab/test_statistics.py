"""Statistics over seeds: against scipy, against numbers worked by hand, and on studies with a planted answer."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from threepo.lab.statistics import (
    censored_median,
    detectable_effect,
    holm,
    paired_differences,
    paired_t_p,
    power,
    running_means,
    smoothed,
    steps_to,
    t_interval,
    welch_interval,
)

METHOD, BASELINE = [0.61, 0.64, 0.55, 0.70, 0.66], [0.58, 0.60, 0.56, 0.61, 0.60]
DIFFERENCES = [a - b for a, b in zip(METHOD, BASELINE, strict=True)]


def test_interval_and_p_are_those_of_scipys_paired_t_test() -> None:
    reference = stats.ttest_rel(METHOD, BASELINE)
    interval = t_interval(DIFFERENCES)
    assert paired_t_p(DIFFERENCES) == pytest.approx(reference.pvalue)
    assert (interval.low, interval.high) == pytest.approx(tuple(reference.confidence_interval(0.95)))


def test_an_unpaired_interval_is_that_of_scipys_welch_test() -> None:
    """Where one side does not scatter, scipy warns; by hand, the other's t interval remains (the next test)."""
    reference = stats.ttest_ind(METHOD, BASELINE[:3], equal_var=False).confidence_interval(0.95)
    interval = welch_interval(METHOD, BASELINE[:3])
    assert (interval.low, interval.high) == pytest.approx(tuple(reference))
    still = welch_interval([1.0, 2.0, 3.0], [5.0, 5.0])
    assert (still.value, still.low) == pytest.approx((-3, -3 - 4.3027 / 3**0.5), rel=1e-4)
    assert math.isnan(welch_interval(METHOD, [0.5]).low)
    assert math.isnan(welch_interval([0.5, 0.5], [0.25, 0.25]).low)


def test_an_interval_by_hand() -> None:
    """1, 2, 3: standard error 1 / sqrt 3, and t of 2 degrees of freedom at 97.5 % is 4.3027."""
    interval = t_interval([1.0, 2.0, 3.0])
    assert (interval.value, interval.low, interval.high) == pytest.approx(
        (2.0, 2 - 4.3027 / 3**0.5, 2 + 4.3027 / 3**0.5), rel=1e-4
    )
    assert math.isnan(t_interval([5.0]).low)
    assert math.isnan(t_interval([1.0, 1.0, 1.0]).low), "that all seeds agree does not make the mean certain"


def test_differences_that_rounding_alone_tells_apart_are_one_value() -> None:
    """0.3 - 0.2 and 0.1 differ in their last bits: their spread gives neither a t statistic nor what n finds."""
    differences = [0.1, 0.3 - 0.2, 0.4 - 0.3, 0.1, 0.1]
    assert len(set(differences)) > 1
    found = paired_differences([differences])[0]
    assert found.p == 2 / 2**5
    assert math.isnan(found.detectable)


def test_differences_that_are_the_same_for_all_seeds_are_judged_by_their_signs() -> None:
    """A t statistic would be infinite, and its p zero, for ten seeds as for two."""
    assert paired_t_p([0.5] * 10) == 2 / 2**10
    assert paired_t_p([0.5, 0.5]) == 0.5
    assert paired_t_p([0.0] * 10) == 1.0


def test_holm_by_hand() -> None:
    """0.01 x 4, 0.02 x 3, 0.03 x 2 and no less than before it, 0.9 x 1."""
    assert holm([0.03, 0.01, 0.9, 0.02]) == pytest.approx([0.06, 0.04, 0.9, 0.06])


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_adjusts_upwards_keeps_the_order_and_stays_below_bonferroni(ps: list[float]) -> None:
    adjusted = holm(ps)
    assert all(p <= q <= min(1, p * len(ps)) + 1e-12 for p, q in zip(ps, adjusted, strict=True))
    assert [adjusted[i] for i in np.argsort(ps, kind="stable")] == sorted(adjusted)


@pytest.mark.parametrize("n", [2, 5, 10, 30])
@pytest.mark.parametrize("effect", [0.0, 0.3, 1.0])
def test_power_is_that_of_the_noncentral_t(n: int, effect: float) -> None:
    critical, centre = stats.t.isf(0.025, n - 1), effect * math.sqrt(n)
    reference = stats.nct.sf(critical, n - 1, centre) + stats.nct.cdf(-critical, n - 1, centre)
    assert power(effect, n) == pytest.approx(reference, abs=2e-5)


def test_the_detectable_difference_has_a_power_of_80_percent() -> None:
    found = detectable_effect(10)
    assert power(found, 10) == pytest.approx(0.8)
    # Tables of the paired t-test: ten pairs find 0.996 standard deviations.
    assert found == pytest.approx(0.996, abs=2e-3)
    assert detectable_effect(10, 0.05 / 9) > found


def simulated(effect: float, studies: int = 200, n: int = 10) -> list[list[float]]:
    """Paired differences of studies: seeds are shared, so what a seed does to both sides is not in them."""
    return np.random.default_rng(7).normal(effect, 0.04, size=(studies, n)).tolist()


def within_chance(found: int, studies: int, rate: float) -> bool:
    low, high = stats.binom.interval(0.99, studies, rate)
    return bool(low <= found <= high)


def test_a_planted_null_is_found_in_5_percent_of_studies() -> None:
    verdicts = [paired_differences([d])[0].verdict for d in simulated(0.0)]
    assert within_chance(sum(verdict != "undecided" for verdict in verdicts), 200, 0.05)


def test_a_planted_effect_is_found_as_often_as_the_power_says() -> None:
    effect = 0.04 * detectable_effect(10)
    verdicts = [paired_differences([d])[0].verdict for d in simulated(effect)]
    assert within_chance(verdicts.count("better"), 200, 0.8)
    verdicts = [paired_differences([[-value for value in d]])[0].verdict for d in simulated(2 * effect)]
    assert within_chance(verdicts.count("worse"), 200, power(2 * effect / 0.04, 10))


def test_three_methods_that_do_nothing_make_a_false_claim_in_5_percent_of_studies() -> None:
    studies = np.reshape(simulated(0.0, 600), (200, 3, 10)).tolist()
    claims = sum(any(c.verdict != "undecided" for c in paired_differences(family)) for family in studies)
    assert within_chance(claims, 200, 0.05)
    unadjusted = sum(any(paired_t_p(d) < 0.05 for d in family) for family in studies)
    assert not within_chance(unadjusted, 200, 0.05), "the simulation would not see a missing adjustment"


def test_a_comparison_by_hand() -> None:
    first, second = paired_differences([DIFFERENCES, [0.01, -0.01, 0.02, -0.02, 0.0]])
    assert (first.n, first.difference) == (5, pytest.approx(0.042))
    assert first.p_adjusted == pytest.approx(2 * first.p)
    assert first.verdict == "undecided"
    # The sum is 0.21; of the 32 signs, those seen, all positive (0.23), and the two negated are as far from 0.
    assert (first.p_sign_flip, first.p_sign_flip_adjusted) == (4 / 32, 8 / 32)
    assert (second.p, second.p_sign_flip) == (1.0, 1.0)
    assert second.verdict == "undecided"
    single = paired_differences([[0.3]])[0]
    assert math.isnan(single.low)
    assert math.isnan(single.detectable)
    assert single.verdict == "undecided"


def test_steps_to_a_target_by_hand() -> None:
    """Means of two: 0.25, 0.5, 0.5, 0.75; the first of them is known after two steps."""
    values = [0.0, 0.5, 0.5, 0.5, 1.0]
    assert running_means(values, 2) == [0.0, 0.25, 0.5, 0.5, 0.75]
    smooth = smoothed([1, 2, 3, 4, 5], values, 2)
    assert smooth == ([2, 3, 4, 5], [0.25, 0.5, 0.5, 0.75])
    assert [steps_to(*smooth, target) for target in (0.5, 0.2, 0.8)] == [3, 2, None]
    assert steps_to(*smoothed([1, 2, 3], [1.0, 0.0, 0.0], 2), 0.9) is None, "one lucky batch is not the target"


def test_the_median_counts_seeds_that_never_arrive() -> None:
    assert censored_median([10, 30, None]) == 30
    assert censored_median([10, None, None]) is None
    assert censored_median([10, 20, None, None]) is None
    assert censored_median([10, 20, 40, None]) == 30
