"""Published problem sets by name, from the Hugging Face hub or from copies.

    aime24    math500=COPY    livecodebench:2025-02..2025-04    livecodebench:2025-02..2025-04=COPY

A problem's id is the name of the benchmark with the id of the published row, or with the row's number if it has none.
It is the same for all copies, so that evaluations can be paired. Nothing heavy is imported here.
"""

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from threepo.config import BenchmarksConfig
from threepo.config.sources import KINDS, SUFFIXES, is_source
from threepo.data.finite import FiniteProblems
from threepo.data.prompts import CODE, MATH_EVALUATION
from threepo.data.rows import BrokenRow, open_rows
from threepo.errors import UserError
from threepo.evaluation import livecodebench
from threepo.evaluation.livecodebench import RELEASE_6, Window
from threepo.evaluation.problems import ProblemSet
from threepo.rewards.math import last_box
from threepo.types import Problem, VerifierName

_IDS = ("unique_id", "question_id", "id", "idx")
_TEXTS = ("problem", "question")
_WHOLE = re.compile(r"([+-]?\d+)\.0+")


def math_problem(row: Mapping[str, Any], identity: str, location: str) -> Problem:
    """A problem with its final answer, from the columns that published sets have them in."""
    text = next((row[key] for key in _TEXTS if isinstance(row.get(key), str)), None)
    if text is None:
        raise UserError(f"{location}: has no problem or question; its columns are {', '.join(map(repr, row))}")
    answer = _answer(row)
    if not answer:
        raise UserError(f"{location}: has no answer, and no solution that ends in \\boxed{{...}} or '#### ...'")
    columns = {key: value for key, value in row.items() if key not in _TEXTS}
    return Problem(identity, text.strip(), answer, columns | {"answer": answer}, location)


def _answer(row: Mapping[str, Any]) -> str:
    """The final answer: its column, the end of a worked answer (gsm8k), or the last box of a solution."""
    given = row.get("answer")
    if given is None or given == "":
        return last_box(str(row.get("solution") or "")) or ""
    text = str(given).strip()
    if "####" in text:
        text = text.rpartition("####")[2].strip().replace(",", "")
    whole = _WHOLE.fullmatch(text)
    return whole[1] if whole else text


@dataclass(frozen=True)
class Benchmark:
    """Where a problem set is published, and how its rows become problems."""

    source: str
    """A source of `data.rows`, with its configuration where the hub has several."""
    verifier: VerifierName = "math"
    read: Callable[[Mapping[str, Any], str, str], Problem] = math_problem
    """The problem in a row, from its id and its location."""
    other_file: str = ""
    """Another name of its local file."""
    months: Window | None = None
    """The months of contests that are evaluated where the user names none; None: the rows have no months."""


BENCHMARKS: Mapping[str, Benchmark] = {
    "aime24": Benchmark("math-ai/aime24"),
    "aime25": Benchmark("math-ai/aime25"),
    "aime26": Benchmark("math-ai/aime26"),
    "math500": Benchmark("math-ai/math500"),
    "amc23": Benchmark("math-ai/amc23"),
    "minerva": Benchmark("math-ai/minervamath", other_file="minerva_math"),
    "gsm8k": Benchmark("openai/gsm8k:main"),
    "livecodebench": Benchmark(livecodebench.SOURCE, "code", livecodebench.problem, months=RELEASE_6),
}
"""To add one: a line here and, if it has other columns, a file next to this one with its `read`."""


@dataclass(frozen=True)
class Choice:
    """One benchmark as a user names it."""

    name: str
    months: Window | None = None
    copy: str = ""
    """Another source; empty: the hub, or the folder of files."""

    @classmethod
    def parse(cls, text: str) -> "Choice":
        """`UserError` for anything but NAME, NAME=COPY, or a name with months."""
        chosen, equals, copy = text.strip().partition("=")
        name, _, months = chosen.partition(":")
        if name not in BENCHMARKS:
            near = difflib.get_close_matches(name, BENCHMARKS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(BENCHMARKS)}"
            raise UserError(f"benchmark {name!r}: unknown; {hint}")
        if equals and not is_source(copy):
            raise UserError(f"benchmark {text}: after the =, name {KINDS}")
        default = BENCHMARKS[name].months
        if chosen == name:
            return cls(name, default, copy)
        if not default:
            raise UserError(f"benchmark {chosen}: only livecodebench is chosen by months")
        return cls(name, Window.parse(months), copy)

    @property
    def label(self) -> str:
        """The name of its results."""
        return self.name if self.months == BENCHMARKS[self.name].months else f"{self.name}:{self.months}"


def choices(settings: BenchmarksConfig) -> list[Choice]:
    """The benchmarks that are named, each once."""
    chosen = [Choice.parse(text) for text in settings.names]
    labels = [choice.label for choice in chosen]
    if twice := [label for label in labels if labels.count(label) > 1]:
        raise UserError(f"benchmarks.names = {labels}: names {twice[0]} twice")
    return chosen


def open_benchmark(choice: Choice, settings: BenchmarksConfig) -> ProblemSet:
    """Read a benchmark; `UserError` if its rows are missing or are not as it is published."""
    benchmark = BENCHMARKS[choice.name]
    source = choice.copy or benchmark.source
    if settings.folder and not choice.copy:
        source = _in_folder(settings.folder, choice.name, benchmark)
    if choice.months and source == benchmark.source and not choice.months.within(RELEASE_6):
        raise UserError(
            f"benchmark {choice.label}: from the hub, threepo reads only what release 6 added, {RELEASE_6}; download "
            f"the files of the earlier releases that you want, join them, and write {choice.label}=FILE.jsonl"
        )
    prompts = {"math": settings.math_prompt or MATH_EVALUATION, "code": settings.code_prompt or CODE}
    template = prompts[benchmark.verifier]
    rows: list[livecodebench.Numbered] = []  # with the number of the published row, which names a row without an id
    for number, found in enumerate(open_rows(source, "test"), start=1):
        if isinstance(found, BrokenRow):
            raise UserError(f"benchmark {choice.label}, {source}, row {number}: {found}")
        rows.append((number, found))
    if choice.months:
        rows = choice.months.select(rows, f"benchmark {choice.label}: {source}")
    problems: dict[str, Problem] = {}
    for number, row in rows[: settings.problems or None]:
        identity = f"{choice.name}/{next((row[key] for key in _IDS if row.get(key) is not None), number - 1)}"
        location = f"benchmark {choice.label}, {source}, row {number}"
        if identity in problems:
            raise UserError(f"{location}: has the id {identity!r} of {problems[identity].location}")
        problems[identity] = replace(benchmark.read(row, identity, location), template=template)
    if not problems:
        raise UserError(f"benchmark {choice.label}: {source} holds no problems")
    finite = FiniteProblems(source, tuple(problems.values()), seed=0, rows=len(problems))
    return ProblemSet(finite, benchmark.verifier, choice.label, source, template)


def _in_folder(folder: str, name: str, benchmark: Benchmark) -> str:
    """The file or folder of a benchmark in `benchmarks.folder`."""
    names = (name, benchmark.other_file or name)
    for path in (Path(folder) / f"{found}{suffix}" for found in names for suffix in ("", *SUFFIXES)):
        if path.exists():
            return str(path)
    raise UserError(
        f"benchmarks.folder = {folder!r}: holds no {name}.jsonl, .json, .csv or .parquet, and no folder {name}; "
        f"copy it there, or name a copy: --benchmarks {name}=COPY"
    )
