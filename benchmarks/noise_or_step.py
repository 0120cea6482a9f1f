"""Is it the noise or the step? The tables of the studies `noise_or_step*`, from their finished runs.

    python benchmarks/small_tasks.py runs/small; threepo study noise_or_step
    python benchmarks/noise_or_step.py [--study runs/studies/noise_or_step] [--reference adamw]

A *point* is a step size, with a rate that stays or falls. Every difference is taken within a task and a seed and
averaged over what a task has of them. The intervals (95 %, Student's t) of a study of several tasks are over tasks, so
they say what to expect of another such task; of a study of one task, they are over seeds.

- Same point: a method less IVON without noise, at each point that both have.
- Best point: the score on one seed of the point that was best on the others (with one seed only, on itself, which
  favours who has more points), less the same of IVON without noise.
  A study with one point of each method compares these.
- Equal movement: AdamW's end, interpolated in the logarithm of the mean `update/rms` over its points, less the end of a
  point of IVON without noise that lies between them; of rates that stay, or of rates that fall.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby, product
from pathlib import Path

import numpy as np

from threepo.lab.statistics import t_interval
from threepo.run_folder import SUMMARY, read_metrics

METHODS = ("adamw", "ivon", "sign", "c3po", "replay")
NAMES = {"adamw": "AdamW", "ivon": "IVON without noise"}
FALLS = "_falls"
"""The end of the name of a point with a cosine, where a study has both schedules."""
MEASURES = ("pass@1 at the end", "mean training reward")


@dataclass(frozen=True)
class Ended:
    """A finished run: where it stood, and what it measured."""

    task: str
    method: str
    point: str
    seed: int
    scores: tuple[float, float]
    """One for each of MEASURES."""
    movement: float
    """Mean of `update/rms` over the steps."""

    @property
    def falls(self) -> bool:
        return self.point.endswith(FALLS)


def read(folder: Path) -> Ended | None:
    """A run in `runs/<task>/<method>_<point>/seed-<n>`, or without a task; None if it has not ended."""
    rows = read_metrics(folder)
    ends = [row["eval/pass_at_1"] for row in rows if "eval/pass_at_1" in row and row["step"] > 0]
    if not ends or not (folder / SUMMARY).is_file():
        return None
    method, _, point = folder.parent.name.partition("_")
    task, seed = folder.parent.parent.name, int(folder.name.removeprefix("seed-"))
    reward = float(np.mean([row["reward/mean"] for row in rows if "reward/mean" in row]))
    movement = float(np.mean([row["update/rms"] for row in rows if "update/rms" in row]))
    return Ended(task, method, point, seed, (ends[-1], reward), movement)


Differences = Sequence[tuple[int, float]]
"""Differences of a task, each with its seed."""


def at_same_point(runs: Sequence[Ended], method: str, reference: str, measure: int) -> Differences:
    """The differences to the reference at the same point and seed."""
    known = {(run.point, run.seed): run.scores[measure] for run in runs if run.method == reference}
    mine = [run for run in runs if run.method == method]
    return [(run.seed, run.scores[measure] - known[at]) for run in mine if (at := (run.point, run.seed)) in known]


def best_elsewhere(runs: Sequence[Ended], method: str, measure: int) -> dict[int, float]:
    """For each seed, the score of the point that was best at the end on the other seeds, or on this one alone."""
    mine = [run for run in runs if run.method == method]
    found = {}
    for seed in sorted({run.seed for run in mine}):
        chosen_on = [run for run in mine if run.seed != seed] or mine
        others = {point: [run.scores[0] for run in chosen_on if run.point == point] for point in points(mine)}
        best = max(others, key=lambda point: float(np.mean(others[point])))
        found[seed] = next(run.scores[measure] for run in mine if run.point == best and run.seed == seed)
    return found


def at_best_point(runs: Sequence[Ended], method: str, reference: str, measure: int) -> Differences:
    """The differences to the reference, each at its best point."""
    mine, known = (best_elsewhere(runs, name, measure) for name in (method, reference))
    return [(seed, mine[seed] - known[seed]) for seed in mine]


def at_equal_movement(runs: Sequence[Ended], method: str, reference: str, measure: int) -> Differences:
    """The differences to the reference where the weights move as far in the mean of all steps."""
    differences = []
    for seed, falls in product({run.seed for run in runs}, (False, True)):
        here = [run for run in runs if run.seed == seed and run.falls is falls]
        line = sorted((np.log(run.movement), run.scores[measure]) for run in here if run.method == method)
        moves, scores = [x for x, _ in line], [y for _, y in line]
        between = [
            run for run in here if moves and run.method == reference and moves[0] <= np.log(run.movement) <= moves[-1]
        ]
        differences += [
            (seed, float(np.interp(np.log(run.movement), moves, scores)) - run.scores[measure]) for run in between
        ]
    return differences


def points(runs: Sequence[Ended]) -> list[str]:
    return sorted({run.point for run in runs}, key=lambda point: (FALLS in point, int(point.removesuffix(FALLS))))


COMPARISONS: dict[str, tuple[Callable[[Sequence[Ended], str, str, int], Differences], Sequence[str]]] = {
    "same point": (at_same_point, ("sign", "c3po", "replay")),
    "best point": (at_best_point, ("adamw", "ivon", "c3po", "replay")),
    "equal movement": (at_equal_movement, ("adamw",)),
}


def differences(tasks: dict[str, list[Ended]], reference: str) -> list[str]:
    """A row for each comparison: the mean of the tasks' means, or of the seeds of one task, with its interval."""
    lines = [
        f"| less {NAMES[reference]} | at | measure | mean | " + " | ".join(tasks) + " |",
        "| --- " * (4 + len(tasks)) + "|",
    ]
    for name, (compare, methods) in COMPARISONS.items():
        for method in methods:
            for i, measure in enumerate(MEASURES):
                found = [compare(runs, method, reference, i) for runs in tasks.values()]
                if method == reference or not all(found):
                    continue
                each = [float(np.mean([value for _, value in own])) for own in found]
                by_seed: dict[int, list[float]] = {}
                for seed, value in found[0]:
                    by_seed.setdefault(seed, []).append(value)
                mean = t_interval(each if len(each) > 1 else [float(np.mean(values)) for values in by_seed.values()])
                cells = " | ".join(f"{value:+.3f}" for value in each)
                told = f"{mean.value:+.3f} ({mean.low:+.3f} to {mean.high:+.3f})"
                lines.append(f"| {method} | {name} | {measure} | {told} | {cells} |")
    return lines


