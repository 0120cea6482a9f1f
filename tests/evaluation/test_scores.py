"""pass@k, maj@k and their errors: by enumeration, by simulation and by hand; and scores of graded completions."""

import math
from collections import Counter
from dataclasses import asdict
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import threepo
from factories import completion as made
from threepo.errors import UserError
from threepo.evaluation.scores import (
    COLUMNS,
    SUBSETS,
    average_scores,
    ks_up_to,
    majority_at_k,
    metric_names,
    normalised,
    pass_at_k,
    score,
    standard_errors,
    subsets,
    without_blanks,
)
from threepo.files import finite
from threepo.run_folder import completion_row
from threepo.types import Purpose


@given(st.integers(1, 9), st.data())
def test_pass_at_k_equals_the_share_of_all_subsets_with_a_right_one(n: int, data: st.DataObject) -> None:
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    subsets = list(combinations(range(n), k))
    expected = sum(any(i < c for i in subset) for subset in subsets) / len(subsets)
    assert pass_at_k(n, c, k) == pytest.approx(expected)


@given(st.integers(1, 2000), st.data())
def test_pass_at_k_agrees_with_the_binomial_form_at_any_size(n: int, data: st.DataObject) -> None:
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    assert pass_at_k(n, c, k) == pytest.approx(1 - math.comb(n - c, k) / math.comb(n, k), abs=1e-9)


def test_edges_of_pass_at_k() -> None:
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
        if trial < 40:
            errors = standard_errors(drawn, seed=trial)
            between.append(errors.between)
            bootstrap.append(errors.bootstrap)
            sampling.append(standard_errors(again).sampling)
    assert np.mean(between) == pytest.approx(np.std(means), rel=0.08)
    assert np.mean(sampling) == pytest.approx(np.std(fixed_means), rel=0.08)
    # Resampling problems and completions counts the sampling noise twice, so it is somewhat larger.
    assert np.mean(between) < np.mean(bootstrap) < 1.3 * np.mean(between)


def test_a_single_problem_or_completion_has_no_such_error() -> None:
    assert math.isnan(standard_errors(np.array([[1.0, 0.0]])).between)
    assert math.isnan(standard_errors(np.array([[1.0], [0.0]])).sampling)


def test_majority_by_hand() -> None:
    """Pairs of 7, 7, 3 and none, 7 being right: 77, 73, 7-, 73, 7-, 3-. A tie goes to the first: five of six."""
    answers, correct = ["7", "7", "3", None], [True, True, False, False]
    assert majority_at_k(answers, correct, 1) == 2 / 4
    assert majority_at_k(answers, correct, 2) == 5 / 6
    assert majority_at_k(answers, correct, 3) == 4 / 4 - 1 / 4 + 1 / 4  # 773, 77-, 73-, 73-: ties go to the first 7
    assert majority_at_k(answers, correct, 4) == 1
    assert majority_at_k(answers[::-1], correct[::-1], 2) == 1 / 6  # -3, -7, -7, 37, 37, 77


def test_completions_without_an_answer_vote_together_and_wrongly() -> None:
    assert majority_at_k([None, None, "7", "8", "9"], [False, False, True, False, False], 5) == 0
    assert majority_at_k(["5", None, "7", "7", "9"], [False, False, True, True, False], 5) == 1


problems = st.lists(st.sampled_from(["1", "2", "3", None]), min_size=1, max_size=7)


@given(problems, st.data())
def test_majority_equals_the_vote_of_every_subset(answers: list[str | None], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(answers)))
    right = 0
    chosen = list(combinations(answers, k))
    for subset in chosen:
        counts = Counter(subset)  # most_common puts equal counts in the order of their first occurrence
        right += counts.most_common(1)[0][0] == "2"
    assert majority_at_k(answers, [a == "2" for a in answers], k) == pytest.approx(right / len(chosen))


def test_of_many_subsets_some_are_drawn() -> None:
    drawn = subsets(16, 8)
    assert drawn.shape == (SUBSETS, 8)
    assert (np.diff(drawn) > 0).all(), "each in ascending order, without repetition"
    assert np.array_equal(drawn, subsets.__wrapped__(16, 8)), "always the same"
    assert len(subsets(8, 4)) == 70, "all of them"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("27.0", "27"),
        (" 27 ", "$27$"),
        ("1,234", "1234"),
        (r"\dfrac{1}{2}", r"\frac{1}{2}"),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}{2})"),
        (r"5\text{ cm}.", "5 cm"),
        (r"2\,\pi", r"2\pi"),
        ("3 1  2", "3 1 2"),
    ],
)
def test_spellings_that_make_no_difference(one: str, other: str) -> None:
    assert normalised(one) == normalised(other)


