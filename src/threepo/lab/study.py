"""Runs a study: a process for each run, as many at once as the machine allows, and nothing is done twice.

study_state.py reads what is done from the folder of the study.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from statistics import median

from threepo.config import TrainConfig
from threepo.errors import Interrupted, UserError
from threepo.files import disk_errors, lock, read_json
from threepo.lab.study_config import Study, StudyRun
from threepo.lab.study_fork import ForkedRun
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


def start_run(study: Study, run: StudyRun, device: str) -> ForkedRun | None:
    """Start a run, or continue it; None as long as a process of an earlier, killed study has it open."""
    run.log.parent.mkdir(parents=True, exist_ok=True)
    command = [run.command[0], "--resume", str(run.folder)] if (run.folder / CONFIG).is_file() else run.command
    try:
        log = lock(run.log)
    except UserError:
        return None
    with closing(log):
        log.write(f"{MARK} $ threepo {' '.join(command)}\n".encode())
        log.flush()
    threads = {"OMP_NUM_THREADS": str(study.tables.study.threads)}
    return ForkedRun(command, run.log, threads | ({"CUDA_VISIBLE_DEVICES": device} if device else {}))


class Runner:
    """Brings runs to their end, on the devices that are free."""

    def __init__(self, study: Study, devices: list[str], reporter: Reporter, stop: StopRequest) -> None:
        self._study, self._reporter, self._stop = study, reporter, stop
        self._done, self._failed = 0, set[str]()
        self._free = devices
        self._running: dict[str, tuple[StudyRun, ForkedRun, str]] = {}

    def finish(self, runs: Sequence[StudyRun]) -> None:
        """Bring the runs to their end that are not there yet; `Interrupted`, with all of them saved, if asked to."""
        waiting, stopping = [run for run in runs if self._is_open(run)], False
        self._done += len(runs) - len(waiting)
        try:
            while waiting or self._running:
                if self._stop.signal_number and not stopping:
                    waiting, stopping = [], True
                    self._terminate()
                waiting = [run for run in waiting if not self._take(run)]
                for name in [name for name, (_, process, _) in self._running.items() if process.poll() is not None]:
                    self._end(name)
                time.sleep(_POLL if waiting or self._running else 0)
        finally:
            self._terminate()  # there are none, unless an error or a second signal came
        if number := self._stop.signal_number:
            text = f"{signal.Signals(number).name}: its runs are saved; the same command goes on"
            raise Interrupted(number, f"study {self._study.name}: {text}")

    def _is_open(self, run: StudyRun) -> bool:
        return run.name not in self._failed and outcome(run).state != "finished"

    def _take(self, run: StudyRun) -> bool:
        """Start a run that waits; False if it has to wait on, for a device or for a process of an earlier study."""
        if not self._free:
            return False
        if not self._is_open(run):  # the earlier study's process has finished it
            self._count()
        elif run.start and not (run.start.folder / SUMMARY).is_file():
            self._fail(run.name, f"is not begun: its warm start {run.start.name} is not finished")
            self._count()
        elif process := start_run(self._study, run, self._free[-1]):
            self._running[run.name] = run, process, self._free.pop()
        else:
            return False
        return True

    def _end(self, name: str) -> None:
        run, process, device = self._running.pop(name)
        self._free.append(device)
        if not self._stop.signal_number:
            with open(run.log, "a") as log:
                log.write(f"{ENDED} {process.poll()}\n")
        found = outcome(run)
        if found.state == "failed":
            self._fail(name, f"failed: {found.reason}; its log is {run.log}")
        elif found.state == "finished" and run.record is TrainConfig:
            final(self._study, run)  # refuses metrics that do not exist after the first run, not after the last
            learning_curve(self._study, run)
        self._count(found.state in ("finished", "failed"))

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
    """Every run with its state, and how long the rest takes if its runs last as long as the finished ones did."""
    refuse_changes(study)
    runs = [*study.starts(), *tuning_runs(study)]
    for cell in study.cells:
        runs += study.reported(cell, chosen_point(study, cell) or ())
    states = [outcome(run).state for run in runs]
    finished = [run for run in runs if run.record is TrainConfig and (run.folder / SUMMARY).is_file()]
    seconds = [read_json(run.folder / SUMMARY)["seconds"] for run in finished]
    jobs, to_come = len(job_devices(study)), len(states) - states.count("finished")
    last = f"{len(runs)} runs, {jobs} at once; {to_come} to come"
    last += f" take about {median(seconds) * to_come / jobs / 60:.0f} minutes" if seconds else ""
    return [*(f"{state:<12}{run.name}" for state, run in zip(states, runs, strict=True)), last]


def job_devices(study: Study) -> list[str]:
    """The GPU of each run that goes on at once; "" where there is none."""
    settings, devices = study.tables.study, gpus()
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
