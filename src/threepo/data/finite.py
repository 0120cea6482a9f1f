"""A finite list of problems, read from the rows of a user's own source or of a published data set."""

import json
import sys
import warnings
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from random import Random

from threepo.config import DataConfig
from threepo.data.rows import BrokenRow, Row
from threepo.errors import ThreepoWarning, UserError
from threepo.types import Problem

_NAMED = 3
"""Broken rows that the message about them names."""


@dataclass(frozen=True)
class FiniteProblems:
    """A finite list of problems. Training goes through it epoch by epoch, each epoch in an order of its own."""

    source: str
    """What messages call it."""
    problems: tuple[Problem, ...]
    seed: int
    rows: int
    """Rows of the source, also those that became no problem; the next three count these."""
    broken: int = 0
    duplicates: int = 0
    too_long: int = 0
    """Problems left out for the length of their prompts, which is known once there is a tokenizer."""

    def batch(self, step: int, size: int) -> list[Problem]:
        """The problems of one training step: a function of (seed, step). An epoch drops its incomplete last batch."""
        if len(self.problems) < size:
            raise UserError(
                f"{self.source}: holds {len(self.problems)} problems, fewer than data.prompts_per_step = {size}; "
                f"lower it"
            )
        return [self.problems[i] for i in epoch_batch(len(self.problems), size, self.seed, step)]

    def first(self, count: int) -> Sequence[Problem]:
        """The first `count` problems, in the order of the source."""
        return self.problems[:count]

    def known(self) -> Sequence[Problem]:
        """All problems."""
        return self.problems

    def without(self, fault: Callable[[Problem], str]) -> "FiniteProblems":
        """The problems without a fault; the others are counted and reported as broken rows."""
        faults = {problem.id: fault(problem) for problem in self.problems}
        prefix = f"{self.source}, "
        broken = [f"{p.label.removeprefix(prefix)}: {faults[p.id]}" for p in self.problems if faults[p.id]]
        kept = tuple(problem for problem in self.problems if not faults[problem.id])
        if not kept:
            raise UserError(f"{self.source}: holds no problems that can be graded; {broken[0]}")
        _report(self.source, broken, self.rows)
        return replace(self, problems=kept, broken=self.broken + len(broken))

    def counts(self) -> dict[str, int]:
        """How many rows became problems and how many did not, by reason; for the run's summary."""
        names = ("rows", "duplicates", "broken", "too_long")
        return {"problems": len(self.problems)} | {name: getattr(self, name) for name in names}


def epoch_batch(count: int, size: int, seed: int, step: int) -> Sequence[int]:
    """The `size` numbers below `count` that step `step` takes; an epoch drops its incomplete last batch."""
    epoch, position = divmod(step, count // size)
    return _epoch_order(count, seed, epoch)[position * size : (position + 1) * size]


@lru_cache(maxsize=1)
def _epoch_order(count: int, seed: int, epoch: int) -> Sequence[int]:
    """Two million numbers take a second or two, and 16 MB."""
    numbers = array("L", range(count))
    Random(f"epoch/{seed}/{epoch}").shuffle(numbers)
    return numbers


def collect(
    source: str,
    rows: Iterable[Row | BrokenRow],
    read: Callable[[Row, int], Problem],
    settings: DataConfig,
    *,
    deduplicate: bool = False,
) -> FiniteProblems:
    """The problems that `read` makes of rows and their numbers; `read` raises `BrokenRow` where it cannot.

    Of problems with the same id, `deduplicate` keeps the first; without it they are a `UserError`.
    """
    seen: dict[str, int] = {}
    problems: list[Problem] = []
    broken: list[str] = []
    number = 0
    for number, row in enumerate(rows, start=1):
        try:
            if isinstance(row, BrokenRow):
                raise row
            problem = replace(read(row, number), location=f"{source}, row {number}")
        except BrokenRow as error:
            broken.append(f"row {number}: {error}")
            if settings.broken_rows == "error":
                raise UserError(
                    f"{source}, {broken[0]}; fix it, or leave such rows out with data.broken_rows = 'skip'"
                ) from error
            continue
        if problem.id not in seen:
            seen[problem.id] = number
            problems.append(problem)
        elif not deduplicate:
            raise UserError(f"{source}: rows {seen[problem.id]} and {number} share the id {problem.id!r}")
    _report(source, broken, number)
    if not problems:
        raise UserError(f"{source}: holds no problems")
    duplicates = number - len(problems) - len(broken)
    return FiniteProblems(source, tuple(problems), settings.seed, number, len(broken), duplicates)


def warn_of_shared(what: str, training: Iterable[str], heldout: Sequence[str]) -> None:
    """Warn if there are held-out problems or conversations to train on too; equal ones have equal texts here."""
    trained = set(training)
    shared = sum(text in trained for text in heldout)
    if shared:
        warnings.warn(
            f"{what}: {shared} of the {len(heldout)} held-out ones are also trained on, so their scores say nothing "
            f"about new ones; take them out of one of the two sources",
            ThreepoWarning,
            stacklevel=2,
        )


def content(problem: Problem) -> str:
    """Prompt and answer of a problem as one text."""
    return json.dumps([problem.prompt, problem.answer], sort_keys=True)


def _report(source: str, broken: Sequence[str], rows: int) -> None:
    if broken:
        more = f"; and {len(broken) - _NAMED} more" if len(broken) > _NAMED else ""
        named = "; ".join(broken[:_NAMED]) + more
        print(f"threepo: {source}: left out {len(broken)} of {rows} rows as broken: {named}", file=sys.stderr)
