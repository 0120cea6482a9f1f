"""Runs a study: a process for each run, as many at once as the machine allows, and nothing is done twice.

study_state.py reads what is done from the folder of the study.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from threepo.config import TrainConfig
from threepo.errors import Interrupted, UserError
from threepo.files import disk_errors, lock, read_json
from threepo.lab.study_config import Study, StudyRun
from threepo.lab.study_state import (
    ENDED,
    MARK,
    choose,
    chosen_point,
    final,
    learning_curve,
    open_choices,
    outcome,
    refuse_changed,
    refuse_changes,
    reported_runs,
    tuning_runs,
)
from threepo.progress import Reporter, StopRequest, polite_stop, progress
from threepo.run_folder import CONFIG, SUMMARY
from threepo.workers import cores

LOCK = "study.lock"
_POLL = 0.2
"""Seconds between looks at the processes."""


class Process(Protocol):
    """Interface of a running process, as the runner uses it."""

    def poll(self) -> int | None: ...
    def terminate(self) -> None: ...


class _ForeignRun:
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
        """Do nothing: the process belongs to another study run, and continues."""
        self._waiting = False


def start_run(study: Study, run: StudyRun, device: str) -> Process:
    """Start a run, or continue it; the process holds the lock of its log until it ends, even if the study is killed."""
    run.log.parent.mkdir(parents=True, exist_ok=True)
    try:
        log = lock(run.log)
    except UserError:
        return _ForeignRun(run.log)
    command = run.command
    if (run.folder / CONFIG).is_file():
        command = [command[0], "--resume", str(run.folder)]
    settings = study.tables.study
    environment = {"OMP_NUM_THREADS": str(settings.threads)} | ({"CUDA_VISIBLE_DEVICES": device} if device else {})
    arguments = [*settings.launcher, sys.executable, "-m", "threepo", *command]
    with closing(log):
        log.write(f"{MARK} $ threepo {' '.join(command)}\n".encode())
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
        self._running: dict[str, tuple[StudyRun, Process, str]] = {}

    def finish(self, runs: Sequence[StudyRun]) -> None:
        """Finish all unfinished runs; `Interrupted`, with all of them saved, if asked to stop."""
        waiting, stopping = deque(run for run in runs if self._is_open(run)), False
        self._done += len(runs) - len(waiting)
        try:
            while waiting or self._running:
                if self._stop.signal_number and not stopping:
                    stopping = True
                    waiting.clear()
                    self._terminate()
                while waiting and self._free:
                    self._begin(waiting.popleft())
                for name in [name for name, (_, process, _) in self._running.items() if process.poll() is not None]:
                    run = self._end(name)
                    if self._is_open(run) and not stopping:  # a run elsewhere, which was killed as well
                        waiting.append(run)
                time.sleep(_POLL if self._running else 0)
        finally:
            self._terminate()  # there are none, unless an error or a second signal came
        if number := self._stop.signal_number:
            text = f"{signal.Signals(number).name}: its runs are saved; the same command goes on"
            raise Interrupted(number, f"study {self._study.name}: {text}")

    def _is_open(self, run: StudyRun) -> bool:
        return run.name not in self._failed and outcome(self._study, run).state not in ("finished", "excluded")

    def _begin(self, run: StudyRun) -> None:
        if run.start and not (run.start.folder / SUMMARY).is_file():
            self._fail(run.name, f"is not begun: its warm start {run.start.name} is not finished")
            self._count()
            return
        device = self._free.pop()
        self._running[run.name] = run, start_run(self._study, run, device), device

    def _end(self, name: str) -> StudyRun:
        run, process, device = self._running.pop(name)
        self._free.append(device)
        if not isinstance(process, _ForeignRun) and not self._stop.signal_number:
            with open(run.log, "a") as log:
                log.write(f"{ENDED} {process.poll()}\n")
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
        self._reporter.update(self._done, {"running": len(self._running), "failed": len(self._failed)})

    def _terminate(self) -> None:
        for _, process, _ in self._running.values():
            process.terminate()


def run_study(study: Study) -> None:
    """Finish all runs of a study: warm starts, tuning, and reported runs."""
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
    """The GPU of each concurrent run; "" where there is none, or where the launcher assigns it."""
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
