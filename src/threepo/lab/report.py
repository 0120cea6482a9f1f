"""Training runs as their folders have them, what came of them, and tables; curves.py and page.py show more.

threepo report RUN... [--output FOLDER | --output FILE.png]
"""

import math
import os
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.table import Table

from threepo.config.recipes import what_matters
from threepo.config.records import flat, shown
from threepo.evaluation.statistics import FEW, Interval, all_equal, normal_interval, standard_error
from threepo.evaluation.tables import MISSING, number, percent, table, with_interval
from threepo.files import finite, read_json
from threepo.lab.arms_view import Metrics, arm_shares, leading_arms
from threepo.lab.statistics import t_interval, welch_interval
from threepo.run_folder import CONFIG, INPUTS, read_evaluation, read_metrics, refuse_no_run

ENDS = ("before", "after")
Score = tuple[float, float]
"""A pass@1 and its standard error."""


@dataclass(frozen=True)
class RunReport:
    """One training run, read from its folder."""

    path: Path
    name: str
    config: dict[str, Any]
    rows: list[dict[str, Any]]
    """metrics.jsonl; the row of step -1 holds only the evaluation before training."""

    @property
    def trains(self) -> bool:
        """True if it learned from rewards; otherwise it was fine-tuned."""
        return "method" in self.config

    @cached_property
    def settings(self) -> dict[str, str]:
        """Settings that decide what is learned, by dotted key, without seeds; a path names its seed's folder `seed`."""
        seed = str(self.config.get("run", {}).get("seed"))
        known = {key: shown(value).replace(f"seed-{seed}", "seed") for key, value in flat(self.config)}
        others = {key for key in known if key.endswith(".seed") or (key.startswith("run.") and key != "run.steps")}
        return {key: text for key, text in known.items() if key not in others}

    @cached_property
    def seed(self) -> tuple[Any, ...]:
        """All seeds of the run; runs of several methods with the same ones are paired."""
        return tuple(value for key, value in flat(self.config) if key.endswith(".seed"))

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The rows of training steps."""
        return [row for row in self.rows if row["step"] >= 0]

    @property
    def examination(self) -> dict[str, Any]:
        """The settings and the problems of evaluations while training."""
        known, data, sampling = (self.config.get(table, {}) for table in ("eval", "data", "sampling"))
        # Problems that were objects of Python are told by their contents, all others by their names.
        objects = [file.read_bytes() for file in (self.path / INPUTS).glob("eval.*")]
        return {
            **{key: known.get(key) for key in ("temperature", "top_p", "top_k", "draws")},
            "heldout": objects or data.get("eval") or (data.get("train"), data.get("levels")),
            "longest": known.get("max_new_tokens") or sampling.get("max_new_tokens"),
            **what_matters({table: self.config.get(table, {}) for table in ("reward", "environment")}),
        }

    @property
    def ends(self) -> list[Score | None]:
        """The held-out pass@1 before and after training, as far as it was evaluated."""
        found = self.summary()
        scores = [(found.get(f"pass_at_1_{at}"), found.get(f"se_{at}")) for at in ENDS]
        return [None if value is None else (value, math.nan if error is None else error) for value, error in scores]

    @cached_property
    def right(self) -> list[dict[str, float]]:
        """Share of right answers to each held-out problem, before and after training, as far as it was kept."""
        after = self.evaluated_at
        return [read_evaluation(self.path, 0), {} if after is None else read_evaluation(self.path, after + 1)]

    @property
    def evaluated_at(self) -> int | None:
        """The step after which the newest held-out pass@1 was measured."""
        return max((row["step"] for row in self.rows if row.get("eval/pass_at_1") is not None), default=None)

    def summary(self) -> dict[str, Any]:
        """The numbers of the table; None for what the run did not measure."""
        steps = self.steps
        first, last = (steps[0], steps[-1]) if steps else ({}, {})
        seconds = statistics.median(row["time/step"] for row in steps) if steps else None
        if not self.trains:
            return {
                "loss_first": first.get("sft/loss"),
                "loss_last": last.get("sft/loss"),
                "eval_loss": next((row["sft/eval_loss"] for row in reversed(steps) if "sft/eval_loss" in row), None),
                "seconds_per_step": seconds,
                "steps": len(steps),
            }
        before: Metrics = next((row for row in self.rows if row["step"] == -1), {})
        after: Metrics = next((row for row in reversed(steps) if "eval/pass_at_1" in row), {})
        silent = [row["groups/zero_advantage_share"] for row in steps]
        prompts, each = self.config["data"]["prompts_per_step"], self.config["method"]["rollouts_per_prompt"]
        # Dynamic sampling and a stream answer more prompts than they learn from (and some of a stream wait at the end).
        answered = sum(row.get("groups/generated", prompts) + row.get("overlap/dropped", 0) for row in steps)
        return {
            "pass_at_1_before": before.get("eval/pass_at_1"),
            "se_before": before.get("eval/se_between"),
            "pass_at_1_after": after.get("eval/pass_at_1"),
            "se_after": after.get("eval/se_between"),
            "reward_first": first.get("reward/mean"),
            "reward_last": last.get("reward/mean"),
            "zero_advantage_share": statistics.fmean(silent) if silent else None,
            "seconds_per_step": seconds,
            "rollouts": round(answered * each),
            "steps": len(steps),
            **({"arms": leading_arms(steps)} if arm_shares([last]) else {}),
        }


def read_run(path: Path) -> RunReport:
    """Read the folder of a training run; `UserError` if it holds none."""
    refuse_no_run(path)
    return RunReport(path, os.path.basename(os.path.abspath(path)), read_json(path / CONFIG), read_metrics(path))


def read_runs(paths: Sequence[Path]) -> list[RunReport]:
    """Read several runs, each once; runs whose folders have the same name go by their paths, from where these part.

    Logs that a study writes beside its runs are left out, so that a pattern such as `seed-*` works.
    """
    paths = [path for path in paths if path.suffix != ".log" or not path.is_file()] or paths
    runs = [read_run(path) for path in {os.path.abspath(path): path for path in paths}.values()]
    if len({run.name for run in runs}) == len(runs):
        return runs
    shared = os.path.commonpath([os.path.abspath(run.path) for run in runs])
    return [replace(run, name=os.path.relpath(run.path, shared)) for run in runs]


def by_method(runs: Sequence[RunReport]) -> dict[str, list[RunReport]]:
    """Runs that differ only by seed, together under a name; all other runs alone, under theirs."""
    methods: dict[Any, list[RunReport]] = {}
    for run in runs:
        settings, repeat = tuple(run.settings.items()), 0
        while any(run.seed == other.seed for other in methods.get((settings, repeat), ())):
            repeat += 1  # a second run of a seed is not a second seed
        methods.setdefault((settings, repeat), []).append(run)
    named: dict[str, list[RunReport]] = {}
    for seeds in methods.values():
        name, more = seeds[0].name, f"{len(seeds)} seeds"
        stem = re.sub(r"[\W_]*(seed)?[\W_]*\d*$", "", name) or seeds[0].path.absolute().parent.name
        short = f"{stem}, {more}" if len(seeds) > 1 else name
        named[short if short not in named else f"{name}, {more}"] = seeds
    return named


def findings(runs: Sequence[RunReport], baseline: RunReport) -> list[tuple[str, str]]:
    """Say of each method, by name, whether it learned, and where it stands against the baseline's."""
    methods = by_method(runs)
    base, reference = next((name, seeds) for name, seeds in methods.items() if baseline in seeds)
    against = {name: _against(base, reference, seeds) for name, seeds in methods.items() if name != base}
    return [(name, _came_of(seeds) + against.get(name, "")) for name, seeds in methods.items()]


