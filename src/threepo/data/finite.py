"""Finite lists of problems, read from the rows of a user's own source or of a published data set."""

import json
import sys
import warnings
from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

from threepo.config import DataConfig
from threepo.config.reward import SUPPLIED
from threepo.data.published import TEMPLATES, PublishedSet
from threepo.data.rows import BrokenRow, Row, chat_messages, digest, open_rows
from threepo.data.task import Split
from threepo.errors import ThreepoWarning, UserError
from threepo.types import Problem


@dataclass(frozen=True)
class FiniteProblems:
    """A finite list of problems. Training goes through it epoch by epoch; each epoch has its own order."""

    source: str
    """Name of the source in messages."""
    problems: tuple[Problem, ...]
    seed: int
    rows: int
    """All rows of the source; the next three count those that became no problem."""
    broken: int = 0
    duplicates: int = 0
    too_long: int = 0
    """Problems left out for the length of their prompts, which only a tokenizer can tell."""

    def batch(self, step: int, size: int) -> list[Problem]:
        """The problems of one training step: a function of (seed, step). An epoch drops its incomplete last batch."""
        n = len(self.problems)
        if n < size:
            raise UserError(f"{self.source}: holds {n} problems, fewer than data.prompts_per_step = {size}; lower it")
        return [self.problems[i] for i in epoch_batch(n, size, self.seed, step)]

    def untried(self, drawn: int, count: int, tried: Collection[str]) -> tuple[list[Problem], int]:
        """The next `count` problems after the first `drawn` of all epochs in turn, and the new `drawn`.

        Problems whose ids were `tried` are passed over, and no problem comes twice; fewer once all have been tried.
        """
        n, seen = len(self.problems), set(tried)
        problems: list[Problem] = []
        while len(problems) < count and len(seen) < n:
            epoch, place = divmod(drawn, n)
            problem = self.problems[_epoch_order(n, self.seed, epoch)[place]]
            drawn += 1
            if problem.id not in seen:
                seen.add(problem.id)
                problems.append(problem)
        return problems, drawn

    def first(self, count: int) -> Sequence[Problem]:
        """The first `count` problems, in the order of the source."""
        return self.problems[:count]

    def known(self) -> Sequence[Problem]:
        """The problems that can be checked before training: all."""
        return self.problems

    def without(self, fault: Callable[[Problem], str]) -> "FiniteProblems":
        """The problems for which `fault` is empty; the others are counted and reported as broken rows."""
        faults = [(problem, fault(problem)) for problem in self.problems]
        kept = tuple(problem for problem, reason in faults if not reason)
        broken = [f"{problem.label}: {reason}" for problem, reason in faults if reason]
        if not kept:
            first = broken[0].removeprefix(f"{self.source}, ")
            raise UserError(f"{self.source}: holds no problems that can be graded; {first}")
        report_broken(self.source, broken, self.rows)
        return replace(self, problems=kept, broken=self.broken + len(broken))

    def counts(self) -> dict[str, int]:
        """The number of problems and of rows, and of rows left out by reason; for the run's summary."""
        left_out = {"duplicates": self.duplicates, "broken": self.broken, "too_long": self.too_long}
        return {"problems": len(self.problems), "rows": self.rows, **left_out}


