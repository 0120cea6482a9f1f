"""Published problem sets by name, from the Hugging Face hub or from copies.

    aime24    math500=COPY    livecodebench:2025-02..2025-04    livecodebench:2025-02..2025-04=COPY

A problem's id is the name of the benchmark with the id of the published row, or with the row's number if it has none.
All copies have the same ids, so that evaluations can be paired. Nothing heavy is imported here.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from threepo.config import BenchmarksConfig, DataConfig
from threepo.config.sources import KINDS, SUFFIXES, is_source
from threepo.data.finite import collect
from threepo.data.prompts import CODE, MATH_EVALUATION
from threepo.data.published import PublishedSet
from threepo.data.rows import BrokenRow, Row, open_rows
from threepo.data.source import ProblemSet, unknown
from threepo.errors import UserError
from threepo.evaluation import livecodebench
from threepo.rewards.math import last_box
from threepo.types import Problem

_IDS = ("unique_id", "question_id", "id", "idx")
_TEXTS = ("problem", "question")


def math_problem(row: Row) -> Problem:
    """The problem and final answer of a row, under any of the names that published sets give their columns."""
    text = next((row[key] for key in _TEXTS if isinstance(row.get(key), str)), None)
    if text is None:
        raise BrokenRow(f"has no problem or question; its columns are {', '.join(map(repr, row))}")
    given = row.get("answer")
    if given is None or given == "":
        answer = last_box(str(row.get("solution") or "")) or ""
    else:  # a final answer, or a worked one that ends in it (gsm8k)
        _, mark, answer = str(given).strip().rpartition("####")
        answer = answer.strip().replace(",", "") if mark else answer
        answer = re.sub(r"^([+-]?\d+)\.0+$", r"\1", answer)
    if not answer:
        raise BrokenRow("has no answer, and no solution that ends in \\boxed{...} or '#### ...'")
    columns: dict[str, Any] = {key: value for key, value in row.items() if key not in _TEXTS}
    return Problem("", text.strip(), answer, columns | {"answer": answer})


_math = partial(PublishedSet, summary="mathematics", read=math_problem, verifier="math")
_SETS = (
    _math("aime24", hub="math-ai/aime24"),
    _math("aime25", hub="math-ai/aime25"),
    _math("aime26", hub="math-ai/aime26"),
    _math("math500", hub="math-ai/math500"),
    _math("amc23", hub="math-ai/amc23"),
    _math("minerva", hub="math-ai/minervamath"),
    _math("gsm8k", hub="openai/gsm8k:main"),
    PublishedSet("livecodebench", "code", hub=livecodebench.SOURCE, read=livecodebench.problem, verifier="code"),
)
"""To add a benchmark, add a line here and, if its columns are new, a file next to this one with its `read`."""
BENCHMARKS = {benchmark.name: benchmark for benchmark in _SETS}
RELEASE_6 = "2025-01..2025-04"
"""Months of the paper's livecodebench problems, first and last included."""
_MONTHS = {"livecodebench": RELEASE_6}
"""Benchmarks whose rows have months of contests, and the months that are evaluated by default."""
_OTHER_FILES = {"minerva": "minerva_math"}
"""Other names that local files may have."""


@dataclass(frozen=True)
class Choice:
    """A benchmark as a user names it."""

    name: str
    months: str = ""
    """First and last month of contests; empty: its rows have no months."""
    copy: str = ""
    """Another source of its rows; empty: the hub, or benchmarks.folder."""

    @classmethod
    def parse(cls, text: str) -> "Choice":
        """Read NAME or NAME:MONTHS, with or without =COPY; `UserError` for anything else."""
        chosen, equals, copy = text.strip().partition("=")
        name, _, months = chosen.partition(":")
        if name not in BENCHMARKS:
            raise unknown("benchmark", name, BENCHMARKS, ", ".join(BENCHMARKS))
        if equals and not is_source(copy):
            raise UserError(f"benchmark {text}: after the =, name {KINDS}")
        if chosen == name:
            return cls(name, _MONTHS.get(name, ""), copy)
        if name not in _MONTHS:
            raise UserError(f"benchmark {chosen}: only livecodebench is chosen by months")
        month = r"(\d{4}-(?:0[1-9]|1[0-2]))"
        found = re.fullmatch(rf"{month}\.\.{month}", months)
        if not found or found[1] > found[2]:
            raise UserError(f"benchmark {chosen}: write months as livecodebench:2025-01..2025-04")
        return cls(name, months, copy)

    @property
    def label(self) -> str:
        """The name of its results."""
        return self.name if self.months == _MONTHS.get(self.name, "") else f"{self.name}:{self.months}"


