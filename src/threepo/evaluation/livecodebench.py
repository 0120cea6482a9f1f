"""LiveCodeBench as published: months of contests, and test cases that come packed (livecodebench/code_generation_lite).

A row's private test cases are JSON, or JSON pickled, compressed and in base 64. A pickle can name any function of any
module to be called while it is read; this one is read by an unpickler that finds none.
"""

import base64
import io
import json
import pickle
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from threepo.data.prompts import CODE_STARTER, CODE_STDIN
from threepo.errors import UserError
from threepo.types import Problem

HUB, FILE = "livecodebench/code_generation_lite", "test6.jsonl"
"""What release 6 added to those before it."""
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
"""What the published grader has before every program; solutions use `List` and the like without importing them."""
KEPT = ("question_title", "platform", "contest_id", "contest_date", "difficulty", "starter_code")
"""Columns that a problem keeps; the tests are there decoded."""
_BROKEN = (ValueError, TypeError, LookupError, AttributeError, EOFError, zlib.error, pickle.UnpicklingError)
"""What base 64, zlib, JSON and pickle raise at what they cannot read."""


@dataclass(frozen=True)
class Window:
    """Months of contests, both included, as YYYY-MM."""

    first: str
    last: str

    @classmethod
    def parse(cls, text: str) -> "Window":
        """From `2025-01..2025-04`; `UserError` for anything else."""
        month = r"\d{4}-(?:0[1-9]|1[0-2])"
        found = re.fullmatch(rf"({month})\.\.({month})", text)
        if not found or found[1] > found[2]:
            raise UserError(f"benchmark livecodebench:{text}: write months as livecodebench:2025-01..2025-04")
        return cls(found[1], found[2])

    def __str__(self) -> str:
        return f"{self.first}..{self.last}"

    def holds(self, date: str) -> bool:
        """Whether a contest's date, which begins with YYYY-MM, lies within."""
        return self.first <= date[:7] <= self.last


RELEASE_6 = Window("2025-01", "2025-04")
"""The paper's problems."""


def problem(row: Mapping[str, Any], identity: str, place: str) -> Problem:
    """A published row as a problem: its text with what the program has to be, and its tests as a column."""
    try:
        tests = _tests(row, place)
        text, starter = str(row["question_content"]).strip(), str(row.get("starter_code") or "").rstrip()
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise UserError(f"{place}: is no row of LiveCodeBench: {type(error).__name__}: {error}") from error
    ending = CODE_STARTER.replace("{starter}", starter) if starter else CODE_STDIN
    columns = {name: row[name] for name in KEPT if name in row}
    return Problem(identity, f"{text}\n\n{ending}", columns=columns | {"tests": tests}, place=place)


def _tests(row: Mapping[str, Any], place: str) -> dict[str, Any]:
    """{"inputs": [...], "outputs": [...]}, with "fn_name" where a function is called: a line of JSON per argument."""
    cases = [*_cases(row["public_test_cases"], place), *_cases(row["private_test_cases"], place)]
    kinds = {case["testtype"] for case in cases}
    if kinds not in ({"stdin"}, {"functional"}):
        raise UserError(f"{place}: has tests of the kinds {sorted(kinds)}; known are stdin and functional, not mixed")
    tests: dict[str, Any] = {
        "prefix": PRELUDE,
        "inputs": [str(case["input"]) for case in cases],
        "outputs": [str(case["output"]) for case in cases],
    }
    if kinds == {"functional"}:
        metadata = row["metadata"]
        tests["fn_name"] = (json.loads(metadata) if isinstance(metadata, str) else metadata)["func_name"]
    return tests


def _cases(packed: Any, place: str) -> list[Mapping[str, Any]]:
    """Test cases from whichever form they are published in."""
    if not isinstance(packed, str):
        return list(packed)
    try:
        if not packed.lstrip().startswith("["):
            packed = _unpickled(zlib.decompress(base64.b64decode(packed, validate=True)))
        return list(json.loads(packed))
    except _BROKEN as error:
        raise UserError(f"{place}: its test cases cannot be decoded: {type(error).__name__}: {error}") from error


class _TextOnly(pickle.Unpickler):
    """Reads pickles of plain values; whatever asks for a function or a class is refused before it is looked up."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"the pickle asks for {module}.{name}; only text is expected")

    def persistent_load(self, identity: Any) -> NoReturn:
        raise pickle.UnpicklingError("the pickle refers to something outside; only text is expected")


def _unpickled(data: bytes) -> str:
    value = _TextOnly(io.BytesIO(data)).load()
    if not isinstance(value, str):
        raise pickle.UnpicklingError(f"holds {type(value).__name__} and not text")
    return value
