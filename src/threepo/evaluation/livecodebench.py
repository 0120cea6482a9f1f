"""LiveCodeBench as published (livecodebench/code_generation_lite): months of contests, and packed test cases.

A row's private test cases are JSON, or JSON that is pickled, compressed and encoded in base 64. A pickle can call any
function of any module while it is read; the unpickler here refuses them all.
"""

import base64
import io
import json
import pickle
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from threepo.data.prompts import CODE_STARTER, CODE_STDIN
from threepo.data.rows import BrokenRow, NumberedRow, Row
from threepo.errors import UserError
from threepo.types import Problem

SOURCE = "hf://datasets/livecodebench/code_generation_lite/test6.jsonl"
"""The problems that release 6 added, as a file: `datasets` refuses the set itself, which has a loading script."""
_MODULES = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics"),
    *("itertools", "functools", "operator", "io", "sys", "json"),
)
PRELUDE = "\n".join(
    [
        *(f"from {module} import *" for module in (*_MODULES, "builtins", "typing")),
        *(f"import {module}" for module in _MODULES),
        "sys.setrecursionlimit(50_000)",
    ]
)
"""The published grader puts this before every program: solutions use `List` and the like without importing them."""
KEPT = ("question_title", "platform", "contest_id", "contest_date", "difficulty", "starter_code")
"""Columns that a problem keeps, besides its tests."""


RELEASE_6 = "2025-01..2025-04"
"""Months of the paper's problems, both included."""


def checked_months(text: str) -> str:
    """The same text; `UserError` unless it is like `RELEASE_6`."""
    month = r"(\d{4}-(?:0[1-9]|1[0-2]))"
    found = re.fullmatch(rf"{month}\.\.{month}", text)
    if not found or found[1] > found[2]:
        raise UserError(f"benchmark livecodebench:{text}: write months as livecodebench:2025-01..2025-04")
    return text


def of_months(chosen: str, rows: Sequence[NumberedRow], source: str) -> list[NumberedRow]:
    """The rows of contests in the months `chosen`, and the broken ones; `UserError` if there are none."""
    first, last = chosen.split("..")
    months = [first if isinstance(row, BrokenRow) else str(row.get("contest_date", ""))[:7] for _, row in rows]
    found = [row for row, month in zip(rows, months, strict=True) if first <= month <= last]
    if rows and not found:
        known = f"{min(months)} to {max(months)}" if all(months) else "no contest_date"
        raise UserError(f"{source} has no problem of {chosen}; it has {known}")
    return found


def problem(row: Row) -> Problem:
    """A published row as a problem: its text with the form of the program, and its tests in a column."""
    text, starter = row["question_content"].strip(), (row.get("starter_code") or "").rstrip()
    ending = CODE_STARTER.replace("{starter}", starter) if starter else CODE_STDIN
    columns = {name: row[name] for name in KEPT if name in row} | {"tests": _tests(row)}
    return Problem("", f"{text}\n\n{ending}", columns=columns)


def _tests(row: Row) -> dict[str, Any]:
    """{"inputs": [...], "outputs": [...]}, with "fn_name" where a function is called: a line of JSON per argument."""
    cases = [*_cases(row["public_test_cases"]), *_cases(row["private_test_cases"])]
    kinds = {case["testtype"] for case in cases}
    if kinds not in ({"stdin"}, {"functional"}):
        raise BrokenRow(f"its tests are of the kinds {sorted(kinds)}; needs all of stdin, or all of functional")
    tests: dict[str, Any] = {
        "prefix": PRELUDE,
        "inputs": [str(case["input"]) for case in cases],
        "outputs": [str(case["output"]) for case in cases],
    }
    if kinds == {"functional"}:
        metadata = row["metadata"]
        tests["fn_name"] = (json.loads(metadata) if isinstance(metadata, str) else metadata)["func_name"]
    return tests


def _cases(packed: Any) -> list[Mapping[str, Any]]:
    """Test cases from any of their published forms."""
    if isinstance(packed, str) and not packed.lstrip().startswith("["):
        packed = _ValuesOnly(io.BytesIO(zlib.decompress(base64.b64decode(packed, validate=True)))).load()
    return list(json.loads(packed) if isinstance(packed, str) else packed)


class _ValuesOnly(pickle.Unpickler):
    """Refuses pickles that ask for a function or a class, before anything is imported."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"the pickle asks for {module}.{name}; only text is expected")
