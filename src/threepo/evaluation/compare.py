"""Two evaluations on the same problems: is one model better than the other? (method.md 6)

    threepo eval --compare A B

Scores are paired by problem, so the difficulty of a problem is in both of its scores and cancels.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
from rich.console import Group

from threepo.config.records import differences
from threepo.errors import UserError
from threepo.evaluation.records import completions_file
from threepo.evaluation.scores import ks_up_to, pass_at_k
from threepo.evaluation.statistics import FEW, bootstrap_interval, sign_flip_p
from threepo.evaluation.tables import TableRow, number, percent, table, with_interval
from threepo.files import finite, read_json
from threepo.run_folder import EVALUATION, SUMMARY


@dataclass(frozen=True)
class ScoreDifference:
    """Mean scores of two evaluations on the same problems, and the significance of their difference."""

    problems: int
    first: float
    second: float
    difference: float
    """second - first; for several sets, the unweighted mean of their differences."""
    error: float
    """Standard error of the difference, from the spread over problems, as a sample of all problems."""
    interval: list[float]
    """95 % interval of the difference under resampling of problems."""
    p: float
    """Two-sided p-value of the sign-flip test: the signs of the problems' differences are random."""
    wins: int
    """Problems on which the second is better."""
    losses: int
    ties: int


def compare_scores(sets: Sequence[Sequence[np.ndarray]], seed: int = 0) -> ScoreDifference:
    """Compare scores per problem over one or several sets, each a pair: [problems] of the first and of the second."""
    by_set = [second - first for first, second in sets]
    every = np.concatenate(by_set)
    variances = [d.var(ddof=1) / len(d) if len(d) > 1 else math.nan for d in by_set]
    mean = bootstrap_interval(by_set, seed)
    return ScoreDifference(
        problems=len(every),
        first=float(np.mean([first.mean() for first, _ in sets])),
        second=float(np.mean([second.mean() for _, second in sets])),
        difference=mean.value,
        error=math.sqrt(sum(variances)) / len(sets),
        interval=[mean.low, mean.high],
        p=sign_flip_p(np.concatenate([d / len(d) for d in by_set]).tolist(), seed),
        wins=int((every > 0).sum()),
        losses=int((every < 0).sum()),
        ties=int((every == 0).sum()),
    )


def compare_evaluations(first: Path, second: Path) -> dict[str, Any]:
    """The comparison of two finished evaluations on the sets of problems that both have, ready for JSON.

    `UserError` if they have no set in common, different K, or different problems under the same name.
    """
    summaries = [_summary(folder) for folder in (first, second)]
    samples = [summary["config"]["eval"]["samples"] for summary in summaries]
    if samples[0] != samples[1]:
        raise UserError(
            f"--compare {first} {second}: have {samples[0]} and {samples[1]} completions a problem, so their pass@k "
            f"have different noise; evaluate both with the same eval.samples"
        )
    names = [list(summary["benchmarks"]) for summary in summaries]
    common = [name for name in names[0] if name in names[1]]
    if not common:
        raise UserError(
            f"--compare: {first} has {', '.join(names[0])}, {second} has {', '.join(names[1])}; none in both"
        )
    counts = {name: _counts((first, second), name) for name in common}
    then, now = (_settings(summary, common) for summary in summaries)
    return {
        "first": str(first),
        "second": str(second),
        "models": [summary["model"] for summary in summaries],
        "samples": samples[0],
        "only_in_one": sorted(set(names[0]) ^ set(names[1])),
        "settings_that_differ": [{"setting": name, "first": a, "second": b} for name, a, b in differences(then, now)],
        "benchmarks": {name: _at_every_k([counts[name]], samples[0]) for name in common},
        "average": _at_every_k(list(counts.values()), samples[0]),
    }


def _summary(folder: Path) -> dict[str, Any]:
    if not (folder / EVALUATION).is_file():
        raise UserError(f"--compare {folder}: holds no evaluation; name the folder that `threepo eval` wrote")
    if not (folder / SUMMARY).is_file():
        raise UserError(f"--compare {folder}: is not finished; repeat the command that began it, which continues it")
    return read_json(folder / SUMMARY)


