"""LiveCodeBench as published (livecodebench/code_generation_lite), with packed test cases.

A row's private test cases are JSON, or JSON that is pickled, compressed and encoded in base 64. A pickle can call any
function of any module while it is read; the unpickler here refuses them all.
"""

import base64
import io
import json
import pickle
import zlib
from collections.abc import Mapping
from typing import Any, NoReturn

from threepo.data.published import CODE_STARTER, CODE_STDIN
from threepo.data.rows import BrokenRow, Row
from threepo.types import Problem

SOURCE = "hf://datasets/livecodebench/code_generation_lite/test6.jsonl"
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


def problem(row: Row) -> Problem:
    """The problem of a published row: its text ends in the required form of the program, and a column has its tests.

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
    """Test cases from any of their published forms."""
    if isinstance(packed, str) and not packed.lstrip().startswith("["):
        packed = _ValuesOnly(io.BytesIO(zlib.decompress(base64.b64decode(packed, validate=True)))).load()
    return list(json.loads(packed) if isinstance(packed, str) else packed)


class _ValuesOnly(pickle.Unpickler):
    """Refuses pickles that ask for a function or a class, before anything is imported."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"the pickle asks for {module}.{name}; only text is expected")
