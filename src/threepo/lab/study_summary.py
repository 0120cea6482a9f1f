"""Findings of a study, from its folder alone: every figure of its tables, and every run that is not in them."""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any, TypeVar

import threepo
from threepo.config.records import to_dict
from threepo.evaluation.statistics import standard_error
from threepo.files import finite, json_digest, read_json
from threepo.lab.statistics import censored_median, paired_differences, smoothed, steps_to, t_interval
from threepo.lab.study_config import Cell, Study, StudyRun
from threepo.lab.study_state import (
    Outcome,
    chosen_point,
    known_runs,
    measured,
    outcome,
    recorded_choices,
    refuse_changes,
)
from threepo.run_folder import SUMMARY, metrics_digest


@dataclass(frozen=True)
class Result:
    """Result of one reported run."""

    final: float
    """The metric after the last step."""
    length: int
    """Number of training steps."""
    area: float
    """Mean of the curve."""
    steps: list[int]
    """Training steps done when the smoothed curve is known."""
    levels: list[float]
    """The smoothed curve at these steps."""
    seconds: float
    rollouts: int
    digest: str
    """Digest of its metrics, times excluded."""

    def lead_at_half(self, baseline: "Result") -> float | None:
        """The smoothed curve after half of the baseline's steps, minus the baseline's end; None: it begins later."""
        known = zip(self.steps, self.levels, strict=True)
        levels = [level for step, level in known if step <= baseline.length / 2]
        return levels[-1] - baseline.levels[-1] if levels else None


STATISTICS: Mapping[str, Callable[[Result, Result], float | None]] = {
    "metric": lambda run, base: run.final - base.final,
    "area": lambda run, base: run.area - base.area,
    "half": Result.lead_at_half,
}
"""Figures that a study compares: a run minus the baseline's run with the same seed; None: not defined."""
_UNTUNED = Outcome("not begun", "its tuning has chosen nothing yet")
Results = Mapping[int, Result]
"""Results of one method by seed."""
T = TypeVar("T")


def summarise(study: Study) -> dict[str, Any]:
    """The summary of a study as far as it has come; what is missing in it is in `left_out`, with reasons."""
    refuse_changes(study)
    states = {f"runs/{cell.name}": _UNTUNED for cell in study.cells if chosen_point(study, cell) is None}
    states |= {run.name: state for run in known_runs(study) if (state := outcome(run)).state != "finished"}
    variants: dict[str, dict[str, Results]] = {}
    for cell in study.cells:
        found = {run: _result(study, run) for run in finished_runs(study, cell)}
        states |= {run.name: Outcome("finished", why) for run, why in found.items() if isinstance(why, str)}
        results = {run.seed: result for run, result in found.items() if isinstance(result, Result)}
        variants.setdefault(cell.variant, {})[cell.method] = results
    return {
        "study": study.name,
        "version": threepo.__version__,
        "tables": to_dict(study.tables),
        "variants": {name: _variant(study, name, methods) for name, methods in variants.items()},
        "average": _average(variants, study.tables.study.baseline) if len(variants) > 1 else None,
        "tuning": recorded_choices(study),
        "left_out": [{"run": name, **asdict(state)} for name, state in states.items()],
    }


def finished_runs(study: Study, cell: Cell) -> list[StudyRun]:
    """The reported runs of a cell that have a result."""
    point = chosen_point(study, cell)
    runs = study.reported(cell, point) if point is not None else []
    return [run for run in runs if outcome(run).state == "finished"]


def _result(study: Study, run: StudyRun) -> Result | str:
    """Result of a finished run, or the reason why it cannot be compared."""
    settings, (last, steps, values) = study.tables.study, measured(study, run)
    if last is None:
        return f"{settings.metric} is no number after the last step"
    if len(values) < settings.smoothing:
        return f"{settings.curve} has {len(values)} values, fewer than study.smoothing = {settings.smoothing}"
    made = read_json(run.folder / SUMMARY)
    smooth_steps, levels = smoothed(steps, values, settings.smoothing)
    return Result(
        final=last,
        length=steps[-1],
        area=fmean(values),
        steps=smooth_steps,
        levels=levels,
        seconds=made["seconds"],
        rollouts=made["rollouts"],
        digest=metrics_digest(run.folder),
    )


