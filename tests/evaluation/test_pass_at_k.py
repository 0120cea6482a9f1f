"""pass@k and its errors against enumeration, simulation and numbers by hand."""

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import threepo
from threepo.errors import UserError
from threepo.evaluation.scores import ks_up_to, pass_at_k, standard_errors


@given(st.integers(1, 9), st.data())
def test_equals_the_share_of_all_subsets_with_a_right_one(n: int, data: st.DataObject) -> None:
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    subsets = list(combinations(range(n), k))
    expected = sum(any(i < c for i in subset) for subset in subsets) / len(subsets)
    assert pass_at_k(n, c, k) == pytest.approx(expected)


@given(st.integers(1, 2000), st.data())
def test_agrees_with_the_binomial_form_at_any_size(n: int, data: st.DataObject) -> None:
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    assert pass_at_k(n, c, k) == pytest.approx(1 - math.comb(n - c, k) / math.comb(n, k), abs=1e-9)


def test_edges() -> None:
    assert threepo.pass_at_k(8, 0, 8) == 0.0
    assert threepo.pass_at_k(8, 1, 8) == 1.0
    assert threepo.pass_at_k(8, 3, 1) == pytest.approx(3 / 8)
    for n, c, k in ((4, 5, 1), (4, -1, 1), (4, 2, 0), (4, 2, 5)):
        with pytest.raises(UserError, match="pass_at_k"):
            pass_at_k(n, c, k)
    assert ks_up_to(8) == [1, 2, 4, 8]
    assert ks_up_to(6) == [1, 2, 4, 6]
    assert ks_up_to(1) == [1]


def test_standard_errors_by_hand() -> None:
    """Scores 1, 0.5, 0 of three problems: sd 0.5; p(1-p)/(K-1) is 0.25/1 for the middle one."""
    errors = standard_errors(np.array([[1, 1], [1, 0], [0, 0]], dtype=float))
    assert errors.between == pytest.approx(0.5 / math.sqrt(3))
    assert errors.sampling == pytest.approx(math.sqrt((0.25 / 3) / 3))


def test_standard_errors_tell_the_truth_in_simulation() -> None:
    generator = np.random.default_rng(0)
    problems, samples, trials = 40, 8, 1500
    between, sampling, bootstrap, means, fixed_means = [], [], [], [], []
    fixed = generator.beta(1, 2, size=problems)
    for trial in range(trials):
        drawn = generator.binomial(1, generator.beta(1, 2, size=(problems, 1)), size=(problems, samples)).astype(float)
        means.append(drawn.mean())
        again = generator.binomial(1, fixed[:, None], size=(problems, samples)).astype(float)
        fixed_means.append(again.mean())
        if trial < 60:
            between.append(standard_errors(drawn).between)
            bootstrap.append(standard_errors(drawn, seed=trial).bootstrap)
            sampling.append(standard_errors(again).sampling)
    assert np.mean(between) == pytest.approx(np.std(means), rel=0.08)
    assert np.mean(sampling) == pytest.approx(np.std(fixed_means), rel=0.08)
    # Resampling problems and completions counts the sampling noise twice, so it is somewhat larger.
    assert np.mean(between) < np.mean(bootstrap) < 1.3 * np.mean(between)


def test_a_single_problem_or_completion_has_no_such_error() -> None:
    assert math.isnan(standard_errors(np.array([[1.0, 0.0]])).between)
    assert math.isnan(standard_errors(np.array([[1.0], [0.0]])).sampling)
