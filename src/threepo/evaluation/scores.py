"""Scores of graded completions: unbiased pass@k, maj@k and standard errors (method.md 6), with their table."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import combinations
from statistics import fmean
from typing import Any

import numpy as np
from rich.console import Group

from threepo.errors import UserError
from threepo.evaluation.statistics import standard_error
from threepo.evaluation.tables import percent, table
from threepo.rewards.quantities import number, split_unit
from threepo.rewards.spelling import spelling
from threepo.types import Purpose

BOOTSTRAP_SAMPLES = 2000
SUBSETS = 100
"""maj@k takes all subsets of size k if there are at most this many, else this many random ones."""
COLUMNS = ("correct", "status", "parsed_answer", "finish_reason", "draw_index")
"""Columns of `run_folder.completion_row` that scores depend on."""
SHARES = ("no_answer_share", "cut_share", "error_share")
"""Scores that training logs as they are."""


@dataclass(frozen=True)
class StandardErrors:
    """Standard errors of a mean pass@1 over P problems with K completions each."""

    between: float
    """Error over problems as a sample of all problems: sd of the problems' scores (ddof 1) / sqrt(P). It includes the
    sampling noise of the completions."""
    sampling: float
    """Error if K completions of the same problems were sampled again: sqrt(mean_p[p (1 - p) / (K - 1)] / P)."""
    bootstrap: float
    """Standard deviation under resampling of problems and then of completions within them. It counts sampling noise
    twice, because the resampled scores include it already: too large, by up to a third for small K."""


@dataclass(frozen=True)
class Scores:
    """Scores of one policy on one set of problems, as summary.json has them."""

    problems: int
    samples: int
    """Completions per problem, K."""
    pass_at: dict[int, float]
    """Mean over problems of unbiased pass@k, for every k from 1 to K."""
    majority_at: dict[int, float]
    """Mean over problems of maj@k, for k = 1, 2, 4, ... and K; empty where completions have no answers to count."""
    pass_at_1_by_draw: dict[int, float]
    """pass@1 by the number of the posterior's draw; empty at the mean."""
    no_answer_share: float
    error_share: float
    """Completions that the verifier failed to judge, or whose environment failed; they count as wrong."""
    cut_share: float
    """Completions cut at max_new_tokens."""
    standard_errors_of_pass_at_1: StandardErrors

    def metrics(self) -> dict[str, float]:
        """Scores by the names under which training logs them."""
        return {
            **{f"eval/pass_at_{k}": self.pass_at[k] for k in ks_up_to(self.samples)},
            **{f"eval/se_{name}": error for name, error in asdict(self.standard_errors_of_pass_at_1).items()},
            **{f"eval/{share}": getattr(self, share) for share in SHARES},
        }


def metric_names(samples: int) -> list[str]:
    """The names of `Scores.metrics`."""
    passes = [f"pass_at_{k}" for k in ks_up_to(samples)]
    errors = [f"se_{name}" for name in StandardErrors.__annotations__]
    return [f"eval/{name}" for name in (*passes, *errors, *SHARES)]


def score(rows: Sequence[Mapping[str, Any]], samples: int, *, votes: Callable[[str], str] | None = None) -> Scores:
    """Scores of `samples` completions of each problem, problem-major.

    `votes`: answers for which it returns the same text are one answer in maj@k; None: answers cannot be counted.
    """
    correct = np.array([row["correct"] for row in rows], dtype=float).reshape(-1, samples)
    right = [int(count) for count in correct.sum(axis=1)]
    draws = sorted({row["draw_index"] for row in rows} - {None})
    return Scores(
        problems=len(right),
        samples=samples,
        pass_at={k: sum(pass_at_k(samples, c, k) for c in right) / len(right) for k in range(1, samples + 1)},
        majority_at=_majority(rows, samples, votes) if votes else {},
        pass_at_1_by_draw={
            draw - Purpose.EVALUATION: fmean(row["correct"] for row in rows if row["draw_index"] == draw)
            for draw in draws
        },
        no_answer_share=fmean(row["status"] == "no_answer" for row in rows),
        error_share=fmean(row["status"] == "error" for row in rows),
        cut_share=fmean(row["finish_reason"] == "length" for row in rows),
        standard_errors_of_pass_at_1=standard_errors(correct),
    )


def average_scores(sets: Sequence[Scores]) -> dict[str, Any]:
    """The unweighted mean over n sets of problems. Its standard errors e of independent sets: sqrt(sum e^2) / n."""
    first = sets[0]
    errors = [asdict(scores.standard_errors_of_pass_at_1) for scores in sets]
    majority = first.majority_at if all(scores.majority_at for scores in sets) else {}
    return {
        "sets": len(sets),
        "pass_at": {k: fmean(scores.pass_at[k] for scores in sets) for k in first.pass_at},
        "majority_at": {k: fmean(scores.majority_at[k] for scores in sets) for k in majority},
        "standard_errors_of_pass_at_1": {
            name: math.sqrt(math.fsum(error[name] ** 2 for error in errors)) / len(sets) for name in errors[0]
        },
    }