def _settings(summary: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The settings that should be equal: of prompts, sampling and grading, but not of the model or the machine."""
    config = summary["config"]
    decoding = {key: config["eval"].get(key, 0) for key in ("temperature", "top_p", "top_k", "draws", "best_draws")}
    longest = config["eval"]["max_new_tokens"] or config["sampling"]["max_new_tokens"]
    return {
        "run": {"seed": config["run"]["seed"]},
        "eval": {**decoding, "max_new_tokens": longest},
        "reward": config["reward"],
        "environment": config.get("environment", {}),
        **{name: digest for name, digest in summary["fingerprint"].items() if name.startswith("code of ")},
        "prompt": {name: summary["benchmarks"][name]["prompt"] for name in names},
        "data": {key: config["data"][key] for key in ("system_prompt", "chat_template")},
    }


def _counts(folders: Sequence[Path], name: str) -> tuple[list[int], list[int]]:
    """Right completions of every problem in the first and in the second evaluation, in the same order."""
    first, second = (_right(completions_file(folder, name)) for folder in folders)
    if single := first.keys() ^ second.keys():
        raise UserError(
            f"--compare: the problems or answers of {name} differ: {len(first)} in {folders[0]} and {len(second)} in "
            f"{folders[1]}, {len(single)} of them in only one, such as {min(single)[0]}; evaluate both on the same"
        )
    return list(first.values()), [second[problem] for problem in first]


def _right(path: Path) -> dict[tuple[str, str], int]:
    """The number of right completions of every problem, by its id and its reference answer or, without one, prompt."""
    right: dict[tuple[str, str], int] = defaultdict(int)
    columns = ["problem_id", "prompt", "reference_answer", "correct"]
    for row in pyarrow.parquet.read_table(path, columns=columns).to_pylist():
        right[row["problem_id"], row["reference_answer"] or row["prompt"]] += row["correct"]
    return right


def _at_every_k(sets: Sequence[tuple[list[int], list[int]]], samples: int) -> dict[str, Any]:
    """The comparison of pass@k for k = 1, 2, 4, ... and K."""
    results = {}
    for k in ks_up_to(samples):
        by_count = np.array([pass_at_k(samples, count, k) for count in range(samples + 1)])
        scores = [(by_count[first], by_count[second]) for first, second in sets]
        results[str(k)] = finite(asdict(compare_scores(scores)))
    return {"pass_at": results}


def comparison_table(comparison: Mapping[str, Any]) -> Group:
    """A table of what `compare_evaluations` returns: pass@1 and pass@K of every set of problems."""
    samples = comparison["samples"]
    sets = dict(comparison["benchmarks"])
    sets |= {"average": comparison["average"]} if len(sets) > 1 else {}
    sections = []
    for k in dict.fromkeys(("1", str(samples))):
        results = {name: scores["pass_at"][k] for name, scores in sets.items()}
        sections.append([_table_row(name, k, result) for name, result in results.items()])
    names = (f"{letter} = {comparison[key]}" for letter, key in (("A", "first"), ("B", "second")))
    title = f"pass@k in per cent, {samples} completions a problem, paired by problem"
    shown: list[Any] = [table("", *sections)]
    compared = [scores["pass_at"][k] for scores in sets.values() for k in ("1", str(samples))]
    if any(0 < result["wins"] + result["losses"] < FEW for result in compared):
        shown += [f"Where fewer than {FEW} problems differ, trust p: the interval is too short."]
    return Group(*names, title, *shown)


def _table_row(name: str, k: str, result: Mapping[str, Any]) -> TableRow:
    return {
        "set": name,
        "k": k,
        "A": percent(result["first"]),
        "B": percent(result["second"]),
        "B - A, 95 %": with_interval(result["difference"], result["interval"], "+.1f", 100),
        "se": percent(result["error"]),
        "p": number(result["p"], ".2g"),
        "won/lost/tied": f"{result['wins']}/{result['losses']}/{result['ties']}",
    }
