"""Findings of a study, from its folder alone: every figure of its tables, and every run that is not in them."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

import scipy

import threepo
from threepo.config.records import to_dict
from threepo.evaluation.statistics import censored_median, paired_differences, running_means, steps_to, t_interval
from threepo.files import finite, read_json
from threepo.lab.study import chosen_point, final, learning_curve, outcome, recorded_choices, refuse_changes
from threepo.lab.study_config import Cell, Study, StudyRun
from threepo.run_folder import SUMMARY, metrics_digest


@dataclass(frozen=True)
class Result:
    """Result of one reported run."""

    final: float
    """The metric after the last step."""
    steps: list[int]
    """Training steps at which the curve is known, counted from 0."""
    values: list[float]
    """The curve at these steps."""
    levels: list[float]
    """The smoothed curve, at the last of these steps."""
    seconds: float
    rollouts: int
    digest: str
    """Of its metrics."""

    @property
    def length(self) -> int:
        """Number of training steps."""
        return self.steps[-1] + 1

    def level_after(self, steps: float) -> float | None:
        """The smoothed curve when so many training steps were done; None if it begins later."""
        pairs = zip(self.steps[-len(self.levels) :], self.levels, strict=True)
        return next((level for step, level in reversed(list(pairs)) if step < steps), None)


Results = Mapping[int, Result]
"""By seed."""


def summarise(study: Study) -> dict[str, Any]:
    """The summary of a study as far as it has come; what is missing in it is in `left_out`, with reasons."""
    refuse_changes(study)
    left_out = list(_left_out(study))
    variants: dict[str, dict[str, Results]] = {}
    for cell in study.cells:
        found = {run: _result(study, run) for run in finished_runs(study, cell)}
        left_out += [_entry(run, "finished", r) for run, r in found.items() if isinstance(r, str)]
        results = {run.seed: result for run, result in found.items() if isinstance(result, Result)}
        variants.setdefault(cell.variant, {})[cell.method] = results
    return {
        "study": study.name,
        "version": threepo.__version__,
        "tables": to_dict(study.tables),
        "variants": {name: _variant(study, name, methods) for name, methods in variants.items()},
        "average": _average(variants, study.tables.study.baseline) if len(variants) > 1 else None,
        "tuning": recorded_choices(study),
        "left_out": left_out,
    }


def finished_runs(study: Study, cell: Cell) -> list[StudyRun]:
    """The reported runs of a cell that have a result."""
    point = chosen_point(study, cell)
    runs = study.reported(cell, point) if point is not None else []
    return [run for run in runs if outcome(study, run).state == "finished"]


def _entry(run: StudyRun, state: str, reason: str) -> dict[str, str]:
    return {"run": run.name, "state": state, "reason": reason}


def _left_out(study: Study) -> Iterator[dict[str, str]]:
    """Every run that is not finished, with its state and the reason; a cell, if nothing is chosen for it yet."""
    runs = study.starts()
    for cell in study.cells:
        if cell in study.tuned():
            runs += [run for point in study.tuning(cell) for run in point]
        if (point := chosen_point(study, cell)) is not None:
            runs += study.reported(cell, point)
        else:
            yield {"run": f"runs/{cell.name}", "state": "not begun", "reason": "its tuning has chosen nothing yet"}
    for run in runs:
        if (found := outcome(study, run)).state != "finished":
            yield _entry(run, found.state, found.reason)


def _result(study: Study, run: StudyRun) -> Result | str:
    """Result of a finished run, or the reason why it cannot be compared."""
    settings = study.tables.study
    last, (steps, values) = final(study, run), learning_curve(study, run)
    if last is None:
        return f"{settings.metric} is no number after the last step"
    if len(values) < settings.smoothing:
        return f"{settings.curve} has {len(values)} values, fewer than study.smoothing = {settings.smoothing}"
    made = read_json(run.folder / SUMMARY)
    levels = running_means(values, settings.smoothing)[settings.smoothing - 1 :]
    return Result(last, steps, values, levels, made["seconds"], made["rollouts"], metrics_digest(run.folder))


def _variant(study: Study, variant: str, methods: Mapping[str, Results]) -> dict[str, Any]:
    """The figures of all methods in one setting, and their comparisons with the baseline."""
    settings = study.tables.study
    base = methods[settings.baseline]
    mean_end = fmean(result.levels[-1] for result in base.values()) if base else None
    target = mean_end if isinstance(settings.target, str) else settings.target
    paired = {
        name: [(results[seed], base[seed]) for seed in base if seed in results]
        for name, results in methods.items()
        if name != settings.baseline
    }
    figures = {name: _figures(results, settings.smoothing, target) for name, results in methods.items()}
    for name in methods:
        figures[name]["chosen"] = chosen_point(study, Cell(variant, name))
    digests = {name: {seed: r.digest for seed, r in results.items()} for name, results in methods.items()}
    return {
        "digest": hashlib.blake2b(json.dumps(digests, sort_keys=True).encode(), digest_size=8).hexdigest(),
        "target": target,
        "methods": figures,
        **{key: _compared({n: _differences(key, pairs) for n, pairs in paired.items()}) for key in STATISTICS},
    }


def _half(run: Result, base: Result) -> float | None:
    """The smoothed curve after half of the baseline's steps, minus where the baseline of the same seed ends."""
    level = run.level_after(base.length / 2)
    return None if level is None else level - base.levels[-1]