def epoch_batch(count: int, size: int, seed: int, step: int) -> Sequence[int]:
    """The `size` numbers below `count` that step `step` takes; an epoch drops its incomplete last batch."""
    epoch, batch = divmod(step, count // size)
    return _epoch_order(count, seed, epoch)[batch * size : (batch + 1) * size]


@lru_cache(maxsize=1)
def _epoch_order(count: int, seed: int, epoch: int) -> Sequence[int]:
    """The order of one epoch; two million numbers take one or two seconds and 16 MB."""
    numbers = array("L", range(count))
    Random(f"epoch/{seed}/{epoch}").shuffle(numbers)
    return numbers


def published_problems(known: PublishedSet, copy: str, split: Split, settings: DataConfig) -> FiniteProblems:
    """The problems of a published set, from `copy` or, where that is empty, from the hub; a file is read whole."""

    def problem(row: Row, number: int) -> Problem:
        found: Problem = known.item(row)
        return replace(found, id=f"{known.name}/{split}/{found.id or number}", template=TEMPLATES[known.verifier])

    hub_split = known.heldout if split == "heldout" and known.heldout else "train"
    rows = known.rows(copy, hub_split)
    return collect(rows.name, rows, problem, settings, deduplicate=True)


def column_problems(source: str, settings: DataConfig) -> FiniteProblems:
    """The problems of a user's own source: one in each row, in the columns that `settings` names."""
    opened = open_rows(source)
    rows = list(opened)
    names = list(dict.fromkeys(name for row in rows if not isinstance(row, BrokenRow) for name in row))
    for name in set(SUPPLIED) & set(names) - {settings.prompt_column}:
        raise UserError(
            f"{opened.name}: has a column {name!r}, but threepo itself gives reward functions an argument of this "
            f"name; rename the column"
        )
    if settings.tests_column not in (*names, "tests"):
        raise UserError(
            f"{opened.name}: no column {settings.tests_column!r}; it has {', '.join(map(repr, names))}; set "
            f"data.tests_column"
        )

    def problem(row: Row, number: int) -> Problem:
        if settings.prompt_column not in row:
            listed = ", ".join(map(repr, row))
            raise BrokenRow(f"no column {settings.prompt_column!r}; it has {listed}; set data.prompt_column")
        prompt, answer, own_id = (row.get(name) for name in (settings.prompt_column, settings.answer_column, "id"))
        if prompt == "":
            raise BrokenRow("its prompt is empty")
        what = "prompt, if it is not text,"
        columns = {name: row.get(name) for name in names if name != settings.prompt_column}
        if settings.answer_column in names:
            columns.setdefault("answer", answer)
        if settings.tests_column in names:
            columns["tests"] = row.get(settings.tests_column)
        return Problem(
            id=f"{Path(source).name}:{number}" if own_id is None else str(own_id),
            prompt=prompt if isinstance(prompt, str) else chat_messages(prompt, what, typed=opened.typed),
            answer="" if answer is None or answer != answer else str(answer),  # pandas writes NaN for a missing one
            columns=columns,
        )

    return collect(opened.name, rows, problem, settings)


def collect(
    source: str,
    rows: Iterable[Row | BrokenRow],
    read: Callable[[Row, int], Problem],
    settings: DataConfig,
    *,
    deduplicate: bool = False,
) -> FiniteProblems:
    """The problems that `read` makes of rows and their numbers; it raises `BrokenRow` for a row without a problem.

    Of problems with the same id, `deduplicate` keeps the first; without it they are a `UserError`.
    """
    problems: dict[str, Problem] = {}
    broken: list[str] = []
    number = 0
    for number, row in enumerate(rows, start=1):
        location = f"{source}, row {number}"
        try:
            if isinstance(row, BrokenRow):
                raise row
            problem = replace(read(row, number), location=location)
        except BrokenRow as error:
            if settings.broken_rows == "error":
                fix = "fix it, or leave such rows out with data.broken_rows = 'skip'"
                raise UserError(f"{location}: {error}; {fix}") from error
            broken.append(f"{location}: {error}")
            continue
        first = problems.setdefault(problem.id, problem)
        if first is not problem and not deduplicate:
            raise UserError(f"{location}: has the id {problem.id!r} of {first.location}; ids must differ")
    report_broken(source, broken, number)
    if not problems:
        raise UserError(f"{source}: holds no problems")
    duplicates = number - len(problems) - len(broken) if deduplicate else 0
    return FiniteProblems(source, tuple(problems.values()), settings.seed, number, len(broken), duplicates)


def report_broken(source: str, broken: Sequence[str], rows: int) -> None:
    """Print how many of `rows` rows were left out as broken, with the location and reason of the first three."""
    if broken:
        named = "; ".join(text.removeprefix(f"{source}, ") for text in broken[:3])
        more = f"; and {len(broken) - 3} more" if len(broken) > 3 else ""
        print(f"threepo: {source}: left out {len(broken)} of {rows} rows as broken: {named}{more}", file=sys.stderr)


def warn_of_shared(what: str, training: Iterable[str], heldout: Sequence[str]) -> None:
    """Warn if held-out problems or conversations are trained on too; equal ones must have equal texts here."""
    trained = set(training)
    shared = sum(text in trained for text in heldout)
    if shared:
        warnings.warn(
            f"{what}: {shared} of the {len(heldout)} held-out ones are also trained on, so their scores say nothing "
            f"about new ones; remove them from one of the two sources",
            ThreepoWarning,
            stacklevel=2,
        )


def warn_of_shared_problems(
    what: str, training: Iterable[Problem], heldout: Iterable[Problem], environment: bool
) -> None:
    """`warn_of_shared` for problems: those with the same prompt and answer.

    With an `environment`, which may read the other columns, all of them must be the same too.
    """

    def content(problem: Problem) -> str:
        more = [problem.columns] if environment else []
        return json.dumps([problem.prompt, problem.answer, *more], sort_keys=True, default=str)

    warn_of_shared(what, map(content, training), list(map(content, heldout)))


def problems_digest(problems: Sequence[Problem], prompts: Sequence[Any]) -> str:
    """The digest of problems, with everything that a grader sees, and of their prompts as text or as tokens."""
    return digest(
        json.dumps([problem.id, problem.answer, problem.columns, prompt], sort_keys=True, default=str)
        for problem, prompt in zip(problems, prompts, strict=True)
    )
