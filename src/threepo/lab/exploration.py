"""Did a run explore more than its baseline? From saved completions, paired by step and problem (docs/analysis.md).

    threepo explore BASELINE RUN... [--output FOLDER]

A group is rescued if the run has a right completion where the baseline has none, and lost if it is the other way round
(the paper's "Does 3PO really explore more?"). Groups of unequal size are compared at the smaller size: each figure of
the bigger group is its mean over all subsets of that size.
"""

import math
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from threepo.errors import UserError
from threepo.evaluation.scores import ks_up_to, pass_at_k
from threepo.files import finite
from threepo.lab.completions import Groups, PromptGroup, read_completions
from threepo.lab.statistics import count_chances, ratio_intervals, win_loss_tie

BAD = ("no_answer", "incorrect", "wrong_answer")
"""Kinds of completions that a run should produce less of: without an answer; not right; with an answer that is not
right. Whether the paper's "incorrect" counts completions without an answer is not said, so both are given."""
PHASES = ("all", "early", "late")
Terms = dict[str, tuple[float, float]]
"""What one pair of groups adds to each figure: above and below the line. NaN below: the figure is the sum above."""


def explore(baseline: Path, runs: Sequence[Path], *, verdict: str = "", above: float | None = None) -> dict[str, Any]:
    """Compare each run with the baseline, ready for JSON; docs/analysis.md explains the figures.

    `verdict` and `above` say what is right (`read_completions`). `UserError` if the runs cannot be paired.
    """
    names = [path.name for path in runs]
    if len({str(baseline), *names}) <= len(names):
        names = list(map(str, runs))
    first = read_completions(baseline, verdict, above)
    found = {
        name: analyse(baseline, path, first, read_completions(path, verdict, above))
        for name, path in zip(names, runs, strict=True)
    }
    return {"baseline": str(baseline), "runs": found}


def analyse(baseline: Path, run: Path, first: Groups, second: Groups) -> dict[str, Any]:
    """All figures of a run compared with the baseline; `UserError` if they cannot be paired."""
    steps = [{step for step, _ in groups} for groups in (first, second)]
    common = sorted(steps[0] & steps[1])
    pairs = _pairs(baseline, run, first, second)
    terms = [(step, terms_of(a, b)) for step, a, b in pairs]
    third = max(1, round(len(common) / 3))
    phases = dict(zip(PHASES, (common, common[:third], common[-third:]), strict=True))
    sizes = [(len(a.right), len(b.right)) for _, a, b in pairs]
    return {
        "pairs": len(pairs),
        "steps": len(common),
        "steps_in_one_only": {"baseline": len(steps[0] - steps[1]), "run": len(steps[1] - steps[0])},
        "group_sizes": {
            "baseline": sorted({size for size, _ in sizes}),
            "run": sorted({size for _, size in sizes}),
            "compared": sorted(set(map(min, sizes))),
        },
        "phases": {
            name: figures([t for step, t in terms if chosen[0] <= step <= chosen[-1]])
            for name, chosen in phases.items()
        },
        "curves": _curves(terms),
    }


def _pairs(baseline: Path, run: Path, first: Groups, second: Groups) -> list[tuple[int, PromptGroup, PromptGroup]]:
    """Common steps with the baseline's group and the run's, by step; `UserError` if their problems are not the same."""
    common = {step for step, _ in first} & {step for step, _ in second}
    if not common:
        raise UserError(f"{baseline} and {run}: have no step in common, so nothing can be paired")
    if single := {key for key in first.keys() ^ second.keys() if key[0] in common}:
        step, problem = min(single)
        fix = "train both on the same prompts in the same order (data.seed), without dynamic sampling or overlap.stream"
        raise UserError(
            f"{baseline} and {run}: {len(single)} problems are in only one of them at their step, such as "
            f"{problem[:60]!r} at step {step}, so rollouts cannot be paired; {fix}"
        )
    return [(key[0], first[key], second[key]) for key in sorted(first) if key[0] in common]


