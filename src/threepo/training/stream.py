"""Groups that are learned from as they finish, and the journal by which such a run is repeated.

The engine generates batch after batch, each with the weights of the moment, and the groups of a batch are graded at the
same time. A step learns from the first groups that are there, whichever batch they are of. What arrives when depends
on the clock, so a journal records for every step which batches were begun before it, and which groups it took and
dropped. A step that is in the journal does the same again; everything else follows from the recipe.
"""

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

from threepo.errors import UserError
from threepo.files import append_line, read_lines_as
from threepo.ranks.world import World
from threepo.training.overlap import in_thread
from threepo.training.rollouts import Rollouts
from threepo.types import Completion

FILE_NAME = "journal.jsonl"
PAUSE_SECONDS = 0.02
"""Longest time between two looks at what the other ranks have graded."""
Name = tuple[int, str]
"""The number of a group's batch, and the id of its problem."""


@dataclass
class Line:
    """A line of the journal: what a step has begun, taken and dropped."""

    step: int
    """The step, whose weights write the batches that it begins."""
    begun: list[int] = field(default_factory=list)
    """Numbers of the batches, which have the problems, draws and random numbers of the step of that number."""
    taken: list[Name] = field(default_factory=list)
    """Groups to learn from."""
    dropped: list[Name] = field(default_factory=list)
    """Groups that were older than `overlap.lag` steps when they arrived."""


@dataclass(frozen=True)
class Batch:
    """A batch that has been begun: a function that generates, and one that grades a group of what was generated."""

    generate: Callable[[], Sequence[Sequence[Completion]]]
    """The completions by group; all ranks call it, in a thread."""
    grade: Callable[[Sequence[Completion]], Rollouts]
    """Grades the completions of a group, in a thread of its own."""


