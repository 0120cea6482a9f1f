"""maj@k by hand, by brute force, and what counts as the same answer."""

from collections import Counter
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from threepo.evaluation.scores import SUBSETS, majority_at_k, normalised, subsets


def test_by_hand() -> None:
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
def test_equals_the_vote_of_every_subset(answers: list[str | None], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(answers)))
    right = 0
    chosen = list(combinations(answers, k))
    for subset in chosen:
        counts = Counter(subset)  # most_common puts equal counts in the order of their first occurrence
        right += counts.most_common(1)[0][0] == "2"
    assert majority_at_k(answers, [a == "2" for a in answers], k) == pytest.approx(right / len(chosen))


@given(problems)
def test_a_single_vote_is_pass_at_1(answers: list[str | None]) -> None:
    correct = [answer == "2" for answer in answers]
    assert majority_at_k(answers, correct, 1) == pytest.approx(np.mean(correct))


def test_many_subsets_are_drawn_by_a_seed() -> None:
    drawn = subsets(16, 8, seed=0)
    assert drawn.shape == (SUBSETS, 8)
    assert (np.diff(drawn) > 0).all(), "each in ascending order, without repetition"
    assert np.array_equal(drawn, subsets(16, 8, seed=0))
    assert not np.array_equal(drawn, subsets(16, 8, seed=1))
    assert len(subsets(8, 4, seed=0)) == 70, "all of them"


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
def test_and_those_that_make_one(one: str, other: str) -> None:
    assert normalised(one) != normalised(other)
