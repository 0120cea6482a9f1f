"""A finite list of problems, whatever it was read from: a user's own file, or a published data set."""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from random import Random

from threepo.config import DataConfig
from threepo.data.rows import BrokenRow, Row, where
from threepo.errors import UserError
from threepo.types import Problem

_NAMED = 3
"""Broken rows that the message about them names."""


@dataclass(frozen=True)
class FiniteProblems:
    """A finite list of problems; training goes through it epoch by epoch, each in its own order."""

    source: str
    """What messages call it."""
    problems: tuple[Problem, ...]
    seed: int
    rows: int
    """Rows that there were; those that are no problems here are counted below."""
    broken: int = 0
    duplicates: int = 0
    too_long: int = 0
    """Problems left out for the length of their prompts, once a model's tokenizer has measured them."""

    def batch(self, step: int, size: int) -> list[Problem]:
        """The problems of one training step: a function of (seed, step). An epoch drops its incomplete last batch."""
        steps_per_epoch = len(self.problems) // size
        if steps_per_epoch == 0:
            raise UserError(
                f"{self.source}: holds {len(self.problems)} problems, fewer than data.prompts_per_step = {size}; "
                f"lower it"
            )
        epoch, position = divmod(step, steps_per_epoch)
        order = list(range(len(self.problems)))
        Random(f"epoch/{self.seed}/{epoch}").shuffle(order)
        return [self.problems[i] for i in order[position * size : (position + 1) * size]]

    def first(self, count: int) -> Sequence[Problem]:
        """The first `count` problems, in the order they were read in."""
        return self.problems[:count]

    def known(self) -> Sequence[Problem]:
        """All problems."""
        return self.problems

    def without(self, fault: Callable[[Problem], str]) -> "FiniteProblems":
        """Without those that have a fault: counted and reported as broken, as rows are."""
        faults = {problem.id: fault(problem) for problem in self.problems}
        here = f"{self.source}, "
        broken = [f"{p.label.removeprefix(here)}: {faults[p.id]}" for p in self.problems if faults[p.id]]
        if not broken:
            return self
        kept = tuple(problem for problem in self.problems if not faults[problem.id])
        if not kept:
            raise UserError(f"{self.source}: holds no problems that can be graded; {broken[0]}")
        _report(self.source, broken, self.rows)
        return replace(self, problems=kept, broken=self.broken + len(broken))

    def counts(self) -> dict[str, int]:
        """What became of the rows, for the run's summary and for people."""
        return {
            "problems": len(self.problems),
            "rows": self.rows,
            "duplicates": self.duplicates,
            "broken": self.broken,
            "too_long": self.too_long,
        }


def collect(
    source: str,
    rows: Iterable[Row | BrokenRow],
    read: Callable[[Row, int], Problem],
    settings: DataConfig,
    *,
    deduplicate: bool = False,
) -> FiniteProblems:
    """The problems that `read` makes of the rows, each with its number from 1; it raises `BrokenRow` where it cannot.

    Of problems with the same id the first is kept where `deduplicate` says so; elsewhere they are refused.
    """
    seen: dict[str, int] = {}
    problems: list[Problem] = []
    broken: list[str] = []
    number = 0
    for number, row in enumerate(rows, start=1):
        try:
            if isinstance(row, BrokenRow):
                raise row
            problem = read(row, number)
        except BrokenRow as error:
            broken.append(f"{where(error, number)}: {error}")
            if settings.broken_rows == "error":
                raise UserError(
                    f"{source}, {broken[0]}; mend it, or leave such rows out with data.broken_rows = 'skip'"
                ) from error
            continue
        if problem.id not in seen:
            seen[problem.id] = number
            problems.append(problem)
        elif not deduplicate:
            raise UserError(f"{source}: rows {seen[problem.id]} and {number} share the id {problem.id!r}")
    if broken:
        _report(source, broken, number)
    if not problems:
        raise UserError(f"{source}: holds no problems")
    duplicates = number - len(problems) - len(broken)
    return FiniteProblems(source, tuple(problems), settings.seed, number, len(broken), duplicates)


def _report(source: str, broken: Sequence[str], rows: int) -> None:
    named = "; ".join(broken[:_NAMED])
    more = f"; and {len(broken) - _NAMED} more" if len(broken) > _NAMED else ""
    print(f"threepo: {source}: left out {len(broken)} of {rows} rows as broken: {named}{more}", file=sys.stderr)
