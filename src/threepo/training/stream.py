"""Groups that are learned from as they finish, and the journal by which such a run is repeated.

The engine generates batch after batch, each with the weights of the moment, and the groups of a batch are graded at the
same time. A step learns from the first groups that are there, whichever batch they are of. What arrives when depends
on the clock, so a journal records for every step which batches were begun before it, and which groups it took and
dropped. A step that is in the journal does the same again; everything else follows from the recipe.
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

from threepo.config import OverlapConfig
from threepo.errors import UserError
from threepo.files import append_line, read_lines_as, write_text
from threepo.ranks.world import World
from threepo.run_folder import JOURNAL, RunFolder
from threepo.training.overlap import in_thread
from threepo.training.rollouts import Rollouts
from threepo.types import Completion, Verdict

PAUSE_SECONDS = 0.01
"""Time between two looks at what the ranks have graded."""
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
    """Groups that are older than `overlap.lag` steps now: they arrived late, or have waited too long."""


@dataclass
class BegunBatch:
    """A batch that has been begun: it is being generated or graded."""

    policy_step: int
    """The step whose weights write it."""
    generate: Callable[[], Sequence[Sequence[Completion]]]
    """Returns the completions by group; all ranks call it, in a thread."""
    grade: Callable[[Sequence[Completion]], Sequence[Verdict]]
    """Returns the verdicts of a group; one rank calls it, in a thread of its own."""
    finish: Callable[[Sequence[Completion], Sequence[Verdict], Mapping[str, float]], Rollouts]
    """Returns the graded group; the last argument has the seconds that it took, by metric."""
    groups: Sequence[Sequence[Completion]] = ()
    """Empty until generated."""
    seconds: float = 0.0
    """Time for the generation of all groups."""
    graded: int = 0
    """Number of groups that some rank has graded."""


_Graded = tuple[int, int, Sequence[Verdict], float]
"""Number of a batch, index of a group in it, its verdicts, and the seconds that they took."""


def first_of_each_problem(names: Iterable[Name]) -> dict[str, Name]:
    """The first of the groups of each problem, by the problem's id."""
    found: dict[str, Name] = {}
    for name in names:
        found.setdefault(name[1], name)
    return found


