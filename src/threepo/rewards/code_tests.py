"""The tests of a program: the forms that data sets have them in, and when an output is the right one.

{"inputs": ["1 2\\n", ...], "outputs": ["3\\n", ...]}                 what the program reads and writes
{"fn_name": "add", "inputs": [[1, 2], ...], "outputs": [3, ...]}   what its function is called with, and returns
{"assert_case": ["assert add(1, 2) == 3", ...]}                    code that raises where the program fails
{"functional": "def check(f): ...\\ncheck(add)"}                   the same as one test

Each also as JSON text. An input for a function may also be text, with the JSON of one argument on each line; its output
is then the JSON of the result. Beside any of them, "prefix" may hold code to come before the program (and before tests
that are code): what published graders import for every program, and the classes that its problem uses.
"""

import ast
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from threepo.rewards.sandbox.interface import Job, Outcome, TestKind

REL_TOLERANCE = 1e-5
ABS_TOLERANCE = 1e-6
LONGEST_NUMBER = 400
"""Digits; longer ones must be equal as texts."""
FORMS = "'inputs' and 'outputs' (with 'fn_name' for a function), 'assert_case', or 'functional'"
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")
_INTEGER = re.compile(r"[+-]?\d+")


@dataclass(frozen=True)
class CodeTests:
    """Tests in the one form that graders use. What they expect is kept from `Job`, and so from the program."""

    kind: TestKind
    cases: tuple[str, ...]
    expected: tuple[Any, ...] = ()
    """For `stdin` the text, for `call` the value; for `script` nothing, the cases judge by themselves."""
    entry: str = ""
    prefix: str = ""

    def job(self, program: str) -> Job:
        """What a sandbox is to run."""
        return Job(kind=self.kind, program=program, cases=self.cases, entry=self.entry, prefix=self.prefix)

    def judged(self, index: int, outcome: Outcome) -> str:
        """What a case comes to that ended `ok`."""
        if self.kind == "script":
            return "passed"
        if self.kind == "stdin":
            return "passed" if same_text(outcome.output, self.expected[index]) else "wrong"
        try:
            value = json.loads(outcome.output)
        except (ValueError, RecursionError):  # the program ended before its function did, or wrote there itself
            return "runtime error"
        return "passed" if same_value(value, self.expected[index]) else "wrong"


def parse_tests(tests: Any) -> CodeTests:
    """Tests from any of the forms; `ValueError` with the reason for anything else."""
    try:
        return _parsed(tests)
    except RecursionError as error:
        raise ValueError("are nested too deeply") from error


def _parsed(tests: Any) -> CodeTests:
    if isinstance(tests, str):
        try:
            tests = json.loads(tests)
        except ValueError as error:
            raise ValueError(f"are text, but not JSON ({error})") from error
    if not isinstance(tests, Mapping):
        raise ValueError(f"are {type(tests).__name__}; they must have {FORMS}")
    found = {key: value for key, value in tests.items() if value is not None}  # tables have all keys in all rows
    prefix = found.get("prefix", "")
    _refuse_unless_code(prefix, "prefix")
    if "functional" in found:
        return _script([found["functional"]], "functional", prefix)
    if "assert_case" in found:
        cases = found["assert_case"]
        return _script([cases] if isinstance(cases, str) else cases, "assert_case", prefix)
    if "inputs" in found and "outputs" in found:
        return _pairs(found["inputs"], found["outputs"], found.get("fn_name", ""), prefix)
    raise ValueError(f"have {', '.join(map(repr, found)) or 'nothing'}; they must have {FORMS}")


def same_text(output: str, expected: str) -> bool:
    """Whether two outputs are the same but for blanks at the ends of lines, and for the last digits of numbers."""
    given, wanted = _lines(output), _lines(expected)
    if given == wanted:
        return True
    return len(given) == len(wanted) and all(
        len(some) == len(others) and all(map(_same_token, some, others))
        for some, others in ((line.split(), other.split()) for line, other in zip(given, wanted, strict=True))
    )


