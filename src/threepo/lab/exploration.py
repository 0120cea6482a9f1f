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
from threepo.lab.completions import Groups, PairMeans, PromptGroup, pair_means, read_completions
from threepo.lab.statistics import count_chances, ratio_intervals, win_loss_tie

MOST_K = 256
SUMS = ("rescued", "lost", "rescued_minus_lost")
"""Figures that are sums over pairs; most others are means over the pairs that have them."""
BAD = ("no_answer", "incorrect", "wrong_answer")
"""Kinds of completions that a run should produce less of: without an answer; not right; with an answer that is not
right. Whether the paper's "incorrect" counts completions without an answer is not said, so both are given."""
SECOND = ("text_distance", "two_answers", "one_right")
"""Figures of what a second completion adds to a first one."""
PHASES = ("all", "early", "late")
Terms = dict[str, float]
"""Figures of one pair of groups; NaN where they are not known."""


def explore(baseline: Path, runs: Sequence[Path], *, verdict: str = "", above: float | None = None) -> dict[str, Any]:
    """Compare each run with the baseline, ready for JSON; docs/analysis.md explains the figures.

    `verdict` and `above` say what is right (`read_completions`). `UserError` if the runs cannot be paired.
    """
    names = [path.name for path in runs] if len({path.name for path in runs}) == len(runs) else list(map(str, runs))
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
    sizes = [sorted({len(group.right) for group in side}) for side in ([p[1] for p in pairs], [p[2] for p in pairs])]
    return {
        "pairs": len(pairs),
        "steps": len(common),
        "steps_in_one_only": {"baseline": len(steps[0] - steps[1]), "run": len(steps[1] - steps[0])},
        "group_sizes": {"baseline": sizes[0], "run": sizes[1], "compared": sorted({t["size"] for _, t in terms})},
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
        fix = "train both on the same prompts in the same order (data.seed), without dynamic sampling"
        raise UserError(
            f"{baseline} and {run}: {len(single)} problems are in only one of them at their step, such as "
            f"{problem[:60]!r} at step {step}, so rollouts cannot be paired; {fix}"
        )
    return [(key[0], first[key], second[key]) for key in sorted(first) if key[0] in common]


def terms_of(base: PromptGroup, run: PromptGroup) -> Terms:
    """All figures of a pair of groups."""
    groups = {"baseline": base, "run": run}
    size = min(len(base.right), len(run.right))
    chances = {name: count_chances(len(group.right), sum(group.right), size) for name, group in groups.items()}
    none = {name: float(found[0]) for name, found in chances.items()}
    terms: Terms = {"size": size, "rescued": none["baseline"] * (1 - none["run"])}
    terms["lost"] = (1 - none["baseline"]) * none["run"]
    terms["rescued_minus_lost"] = terms["rescued"] - terms["lost"]
    for name, group in groups.items():
        terms[f"all_wrong/{name}"], terms[f"all_right/{name}"] = none[name], float(chances[name][-1])
        terms[f"distinct_answers/{name}"] = distinct_answers(group.answers, size) if group.answers else math.nan
        terms[f"text_distance/{name}"] = group.text_distance.all
        for k in ks_up_to(min(size, MOST_K)):
            terms[f"pass_at_{k}/{name}"] = pass_at_k(len(group.right), sum(group.right), k)
    for kind in BAD:
        marked = {name: _bad(group, kind) for name, group in groups.items()}
        for name, bad in marked.items():
            terms[f"{kind}/{name}"] = sum(bad) / len(bad) if bad else math.nan
        outcome = (math.nan,) * 3
        if all(marked.values()):
            outcome = win_loss_tie(*(count_chances(len(bad), sum(bad), size) for bad in marked.values()))
        terms |= dict(zip((f"{kind}/wins", f"{kind}/losses", f"{kind}/ties"), outcome, strict=True))
    return terms | _second_draw(run)


def distinct_answers(answers: Sequence[str | None], k: int) -> float:
    """Mean number of distinct answers over all subsets of k completions; None is no answer, and not counted."""
    known = [answer for answer in answers if answer is not None]
    return sum(pass_at_k(len(answers), known.count(answer), k) for answer in set(known))


def _bad(group: PromptGroup, kind: str) -> list[bool]:
    """Returns for each completion whether it is bad in this sense; empty if that was not recorded."""
    if kind == "incorrect":
        return [not right for right in group.right]
    none = list(group.no_answer or ())
    return none if kind == "no_answer" or not none else [not (r or n) for r, n in zip(group.right, none, strict=True)]


def _second_draw(run: PromptGroup) -> Terms:
    """Value of a second completion after a first: from the same draw, and from another draw."""
    right, two_answers = np.array(run.right), PairMeans()
    if run.answers is not None:
        answers = np.array(run.answers, dtype=object)
        have = np.array([answer is not None for answer in run.answers])
        other = np.not_equal.outer(answers, answers).astype(bool)
        two_answers = pair_means(other & have[:, None] & have, run.draws)
    means = (run.text_distance, two_answers, pair_means(right[:, None] | right, run.draws))
    terms: Terms = {}
    for name, mean in zip(SECOND, means, strict=True):
        terms |= {f"second/{name}/same_draw": mean.same_draw, f"second/{name}/other_draw": mean.other_draw}
    return terms


def figures(terms: Sequence[Terms]) -> dict[str, Any]:
    """Value and 95 % interval of every figure over the pairs of a phase."""
    shared = [name for name in terms[0] if all(name in t for t in terms) and name != "size"]  # k up to the smallest
    columns = {name: np.array([t[name] for t in terms]) for name in shared}
    ones = np.ones(len(terms))
    fractions: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for name, x in columns.items():
        stem, _, last = name.rpartition("/")
        if name in SUMS or last in ("wins", "losses", "ties"):
            fractions[name] = (x, ones * math.nan)
        else:
            fractions[name] = (np.nan_to_num(x), ~np.isnan(x) * ones)
        if last == "losses":
            fractions[f"{stem}/win_rate"] = (columns[f"{stem}/wins"], columns[f"{stem}/wins"] + x)
        if last in ("run", "other_draw"):
            d = x - columns[f"{stem}/{'baseline' if last == 'run' else 'same_draw'}"]
            fractions[f"{stem}/difference"] = (np.nan_to_num(d), ~np.isnan(d) * ones)
    numerators, denominators = (np.array(side) for side in zip(*fractions.values(), strict=True))
    intervals = zip(fractions, ratio_intervals(numerators, denominators), strict=True)
    return finite({name: {"value": i.value, "interval": [i.low, i.high]} for name, i in intervals})  # type: ignore[no-any-return]


def _curves(terms: Sequence[tuple[int, Terms]]) -> dict[str, list[float]]:
    """Curves over common steps: groups rescued and lost so far, and shares of groups without a signal."""
    by_step = {step: [t for _, t in found] for step, found in groupby(terms, key=itemgetter(0))}
    curves: dict[str, list[float]] = {"step": list(by_step)}
    for name in ("rescued", "lost"):
        curves[name] = np.cumsum([sum(t[name] for t in found) for found in by_step.values()]).tolist()
    for name in (f"{end}/{side}" for end in ("all_wrong", "all_right") for side in ("baseline", "run")):
        curves[name] = [float(np.mean([t[name] for t in found])) for found in by_step.values()]
    return curves
