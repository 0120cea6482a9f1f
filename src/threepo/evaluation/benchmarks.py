"""Published problem sets by name, from the Hugging Face hub or from copies.

    aime24    math500=COPY

A problem's id is the name of the benchmark with the id of the published row, or with the row's number if it has none.
All copies have the same ids, so that evaluations can be paired. Nothing heavy is imported here.
"""

import re
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

from threepo.config import BenchmarksConfig, DataConfig
from threepo.config.sources import KINDS, is_source
from threepo.data.finite import collect
from threepo.data.published import CODE, MATH_EVALUATION, PublishedSet
from threepo.data.rows import BrokenRow, Row
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


def parse_names(names: Iterable[str]) -> dict[str, str]:
    """The copy of every benchmark that is named as NAME or NAME=COPY, by its name; an empty copy means the hub."""
    copies: dict[str, str] = {}
    for text in names:
        name, equals, copy = text.strip().partition("=")
        if name not in BENCHMARKS:
            raise unknown("benchmark", name, BENCHMARKS, ", ".join(BENCHMARKS))
        if equals and not is_source(copy):
            raise UserError(f"benchmark {text}: after the =, name {KINDS}")
        if name in copies:
            raise UserError(f"benchmarks.names: names {name} twice")
        copies[name] = copy
    return copies


def open_benchmark(name: str, copy: str, settings: BenchmarksConfig, data: DataConfig) -> ProblemSet:
    """Read a benchmark; `UserError` if its rows are missing or differ from the published format."""
    benchmark = BENCHMARKS[name]
    source = copy or benchmark.hub
    prompts = {"math": settings.math_prompt or MATH_EVALUATION, "code": settings.code_prompt or CODE}
    template = prompts[str(benchmark.verifier)]

    def problem(row: Row, number: int) -> Problem:
        identity = next((row[key] for key in _IDS if row.get(key) is not None), number - 1)
        found: Problem = benchmark.item(row)
        return replace(found, id=f"{name}/{identity}", template=template)

    rows = islice(benchmark.rows(copy, "test"), settings.problems or None)
    problems = collect(f"benchmark {name}, {source}", rows, problem, data)
    return ProblemSet(problems, benchmark.verifier, source, name, template)