def same_value(value: Any, expected: Any) -> bool:
    """Whether two values are the same as JSON has them, but for the last digits of fractions."""
    if isinstance(value, list) and isinstance(expected, (list, tuple)):
        return len(value) == len(expected) and all(map(same_value, value, expected))
    if isinstance(value, dict) and isinstance(expected, Mapping):
        wanted = {str(key): item for key, item in expected.items()}
        return value.keys() == wanted.keys() and all(same_value(item, wanted[key]) for key, item in value.items())
    if isinstance(value, float) or isinstance(expected, float):
        numbers = isinstance(value, (int, float)) and isinstance(expected, (int, float))
        return numbers and _close(value, expected)
    return bool(value == expected)


def _close(a: float, b: float) -> bool:
    try:
        return math.isclose(a, b, rel_tol=REL_TOLERANCE, abs_tol=ABS_TOLERANCE)
    except OverflowError:  # an integer that no float can be
        return False


def _lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _same_token(token: str, other: str) -> bool:
    """Equal, or close numbers; two integers are only close where they are equal, however long they are."""
    if token == other:
        return True
    if max(len(token), len(other)) > LONGEST_NUMBER or not (_NUMBER.fullmatch(other) and _NUMBER.fullmatch(token)):
        return False
    integers = _INTEGER.fullmatch(token) and _INTEGER.fullmatch(other)
    return int(token) == int(other) if integers else _close(float(token), float(other))


def _refuse_unless_code(code: Any, name: str) -> None:
    try:
        ast.parse(code)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:  # the last two: nested deeply
        raise ValueError(f"have {name!r}, which must be Python code: {error or type(error).__name__}") from error


def _script(cases: Any, name: str, prefix: str) -> CodeTests:
    if not _filled(cases) or not all(isinstance(case, str) and case.strip() for case in cases):
        raise ValueError(f"have {name!r}, which must be Python code")
    for code in cases:
        _refuse_unless_code(code, name)
    return CodeTests(kind="script", cases=tuple(cases), prefix=prefix)


def _pairs(inputs: Any, outputs: Any, entry: Any, prefix: str) -> CodeTests:
    if not _filled(inputs) or not _filled(outputs) or len(inputs) != len(outputs):
        raise ValueError("have 'inputs' and 'outputs', which must be two lists of the same length, and not empty")
    if not isinstance(entry, str):
        raise ValueError(f"have 'fn_name' = {entry!r}, which must be the name of a function")
    if not entry:
        return CodeTests(
            kind="stdin",
            cases=tuple(_text(text, "inputs") for text in inputs),
            expected=tuple(_text(text, "outputs") for text in outputs),
            prefix=prefix,
        )
    cases = [_arguments(arguments) for arguments in inputs]
    expected = [_result(given, result) for given, result in zip(inputs, outputs, strict=True)]
    if not any(isinstance(given, str) for given in inputs) and all(_filled(v) and len(v) == 1 for v in expected):
        expected = [value[0] for value in expected]  # APPS and TACO wrap every result in a list of one
    return CodeTests(kind="call", cases=tuple(cases), expected=tuple(expected), entry=entry, prefix=prefix)


def _filled(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes)) and len(value) > 0


def _text(value: Any, name: str) -> str:
    """What a program reads or writes; some data sets have it by lines."""
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    raise ValueError(f"have {name!r} with {value!r}, which must be text")


def _arguments(given: Any) -> str:
    if isinstance(given, str):
        try:
            given = [json.loads(line) for line in given.splitlines() if line.strip()]
        except ValueError as error:
            raise ValueError(f"have 'inputs' with a line that is no JSON ({error})") from error
    elif not isinstance(given, Sequence):
        raise ValueError(f"have 'inputs' with {given!r}, which must be the list of the function's arguments")
    try:
        return json.dumps(given)
    except TypeError as error:  # bytes or a time, which parquet has
        raise ValueError(f"have 'inputs' with {given!r}, which JSON cannot say: {error}") from error


def _result(given: Any, result: Any) -> Any:
    if not (isinstance(given, str) and isinstance(result, str)):
        return result
    try:
        return json.loads(result)
    except ValueError:
        return result