def _variant(study: Study, variant: str, methods: Mapping[str, Results]) -> dict[str, Any]:
    """The figures of all methods in one setting, and their comparisons with the baseline."""
    settings = study.tables.study
    target = None if isinstance(settings.target, str) else settings.target
    base = methods[settings.baseline].values()
    if target is None and base:
        begin, end = (fmean(result.levels[at] for result in base) for at in (0, -1))
        target = end if end > begin else None  # others would be there from the beginning
    figures = {name: _figures(results, target) for name, results in methods.items()}
    for name in methods:
        figures[name]["chosen"] = chosen_point(study, Cell(variant, name))
    digests = {name: {seed: result.digest for seed, result in results.items()} for name, results in methods.items()}
    return {
        "digest": json_digest(digests),
        "target": target,
        "methods": figures,
        **{name: _against(settings.baseline, methods, difference) for name, difference in STATISTICS.items()},
    }


def _figures(results: Results, target: float | None) -> dict[str, Any]:
    """Figures of one method alone."""
    if not results:
        return {"n": 0}
    runs = list(results.values())
    reached = [None if target is None else steps_to(run.steps, run.levels, target) for run in runs]
    return {
        "n": len(runs),
        "final": _mean([run.final for run in runs]) | {"values": {str(s): run.final for s, run in results.items()}},
        "area": _mean([run.area for run in runs]),
        "steps": max(run.length for run in runs),
        "steps_to_target": dict(zip(map(str, results), reached, strict=True)),
        "median_steps_to_target": censored_median(reached),
        "rollouts": round(fmean(run.rollouts for run in runs)),
        "seconds": median(run.seconds for run in runs),
    }


def _mean(values: Sequence[float]) -> dict[str, Any]:
    """Mean over seeds with its standard error and t interval, ready for JSON."""
    interval = t_interval(values)
    figures = {"mean": interval.value, "se": standard_error(values), "low": interval.low, "high": interval.high}
    return finite(figures)  # type: ignore[no-any-return]


def _against(
    baseline: str, methods: Mapping[str, Mapping[int, T]], difference: Callable[[T, T], float | None]
) -> dict[str, Any]:
    """Differences to the baseline of the same seed: a family of all methods that share seeds with it."""
    base = methods[baseline]
    families: dict[str, list[float]] = {}
    for name, results in methods.items():
        pairs = [(results[seed], base[seed]) for seed in base if seed in results]
        known = [d for run, other in pairs if (d := difference(run, other)) is not None]
        if known and name != baseline:
            families[name] = known
    tests = zip(families, paired_differences(list(families.values())), strict=True)
    return {name: finite(asdict(test)) | {"verdict": test.verdict} for name, test in tests}


def _average(variants: Mapping[str, Mapping[str, Results]], baseline: str) -> dict[str, Any]:
    """Means over the settings, by method, for the seeds that have a result in each of them."""
    means: dict[str, dict[int, float]] = {}
    for method in next(iter(variants.values())):
        everywhere = [methods[method] for methods in variants.values()]
        seeds = [seed for seed in everywhere[0] if all(seed in results for results in everywhere)]
        means[method] = {seed: fmean(results[seed].final for results in everywhere) for seed in seeds}
    finals: dict[str, dict[str, Any]] = {name: {"n": len(by_seed)} for name, by_seed in means.items()}
    for name, by_seed in means.items():
        if by_seed:
            finals[name]["final"] = _mean(list(by_seed.values()))
    return {"methods": finals, "metric": _against(baseline, means, operator.sub)}