def _against(base: str, reference: Sequence[RunReport], seeds: Sequence[RunReport]) -> str:
    """Say where a method stands against the baseline: over pairs of runs with the same seeds, if there are several."""
    first, second = ({run.seed: run for run in runs if run.ends[1]} for runs in (reference, seeds))
    if not first or not second:
        return ""
    shared = [seed for seed in first if seed in second]
    if len(shared) > 1:
        first, second = ({seed: known[seed] for seed in shared} for known in (first, second))
    olds, news = ([end for run in known.values() if (end := run.ends[1])] for known in (first, second))
    values, others = ([value for value, _ in ends] for ends in (news, olds))
    examinations = [run.examination for run in (*reference, *seeds)]
    if len(reference) == len(seeds) == 1:
        pairing = "" if shared else " (another seed)"
        was, now = (examination["heldout"] for examination in examinations)
        answers = (reference[0].right[1], seeds[0].right[1]) if was == now else ()  # others may have the same ids
        change = _change(olds[0], news[0], *answers)
    elif len(shared) > 1:
        differences = [value - other for value, other in zip(values, others, strict=True)]
        # Differences that do not scatter have no interval over seeds, but each has one over problems.
        change = _change(olds[0], news[0]) if all_equal(differences) else t_interval(differences)
        pairing = f" (paired by seed, {len(shared)} pairs)"
    else:
        pairing = f" (not paired: {len(shared) or 'no'} seed in both)"
        change = welch_interval(values, others)
    verdict = _verdict(change, "better", "worse", "no interval" if math.isnan(change.low) else "no clear difference")
    steps = {run.evaluated_at for run in (*first.values(), *second.values())}
    uneven = ", after unlike numbers of steps" if len(steps) > 1 else ""
    if any(examination != examinations[0] for examination in examinations):
        uneven += ", evaluated unlike: see [data], [eval], [reward] and [environment]"
    return f" Against {base}{pairing}: {_points(change)}, {verdict}{uneven}."


