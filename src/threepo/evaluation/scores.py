"""From graded completions to the scores that are reported (method.md 6)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from threepo.evaluation.majority import majority_at_k
from threepo.evaluation.pass_at_k import StandardErrors, average_error, ks_up_to, mean_pass_at_k, standard_errors

Row = Mapping[str, Any]
"""A graded completion as `run_folder.completion_row` has it."""
COLUMNS = ("correct", "status", "parsed_answer", "finish_reason", "draw_index")
"""Columns of a row that scores depend on."""


@dataclass(frozen=True)
class Scores:
    """Scores of one policy on one set of problems."""

    problems: int
    samples: int
    """Completions per problem, K."""
    pass_at: dict[int, float]
    """Mean over problems of unbiased pass@k, for every k from 1 to K."""
    majority_at: dict[int, float]
    """Mean over problems of maj@k, for k = 1, 2, 4, ... and K; empty where completions have no answers to count."""
    errors: StandardErrors
    """Of pass@1."""
    pass_at_1_by_draw: dict[int, float]
    """By the number of the posterior's draw, from 0; empty at the mean."""
    no_answer_share: float
    error_share: float
    """Completions that the verifier failed to judge; they count as wrong."""
    cut_share: float
    """Completions cut at max_new_tokens."""

    def metrics(self) -> dict[str, float]:
        """As logged while training."""
        return {
            **{f"eval/pass_at_{k}": self.pass_at[k] for k in ks_up_to(self.samples)},
            "eval/se_between": self.errors.between,
            "eval/se_sampling": self.errors.sampling,
            "eval/se_bootstrap": self.errors.bootstrap,
            "eval/no_answer_share": self.no_answer_share,
            "eval/cut_share": self.cut_share,
        }


def score(rows: Sequence[Row], samples: int, *, votes: bool = True) -> Scores:
    """Scores of `samples` completions of each problem, problem-major; `votes`: their answers can be counted."""
    correct = np.array([row["correct"] for row in rows], dtype=float).reshape(-1, samples)
    right = [int(count) for count in correct.sum(axis=1)]
    draws = sorted({row["draw_index"] for row in rows} - {None})
    return Scores(
        problems=len(correct),
        samples=samples,
        pass_at={k: mean_pass_at_k(right, samples, k) for k in range(1, samples + 1)},
        majority_at=_majority(rows, samples) if votes else {},
        errors=standard_errors(correct),
        pass_at_1_by_draw={
            number: _mean([row["correct"] for row in rows if row["draw_index"] == draw])
            for number, draw in enumerate(draws)
        },
        no_answer_share=_mean([row["status"] == "no_answer" for row in rows]),
        error_share=_mean([row["status"] == "error" for row in rows]),
        cut_share=_mean([row["finish_reason"] == "length" for row in rows]),
    )


def _majority(rows: Sequence[Row], samples: int) -> dict[int, float]:
    """maj@k by k; empty where the verifier reports no answers, as a user's own function does not."""
    answers, correct = [row["parsed_answer"] for row in rows], [row["correct"] for row in rows]
    judged = [row for row in rows if row["status"] in ("right", "wrong")]
    unread = [row for row in judged if row["parsed_answer"] is None]
    if any(row["correct"] for row in unread) or (judged and len(unread) == len(judged)):
        return {}
    problems = [slice(i, i + samples) for i in range(0, len(rows), samples)]
    return {k: _mean([majority_at_k(answers[p], correct[p], k) for p in problems]) for k in ks_up_to(samples)}


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def average_scores(sets: Sequence[Scores]) -> dict[str, Any]:
    """The unweighted mean over sets of problems, with its standard errors, ready for JSON."""
    first = sets[0]
    errors = [asdict(scores.errors) for scores in sets]
    majority = first.majority_at if all(scores.majority_at for scores in sets) else {}
    return {
        "sets": len(sets),
        "pass_at": _finite({k: _mean([scores.pass_at[k] for scores in sets]) for k in first.pass_at}),
        "majority_at": _finite({k: _mean([scores.majority_at[k] for scores in sets]) for k in majority}),
        "standard_errors_of_pass_at_1": _finite({key: average_error([e[key] for e in errors]) for key in errors[0]}),
    }


def as_json(scores: Scores) -> dict[str, Any]:
    """The scores ready for JSON."""
    values = asdict(scores)
    values["standard_errors_of_pass_at_1"] = values.pop("errors")
    return {key: _finite(value) if isinstance(value, Mapping) else value for key, value in values.items()}


def _finite(values: Mapping[Any, float]) -> dict[str, float | None]:
    """JSON has no NaN, which is the standard error of one problem or completion: it becomes null."""
    return {str(key): value if math.isfinite(value) else None for key, value in values.items()}