def terms_of(base: PromptGroup, run: PromptGroup) -> Terms:
    """All figures of a pair of groups."""
    groups, size = (base, run), min(len(base.right), len(run.right))
    chances = [count_chances(len(group.right), sum(group.right), size) for group in groups]
    none, everything = ([float(found[i]) for found in chances] for i in (0, -1))
    rescued, lost = none[0] * (1 - none[1]), (1 - none[0]) * none[1]
    terms = {"rescued": _total(rescued), "lost": _total(lost), "rescued_minus_lost": _total(rescued - lost)}
    terms |= _both("all_wrong", none) | _both("all_right", everything)
    found = [distinct_answers(group.answers, size) if group.answers else math.nan for group in groups]
    terms |= _both("distinct_answers", found) | _both("text_distance", [group.text_distance for group in groups])
    for k in ks_up_to(size):
        terms |= _both(f"pass_at_{k}", [pass_at_k(len(group.right), sum(group.right), k) for group in groups])
    for kind in BAD:
        marked = [_bad(group, kind) for group in groups]
        terms |= _both(kind, [sum(bad) / len(bad) if bad else math.nan for bad in marked])
        wins = losses = ties = math.nan
        if all(marked):
            wins, losses, ties = win_loss_tie(*(count_chances(len(bad), sum(bad), size) for bad in marked))
        terms |= {f"{kind}/wins": _total(wins), f"{kind}/losses": _total(losses), f"{kind}/ties": _total(ties)}
        terms[f"{kind}/win_rate"] = wins, wins + losses
    return terms


def _total(value: float) -> tuple[float, float]:
    """A pair's part of a sum over pairs."""
    return value, math.nan


def _both(stem: str, values: Sequence[float]) -> Terms:
    """A pair's part of the means of both sides, and of their difference, over the pairs where these are known."""
    named = zip(("baseline", "run", "difference"), (*values, values[1] - values[0]), strict=True)
    return {f"{stem}/{name}": (0.0, 0.0) if math.isnan(value) else (value, 1.0) for name, value in named}


def distinct_answers(answers: Sequence[str | None], k: int) -> float:
    """Mean number of distinct answers over all subsets of k completions; None is no answer, and not counted."""
    known = [answer for answer in answers if answer is not None]
    return sum(pass_at_k(len(answers), known.count(answer), k) for answer in set(known))


def _bad(group: PromptGroup, kind: str) -> list[bool]:
    """Returns for each completion whether it is bad in this sense; empty if that was not recorded."""
    if kind == "incorrect":
        return [not right for right in group.right]
    if group.no_answer is None:
        return []
    if kind == "no_answer":
        return list(group.no_answer)
    return [not (right or none) for right, none in zip(group.right, group.no_answer, strict=True)]


def figures(terms: Sequence[Terms]) -> dict[str, Any]:
    """Value and 95 % interval of every figure over the pairs of a phase."""
    shared = [name for name in terms[0] if all(name in t for t in terms)]  # k up to the smallest
    above, below = np.array([[t[name] for t in terms] for name in shared]).transpose(2, 0, 1)
    intervals = zip(shared, ratio_intervals(above, below), strict=True)
    return finite({name: {"value": i.value, "interval": [i.low, i.high]} for name, i in intervals})  # type: ignore[no-any-return]


def _curves(terms: Sequence[tuple[int, Terms]]) -> dict[str, list[float]]:
    """Curves over common steps: groups rescued and lost so far, and shares of groups without a signal."""
    by_step = {step: [t for _, t in found] for step, found in groupby(terms, key=itemgetter(0))}
    curves: dict[str, list[float]] = {"step": list(by_step)}
    for name in ("rescued", "lost"):
        curves[name] = np.cumsum([sum(t[name][0] for t in found) for found in by_step.values()]).tolist()
    for name in (f"{end}/{side}" for end in ("all_wrong", "all_right") for side in ("baseline", "run")):
        curves[name] = [float(np.mean([t[name][0] for t in found])) for found in by_step.values()]
    return curves
