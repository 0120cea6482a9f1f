"""State of a study, read from its folder: each run's state and results, and the points that tuning has chosen.

Nothing else is remembered: a run is finished if it has a summary, is continued if it has begun, and its log says how it
ended. So a study that was stopped or killed goes on when it is started again.
"""

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from threepo.config.records import build, differences, require, shown, to_dict
from threepo.errors import UserError
from threepo.files import read_json, write_json
from threepo.lab.report import series
from threepo.lab.study_config import Cell, Overrides, Study, StudyRun
from threepo.run_folder import CONFIG, SUMMARY, read_metrics

CHOSEN = "chosen.json"
MARK = "[study]"
ENDED = f"{MARK} ended with status"
"""Beginnings of lines that the study writes into the log of a run."""
_TAIL = 2**16
"""Bytes at the end of a log in which its last attempt is looked for."""


@dataclass(frozen=True)
class Outcome:
    """State of a run: `finished`, `failed`, `unfinished` or `not begun`, and why it has no result."""

    state: str
    reason: str = ""


def outcome(run: StudyRun) -> Outcome:
    """Read the state of a run from the folder of the study."""
    if (run.folder / SUMMARY).is_file():
        return Outcome("finished")
    if run.start and not (run.start.folder / SUMMARY).is_file():
        return Outcome("not begun", f"its warm start {run.start.name} is not finished")
    if not run.log.is_file():
        return Outcome("not begun", "it has not begun")
    tail = run.log.read_bytes()[-_TAIL:].decode("utf-8", "replace")
    last_attempt = tail.split(f"{MARK} $ ")[-1].splitlines()[1:]
    lines = [line.strip() for line in last_attempt if line.strip()]
    ended = re.fullmatch(rf"{re.escape(ENDED)} (-?\d+)", lines[-1]) if lines else None
    if not ended:
        return Outcome("unfinished", "it was stopped; start the study again")
    status, output = int(ended[1]), lines[:-1]
    how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"status {status}"
    # Only a status above 1 comes with a last word of ours: before a traceback or a kill, such lines are notices.
    ours = [line for line in output if line.startswith("threepo: ") and not line.startswith("threepo: warning")]
    return Outcome("failed", ": ".join([how, *(ours if status > 1 and ours else output)[-1:]]))


def measured(study: Study, run: StudyRun) -> tuple[float | None, list[int], list[float]]:
    """The study's metric after the last step of a finished run, and its curve: training steps done, and values.

    None: the metric is no number; the curve is where it is one. `UserError` if the run has not logged them.
    """
    rows, metric, curve = read_metrics(run.folder), study.tables.study.metric, study.tables.study.curve
    last, known = rows[-1] if rows else {}, {key for row in rows for key in row}
    fix = f"is not measured after the last step of {run.name}; it has {', '.join(sorted(last)) or 'no metrics'}"
    require(metric in last, "study.metric", metric, fix)
    require(curve in known, "study.curve", curve, f"is not logged by {run.name}; it has {', '.join(sorted(known))}")
    return last[metric], *series(rows, curve)


def refuse_changes(study: Study) -> None:
    """`UserError` if a choice, or a run that has begun, is not what the study now asks for, ignoring its location."""
    begun = [name for name in study.tables.methods if any((study.folder / "runs" / name).glob("seed-*"))]
    if study.tables.variants and begun:
        fix = "a study that began without variants has its runs elsewhere; choose another study.folder"
        raise UserError(f"{study.file.name}: variants = {', '.join(study.tables.variants)}: {fix}")
    for run in known_runs(study):
        if not (run.folder / CONFIG).is_file():
            continue
        asked = run.config()
        recorded = to_dict(build(type(asked), read_json(run.folder / CONFIG)))
        # A study that has been moved since has other paths to its own folders.
        place_then, place_now = recorded["run"]["folder"].removesuffix(run.name), f"{study.folder}/"
        for name, then, now in differences(recorded, to_dict(asked)):
            if str(then).removeprefix(place_then) != str(now).removeprefix(place_now):
                text = f"{name} = {shown(then)} then, {shown(now)} now"
                fix = "restore it, or choose another study.folder"
                raise UserError(f"{study.file.name}: has changed since {run.name} began ({text}); {fix}")