def ks_up_to(samples: int) -> list[int]:
    """The k that are reported for K samples: 1, 2, 4, ..., and K itself."""
    return sorted({*(2**i for i in range(samples.bit_length())), samples})


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that at least one of k completions is right, estimated without bias from c right ones among n.

    1 - C(n-c, k) / C(n, k) (Chen et al., 2021), in the product form that does not overflow. Needs 0 <= c <= n and
    1 <= k <= n; `UserError` otherwise.

    Examples:
        >>> threepo.pass_at_k(n=4, c=1, k=2)
        0.5
    """
    if not 0 <= c <= n or not 1 <= k <= n:
        raise UserError(f"pass_at_k(n={n}, c={c}, k={k}): needs 0 <= c <= n and 1 <= k <= n")
    if n - c < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))


def standard_errors(correct: np.ndarray, seed: int = 0) -> StandardErrors:
    """The three standard errors for a [P, K] matrix of right (1) and wrong (0). With P or K = 1 some are NaN."""
    problems, samples = correct.shape
    scores = correct.mean(axis=1)
    within = float(np.mean(scores * (1 - scores))) / (samples - 1) if samples > 1 else math.nan
    generator = np.random.default_rng(seed)
    means: list[np.ndarray] = []
    each = max(1, 1_000_000 // problems)  # resamples at a time, in bounded memory
    for first in range(0, BOOTSTRAP_SAMPLES, each):
        drawn = generator.integers(problems, size=(min(each, BOOTSTRAP_SAMPLES - first), problems))
        means.append(generator.binomial(samples, scores[drawn]).mean(axis=1) / samples)
    bootstrap = float(np.std(np.concatenate(means), ddof=1))
    return StandardErrors(standard_error(scores), math.sqrt(within / problems), bootstrap)


def _majority(rows: Sequence[Mapping[str, Any]], samples: int, same: Callable[[str], str]) -> dict[int, float]:
    """maj@k by k; empty where the verifier reports no answers, as a user's own function does not."""
    if any(row["parsed_answer"] is None for row in rows if row["status"] in ("right", "wrong")):
        return {}
    answers = [None if row["parsed_answer"] is None else same(row["parsed_answer"]) for row in rows]
    correct = [row["correct"] for row in rows]
    problems = [slice(i, i + samples) for i in range(0, len(rows), samples)]
    return {k: fmean(majority_at_k(answers[p], correct[p], k) for p in problems) for k in ks_up_to(samples)}


def majority_at_k(answers: Sequence[str | None], correct: Sequence[bool], k: int) -> float:
    """Share of subsets of k of one problem's completions whose most frequent answer is right.

    A tie goes to the answer that occurs first; all completions without an answer count as one wrong answer. Of C(K, k)
    subsets all are taken, or `SUBSETS` random ones.
    """
    classes = ["" if answer is None else answer for answer in answers]
    chosen = subsets(len(classes), k)
    votes = np.array([classes.index(name) for name in classes])[chosen]  # [subsets, k]
    counts = (votes[:, :, None] == votes[:, None, :]).sum(axis=2)  # for every vote, how many agree with it
    elected = chosen[np.arange(len(chosen)), counts.argmax(axis=1)]  # argmax takes the first of equals
    right = np.array([name != "" and good for name, good in zip(classes, correct, strict=True)])
    return float(right[elected].mean())


def without_blanks(answer: str) -> str:
    """A text that is equal for answers that differ in blanks at most."""
    return " ".join(answer.split())


def normalised(answer: str) -> str:
    r"""A text that is equal for answers of equal spelling, number and unit: 27.0 and 27, 1/2 and \frac{1}{2}."""
    body, unit = split_unit(spelling(answer))
    read = number(body)
    return f"{read.value if read else body.replace(', ', ',')} {unit}".strip()


@cache
def subsets(samples: int, k: int) -> np.ndarray:
    """Subsets of size k of the numbers 0 .. samples - 1, each ascending: [subsets, k], for reading only."""
    if math.comb(samples, k) <= SUBSETS:
        return np.array(list(combinations(range(samples), k)))
    generator = np.random.default_rng([0, samples, k])
    return np.array([np.sort(generator.choice(samples, size=k, replace=False)) for _ in range(SUBSETS)])


def evaluation_table(summary: Mapping[str, Any]) -> Group:
    """A table of summary.json: a column for each set of problems, and their average."""
    sets: dict[str, Mapping[str, Any]] = dict(summary["benchmarks"])
    columns = sets | ({"average": summary["average"]} if len(sets) > 1 else {})
    samples = int(summary["config"]["eval"]["samples"])
    ks = [str(k) for k in ks_up_to(samples)]
    problems = {name: str(scores["problems"]) for name, scores in sets.items()}
    shares = {"no answer": "no_answer_share", "not judged": "error_share", "cut": "cut_share"}
    lines = [f"{summary['model']}: pass@k and maj@k in per cent, {samples} completions a problem"]
    if selection := summary.get("selection"):
        best = ", ".join(map(str, selection["best"]))
        lines.append(
            f"draws {best}: the best of {len(selection['scores'])} on {selection['problems']} problems of "
            f"{selection['source']}"
        )
    labels = {
        "pass_at": {f"pass@{k}": k for k in ks},
        "standard_errors_of_pass_at_1": {f"se {name}": name for name in StandardErrors.__annotations__},
        "majority_at": {f"maj@{k}": k for k in ks[1:]},
    }
    sections = [[{"": "problems", **problems}]]
    for figures, rows in labels.items():
        by_set = {name: scores[figures] for name, scores in columns.items()}
        if any(by_set.values()):
            sections.append(_section(by_set, rows))
    return Group(*lines, table("", *sections, _section(columns, shares), columns=("", *columns)))


def _section(columns: Mapping[str, Mapping[str, Any]], rows: Mapping[str, str]) -> list[dict[str, str]]:
    """Rows in per cent: `columns` has the figures of each column, `rows` the figure of each label."""
    return [
        {"": label, **{name: percent(figures.get(key)) for name, figures in columns.items()}}
        for label, key in rows.items()
    ]