STATISTICS: Mapping[str, Callable[[Result, Result], float | None]] = {
    "metric": lambda run, base: run.final - base.final,
    "area": lambda run, base: fmean(run.values) - fmean(base.values),
    "half": _half,
}
"""What a study compares: the difference of a run from the baseline's run with the same seed; None: not defined."""


def _differences(statistic: str, pairs: Sequence[tuple[Result, Result]]) -> list[float]:
    """The differences of pairs of a run and its baseline that are defined."""
    differences = [STATISTICS[statistic](run, base) for run, base in pairs]
    return [difference for difference in differences if difference is not None]


def _figures(results: Results, width: int, target: float | None) -> dict[str, Any]:
    """Figures of one method alone."""
    if not results:
        return {"n": 0}
    found = list(results.values())
    reached = [steps_to(r.steps, r.values, width, target) if target is not None else None for r in found]
    return {
        "n": len(found),
        "final": _mean([r.final for r in found]) | {"values": {str(s): r.final for s, r in results.items()}},
        "area": _mean([fmean(r.values) for r in found]),
        "steps": max(r.length for r in found),
        "steps_to_target": dict(zip(map(str, results), reached, strict=True)),
        "median_steps_to_target": censored_median(reached),
        "rollouts": round(fmean(r.rollouts for r in found)),
        "seconds": median(r.seconds for r in found),
    }


def _mean(values: Sequence[float]) -> dict[str, Any]:
    """Mean over seeds with its standard error and t interval, ready for JSON."""
    interval = t_interval(values)
    error = float(scipy.stats.sem(values)) if len(values) > 1 else None
    return finite({"mean": interval.value, "se": error, "low": interval.low, "high": interval.high})  # type: ignore[no-any-return]


def _compared(differences: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Comparisons of the methods that share seeds with the baseline, as one family."""
    known = {name: d for name, d in differences.items() if d}
    found = paired_differences(list(known.values()))
    return {name: finite(asdict(d)) | {"verdict": d.verdict} for name, d in zip(known, found, strict=True)}


def _average(variants: Mapping[str, Mapping[str, Results]], baseline: str) -> dict[str, Any]:
    """Means over the settings, by method: of the seeds that have a result in each of them."""
    means: dict[str, dict[int, float]] = {}
    for method in next(iter(variants.values())):
        everywhere = [methods[method] for methods in variants.values()]
        seeds = [seed for seed in everywhere[0] if all(seed in results for results in everywhere)]
        means[method] = {seed: fmean(results[seed].final for results in everywhere) for seed in seeds}
    base = means[baseline]
    rivals = {n: [v[seed] - base[seed] for seed in v if seed in base] for n, v in means.items() if n != baseline}
    methods = {n: {"n": len(v)} | ({"final": _mean([*v.values()])} if v else {}) for n, v in means.items()}
    return {"methods": methods, "metric": _compared(rivals)}
