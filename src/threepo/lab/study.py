"""Runs a study: a process for each run, as many at once as the machine allows, and nothing is done twice.

Only the folder of the study says what is done: a run is finished if it has a summary, is continued if it has begun, and
its log says how it ended. So a study that was stopped or killed goes on when it is started again.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, Protocol

from threepo.config import TrainConfig
from threepo.config.records import build, differences, require, shown, to_dict
from threepo.errors import Interrupted, UserError
from threepo.files import disk_errors, lock, read_json, write_json
from threepo.lab.report import series
from threepo.lab.study_config import Cell, Overrides, Study, StudyRun
from threepo.progress import Reporter, StopRequest, polite_stop, progress
from threepo.run_folder import CONFIG, SUMMARY, read_metrics
from threepo.workers import cores

LOCK, CHOSEN = "study.lock", "chosen.json"
_MARK = "[study]"
_ENDED = f"{_MARK} ended with status"
_TAIL = 2**16
"""Bytes at the end of a log in which its last attempt is looked for."""
_POLL = 0.2
"""Seconds between looks at the processes."""


@dataclass(frozen=True)
class Outcome:
    """State of a run: `finished`, `failed`, `unfinished`, `not begun` or `excluded`, and why it has no result."""

    state: str
    reason: str = ""


def outcome(study: Study, run: StudyRun) -> Outcome:
    """Reads the state of a run from the folder of the study."""
    if reason := study.tables.excluded.get(run.name):
        return Outcome("excluded", reason)
    if (run.folder / SUMMARY).is_file():
        return Outcome("finished")
    if run.start and not (run.start.folder / SUMMARY).is_file():
        return Outcome("not begun", f"its warm start {run.start.name} is not finished")
    if not run.log.is_file():
        return Outcome("not begun", "it has not begun")
    lines = run.log.read_bytes()[-_TAIL:].decode("utf-8", "replace").split(f"{_MARK} $ ")[-1].splitlines()
    lines = [line.strip() for line in lines[1:] if line.strip()]
    ended = re.fullmatch(rf"{re.escape(_ENDED)} (-?\d+)", lines[-1]) if lines else None
    if not ended:
        return Outcome("unfinished", "it was stopped; start the study again")
    status, said = int(ended[1]), lines[:-1]
    how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"status {status}"
    ours = [line for line in said if line.startswith("threepo: ") and not line.startswith("threepo: warning")]
    return Outcome("failed", ": ".join([how, *(ours or said)[-1:]]))


def final(study: Study, run: StudyRun) -> float | None:
    """The metric of a finished run after its last step; None if it is no number."""
    rows, metric = read_metrics(run.folder), study.tables.study.metric
    last = rows[-1] if rows else {}
    fix = f"is not measured after the last step of {run.name}; it has {', '.join(sorted(last)) or 'no metrics'}"
    require(metric in last, "study.metric", metric, fix)
    return last[metric]  # type: ignore[no-any-return]


def learning_curve(study: Study, run: StudyRun) -> tuple[list[int], list[float]]:
    """`curve` of the study's own curve; `UserError` if the run does not log it."""
    known, name = {key for row in read_metrics(run.folder) for key in row}, study.tables.study.curve
    require(name in known, "study.curve", name, f"is not logged by {run.name}; it has {', '.join(sorted(known))}")
    return curve(run, name)


def curve(run: StudyRun, metric: str) -> tuple[list[int], list[float]]:
    """Training steps done and values of a metric of a run, where it is a number."""
    return series(read_metrics(run.folder), metric)


def refuse_changes(study: Study) -> None:
    """`UserError` if the study is not the one whose choices and runs its folder has."""
    refuse_changed(study, [*study.starts(), *tuning_runs(study, study.tuned()), *reported_runs(study)])


