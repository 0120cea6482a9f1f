"""What a study found, from its folder alone: every figure of its table, and every run that is not in it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

import numpy as np

from threepo.analysis.paired import Comparison, censored_median, compare, smoothed, steps_to, t_interval
from threepo.analysis.study import chosen_point, curve, final, outcome, recorded_choices
from threepo.config.study import Cell, Study, StudyRun
from threepo.files import read_json
from threepo.run_folder import SUMMARY


@dataclass(frozen=True)
class Result:
    """What one reported run gave."""

    run: StudyRun
    final: float
    steps: list[int]
    values: list[float]
    """The curve at these steps."""
    level: np.ndarray
    """The smoothed curve; it ends where the curve ends."""
    seconds: float
    rollouts: int

    def level_after(self, steps: float) -> float | None:
        """The smoothed curve when so many training steps were done; None before it has begun."""
        known = [v for s, v in zip(self.steps[-len(self.level) :], self.level, strict=True) if s + 1 <= steps]
        return float(known[-1]) if known else None


Results = Mapping[int, Result]
"""By seed."""


def summarise(study: Study) -> dict[str, Any]:
    """The summary of a study as far as it has come; what is missing in it is under `left_out`, with reasons."""
    settings, left_out = study.tables.study, list(_left_out(study))
    results: dict[Cell, Results] = {}
    for cell in study.cells:
        point = chosen_point(study, cell)
        runs = study.reported(cell, point) if point is not None else []
        found = [_result(study, run) for run in runs if outcome(study, run).state == "finished"]
        left_out += [{"run": r.name, "state": "finished", "reason": r.reason} for r in found if isinstance(r, NoResult)]
        results[cell] = {result.run.seed: result for result in found if isinstance(result, Result)}
    variants = study.tables.variants or ("",)
    by_variant = {v: {c.method: results[c] for c in study.cells if c.variant == v} for v in variants}
    keys = ("baseline", "metric", "curve", "smoothing", "seeds")
    return {
        "study": study.name,
        **{key: getattr(settings, key) for key in keys},
        "variants": {name: _variant(study, name, found) for name, found in by_variant.items()},
        "average": _average(by_variant, settings.baseline) if len(by_variant) > 1 else {},
        "tuning": recorded_choices(study),
        "left_out": left_out,
    }


@dataclass(frozen=True)
class NoResult:
    """A finished run whose numbers cannot be compared."""

    name: str
    reason: str


def _result(study: Study, run: StudyRun) -> Result | NoResult:
    settings = study.tables.study
    last, (steps, values) = final(study, run), curve(run, settings.curve)
    if last is None:
        return NoResult(run.name, f"{settings.metric} is no number after the last step")
    if len(values) < settings.smoothing:
        few = f"{settings.curve} has {len(values)} values, fewer than study.smoothing = {settings.smoothing}"
        return NoResult(run.name, few)
    made = read_json(run.folder / SUMMARY)
    level = smoothed(values, settings.smoothing)
    return Result(run, last, steps, values, level, made["seconds"], made["rollouts"])


def _left_out(study: Study) -> Iterator[dict[str, str]]:
    """Every run without a result, with its state and its reason; a cell, if nothing is chosen for it yet."""
    runs = study.starts()
    for cell in study.cells:
        if study.tuned_in(cell) == cell:
            runs += [run for point in study.tuning(cell) for run in point]
        point = chosen_point(study, cell)
        if point is None:
            yield {"run": f"runs/{cell.name}", "state": "not begun", "reason": "its tuning has chosen nothing yet"}
        else:
            runs += study.reported(cell, point)
    for run in runs:
        found = outcome(study, run)
        if found.state != "finished":
            yield {"run": run.name, "state": found.state, "reason": found.reason}


def _variant(study: Study, variant: str, methods: Mapping[str, Results]) -> dict[str, Any]:
    """The figures of all methods in one setting, and their comparisons with the baseline."""
    settings = study.tables.study
    base = methods[settings.baseline]
    ends = [float(result.level[-1]) for result in base.values()]
    target = settings.target if not isinstance(settings.target, str) else fmean(ends) if ends else None
    rivals = [name for name in methods if name != settings.baseline]
    common = {name: [seed for seed in base if seed in methods[name]] for name in rivals}
    half = {name: _ahead_at_half(methods[name], base, common[name]) for name in rivals}
    return {
        "target": target,
        "methods": {
            name: _figures(results, settings.smoothing, target) | {"settings": _settings(study, Cell(variant, name))}
            for name, results in methods.items()
        },
        "comparisons": {
            "metric": _compared({n: [methods[n][s].final - base[s].final for s in common[n]] for n in rivals}),
            "area": _compared(
                {n: [fmean(methods[n][s].values) - fmean(base[s].values) for s in common[n]] for n in rivals}
            ),
            "half": _compared(half),
        },
    }


def _ahead_at_half(results: Results, base: Results, seeds: Sequence[int]) -> list[float]:
    """The smoothed curve after half of the baseline's steps, minus where the baseline of the same seed ends."""
    levels = {seed: results[seed].level_after((base[seed].steps[-1] + 1) / 2) for seed in seeds}
    return [level - float(base[seed].level[-1]) for seed, level in levels.items() if level is not None]


def _settings(study: Study, cell: Cell) -> list[str] | None:
    """The point that was chosen for a cell; None: there was nothing to choose, or nothing is chosen yet."""
    point = chosen_point(study, cell)
    return list(point) if point is not None and study.tuned_in(cell) else None


def _figures(results: Results, width: int, target: float | None) -> dict[str, Any]:
    """What is said of one method alone."""
    if not results:
        return {"n": 0}
    found = list(results.values())
    reached = [steps_to(r.steps, r.values, width, target) if target is not None else None for r in found]
    return {
        "n": len(found),
        "final": asdict(t_interval([r.final for r in found])) | {"values": {s: r.final for s, r in results.items()}},
        "area": asdict(t_interval([fmean(r.values) for r in found])),
        "steps": max(r.steps[-1] + 1 for r in found),
        "steps_to_target": {
            "median": censored_median(reached),
            "reached": sum(steps is not None for steps in reached),
            "values": dict(zip(results, reached, strict=True)),
        },
        "rollouts": round(fmean(r.rollouts for r in found)),
        "seconds": median(r.seconds for r in found),
    }


def _compared(differences: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Comparisons of the methods that share seeds with the baseline: one family."""
    known = {name: d for name, d in differences.items() if d}
    found: list[Comparison] = compare(list(known.values())) if known else []
    return {name: asdict(c) | {"verdict": c.verdict} for name, c in zip(known, found, strict=True)}


def _average(variants: Mapping[str, Mapping[str, Results]], baseline: str) -> dict[str, Any]:
    """Means over the settings, by method: of the seeds that have a result in each of them."""
    means: dict[str, dict[int, float]] = {}
    for method in next(iter(variants.values())):
        everywhere = [found[method] for found in variants.values()]
        seeds = [seed for seed in everywhere[0] if all(seed in results for results in everywhere)]
        means[method] = {seed: fmean(results[seed].final for results in everywhere) for seed in seeds}
    base = means[baseline]
    rivals = {n: [v[s] - base[s] for s in v if s in base] for n, v in means.items() if n != baseline}
    final = {
        n: {"n": len(v), "final": asdict(t_interval(list(v.values())))} if v else {"n": 0} for n, v in means.items()
    }
    return {"methods": final, "comparisons": {"metric": _compared(rivals)}}
