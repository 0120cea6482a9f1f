"""Tests of a program in the forms that data sets have, and whether an output is right.

{"inputs": ["1 2\\n", ...], "outputs": ["3\\n", ...]}                 what the program reads and must write
{"fn_name": "add", "inputs": [[1, 2], ...], "outputs": [3, ...]}   what its function is called with and must return
{"assert_case": ["assert add(1, 2) == 3", ...]}                    code that raises if the program is wrong
{"functional": "def check(f): ...\\ncheck(add)"}                   the same as one test

Each may also be JSON text. An input of a function may be text with the JSON of one argument on each line; its output is
then JSON too. "prefix" may be added to each form: code to run before the program, such as the imports of a published
grader or the classes that a problem uses.
"""

import ast
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from threepo.rewards.sandbox import Outcome, Submission
from threepo.types import Problem

COLUMN = "tests"
"""The column of the data that holds a problem's tests."""
TOLERANCE = {"rel_tol": 1e-5, "abs_tol": 1e-6}
LONGER = 100
"""Longest JSON of a right value, in lengths of the expected value: 1e300 may be returned as an integer."""
FORMS = "'inputs' and 'outputs' (with 'fn_name' for a function), 'assert_case', or 'functional'"
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d{1,9})?")


@dataclass(frozen=True)
class CodeTests:
    """Tests in the one form that graders use."""

    submission: Submission
    """The cases, without a program yet. It never contains what the cases expect, so the sandbox never does."""
    expected: tuple[Any, ...] = ()
    """The text for `stdin`, the value for `call`; empty for `script`, whose cases judge by themselves."""
    wrapped: bool = False
    """True if each expected value is a list of one, which may stand for what is in it: APPS and TACO write so."""

    def judge(self, index: int, outcome: Outcome) -> str:
        """The verdict on a case: `passed`, or the reason that it did not pass."""
        if outcome.ending != "ok":
            return outcome.ending
        if self.submission.kind == "script":
            return "passed"
        expected = self.expected[index]
        if self.submission.kind == "stdin":
            return "passed" if same_text(outcome.output, expected) else "wrong"
        if len(outcome.output) > LONGER * len(repr(expected)):
            return "wrong"  # without reading millions of values
        try:
            value = json.loads(outcome.output)
        except (ValueError, RecursionError):  # the program ended before its function returned, or wrote there itself
            return "runtime error"
        same = same_value(value, expected) or (self.wrapped and same_value(value, expected[0]))
        return "passed" if same else "wrong"


def lacks_tests(problem: Problem) -> str:
    """Why `CodeGrader` cannot grade a problem; empty if it can."""
    try:
        parse_tests(problem.columns.get(COLUMN))
    except ValueError as error:
        return f"its tests (column {COLUMN!r}) {error}; set data.tests_column"
    return ""


def parse_tests(tests: Any) -> CodeTests:
    """Tests from any of the forms; `ValueError` with the reason if they have none of them."""
    try:
        tests = json.loads(tests) if isinstance(tests, str) else tests
        if not isinstance(tests, Mapping):
            raise ValueError(f"are {type(tests).__name__}; they must have {FORMS}")
        parts = {key: value for key, value in tests.items() if value is not None}  # tables have all keys in all rows
        prefix = _code(parts.get("prefix", ""), "prefix")
        for name in ("functional", "assert_case"):
            if name in parts:
                return _scripts(parts[name], name, prefix)
        if "inputs" in parts and "outputs" in parts:
            return _pairs(parts["inputs"], parts["outputs"], parts.get("fn_name", ""), prefix)
        raise ValueError(f"have {', '.join(map(repr, parts)) or 'nothing'}; they must have {FORMS}")
    except json.JSONDecodeError as error:
        raise ValueError(f"have text that is not JSON ({error})") from error
    except TypeError as error:  # bytes or a time, which parquet has
        raise ValueError(f"have a value that JSON cannot express ({error})") from error


def _scripts(scripts: Any, name: str, prefix: str) -> CodeTests:
    cases = [scripts] if isinstance(scripts, str) else scripts
    if not _is_list(cases) or not all(isinstance(case, str) and case.strip() for case in cases):
        raise ValueError(f"have {name!r}, which must be Python code")
    return CodeTests(Submission("script", "", tuple(_code(case, name) for case in cases), prefix=prefix))