def choices(settings: BenchmarksConfig) -> list[Choice]:
    """The benchmarks that are named, each once."""
    chosen = [Choice.parse(text) for text in settings.names]
    labels = [choice.label for choice in chosen]
    if twice := [label for label in labels if labels.count(label) > 1]:
        raise UserError(f"benchmarks.names = {labels}: names {twice[0]} twice")
    return chosen


def open_benchmark(choice: Choice, settings: BenchmarksConfig, data: DataConfig) -> ProblemSet:
    """Read a benchmark; `UserError` if its rows are missing or differ from the published format."""
    benchmark = BENCHMARKS[choice.name]
    source = _find_source(choice, settings, benchmark.hub)
    prompts = {"math": settings.math_prompt or MATH_EVALUATION, "code": settings.code_prompt or CODE}
    template = prompts[str(benchmark.verifier)]

    def problem(row: Row, number: int) -> Problem:
        identity = next((row[key] for key in _IDS if row.get(key) is not None), number - 1)
        found: Problem = benchmark.item(row)
        return replace(found, id=f"{choice.name}/{identity}", template=template)

    name = f"benchmark {choice.label}, {source}"
    rows: Iterable[tuple[int, Row | BrokenRow]] = enumerate(open_rows(source, "test"), start=1)
    if choice.months:
        rows = _rows_in_months(list(rows), choice.months, name)
    problems = collect(name, islice(rows, settings.problems or None), problem, data)
    return ProblemSet(problems, benchmark.verifier, source, choice.label, template)


def _find_source(choice: Choice, settings: BenchmarksConfig, hub: str) -> str:
    """The source of a benchmark's rows: the copy that is named, a file of benchmarks.folder, or the hub."""
    source = choice.copy or hub
    if settings.folder and not choice.copy:
        names = (choice.name, _OTHER_FILES.get(choice.name, choice.name))
        files = (Path(settings.folder) / f"{name}{suffix}" for name in names for suffix in ("", *SUFFIXES))
        source = next((str(file) for file in files if file.exists()), "")
        if not source:
            raise UserError(
                f"benchmarks.folder = {settings.folder!r}: holds no {choice.name}.jsonl, .json, .csv or .parquet, and "
                f"no folder {choice.name}; copy it there, or name a copy: --benchmarks {choice.name}=COPY"
            )
    beyond = choice.months and (choice.months[:7] < RELEASE_6[:7] or choice.months[-7:] > RELEASE_6[-7:])
    if beyond and source == hub:
        raise UserError(
            f"benchmark {choice.label}: from the hub, threepo reads only what release 6 added, {RELEASE_6}; download "
            f"the files of the earlier releases that you want, join them, and write {choice.label}=FILE.jsonl"
        )
    return source


def _rows_in_months(
    numbered: Sequence[tuple[int, Row | BrokenRow]], months: str, name: str
) -> list[tuple[int, Row | BrokenRow]]:
    """The numbered rows of contests in these months, and broken rows; `UserError` if there are none."""
    first, last = months.split("..")
    found = [first if isinstance(row, BrokenRow) else str(row.get("contest_date", ""))[:7] for _, row in numbered]
    rows = [row for row, month in zip(numbered, found, strict=True) if first <= month <= last]
    if numbered and not rows:
        known = f"{min(found)} to {max(found)}" if all(found) else "no contest_date"
        raise UserError(f"{name} has no problem of {months}; it has {known}")
    return rows