class Stream:
    """The groups that are being made, and those that wait to be learned from.

    Args:
        lag: how many steps old a group may be.
        steps: number of steps of the run.
        size: groups in a batch, and in a step.
        journal: the file of the journal; it begins with `lines`, and gets a line for every step that is not in them.
        lines: the journal's lines of the steps to repeat.
        waiting: what `wait` returned when the run was saved.
    """

    def __init__(
        self,
        lag: int,
        steps: int,
        size: int,
        journal: Path,
        world: World,
        lines: Sequence[Line] = (),
        waiting: Iterable[Rollouts] = (),
    ) -> None:
        self._lag, self._steps, self._size, self._journal, self._world = lag, steps, size, journal, world
        world.on_first(lambda: write_text(journal, "".join(json.dumps(asdict(line)) + "\n" for line in lines)))
        self._repeated = {line.step: line for line in lines}
        self._next = max((number for line in lines for number in line.begun), default=-1) + 1
        self._finished = False
        self._ready = {_name(rollouts): rollouts for rollouts in waiting}
        """The groups that have arrived, in that order; on all ranks the same."""
        self._recorded = max((number for number, _ in self._ready), default=-1)
        """The last batch that a finished step has begun, as far as groups wait."""
        self._begun: dict[int, BegunBatch] = {}
        self._generating: Future[None] | None = None
        self._grading: list[Future[_Graded | None]] = []
        """Groups of this rank that the others do not know of yet."""
        self._lost: Exception | None = None
        """The error of a group that nobody can learn from."""
        self._stopped = False

    def take(self, step: int, begin: Callable[[int], BegunBatch], ahead: int) -> Rollouts:
        """Begin the batches that are due, with the current weights, and return what the step learns from.

        All ranks call. `ahead`: for how many later steps there may be groups. Raises the errors of rollouts, and
        `UserError` if the step is repeated and the journal does not fit.
        """
        line = self._repeat(step, begin) if step in self._repeated else self._choose(step, begin, ahead)
        self._recorded = max([self._recorded, *line.begun])
        # Where the journal goes on, an extended run will need the groups that wait now.
        self._finished = step == self._steps - 1 and step + 1 not in self._repeated
        taken = [self._ready.pop(name) for name in sorted(line.taken)]
        dropped = [self._ready.pop(name) for name in line.dropped]
        costs: Counter[str] = Counter()
        for rollouts in (*taken, *dropped):
            costs.update(rollouts.costs)
        groups = [group for rollouts in taken for group in rollouts.groups]
        discarded = [group for rollouts in dropped for group in rollouts.groups]
        return replace(taken[0], groups=groups, discarded=discarded, costs=costs, number=0)

    def wait(self) -> Sequence[Rollouts]:
        """Wait until nothing is being generated or graded; returns the groups that are to be learned from.

        Batches of a step that has not got what it needs are left out: it will begin them again, with the same weights.
        At the end of the run, only the engine is waited for.
        """
        if self._finished:
            self._stopped = True  # nobody learns from what is not graded yet
            while not all(self._world.gather(self._rests)):
                self._pause()
            return []
        while not self._collect() or self._begun:
            self._pause()
        return [rollouts for (number, _), rollouts in self._ready.items() if number <= self._recorded]

    def stop(self) -> None:
        """Grade no more, and wait until this rank's engine is idle."""
        self._stopped = True
        if self._generating:
            self._generating.exception()

    def _choose(self, step: int, begin: Callable[[int], BegunBatch], ahead: int) -> Line:
        """Begin what is due, take what is there first, and record it; no problem twice."""
        line, size = Line(step), self._size
        while True:
            idle = self._collect()
            young, old = self._by_age(step)
            usable = first_of_each_problem(young)
            recent = [batch for batch in self._begun.values() if step - batch.policy_step <= self._lag]
            coming = sum(size - batch.graded for batch in recent)
            lacking = not coming and len(usable) < size
            there = len(young) + coming
            early = there <= size * ahead and there < size * (self._steps - step)
            if idle and (lacking or early):
                line.begun.append(self._next)
                self._begin(self._next, begin)
            elif len(usable) >= size:
                line.taken = list(usable.values())[:size]
                others = first_of_each_problem(old).items()
                line.dropped = [name for problem, name in others if usable.get(problem) not in line.taken]
                self._world.on_first(lambda: append_line(self._journal, json.dumps(asdict(line))))
                return line
            else:
                self._pause()

    def _by_age(self, step: int) -> tuple[list[Name], list[Name]]:
        """The groups that have arrived: those that are at most `lag` steps old, and older ones."""
        young: list[Name] = []
        old: list[Name] = []
        for name, rollouts in self._ready.items():
            age = step - rollouts.groups[0].completions[0].policy_step
            (old if age > self._lag else young).append(name)
        return young, old

    def _repeat(self, step: int, begin: Callable[[int], BegunBatch]) -> Line:
        """Do what the journal says."""
        line = self._repeated[step]
        for number in line.begun:
            while not self._collect():
                self._pause()
            self._begin(number, begin)
        while missing := {*line.taken, *line.dropped} - self._ready.keys():
            if not self._begun:
                raise UserError(
                    f"overlap.journal: step {step} learned from {len(missing)} groups that this run does not have, "
                    f"such as batch {min(missing)[0]}, problem {min(missing)[1]}: give it the recipe of the journal"
                )
            self._pause()
            self._collect()
        return line

    def _begin(self, number: int, begin: Callable[[int], BegunBatch]) -> None:
        """Begin a batch, while no engine is generating."""
        batch = self._begun[number] = begin(number)
        self._next = number + 1

        def generate() -> None:
            since = time.perf_counter()
            groups = batch.generate()
            batch.seconds = time.perf_counter() - since
            batch.groups = groups
            for index in self._world.own(len(groups)):
                self._grading.append(in_thread(partial(grade, index)))

        def grade(index: int) -> _Graded | None:
            if self._stopped:
                return None
            since = time.perf_counter()
            verdicts = batch.grade(batch.groups[index])
            return number, index, verdicts, time.perf_counter() - since

        self._generating = in_thread(generate)

    def _collect(self) -> bool:
        """Take in what all ranks have graded; true if no engine is generating. All ranks call.

        Raises the error of rollouts that failed, each time it is called.
        """
        with self._world.together():
            rests = self._rests  # once: an engine that fails from here on is told of next time
            if self._generating and rests:
                self._generating.result()
            done = [future for future in self._grading if future.done()]
            graded = [future.result() for future in done]
        if self._lost:
            raise self._lost
        for future in done:
            self._grading.remove(future)
        shares = self._world.gather((rests, graded))
        for number, index, verdicts, seconds in (one for _, share in shares for one in share if one):
            batch = self._begun[number]
            while not batch.groups:  # another rank has got them a little earlier
                if self._rests and not batch.groups:
                    return False  # this rank has failed; the other ranks are told next time
                self._pause()
            costs = {"time/rollout": batch.seconds / self._size, "time/reward": seconds}
            try:
                rollouts = batch.finish(batch.groups[index], verdicts, costs)
            except Exception as error:  # such as rewards that the credit rule is not defined for
                self._lost = error
                raise
            self._ready[_name(rollouts)] = rollouts
            batch.graded += 1
            if batch.graded == self._size:
                del self._begun[number]
        return all(rests for rests, _ in shares)

    @property
    def _rests(self) -> bool:
        """True if this rank's engine is idle."""
        return self._generating is None or self._generating.done()

    def _pause(self) -> None:
        """Wait a little for what this or another rank has not finished."""
        time.sleep(PAUSE_SECONDS)


def lines_to_repeat(settings: OverlapConfig, resumed: RunFolder | None) -> list[Line]:
    """The journal of a resumed run, or the one that a new run repeats; `UserError` if that is missing or damaged."""
    if resumed:
        return read_journal(resumed.path / JOURNAL)
    if not settings.journal:
        return []
    path = Path(settings.journal)
    settings.check("journal", path.is_file(), "there is no such file")
    return read_journal(path)


def refuse_gap(lines: Sequence[Line], done: int) -> None:
    """`UserError` if a journal lacks one of the first `done` steps: a resumed run would learn from its groups again."""
    missing = sorted(set(range(done)) - {line.step for line in lines})
    if missing:
        fix = "bring back the whole file, or begin a new run"
        raise UserError(f"{JOURNAL}: has no line of step {missing[0]}, which the run has taken; {fix}")


def read_journal(path: Path) -> list[Line]:
    """The lines of a journal, without a last one that was written by half; none without a file."""
    return read_lines_as(path, Line)


def _name(rollouts: Rollouts) -> Name:
    return rollouts.number, rollouts.groups[0].problem.id