def _code(code: Any, name: str) -> str:
    try:
        ast.parse(code)
    except (SyntaxError, ValueError, TypeError) as error:
        raise ValueError(f"have {name!r}, which must be Python code: {error}") from error
    return str(code)


def _pairs(inputs: Any, outputs: Any, entry: Any, prefix: str) -> CodeTests:
    if not _is_list(inputs) or not _is_list(outputs) or len(inputs) != len(outputs):
        raise ValueError("have 'inputs' and 'outputs', which must be two lists of the same length, and not empty")
    if not isinstance(entry, str):
        raise ValueError(f"have 'fn_name' = {entry!r}, which must be the name of a function")
    if not entry:
        return CodeTests(Submission("stdin", "", _texts(inputs, "inputs"), prefix=prefix), _texts(outputs, "outputs"))
    cases, expected = zip(*map(_call, inputs, outputs), strict=True)
    lists_of_one = all(_is_list(value) and len(value) == 1 for value in expected)
    wrapped = lists_of_one and not any(isinstance(arguments, str) for arguments in inputs)
    return CodeTests(Submission("call", "", cases, entry, prefix), expected, wrapped)


def _is_list(value: Any) -> bool:
    """True if a value is a list or tuple that is not empty."""
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes)) and len(value) > 0


def _texts(values: Sequence[Any], name: str) -> tuple[str, ...]:
    """Inputs or outputs of a program, a text for each case; some data sets have lists of lines."""
    for value in values:
        lines = [value] if isinstance(value, str) else value
        if not isinstance(lines, Sequence) or not all(isinstance(line, str) for line in lines):
            raise ValueError(f"have {name!r} with {value!r}, which must be text")
    return tuple(value if isinstance(value, str) else "\n".join(value) for value in values)


def _call(arguments: Any, result: Any) -> tuple[str, Any]:
    """The JSON of a function's arguments, and what it must return."""
    if isinstance(arguments, str):
        arguments = [json.loads(line) for line in arguments.split("\n") if line.strip()]
        with suppress(ValueError):
            result = json.loads(result) if isinstance(result, str) else result
    elif not isinstance(arguments, Sequence):
        raise ValueError(f"have 'inputs' with {arguments!r}, which must be the list of the function's arguments")
    return json.dumps(arguments), result


def same_text(output: str, expected: str) -> bool:
    """True if an output is right: each line has the same words, and numbers are compared by value."""
    return _same_parts(output.rstrip(), expected.rstrip(), "\n", _same_line)


def _same_line(line: str, expected: str) -> bool:
    return _same_parts(line, expected, None, _same_word)


def _same_parts(output: str, expected: str, separator: str | None, same: Callable[[str, str], bool]) -> bool:
    wanted = expected.split(separator)
    given = output.split(separator, len(wanted))  # one piece more than can be right, however many there are
    return given == wanted or (len(given) == len(wanted) and all(map(same, given, wanted)))


def same_value(value: Any, expected: Any) -> bool:
    """True if a value, read from JSON, is right; a close one is enough only where a fraction is expected."""
    if isinstance(value, list) and isinstance(expected, (list, tuple)):
        return len(value) == len(expected) and all(map(same_value, value, expected))
    if isinstance(value, dict) and isinstance(expected, Mapping):
        wanted = {str(key): item for key, item in expected.items()}
        return value.keys() == wanted.keys() and all(same_value(item, wanted[key]) for key, item in value.items())
    if isinstance(expected, float) and isinstance(value, (int, float)):
        return _close(value, expected)
    return bool(value == expected)


def _close(value: float, expected: float) -> bool:
    with suppress(OverflowError):  # an integer that no float can be
        return math.isclose(value, expected, **TOLERANCE)
    return False


def _same_word(word: str, expected: str) -> bool:
    """True if two words are equal, or are equal numbers; a close one is enough only where a fraction is expected."""
    if word == expected or not (_NUMBER.fullmatch(expected) and _NUMBER.fullmatch(word)):
        return word == expected
    if re.fullmatch(r"[+-]?0[0-9]+", expected):  # such as a binary string: the zeros are part of it
        return False
    if expected.lstrip("+-").isdecimal():
        return Decimal(word) == Decimal(expected)
    return _close(float(word), float(expected))