def _came_of(seeds: Sequence[RunReport]) -> str:
    """Say whether one method learned, without the others."""
    summaries = [run.summary() for run in seeds if run.steps]
    if not summaries:
        return "has not finished a step."
    evaluated = [run for run in seeds if all(run.ends)]
    pairs = [(before, after) for before, after in (run.ends for run in evaluated) if before and after]
    if not pairs:
        key, what = ("reward", "reward of the rollouts") if seeds[0].trains else ("loss", "cross-entropy")
        known = [[s[f"{key}_{at}"] for s in summaries if s[f"{key}_{at}"] is not None] for at in ("first", "last")]
        first, last = (number(statistics.fmean(values) if values else None) for values in known)
        steps = _steps([summary["steps"] for summary in summaries])
        when = " since the start" if any(run.ends[0] for run in seeds) else ""
        return f"not evaluated{when}, {steps}: {what} {first} in the first step, {last} in the last."
    steps = _steps([run.evaluated_at + 1 for run in evaluated if run.evaluated_at is not None])
    changes = [_change(*pair, *run.right) for pair, run in zip(pairs, evaluated, strict=True)]
    start, end = (shown_score(_mean(scores)) for scores in zip(*pairs, strict=True))
    scores = f"held-out pass@1 from {start} to {end} in {steps}"
    if len(changes) > 1:
        share = "" if len(changes) == len(seeds) else f" ({len(changes)} of {len(seeds)} seeds evaluated)"
        return f"learned in {sum(change.low > 0 for change in changes)} of {len(changes)} seeds: {scores}{share}."
    verdict = _verdict(changes[0], "learned", "got worse", "did not clearly learn")
    return f"{verdict}: {scores}, {_points(changes[0])}."


def _steps(counts: Sequence[int]) -> str:
    """Numbers of steps in words: 60 steps, 40 to 60 steps."""
    return " to ".join(map(str, sorted({min(counts), max(counts)}))) + " step" + "s" * (max(counts) > 1)


