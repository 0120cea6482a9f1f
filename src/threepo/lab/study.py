"""Runs a study, or the demonstration: a process for each run, as many at once as the machine allows, nothing twice.

study_state.py reads what is done from the folder of the study.
"""

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from statistics import median
from unittest.mock import patch

from threepo.cli import main
from threepo.errors import Interrupted, UserError
from threepo.files import disk_errors, lock, read_json
from threepo.lab.study_config import Study, StudyRun
from threepo.lab.study_state import (
    ENDED,
    MARK,
    choose_point,
    chosen_point,
    measured,
    open_choices,
    outcome,
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
TERMINAL = (signal.SIGINT, signal.SIGHUP)
"""Signals that a terminal sends to the study and to the process that forks: only the study must obey them."""


def fork(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> ForkServerProcess:
    """Start a command of threepo as a fork of a process that has imported PyTorch and transformers for all of them.

    The fork has the lock of its log until it ends, even if the study is killed. Importing takes most of the time in
    which a short run starts (docs/performance.md), and a study starts hundreds.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "threepo.api", "transformers.modeling_utils"])
    process = context.Process(target=_run_command, args=(list(command), log, os.getcwd(), dict(environment)))
    # Libraries read the number of threads when they are imported. A script without a guard would begin the study again.
    without_main = patch.multiple("__main__", create=True, __spec__=None, __file__=None)
    with without_main, patch.dict(os.environ, environment):
        resource_tracker.ensure_running()  # which lets signals through again when it has started
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, TERMINAL)  # the process that forks inherits it
        try:
            forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        process.start()
    return process


def _run_command(command: list[str], log: Path, folder: str, environment: Mapping[str, str]) -> None:
    """Run the command in the fork, as `python -m threepo` runs it in `folder`."""
    os.setsid()  # the terminal's Ctrl-C must reach it once, from the study
    signal.pthread_sigmask(signal.SIG_UNBLOCK, TERMINAL)
    with closing(lock(log)) as output:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.environ.update(environment)
    os.chdir(folder)
    sys.path.insert(0, folder)
    sys.exit(main(command))


def start_run(run: StudyRun, threads: int, device: str) -> ForkServerProcess | None:
    """Start a run, or continue it; None as long as a process of an earlier, killed study has it open."""
    run.log.parent.mkdir(parents=True, exist_ok=True)
    command = [run.kind, "--resume", str(run.folder)] if (run.folder / CONFIG).is_file() else run.command
    try:
        log = lock(run.log)
    except UserError:
        return None
    with closing(log):
        log.write(f"{MARK} $ threepo {' '.join(command)}\n".encode())
        log.flush()
    gpu = {"CUDA_VISIBLE_DEVICES": device} if device else {}
    return fork(command, run.log, {"OMP_NUM_THREADS": str(threads), **gpu})


@dataclass
class Runner:
    """Brings runs to their end, on the devices that are free."""

    title: str
    threads: int
    free: list[str]
    """GPUs of the next runs; "" where there is none."""
    reporter: Reporter
    stop: StopRequest
    finished: Callable[[StudyRun], object]
    """Called with every run that has just finished."""
    failed: set[str] = field(default_factory=set)
    done: int = 0
    running: dict[str, tuple[StudyRun, ForkServerProcess, str]] = field(default_factory=dict)

    def finish(self, runs: Sequence[StudyRun]) -> None:
        """Bring the runs to their end that are not there yet; `Interrupted`, with all of them saved, if asked to."""
        waiting, stopping = [run for run in runs if self._is_open(run)], False
        self._count(len(runs) - len(waiting))
        try:
            while waiting or self.running:
                if self.stop.signal_number and not stopping:
                    waiting, stopping = [], True
                    self._terminate()
                waiting = [run for run in waiting if not self._take(run)]
                for name in [name for name, (_, process, _) in self.running.items() if process.exitcode is not None]:
                    self._end(name)
                time.sleep(_POLL if waiting or self.running else 0)
        finally:
            self._terminate()  # there are none, unless an error or a second signal came
        if number := self.stop.signal_number:
            text = f"{signal.Signals(number).name}: its runs are saved; the same command goes on"
            raise Interrupted(number, f"{self.title}: {text}")

    def _is_open(self, run: StudyRun) -> bool:
        return run.name not in self.failed and outcome(run).state != "finished"

    def _take(self, run: StudyRun) -> bool:
        """Start a run; False if it has to wait for a device, its warm start, or a process of an earlier study."""
        if not self.free:
            return False
        if not self._is_open(run):  # the earlier study's process has finished it
            self._count()
        elif run.start and run.start.name in self.failed:
            self._fail(run.name, f"is not begun: its warm start {run.start.name} is not finished")
        elif run.start and not (run.start.folder / SUMMARY).is_file():
            return False
        elif process := start_run(run, self.threads, self.free[-1]):
            self.running[run.name] = run, process, self.free.pop()
            self._count(0)
        else:
            return False
        return True

    def _end(self, name: str) -> None:
        run, process, device = self.running.pop(name)
        self.free.append(device)
        if not self.stop.signal_number:
            with open(run.log, "a") as log:
                log.write(f"{ENDED} {process.exitcode}\n")
        found = outcome(run)
        if found.state == "failed":
            self._fail(name, f"failed: {found.reason}; its log is {run.log}")
            return
        if found.state == "finished":
            self.finished(run)
        self._count(found.state == "finished")

    def _fail(self, name: str, why: str) -> None:
        self.failed.add(name)
        print(f"threepo: {name} {why}", file=sys.stderr, flush=True)
        self._count()

    def _count(self, done: int = 1) -> None:
        self.done += done
        self.reporter.update(self.done, {"running": len(self.running), "failed": len(self.failed)})

    def _terminate(self) -> None:
        for _, process, _ in self.running.values():
            process.terminate()


@contextmanager
def open_runner(
    title: str, folder: Path, total: int, finished: Callable[[StudyRun], object], jobs: int = 0, threads: int = 1
) -> Iterator[Runner]:
    """Lock the folder of `total` runs, show their progress, and yield what brings them to their end."""
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    devices = job_devices(jobs, threads)
    with lock(folder / LOCK), polite_stop() as stop, progress(title, total, 0, folder, unit="run") as reporter:
        yield Runner(title, threads, devices, reporter, stop, finished)


def run_study(study: Study) -> None:
    """Finish all runs of a study: warm starts, tuning, and reported runs."""
    first = [*study.starts(), *tuning_runs(study)]
    refuse_changes(study)

    def refuse_unlogged(run: StudyRun) -> None:
        """`UserError` for metrics that do not exist after the first run that has them, not after the last."""
        if run.kind == "train":
            measured(study, run)

    settings, title = study.tables.study, f"study {study.name}"
    total = len(first) + len(study.cells) * len(settings.seeds)
    with open_runner(title, study.folder, total, refuse_unlogged, settings.jobs, settings.threads) as runner:
        runner.finish(first)
        for cell in open_choices(study):
            print(f"threepo: {cell.name}: {choose_point(study, cell)}", file=sys.stderr)
        refuse_changes(study)
        runner.finish(reported_runs(study))


def forecast(study: Study) -> list[str]:
    """Every run with its state, and how long the rest takes if its runs last as long as the finished ones did."""
    refuse_changes(study)
    runs = [*study.starts(), *tuning_runs(study)]
    for cell in study.cells:
        runs += study.reported(cell, chosen_point(study, cell) or ())
    states = [outcome(run).state for run in runs]
    finished = [run for run in runs if run.kind == "train" and (run.folder / SUMMARY).is_file()]
    seconds = [read_json(run.folder / SUMMARY)["seconds"] for run in finished]
    settings, to_come = study.tables.study, len(states) - states.count("finished")
    jobs = len(job_devices(settings.jobs, settings.threads))
    last = f"{len(runs)} runs, {jobs} at once; {to_come} to come"
    last += f" take about {median(seconds) * to_come / jobs / 60:.0f} minutes" if seconds else ""
    return [*(f"{state:<12}{run.name}" for state, run in zip(states, runs, strict=True)), last]


def job_devices(jobs: int, threads: int) -> list[str]:
    """The GPU of each of `jobs` runs at once, "" where there is none; 0 jobs stand for as many as there is room for."""
    devices = gpus()
    jobs = jobs or len(devices) or max(1, cores() // threads)
    return [devices[i % len(devices)] if devices else "" for i in range(jobs)]


def gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    if (named := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name for name in named.split(",") if name.strip() not in ("", "-1")]
    if not shutil.which("nvidia-smi"):
        return []
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
    return [str(index) for index, _ in enumerate(line for line in listed.splitlines() if line.startswith("GPU"))]