def refuse_changed(study: Study, runs: Iterable[StudyRun]) -> None:
    """`UserError` if a run that has begun is not what the study now asks for, but for where it lies."""
    for run in runs:
        if not (run.folder / CONFIG).is_file():
            continue
        recorded = to_dict(build(run.record, read_json(run.folder / CONFIG)))
        moved = {"run.folder", *(["model.path"] if run.start else [])}
        for name, then, now in differences(recorded, to_dict(run.config())):
            if name not in moved:
                text = f"{name} = {shown(then)} then, {shown(now)} now"
                fix = "restore it, or choose another study.folder"
                raise UserError(f"{study.file.name}: has changed since {run.name} began ({text}); {fix}")


def chosen_point(study: Study, cell: Cell) -> Overrides | None:
    """The point of its grid with which a cell is reported; None as long as there is none."""
    place = study.tuned_in(cell)
    if place is None:
        return ()
    if not (entry := recorded_choices(study).get(place.name)):
        return None
    fix = "was tuned on; restore it, or choose another study.folder"
    for name, now in _tuned_on(study, place).items():
        then = entry["tuned_on"][name]
        require(then == now, name, now, f"{shown(then)} {fix}")
    return tuple(entry["chosen"])


def _tuned_on(study: Study, cell: Cell) -> dict[str, Any]:
    """Settings of the study, by name, that a choice depends on besides the settings of its runs."""
    return {
        f"methods.{cell.method}.grid": [list(point) for point in study.tables.methods[cell.method].grid],
        "tuning.seeds": [run.seed for run in study.tuning(cell)[0]],
        "study.metric": study.tables.study.metric,
        "study.curve": study.tables.study.curve,
    }


def recorded_choices(study: Study) -> dict[str, Any]:
    """Choices of the tuning by the name of the cell; each is made once, and stays."""
    path = study.folder / CHOSEN
    return read_json(path) if path.is_file() else {}


def choose(study: Study, cell: Cell) -> bool:
    """Choose the point of a cell whose tuning has ended, and record it; False if no point has all of its runs.

    The best mean of the metric; if equal, the best mean of the curve, for then learning began earlier; if equal, the
    first.
    """
    points: list[dict[str, Any]] = []
    for runs in study.tuning(cell):
        whole = all(outcome(study, run).state == "finished" for run in runs)
        finals = [final(study, run) if whole else None for run in runs]
        curves = [learning_curve(study, run)[1] for run in runs] if whole else []
        points.append({"metric": finals, "area": [fmean(values) if values else None for values in curves]})
    whole_points = {i: point for i, point in enumerate(points) if None not in point["metric"] + point["area"]}
    known = [(fmean(point["metric"]), fmean(point["area"]), -index) for index, point in whole_points.items()]
    if known:
        chosen = study.tables.methods[cell.method].grid[-max(known)[2]]
        entry = {"tuned_on": _tuned_on(study, cell), "points": points, "chosen": list(chosen)}
        write_json(study.folder / CHOSEN, recorded_choices(study) | {cell.name: entry})
    return bool(known)


class Process(Protocol):
    """Interface of a running process, as the runner uses it."""

    def poll(self) -> int | None: ...
    def terminate(self) -> None: ...


class _Elsewhere:
    """A run that a process of an earlier, killed study still has open."""

    def __init__(self, log: Path) -> None:
        self._log, self._waiting = log, True

    def poll(self) -> int | None:
        try:
            lock(self._log).close()
        except UserError:
            return None if self._waiting else 0
        return 0

    def terminate(self) -> None:
        """It is not ours, so it goes on, and nobody waits for it."""
        self._waiting = False


