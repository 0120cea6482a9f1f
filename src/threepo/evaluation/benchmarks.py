"""Published problem sets by name, from the Hugging Face hub or from copies.

    aime24    math500=COPY

A problem's id is the name of the benchmark with the id of the published row, or with the row's number if it has none.
All copies have the same ids, so that evaluations can be paired. Nothing heavy is imported here.
"""

import base64
import io
import json
import pickle
import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, NoReturn

from threepo.config import BenchmarksConfig, DataConfig
from threepo.config.sources import KINDS, is_source
from threepo.data.finite import collect
from threepo.data.published import CODE, CODE_STARTER, CODE_STDIN, MATH_EVALUATION, PublishedSet
from threepo.data.rows import BrokenRow, Row, open_rows
from threepo.data.source import ProblemSet, unknown
from threepo.errors import UserError
from threepo.rewards.math import last_box
from threepo.types import Problem

_IDS = ("unique_id", "question_id", "id", "idx")
_TEXTS = ("problem", "question")
LIVECODEBENCH = "hf://datasets/livecodebench/code_generation_lite/test6.jsonl"
"""The file of problems that release 6 added; `datasets` refuses the whole set because of its loading script."""
_MODULES = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics"),
    *("itertools", "functools", "operator", "io", "sys", "json"),
)
PRELUDE = "\n".join(
    [f"from {module} import *" for module in (*_MODULES, "builtins", "typing")]
    + [f"import {module}" for module in _MODULES]
    + ["sys.setrecursionlimit(50_000)"]
)
"""The published grader puts this before every program: solutions use `List` and the like without importing them."""
KEPT = ("question_title", "platform", "contest_id", "contest_date", "difficulty", "starter_code")
"""Columns that a problem keeps in addition to its tests."""


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


def livecodebench_problem(row: Row) -> Problem:
    """The problem of a row: its text ends in the required form of the program, and a column has its tests.

    Tests are {"inputs": [...], "outputs": [...]}, with "fn_name" if a function is called: a line of JSON per argument.
    """
    text, starter = row["question_content"].strip(), (row.get("starter_code") or "").rstrip()
    cases = [*_cases(row["public_test_cases"]), *_cases(row["private_test_cases"])]
    kinds = {case["testtype"] for case in cases}
    if kinds not in ({"stdin"}, {"functional"}):
        raise BrokenRow(f"its tests are of the kinds {sorted(kinds)}; needs all of stdin, or all of functional")
    tests: dict[str, Any] = {f"{key}s": [str(case[key]) for case in cases] for key in ("input", "output")}
    if kinds == {"functional"}:
        metadata = row["metadata"]
        tests["fn_name"] = (json.loads(metadata) if isinstance(metadata, str) else metadata)["func_name"]
    columns = {name: row[name] for name in KEPT if name in row} | {"tests": {"prefix": PRELUDE, **tests}}
    ending = CODE_STARTER.replace("{starter}", starter) if starter else CODE_STDIN
    return Problem("", f"{text}\n\n{ending}", columns=columns)


def _cases(packed: Any) -> list[Mapping[str, Any]]:
    """Test cases from JSON, or from JSON that is pickled, compressed and encoded in base 64."""
    if isinstance(packed, str) and not packed.lstrip().startswith("["):
        packed = _ValuesOnly(io.BytesIO(zlib.decompress(base64.b64decode(packed, validate=True)))).load()
    return list(json.loads(packed) if isinstance(packed, str) else packed)


class _ValuesOnly(pickle.Unpickler):
    """Refuses pickles that ask for a function or a class: reading one could call anything."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"the pickle asks for {module}.{name}; only text is expected")


_math = partial(PublishedSet, summary="mathematics", read=math_problem, verifier="math")
_SETS = (
    _math("aime24", hub="math-ai/aime24"),
    _math("aime25", hub="math-ai/aime25"),
    _math("aime26", hub="math-ai/aime26"),
    _math("math500", hub="math-ai/math500"),
    _math("amc23", hub="math-ai/amc23"),
    _math("minerva", hub="math-ai/minervamath"),
    _math("gsm8k", hub="openai/gsm8k:main"),
    PublishedSet("livecodebench", "code", hub=LIVECODEBENCH, read=livecodebench_problem, verifier="code"),
)
"""To add a benchmark, add a line here and, if its columns are new, its `read` above."""
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

    rows = islice(open_rows(source, "test"), settings.problems or None)
    problems = collect(f"benchmark {name}, {source}", rows, problem, data)
    return ProblemSet(problems, benchmark.verifier, source, name, template)
