"""Overlap of rollouts and training: rollouts are made ahead, in a thread, while the trainer updates.

The rollouts of step t come from the weights of step t - lag, whatever takes how long, so a run repeats bit for bit. The
engine, which copies the weights, holds one step's at a time, so the thread makes the rollouts of one step at a time;
with a lag above 1 they wait to be learned from.
"""

import json
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

from threepo.files import read_json_as, write_text
from threepo.training.rollouts import Rollouts
from threepo.types import Group, Problem

FILE_NAME = "rollouts.json"
"""File of a checkpoint with the rollouts that were made ahead."""


class Ahead:
    """Makes rollouts so many steps before they are learned from."""

    def __init__(
        self, lag: int, steps: int, begin: Callable[[int], Callable[[], Rollouts]], made: Iterable[Rollouts] = ()
    ) -> None:
        """`begin(step)` loads weights, and returns what makes the rollouts of the step, of all `steps`, with them.

        `made`: the rollouts of the next steps, of a run that is resumed.
        """
        self.lag, self._steps, self._begin = lag, steps, begin
        self._made = deque(made)
        self._running: Future[Rollouts] | None = None
        self._thread = ThreadPoolExecutor(1)

    def take(self, step: int) -> Rollouts:
        """The rollouts of this step, after those of the step `lag` later have begun, with the weights of now."""
        known = step + len(self._made) + bool(self._running)
        for later in range(known, min(step + self.lag, self._steps - 1) + 1):
            self.wait()
            work = self._begin(later)
            if self.lag:
                self._running = self._thread.submit(work)
            else:
                self._made.append(work())
        if not self._made:
            self.wait()
        return self._made.popleft()

    def wait(self) -> Sequence[Rollouts]:
        """Wait until the engine is idle; returns the rollouts that are still to be learned from, in order."""
        running, self._running = self._running, None
        if running:
            self._made.append(running.result())
        return list(self._made)


def save(made: Sequence[Rollouts], path: Path) -> None:
    """Write rollouts; of their problems, the ids."""

    def short(group: Group) -> Group:
        completions = (replace(c, problem=Problem(c.problem.id, "")) for c in group.completions)
        return replace(group, completions=tuple(completions))

    shortened = (
        replace(rollouts, groups=[*map(short, rollouts.groups)], discarded=[*map(short, rollouts.discarded)])
        for rollouts in made
    )
    write_text(path, json.dumps([asdict(rollouts) for rollouts in shortened]))


def load(path: Path, problems: Callable[[int, Rollouts], Iterable[Problem]]) -> list[Rollouts]:
    """The rollouts that `save` has written; `problems(i, rollouts)` has at least the problems of the i-th."""

    def whole(group: Group, known: dict[str, Problem]) -> Group:
        completions = (replace(c, problem=known[c.problem.id]) for c in group.completions)
        return replace(group, completions=tuple(completions))

    made: list[Rollouts] = []
    for rollouts in read_json_as(path, list[Rollouts], "delete the checkpoint to resume from an older one"):
        known = {problem.id: problem for problem in problems(len(made), rollouts)}
        groups, discarded = ([whole(group, known) for group in part] for part in (rollouts.groups, rollouts.discarded))
        made.append(replace(rollouts, groups=groups, discarded=discarded))
    return made