def begin(study: Study, run: StudyRun, device: str) -> Process:
    """Start a run, or continue it; the process holds the lock of its log until it ends, even if the study is killed."""
    run.log.parent.mkdir(parents=True, exist_ok=True)
    try:
        log = lock(run.log)
    except UserError:
        return _Elsewhere(run.log)
    command = run.command
    if (run.folder / CONFIG).is_file():
        command = [command[0], "--resume", str(run.folder)]
    settings = study.tables.study
    environment = {"OMP_NUM_THREADS": str(settings.threads)} | ({"CUDA_VISIBLE_DEVICES": device} if device else {})
    arguments = [*settings.launcher, sys.executable, "-m", "threepo", *command]
    with closing(log):
        log.write(f"{_MARK} $ threepo {' '.join(command)}\n".encode())
        log.flush()
        if settings.launcher:
            # In a session of its own: the terminal's Ctrl-C must reach it once, from the study.
            pipes: Any = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            return subprocess.Popen(arguments, env=os.environ | environment, start_new_session=True, **pipes)
    from threepo.lab.study_fork import ForkedRun

    return ForkedRun(command, run.log, environment)


class Runner:
    """Brings runs to their end, on the devices that are free."""

    def __init__(self, study: Study, devices: list[str], reporter: Reporter, stop: StopRequest) -> None:
        self._study, self._reporter, self._stop = study, reporter, stop
        self._done, self._failed = 0, set[str]()
        self._free = devices
        self._going: dict[str, tuple[StudyRun, Process, str]] = {}

    def finish(self, runs: Sequence[StudyRun]) -> None:
        """Bring the runs to their end that are not there yet; `Interrupted`, with all of them saved, if asked to."""
        waiting, stopping = deque(run for run in runs if self._open(run)), False
        self._done += len(runs) - len(waiting)
        try:
            while waiting or self._going:
                if self._stop.signal_number and not stopping:
                    stopping = True
                    waiting.clear()
                    self._terminate()
                while waiting and self._free:
                    self._begin(waiting.popleft())
                for name in [name for name, (_, process, _) in self._going.items() if process.poll() is not None]:
                    run = self._end(name)
                    if self._open(run) and not stopping:  # a run elsewhere, which was killed as well
                        waiting.append(run)
                time.sleep(_POLL if self._going else 0)
        finally:
            self._terminate()  # there are none, unless an error or a second signal came
        if number := self._stop.signal_number:
            text = f"{signal.Signals(number).name}: its runs are saved; the same command goes on"
            raise Interrupted(number, f"study {self._study.name}: {text}")

    def _open(self, run: StudyRun) -> bool:
        return run.name not in self._failed and outcome(self._study, run).state not in ("finished", "excluded")

    def _begin(self, run: StudyRun) -> None:
        if run.start and not (run.start.folder / SUMMARY).is_file():
            self._fail(run.name, f"is not begun: its warm start {run.start.name} is not finished")
            self._count()
            return
        device = self._free.pop()
        self._going[run.name] = run, begin(self._study, run, device), device

    def _end(self, name: str) -> StudyRun:
        run, process, device = self._going.pop(name)
        self._free.append(device)
        if not isinstance(process, _Elsewhere) and not self._stop.signal_number:
            with open(run.log, "a") as log:
                log.write(f"{_ENDED} {process.poll()}\n")
        found = outcome(self._study, run)
        if found.state == "failed":
            self._fail(name, f"failed: {found.reason}; its log is {run.log}")
        elif found.state == "finished" and run.record is TrainConfig:
            final(self._study, run)  # refuses metrics that do not exist after the first run, not after the last
            learning_curve(self._study, run)
        self._count(found.state in ("finished", "failed"))
        return run

    def _fail(self, name: str, why: str) -> None:
        self._failed.add(name)
        print(f"threepo: {name} {why}", file=sys.stderr, flush=True)

    def _count(self, done: int = 1) -> None:
        self._done += done
        self._reporter.update(self._done, {"running": len(self._going), "failed": len(self._failed)})

    def _terminate(self) -> None:
        for _, process, _ in self._going.values():
            process.terminate()