def every_point(tasks: dict[str, list[Ended]]) -> list[str]:
    """A row for each method and point: pass@1 at the end and the mean of `update/rms`, means over seeds."""
    lines = ["| method | step size (1e-6) | " + " | ".join(tasks) + " |", "| --- " * (2 + len(tasks)) + "|"]
    runs = [run for each in tasks.values() for run in each]
    for method in METHODS:
        for point in points([run for run in runs if run.method == method]):
            cells = []
            for each in tasks.values():
                here = [run for run in each if (run.method, run.point) == (method, point)]
                end, movement = (
                    float(np.mean(values)) for values in zip(*((r.scores[0], r.movement) for r in here), strict=True)
                )
                cells.append(f"{end:.3f}; {movement:.1e}")
            lines.append(f"| {method} | {point} | " + " | ".join(cells) + " |")
    return lines


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--study", type=Path, default=Path("runs/studies/noise_or_step"))
    parser.add_argument("--reference", choices=NAMES, default="ivon", help="the method that is subtracted")
    parser.add_argument("--seeds", type=int, nargs="+", default=range(5))
    options = parser.parse_args()
    folders = [path for path in sorted(options.study.glob("runs/**/seed-*")) if (path / "metrics.jsonl").is_file()]
    ended = [run for folder in folders if (run := read(folder)) and run.seed in options.seeds]
    points_of: dict[tuple[str, int], set[tuple[str, str]]] = {}
    for run in ended:
        points_of.setdefault((run.task, run.seed), set()).add((run.method, run.point))
    every = set().union(*points_of.values())
    for (task, seed), found in points_of.items():
        if found != every:
            print(f"left out: {task}, seed {seed}, with {len(found)} points of {len(every)}")
    ended = [run for run in ended if points_of[run.task, run.seed] == every]
    by_task = {task: list(runs) for task, runs in groupby(ended, lambda run: run.task)}
    print(f"{len(ended)} runs\n", *differences(by_task, options.reference), "", *every_point(by_task), sep="\n")