@pytest.mark.parametrize(
    ("one", "other"), [("1 2", "12"), ("(1,234)", "(1234)"), ("27.5", "27"), ("-3", "3"), (r"\leftarrow", r"arrow")]
)
def test_spellings_that_make_a_difference(one: str, other: str) -> None:
    assert normalised(one) != normalised(other)


def row(
    answer: str | None = "x", *, right: bool = False, status: str = "", draw: int | None = None, finish: str = "stop"
) -> dict[str, object]:
    """A completion."""
    judged = status or ("right" if right else "wrong")
    return dict(zip(COLUMNS, (right, judged, answer, finish, draw), strict=True))


def test_shares_of_completions_by_hand() -> None:
    result = score([row(finish="length"), *[row(status="error")] * 2, row(status="no_answer")], 4)
    assert (result.cut_share, result.error_share, result.no_answer_share) == (0.25, 0.5, 0.25)
    assert (result.metrics()["eval/cut_share"], result.metrics()["eval/no_answer_share"]) == (0.25, 0.25)
    assert result.metrics()["eval/error_share"] == 0.5


def test_scores_by_hand() -> None:
    rows = [
        made("a", 0, reward=1),
        made("a", 1),
        made("b", 0),
        made("b", 1, status="no_answer"),
    ]
    result = score([completion_row(0, completion) for completion in rows], samples=2, votes=normalised)
    assert (result.problems, result.samples) == (2, 2)
    assert result.pass_at == {1: 0.25, 2: 0.5}
    assert result.no_answer_share == 0.25
    assert result.metrics()["eval/pass_at_2"] == 0.5
    assert list(result.metrics()) == metric_names(2)


def test_every_k_is_scored_and_powers_of_two_are_logged() -> None:
    rows = [row(str(i), right=i == 0) for i in range(6)]
    result = score(rows, samples=6, votes=normalised)
    assert result.pass_at == pytest.approx({k: k / 6 for k in range(1, 7)})
    assert [name for name in result.metrics() if "pass_at" in name] == [f"eval/pass_at_{k}" for k in (1, 2, 4, 6)]
    assert list(result.majority_at) == [1, 2, 4, 6]
    assert result.majority_at[6] == 1, "of six different answers the first wins"


def test_majority_needs_answers() -> None:
    """A user's own function says right or wrong, and reports no answer; a verifier that found none says so."""
    assert score([row(None), row(None)], 2, votes=normalised).majority_at == {}
    assert score([row(None, right=True), row(None)], 2, votes=normalised).majority_at == {}
    assert score([row(None, status="no_answer")] * 2, 2, votes=normalised).majority_at == {1: 0, 2: 0}
    assert score([row(right=True)] * 2, 2).majority_at == {}


def test_answers_that_are_compared_exactly_vote_exactly() -> None:
    """0379 is the right way to sort 9730, and 379 is not."""
    rows = [row("379"), *[row("0379", right=True), row(" 0379", right=True)]]
    assert score(rows, 3, votes=without_blanks).majority_at[3] == 1
    assert score(rows, 3, votes=normalised).majority_at[3] == 0, "as numbers all are equal"


def test_draws_are_scored_apart_too() -> None:
    rows = [
        row(right=True, draw=Purpose.EVALUATION + 2),
        row(draw=Purpose.EVALUATION + 5),
        row(right=True, draw=Purpose.EVALUATION + 2),
        row(right=True, draw=Purpose.EVALUATION + 5),
    ]
    result = score(rows, samples=2, votes=normalised)
    assert result.pass_at == {1: 0.75, 2: 1.0}
    assert result.pass_at_1_by_draw == {2: 1.0, 5: 0.5}


def test_the_average_by_hand() -> None:
    """Scores 0.5 and 1 of two sets weigh the same, however many problems each has."""
    half = score([row(right=True), row(), row(right=True), row()], 2, votes=normalised)
    whole = score([row(right=True) for _ in range(6) for _ in range(2)], 2, votes=normalised)
    result = average_scores([half, whole])
    assert result["pass_at"] == {1: 0.75, 2: 1.0}
    assert result["majority_at"] == {1: 0.75, 2: 1.0}
    sampling = math.sqrt((0.25 + 0.25) / 2 / 2)  # of the first set: p (1 - p) / (K - 1) is 0.25 for both problems
    assert result["standard_errors_of_pass_at_1"]["sampling"] == pytest.approx(sampling / 2)
    assert average_scores([half, score([row(None)] * 2, 2, votes=normalised)])["majority_at"] == {}


def test_the_standard_error_of_one_problem_is_null_in_json() -> None:
    scores = score([row()], 1)
    assert finite(asdict(scores))["standard_errors_of_pass_at_1"]["between"] is None
    assert finite(average_scores([scores]))["standard_errors_of_pass_at_1"]["between"] is None
