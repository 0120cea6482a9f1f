"""Scores of graded completions, and their average over sets of problems."""

import math

import pytest

from factories import completion
from threepo.evaluation.pass_at_k import average_error
from threepo.evaluation.scores import Mark, as_json, average_scores, score


def mark(answer: str | None = "x", *, right: bool = False, status: str = "", draw: int | None = None) -> Mark:
    """A mark of a completion that was not cut."""
    judged = status or ("right" if right else "wrong")
    return Mark(right, judged, answer, "stop", draw)  # type: ignore[arg-type]


def test_scores_by_hand() -> None:
    rows = [
        completion("a", 0, reward=1),
        completion("a", 1),
        completion("b", 0),
        completion("b", 1, status="no_answer"),
    ]
    result = score([Mark.of(row) for row in rows], samples=2)
    assert (result.problems, result.samples) == (2, 2)
    assert result.pass_at == {1: 0.25, 2: 0.5}
    assert result.no_answer_share == 0.25
    assert result.metrics()["eval/pass_at_2"] == 0.5


def test_every_k_is_scored_and_powers_of_two_are_logged() -> None:
    marks = [mark(str(i), right=i == 0) for i in range(6)]
    result = score(marks, samples=6)
    assert result.pass_at == pytest.approx({k: k / 6 for k in range(1, 7)})
    assert [name for name in result.metrics() if "pass_at" in name] == [f"eval/pass_at_{k}" for k in (1, 2, 4, 6)]
    assert list(result.majority_at) == [1, 2, 4, 6]
    assert result.majority_at[6] == 1, "of six different answers the first wins"


def test_majority_needs_answers() -> None:
    """A user's own function says right or wrong, and reports no answer; a verifier that found none says so."""
    assert score([mark(None), mark(None)], 2).majority_at == {}
    assert score([mark(None, right=True), mark(None)], 2).majority_at == {}
    assert score([mark(None, status="no_answer")] * 2, 2).majority_at == {1: 0, 2: 0}
    assert score([mark(right=True)] * 2, 2, votes=False).majority_at == {}


def test_draws_are_scored_apart_too() -> None:
    marks = [
        mark(right=True, draw=9),
        mark(draw=12),
        mark(right=True, draw=9),
        mark(right=True, draw=12),
    ]
    result = score(marks, samples=2)
    assert result.pass_at == {1: 0.75, 2: 1.0}
    assert result.pass_at_1_by_draw == {0: 1.0, 1: 0.5}


def test_the_average_by_hand() -> None:
    """Scores 0.5 and 1 of two sets weigh the same, however many problems each has; errors 3 and 4 give 5 / 2."""
    assert average_error([3, 4]) == pytest.approx(2.5)
    half = score([mark(right=True), mark(), mark(right=True), mark()], 2)
    whole = score([mark(right=True) for _ in range(6) for _ in range(2)], 2)
    result = average_scores([half, whole])
    assert result["pass_at"] == {"1": 0.75, "2": 1.0}
    assert result["majority_at"] == {"1": 0.75, "2": 1.0}
    sampling = math.sqrt((0.25 + 0.25) / 2 / 2)  # of the first set: p (1 - p) / (K - 1) is 0.25 for both problems
    assert result["standard_errors_of_pass_at_1"]["sampling"] == pytest.approx(sampling / 2)
    assert average_scores([half, score([mark(None)] * 2, 2)])["majority_at"] == {}


def test_what_json_does_not_know_is_null() -> None:
    assert as_json(score([mark()], 1))["standard_errors_of_pass_at_1"]["between"] is None