def run_study(study: Study) -> None:
    """Bring all runs of a study to their end: warm starts, tuning, and what is reported."""
    starts, tuning = study.starts(), tuning_runs(study)
    refuse_changes(study)
    with disk_errors(study.folder):
        study.folder.mkdir(parents=True, exist_ok=True)
    total = len(starts) + len(tuning) + len(study.cells) * len(study.tables.study.seeds)
    bar = progress(f"study {study.name}", total, 0, study.folder, unit="run")
    devices = job_devices(study)
    with lock(study.folder / LOCK), polite_stop() as stop, bar as reporter:
        runner = Runner(study, devices, reporter, stop)
        runner.finish(starts)
        runner.finish(tuning)
        for cell in open_choices(study):
            if not choose(study, cell):
                text = "no point of its grid has all of its runs, so nothing is chosen"
                print(f"threepo: {cell.name}: {text}", file=sys.stderr)
        reported = reported_runs(study)
        refuse_changed(study, reported)
        runner.finish(reported)


def open_choices(study: Study) -> list[Cell]:
    """The cells whose grids have to be tried, because nothing has been chosen yet."""
    return [cell for cell in study.tuned() if cell.name not in recorded_choices(study)]


def tuning_runs(study: Study, cells: Sequence[Cell] | None = None) -> list[StudyRun]:
    """The runs of choices, by default of those still to be made; a seed of all methods and points before the next."""
    points = [runs for cell in (open_choices(study) if cells is None else cells) for runs in study.tuning(cell)]
    return [run for runs in zip(*points, strict=True) for run in runs]


def reported_runs(study: Study) -> list[StudyRun]:
    """The runs that are reported, of all cells whose settings are known; a seed of all methods before the next."""
    points = [(cell, chosen_point(study, cell)) for cell in study.cells]
    cells = [study.reported(cell, point) for cell, point in points if point is not None]
    return [run for runs in zip(*cells, strict=True) for run in runs]


def forecast(study: Study) -> list[str]:
    """Every run with its state, and how long the rest takes if runs of a method last as long as finished ones did."""
    refuse_changes(study)
    starts, tuning, reported = study.starts(), tuning_runs(study), []
    for cell in study.cells:
        point = chosen_point(study, cell)
        reported += study.reported(cell, point or ())
    lines, seconds, unknown = [], 0.0, 0
    lasted: dict[str, list[float]] = {}
    for run in (*starts, *tuning, *reported):
        if (run.folder / SUMMARY).is_file():
            lasted.setdefault(_kind(run), []).append(read_json(run.folder / SUMMARY)["seconds"])
    for run in (*starts, *tuning, *reported):
        state = outcome(study, run).state
        lines.append(f"{state:<12}{run.name}")
        if state not in ("finished", "excluded"):
            known = lasted.get(_kind(run), [])
            seconds += median(known) if known else 0.0
            unknown += not known
    jobs = len(job_devices(study))
    last = f"{len(lines)} runs, {jobs} at once; those to come take about {seconds / jobs / 60:.0f} minutes"
    return [*lines, last + (f" and what {unknown} take, of whose kind none is finished yet" if unknown else "")]


def _kind(run: StudyRun) -> str:
    """Runs that last alike: warm starts, or all of a method in a variant."""
    parts = [part for part in run.name.split("/")[1:] if not part.startswith(("point-", "seed-"))]
    return "/".join(parts if run.record is TrainConfig else ["start"])


def job_devices(study: Study) -> list[str]:
    """For each run that goes on at once, the GPU that it gets; "" where there is none, or where others see to it."""
    settings = study.tables.study
    devices = [] if settings.launcher else gpus()
    jobs = settings.jobs or len(devices) or max(1, cores() // settings.threads)
    return [devices[i % len(devices)] if devices else "" for i in range(jobs)]


def gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    if (named := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name for name in named.split(",") if name.strip()]
    if not shutil.which("nvidia-smi"):
        return []
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
    return [str(index) for index, _ in enumerate(line for line in listed.splitlines() if line.startswith("GPU"))]
