"""Scores of graded completions, and their average over sets of problems."""

import math
from dataclasses import asdict

import pytest

from factories import completion as made
from threepo.evaluation.scores import COLUMNS, average_scores, score
from threepo.files import finite
from threepo.run_folder import completion_row


def row(
    answer: str | None = "x", *, right: bool = False, status: str = "", draw: int | None = None
) -> dict[str, object]:
    """A completion that was not cut."""
    judged = status or ("right" if right else "wrong")
    return dict(zip(COLUMNS, (right, judged, answer, "stop", draw), strict=True))


def test_scores_by_hand() -> None:
    rows = [
        made("a", 0, reward=1),
        made("a", 1),
        made("b", 0),
        made("b", 1, status="no_answer"),
    ]
    result = score([completion_row(0, completion) for completion in rows], samples=2)
    assert (result.problems, result.samples) == (2, 2)
    assert result.pass_at == {1: 0.25, 2: 0.5}
    assert result.no_answer_share == 0.25
    assert result.metrics()["eval/pass_at_2"] == 0.5


def test_every_k_is_scored_and_powers_of_two_are_logged() -> None:
    rows = [row(str(i), right=i == 0) for i in range(6)]
    result = score(rows, samples=6)
    assert result.pass_at == pytest.approx({k: k / 6 for k in range(1, 7)})
    assert [name for name in result.metrics() if "pass_at" in name] == [f"eval/pass_at_{k}" for k in (1, 2, 4, 6)]
    assert list(result.majority_at) == [1, 2, 4, 6]
    assert result.majority_at[6] == 1, "of six different answers the first wins"


def test_majority_needs_answers() -> None:
    """A user's own function says right or wrong, and reports no answer; a verifier that found none says so."""
    assert score([row(None), row(None)], 2).majority_at == {}
    assert score([row(None, right=True), row(None)], 2).majority_at == {}
    assert score([row(None, status="no_answer")] * 2, 2).majority_at == {1: 0, 2: 0}
    assert score([row(right=True)] * 2, 2, votes=False).majority_at == {}


def test_draws_are_scored_apart_too() -> None:
    rows = [
        row(right=True, draw=9),
        row(draw=12),
        row(right=True, draw=9),
        row(right=True, draw=12),
    ]
    result = score(rows, samples=2)
    assert result.pass_at == {1: 0.75, 2: 1.0}
    assert result.pass_at_1_by_draw == {0: 1.0, 1: 0.5}


def test_the_average_by_hand() -> None:
    """Scores 0.5 and 1 of two sets weigh the same, however many problems each has."""
    half = score([row(right=True), row(), row(right=True), row()], 2)
    whole = score([row(right=True) for _ in range(6) for _ in range(2)], 2)
    result = average_scores([half, whole])
    assert result["pass_at"] == {1: 0.75, 2: 1.0}
    assert result["majority_at"] == {1: 0.75, 2: 1.0}
    sampling = math.sqrt((0.25 + 0.25) / 2 / 2)  # of the first set: p (1 - p) / (K - 1) is 0.25 for both problems
    assert result["standard_errors_of_pass_at_1"]["sampling"] == pytest.approx(sampling / 2)
    assert average_scores([half, score([row(None)] * 2, 2)])["majority_at"] == {}


def test_the_standard_error_of_one_problem_is_null_in_json() -> None:
    scores = score([row()], 1)
    assert finite(asdict(scores))["standard_errors_of_pass_at_1"]["between"] is None
    assert finite(average_scores([scores]))["standard_errors_of_pass_at_1"]["between"] is None
