"""Overlap of rollouts and training: rollouts are made ahead, in a thread, while the trainer updates.

The rollouts of step t come from the weights of step t - lag, whatever takes how long, so a run repeats bit for bit. The
engine, which copies the weights, holds one step's at a time, so the thread makes the rollouts of one step at a time;
with a lag above 1 they wait to be learned from.
"""

import atexit
import json
import sys
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path
from typing import TypeVar

import torch

from threepo.config import LocalEngineConfig, TrainConfig
from threepo.data.source import ProblemSource
from threepo.errors import ThreepoWarning
from threepo.files import read_json_as, write_text
from threepo.methods.method import rollouts_are_filtered
from threepo.models.loading import pick_device
from threepo.run_folder import ROLLOUTS_FILE, RunFolder, newest_checkpoint
from threepo.training.checkpoint import TrainState
from threepo.training.rollouts import Rollouts
from threepo.types import Completion, Group, OwnReward, Problem, integers, numbers

T = TypeVar("T")
Begin = Callable[[int], Callable[[], Rollouts]]
"""Loads the current weights, and returns a function that makes the rollouts of a step with them."""


class Ahead:
    """Makes rollouts up to `lag` steps before they are learned from."""

    def __init__(self, lag: int, steps: int, waiting: Iterable[Rollouts] = ()) -> None:
        """`steps`: length of the run. `waiting`: the rollouts of the next steps, if it is resumed."""
        self._lag, self._steps = lag, steps
        self._waiting = deque(waiting)
        self._running: Future[Rollouts] | None = None

    def take(self, step: int, begin: Begin, ahead: int) -> Rollouts:
        """Begin the rollouts of the step `ahead` later with the current weights, and return this step's."""
        next_step = step + len(self._waiting) + bool(self._running)
        for later in range(next_step, min(step + ahead, self._steps - 1) + 1):
            self.wait()
            work = begin(later)
            if self._lag:
                self._running = in_thread(work)
            else:
                self._waiting.append(work())
        if not self._waiting:
            self.wait()
        return self._waiting.popleft()

    def wait(self) -> Sequence[Rollouts]:
        """Wait until the engine is idle; returns the rollouts that are still to be learned from, in order.

        Raises the error of rollouts that failed, each time it is called.
        """
        if self._running:
            self._waiting.append(self._running.result())
            self._running = None
        return list(self._waiting)

    def stop(self) -> None:
        """Wait until the engine is idle, whether rollouts have failed or not."""
        if self._running:
            self._running.exception()


def check_ahead(config: TrainConfig, verifier: object) -> None:
    """Raise `UserError` for what cannot work beside an update, and warn of rollouts that nothing corrects.

    `verifier` is the data source's own.
    """
    method = config.method
    if not config.overlap.lag:
        return
    if isinstance(verifier, OwnReward) and "task" in config.reward.names:
        fix = "the data source's rewards can be had in the main thread only; set it to 0"
        config.overlap.check("lag", not verifier.in_main_thread, fix)
    engine = config.engine
    if isinstance(engine, LocalEngineConfig) and pick_device(config.model.device).type != "cpu":
        fix = "rollouts ahead would take the update's memory; set it to what --dry-run leaves for keys and values, "
        engine.check("memory_gib", engine.memory_gib > 0, fix + "and the weights of the draws")
    if config.ess_schedule.metric_read.startswith("correction/"):
        what = f"ess_schedule.kind = {config.ess_schedule.kind!r}: reads what noise and lag do together, so the noise"
        fix = "watch posterior/sigma_to_rms, or set overlap.lag = 0"
        print(f"threepo: {what} falls where the lag alone is too much: {fix}", file=sys.stderr)
    corrected = method.correction.kind != "none" and not rollouts_are_filtered(method, config.sampling)
    if not corrected and method.gradient_at != "evolution":
        fix = "set method.correction.kind = 'seq_mis', which needs sampling.top_p = 1 and sampling.top_k = 0"
        if method.greedy:
            fix = "greedy rollouts have no ratio to correct by: lower the learning rate, or set overlap.lag = 0"
        warnings.warn(
            f"overlap.lag = {config.overlap.lag}: the rollouts are of earlier weights, and nothing corrects for it; "
            f"{fix}",
            ThreepoWarning,
            stacklevel=2,
        )