class Stream:
    """The groups that are being made, and those that wait to be learned from.

    Args:
        lag: how many steps old a group may be.
        steps: number of steps of the run.
        size: groups in a batch, and in a step.
        journal: the journal, to which this run adds its steps. If it is resumed, steps that are there are repeated.
        other: the journal of another run to repeat, if there is one.
        waiting: what `wait` returned when the run was saved.
    """

    def __init__(
        self,
        lag: int,
        steps: int,
        size: int,
        journal: Path,
        world: World,
        other: Path | None = None,
        waiting: Iterable[Rollouts] = (),
    ) -> None:
        self._lag, self._steps, self._size, self._journal, self._world = lag, steps, size, journal, world
        lines = world.on_first(lambda: read_journal(journal))
        self._noted = {line.step for line in lines}
        more = world.on_first(lambda: read_journal(other)) if other else []
        self._repeated = {line.step: line for line in (*more, *lines)}
        self._next = 1 + max((number for line in self._repeated.values() for number in line.begun), default=-1)
        self._ready = {_name(rollouts): rollouts for rollouts in waiting}
        """The groups that have arrived, in that order; on all ranks the same."""
        self._unfinished = 0
        """Groups that are being generated or graded, by any rank."""
        self._changed = threading.Condition()
        # Of this rank; under the condition's lock.
        self._generating = False
        self._graded: list[Rollouts] = []
        """Groups that the other ranks have not been told of."""
        self._errors: list[BaseException] = []

    def take(self, step: int, begin: Callable[[int], Batch], held: bool = False) -> Rollouts:
        """What a step learns from; batches that are due are begun with the current weights. All ranks call.

        If `held`, no batch is begun that this step does not need. Raises the errors of rollouts, and `UserError` if
        the step is repeated and the journal does not fit.
        """
        line = self._repeat(step, begin) if step in self._repeated else self._choose(step, begin, held)
        taken, dropped = ([self._ready.pop(name) for name in names] for names in (sorted(line.taken), line.dropped))
        seconds: Counter[str] = Counter()
        for rollouts in (*taken, *dropped):
            seconds.update(rollouts.seconds)
        groups, discarded = ([group for rollouts in part for group in rollouts.groups] for part in (taken, dropped))
        return replace(taken[0], groups=groups, discarded=discarded, seconds=seconds, number=0)

    def wait(self) -> Sequence[Rollouts]:
        """Wait until nothing is being generated or graded; returns the groups that are to be learned from."""
        while not self._collect() or self._unfinished:
            self._pause()
        return list(self._ready.values())

    def _choose(self, step: int, begin: Callable[[int], Batch], held: bool) -> Line:
        """Begin what is due, take what is there first, and record it."""
        line = Line(step)
        while True:
            idle = self._collect()
            line.dropped = [name for name, rollouts in self._ready.items() if step - _written_at(rollouts) > self._lag]
            usable: dict[str, Name] = {}  # a problem that comes again is for another step
            for name in self._ready:
                if name not in line.dropped:
                    usable.setdefault(name[1], name)
            left = len(self._ready) - len(line.dropped) + self._unfinished
            due = left <= self._size * self._lag * (not held) or (not self._unfinished and len(usable) < self._size)
            if idle and due and left < self._size * (self._steps - step):
                line.begun.append(self._next)
                self._begin(self._next, begin)
            elif len(usable) >= self._size:
                line.taken = list(usable.values())[: self._size]
                self._note(line)
                return line
            else:
                self._pause()

    def _repeat(self, step: int, begin: Callable[[int], Batch]) -> Line:
        """Do what the journal says."""
        line = self._repeated[step]
        for number in line.begun:
            while not self._collect():
                self._pause()
            self._begin(number, begin)
        while missing := {*line.taken, *line.dropped} - self._ready.keys():
            if not self._unfinished:
                raise UserError(
                    f"overlap.journal: step {step} learned from {len(missing)} groups that this run does not have, "
                    f"such as batch {min(missing)[0]}, problem {min(missing)[1]}: give it the recipe of the journal"
                )
            self._pause()
            self._collect()
        self._note(line)
        return line

    def _note(self, line: Line) -> None:
        """Add a line to the journal, unless it is there."""
        if line.step not in self._noted:
            self._world.on_first(lambda: append_line(self._journal, json.dumps(asdict(line))))

    def _begin(self, number: int, begin: Callable[[int], Batch]) -> None:
        """Begin a batch, while no engine is generating."""
        batch = begin(number)
        self._next, self._unfinished, self._generating = number + 1, self._unfinished + self._size, True

        def generate() -> None:
            with self._reporting():
                for index, group in enumerate(batch.generate()):
                    if index % self._world.size == self._world.rank:
                        in_thread(partial(grade, group))
                self._generating = False

        def grade(group: Sequence[Completion]) -> None:
            with self._reporting():
                graded = replace(batch.grade(group), number=number)
                with self._changed:
                    self._graded.append(graded)

        in_thread(generate)

    def _collect(self) -> bool:
        """Take in what all ranks have graded; true if no engine is generating. All ranks call.

        Raises the error of rollouts that failed, each time it is called.
        """
        with self._changed:
            graded, self._graded = self._graded, []
            idle = not self._generating
        with self._world.together():
            for error in self._errors:
                raise error
        shares = self._world.gather((idle, graded))
        arrived = {_name(rollouts): rollouts for _, share in shares for rollouts in share}
        self._ready |= arrived
        self._unfinished -= len(arrived)
        return all(idle for idle, _ in shares)

    def _pause(self) -> None:
        """Wait until this rank has finished something; but not for long, as another rank may have."""
        with self._changed:
            if not (self._graded or self._errors):
                self._changed.wait(PAUSE_SECONDS)

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """Wake the thread that trains; an error of the body is for it."""
        try:
            yield
        except BaseException as error:
            self._errors.append(error)
        with self._changed:
            self._changed.notify_all()


def read_journal(path: Path) -> list[Line]:
    """The lines of a journal; none without a file."""
    return read_lines_as(path, Line)


def _name(rollouts: Rollouts) -> Name:
    return rollouts.number, rollouts.groups[0].problem.id


def _written_at(rollouts: Rollouts) -> int:
    """The policy step whose weights have written a group."""
    return rollouts.groups[0].completions[0].policy_step