def _mean(scores: Sequence[Score]) -> Score:
    """Mean score with its standard error: over seeds, or for one seed over problems."""
    values = [value for value, _ in scores]
    return scores[0] if len(scores) == 1 else (statistics.fmean(values), standard_error(values))


def _change(
    first: Score, second: Score, was: Mapping[str, float] | None = None, now: Mapping[str, float] | None = None
) -> Interval:
    """The difference of two scores with its 95 % interval over problems.

    Where the share of right answers to each problem is known (`was`, `now`), the problems are the same, and enough of
    them differ, it is paired; otherwise it is as wide as if they had answered different ones.
    """
    error = math.hypot(first[1], second[1])
    if was and now and was.keys() == now.keys():
        differences = [now[problem] - was[problem] for problem in was]
        if sum(map(bool, differences)) >= FEW:
            error = standard_error(differences)
    return normal_interval(second[0] - first[0], error)


def _verdict(change: Interval, above: str, below: str, neither: str) -> str:
    if change.low > 0:
        return above
    return below if change.high < 0 else neither


def _points(change: Interval) -> str:
    return with_interval(change.value, finite([change.low, change.high]), "+.1f", 100, " points")


def shown_score(score: Score | None) -> str:
    """A held-out pass@1 in percent, with its standard error."""
    if score is None:
        return MISSING
    value, error = score
    known = error is not None and not math.isnan(error)  # an evaluation's summary has None
    return f"{percent(value)} %" + f" ± {percent(error)}" * known


def differing_settings(runs: Sequence[RunReport]) -> Table:
    """The settings in which methods differ, a row each, or all of a single one; seeds and folders are left out."""
    methods = {name: seeds[0].settings for name, seeds in by_method(runs).items()}
    keys = dict.fromkeys(key for settings in methods.values() for key in settings)
    alone, rows = len(methods) == 1, []
    for key in keys:
        values = {name: settings.get(key, MISSING) for name, settings in methods.items()}
        if alone or len(set(values.values())) > 1:
            rows.append({"setting": key, **values})
    return table("" if alone else "Settings in which the runs differ", rows)


Measure = str | Callable[[Metrics], float | None]
"""A metric, or what a function makes of a row of metrics; None: not known."""


def series(rows: Sequence[Metrics], measure: Measure) -> tuple[list[int], list[float]]:
    """Training steps done and values of a measure, where it is known; step 0 is before training."""
    values = [row.get(measure) if isinstance(measure, str) else measure(row) for row in rows]
    known = [(row["step"] + 1, value) for row, value in zip(rows, values, strict=True) if value is not None]
    return [step for step, _ in known], [value for _, value in known]


def tables(runs: Sequence[RunReport]) -> list[Table]:
    """The summaries, a row per run: a table for reinforcement learning, one for fine-tuning."""
    title = "Reward of the rollouts in the first and the last step; nothing was evaluated"
    if evaluated := any(any(run.ends) for run in runs):
        title = "Held-out pass@1, mean and standard error over problems"
    learned, tuned = [], []
    for run in runs:
        summary = run.summary()
        row, speed = {"run": run.name}, {"s/step": number(summary["seconds_per_step"], ".2f")}
        if run.trains:
            rewards = {f"reward {at}": number(summary[f"reward_{at}"]) for at in ("first", "last")}
            scores = {f"pass@1 {at}": shown_score(score) for at, score in zip(ENDS, run.ends, strict=True)}
            row |= scores if evaluated else rewards
            silent = {"zero-adv. %": percent(summary["zero_advantage_share"], ".0f")}
            learned.append(row | silent | speed | {"rollouts": f"{summary['rollouts']:,}"})
        else:
            losses = {"loss first": "loss_first", "loss last": "loss_last", "held-out loss": "eval_loss"}
            row |= {head: number(summary[key]) for head, key in losses.items()}
            tuned.append(row | speed | {"steps": str(summary["steps"])})
    found = [table(title, learned), table("Cross-entropy of the targets, nats a token", tuned)]
    return [each for each in found if each.row_count]