def in_thread(work: Callable[[], T]) -> Future[T]:
    """Begin work in a thread that keeps the process from ending for `LEAVING_S` seconds at most; a pool's would wait.

    On a GPU it has a stream of its own, after what has been queued so far: in the trainer's stream, every token would
    wait for the micro-batches before it.
    """
    future: Future[T] = Future()
    stream = None
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        stream = _stream_beside(torch.cuda.current_device())
        stream.wait_stream(torch.cuda.current_stream())

    def run() -> None:
        try:
            if stream:  # a new thread begins on the first GPU, and would go back there
                torch.cuda.set_device(stream.device)
            with torch.cuda.stream(stream):  # None changes nothing
                result = work()
            if stream:
                stream.synchronize()
            future.set_result(result)
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=run, daemon=True)
    with _ADDING:
        _THREADS.add(thread)
    thread.start()
    return future


_THREADS: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_ADDING = threading.Lock()
LEAVING_S = 10.0
"""Seconds in which threads may finish what they do when Python ends."""


@atexit.register
def _wait_for_threads() -> None:
    """Wait for threads a while: up to Python 3.13, the end of the process aborts one that is in C++, as torch is."""
    end = time.monotonic() + LEAVING_S
    with _ADDING:
        threads = list(_THREADS)
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))


@cache
def _stream_beside(device: int) -> torch.cuda.Stream:
    """One for all threads: torch keeps the freed memory of each stream for that stream."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def save_rollouts(waiting: Sequence[Rollouts], path: Path) -> None:
    """Write rollouts, with only the ids of their problems."""
    shortened = (_changed(rollouts, lambda c: replace(c, problem=Problem(c.problem.id, ""))) for rollouts in waiting)
    write_text(path, json.dumps([asdict(rollouts) for rollouts in shortened], default=list))


def load_rollouts(
    config: TrainConfig, resumed: RunFolder | None, state: TrainState, source: ProblemSource
) -> list[Rollouts]:
    """The rollouts that a resumed run had made ahead, with their problems from the source; none of a new run."""
    checkpoint = newest_checkpoint(resumed.path) if resumed else None
    if not checkpoint or not (checkpoint / ROLLOUTS_FILE).is_file():
        return []
    fix = "delete the checkpoint to resume from an older one"
    saved: list[Rollouts] = read_json_as(checkpoint / ROLLOUTS_FILE, list[Rollouts], fix)
    waiting, drawn = [], state.drawn
    for index, rollouts in enumerate(saved):
        if rollouts.rounds:
            problems, _ = source.untried(drawn, rollouts.drawn - drawn, ())
            drawn = rollouts.drawn
        else:
            number = rollouts.number if config.overlap.stream else state.step + index
            problems = source.batch(number, config.data.prompts_per_step)
        waiting.append(_changed(rollouts, partial(_restored, {problem.id: problem for problem in problems})))
    return waiting


def _restored(problems: Mapping[str, Problem], completion: Completion) -> Completion:
    """A completion that was read from a file, with its problem and arrays."""
    return replace(
        completion,
        problem=problems[completion.problem.id],
        tokens=integers(completion.tokens),
        logprobs=numbers(completion.logprobs),
    )


def _changed(rollouts: Rollouts, change: Callable[[Completion], Completion]) -> Rollouts:
    """Rollouts with other completions."""

    def changed(groups: Sequence[Group]) -> list[Group]:
        return [replace(group, completions=tuple(map(change, group.completions))) for group in groups]

    return replace(rollouts, groups=changed(rollouts.groups), discarded=changed(rollouts.discarded))