def chosen_point(study: Study, cell: Cell) -> Overrides | None:
    """The point of its grid with which a cell is reported; None as long as there is none."""
    if cell not in study.tuned():
        return ()
    if not (entry := recorded_choices(study).get(cell.name)):
        return None
    fix = "was tuned on; restore it, or choose another study.folder"
    for name, now in _tuned_on(study, cell).items():
        then = entry["tuned_on"][name]
        require(then == now, name, now, f"{shown(then)} {fix}")
    return tuple(entry["chosen"])


def _tuned_on(study: Study, cell: Cell) -> dict[str, Any]:
    """Settings of the study, by name, that a choice depends on besides the settings of its runs."""
    tuning = study.tables.tuning
    assert tuning is not None
    return {
        f"methods.{cell.method}.grid": [list(point) for point in study.tables.methods[cell.method].grid],
        "tuning.seeds": list(tuning.seeds),
        "study.metric": study.tables.study.metric,
        "study.curve": study.tables.study.curve,
    }


def recorded_choices(study: Study) -> dict[str, Any]:
    """Choices of the tuning by the name of the cell; each is made once, and stays."""
    path = study.folder / CHOSEN
    return read_json(path) if path.is_file() else {}


def choose_point(study: Study, cell: Cell) -> str:
    """Choose the point of a cell whose tuning has ended, and record it; returns what was chosen, in words.

    The best mean of the metric; if equal, the best mean of the curve, for then learning began earlier; if equal, the
    first.
    """
    points: list[dict[str, Any]] = []
    for runs in study.tuning(cell):
        whole = all(outcome(run).state == "finished" for run in runs)
        found = [measured(study, run) for run in runs] if whole else []
        areas = [fmean(values) if values else None for _, _, values in found]
        points.append({"metric": [last for last, _, _ in found] or [None] * len(runs), "area": areas})
    known = [index for index, point in enumerate(points) if None not in point["metric"] + point["area"]]
    if not known:
        return "no point of its grid has all of its runs, so nothing is chosen"
    best = max(known, key=lambda index: (fmean(points[index]["metric"]), fmean(points[index]["area"]), -index))
    chosen = study.tables.methods[cell.method].grid[best]
    entry = {"tuned_on": _tuned_on(study, cell), "points": points, "chosen": list(chosen)}
    write_json(study.folder / CHOSEN, recorded_choices(study) | {cell.name: entry})
    means = [fmean(points[index]["metric"]) for index in known]
    told = f"chosen {' '.join(chosen) or 'no settings'}, {study.tables.study.metric} {max(means):.3f}"
    if (equal := means.count(max(means))) > 1:
        told += f", equal at {equal} points, so the curve chose"
    if missing := len(points) - len(known):  # a point may diverge, but a disk may also have been full
        why = "without a result from all of its seeds"
        told += f"; left out {missing} of {len(points)} points, {why} (to retry, delete {cell.name} from {CHOSEN})"
    return f"{told}; it is an end of the grid, which may be too small" if best in (0, len(points) - 1) else told


def open_choices(study: Study) -> list[Cell]:
    """The cells whose grids have to be tried, because nothing has been chosen yet."""
    return [cell for cell in study.tuned() if cell.name not in recorded_choices(study)]


def known_runs(study: Study) -> list[StudyRun]:
    """All runs but those that are reported with a point that is yet to be chosen."""
    return [*study.starts(), *tuning_runs(study, study.tuned()), *reported_runs(study)]


def tuning_runs(study: Study, cells: Sequence[Cell] | None = None) -> list[StudyRun]:
    """The runs of choices, by default of those still to be made; a seed of all methods and points before the next."""
    points = [runs for cell in (open_choices(study) if cells is None else cells) for runs in study.tuning(cell)]
    return [run for runs in zip(*points, strict=True) for run in runs]


def reported_runs(study: Study) -> list[StudyRun]:
    """The runs that are reported, of all cells whose settings are known; a seed of all methods before the next."""
    points = [(cell, chosen_point(study, cell)) for cell in study.cells]
    cells = [study.reported(cell, point) for cell, point in points if point is not None]
    return [run for runs in zip(*cells, strict=True) for run in runs]
