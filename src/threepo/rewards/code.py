"""Verdicts on programs: the code in a completion runs in a sandbox and must pass the tests.

    grade("```python\\nprint(int(input()) + 1)\\n```", {"inputs": ["1\\n"], "outputs": ["2\\n"]}).correct

A verdict's `detail` is `passed`, or how the first failed test ended: `wrong`, `runtime error`, `time-out`, `memory` or
`compile error`; or `sandbox error`, which is not the program's fault. Tests have one of these forms:

{"inputs": ["1 2\\n", ...], "outputs": ["3\\n", ...]}                 what the program reads and must write
{"fn_name": "add", "inputs": [[1, 2], ...], "outputs": [3, ...]}   what its function is called with and must return
{"assert_case": ["assert add(1, 2) == 3", ...]}                    code that raises if the program is wrong
{"functional": "def check(f): ...\\ncheck(add)"}                   the same as one test

Each may also be JSON text. An input of a function may be text with the JSON of one argument on each line; its output is
then JSON too. "prefix" may be added to each form: code to run before the program, such as the imports of a published
grader or the classes that a problem uses.
"""

import ast
import functools
import json
import math
import os.path
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from typing import Any

from threepo.config import RewardConfig
from threepo.rewards.sandbox import Outcome, Submission, open_sandbox
from threepo.types import Completion, Problem, Verdict

COLUMN = "tests"
"""The column of the data that holds a problem's tests."""
TOLERANCE = {"rel_tol": 1e-5, "abs_tol": 1e-6}
LONGER = 100
"""How many times as long as the expected value the JSON of a right one may be: 1e300 may be returned as an integer."""
FORMS = "'inputs' and 'outputs' (with 'fn_name' for a function), 'assert_case', or 'functional'"
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")


@dataclass(frozen=True)
class CodeTests:
    """Tests in the one form that graders use."""

    submission: Submission
    """The cases, without a program yet. It never contains what the cases expect, so the sandbox never does."""
    expected: tuple[Any, ...] = ()
    """The text for `stdin`, the value for `call`; empty for `script`, whose cases judge by themselves."""

    def judged(self, index: int, outcome: Outcome) -> str:
        """Verdict on a case: `passed`, or the reason that it did not pass."""
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
        return "passed" if same_value(value, expected) else "wrong"


class CodeGrader:
    """Grades programs, several at a time; the tests of a problem are in its column `tests`."""

    def __init__(self, settings: RewardConfig) -> None:
        self._binary = settings.scoring != "passed_share"
        self._sandbox = open_sandbox(settings.sandbox)
        self._pool = ThreadPoolExecutor(self._sandbox.workers, thread_name_prefix="sandbox")

    def __call__(self, completions: Sequence[Completion]) -> list[Verdict]:
        """A verdict for each completion."""
        problems = {id(completion.problem): completion.problem for completion in completions}  # most come many times
        tests = {key: parse_tests(problem.columns.get(COLUMN)) for key, problem in problems.items()}
        return self.grade_all([(completion.text, tests[id(completion.problem)]) for completion in completions])

    def grade_all(self, pairs: Sequence[tuple[str, CodeTests]]) -> list[Verdict]:
        """The verdict on each text under its tests."""
        return list(self._pool.map(lambda pair: self.grade(*pair), pairs))

    def grade(self, text: str, tests: CodeTests) -> Verdict:
        """The verdict on the text of one completion."""
        if (program := extract_program(text)) is None:
            return Verdict(correct=False, status="no_answer", answer=None, format_ok=False)
        endings: list[str] = []
        with closing(self._sandbox.run(replace(tests.submission, program=program))) as outcomes:
            for index, outcome in enumerate(outcomes):
                endings.append(tests.judged(index, outcome))
                if endings[-1] == "sandbox error" or (self._binary and endings[-1] != "passed"):
                    break  # no other test can change the verdict
        if endings[-1] == "sandbox error":
            return Verdict(False, "error", program, 0.0, "sandbox error", format_ok=True)
        detail = next((ending for ending in endings if ending != "passed"), "passed")
        right = detail == "passed"
        reward = float(right) if self._binary else endings.count("passed") / len(endings)
        return Verdict(right, "right" if right else "wrong", program, reward, detail, format_ok=True)


def extract_program(completion: str) -> str | None:
    """The last block marked as Python, or else the first of any kind; None if there is none, or nothing in it."""
    _, marked, inside = completion.rpartition("```python")
    inside = inside if marked else completion.partition("```")[2]
    inside = inside.partition("```")[0]
    rest_of_line = re.match(r"[\d.]*[ \t]*\n" if marked else r"[ \t]*[A-Za-z]+[ \t]*\n", inside)
    program = inside[rest_of_line.end() :] if rest_of_line else inside
    return _dedented(program) if program.strip() else None


def _dedented(program: str) -> str:
    """The program without the blanks that begin all its lines; `textwrap` makes a regular expression of all of them."""
    lines = program.split("\n")
    shared = os.path.commonprefix([line for line in lines if line.strip()])  # noqa: RUF071 - of letters, as meant
    margin = shared[: len(shared) - len(shared.lstrip(" \t"))]
    return "\n".join(line.removeprefix(margin) for line in lines) if margin else program


def grade(completion: str, tests: Any) -> Verdict:
    """The verdict on one completion under the default settings; `ValueError` for tests in an unknown form."""
    return _default_grader().grade(completion, parse_tests(tests))


def reward(completions: Sequence[Any], tests: Sequence[Any], **_: Any) -> list[float | None]:
    """A reward function for TRL: 1.0 where a completion passes all tests of its row, None where the sandbox failed."""
    texts = [text if isinstance(text, str) else text[-1]["content"] for text in completions]
    verdicts = _default_grader().grade_all(list(zip(texts, map(parse_tests, tests), strict=True)))
    return [None if verdict.status == "error" else verdict.reward for verdict in verdicts]


_default_grader = functools.cache(lambda: CodeGrader(RewardConfig(function="code")))


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
        found = {key: value for key, value in tests.items() if value is not None}  # tables have all keys in all rows
        prefix = _code(found.get("prefix", ""), "prefix")
        for name in [name for name in ("functional", "assert_case") if name in found]:
            cases = [found[name]] if isinstance(found[name], str) else found[name]
            if not _filled(cases) or not all(isinstance(case, str) and case.strip() for case in cases):
                raise ValueError(f"have {name!r}, which must be Python code")
            return CodeTests(Submission("script", "", tuple(_code(case, name) for case in cases), prefix=prefix))
        if "inputs" in found and "outputs" in found:
            return _pairs(found["inputs"], found["outputs"], found.get("fn_name", ""), prefix)
        raise ValueError(f"have {', '.join(map(repr, found)) or 'nothing'}; they must have {FORMS}")
    except json.JSONDecodeError as error:
        raise ValueError(f"are text, but not JSON ({error})") from error
    except RecursionError as error:
        raise ValueError("are nested too deeply") from error


def _code(code: Any, name: str) -> str:
    try:
        ast.parse(code)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:  # the last two: nested deeply
        raise ValueError(f"have {name!r}, which must be Python code: {error or type(error).__name__}") from error
    return str(code)


def _pairs(inputs: Any, outputs: Any, entry: Any, prefix: str) -> CodeTests:
    if not _filled(inputs) or not _filled(outputs) or len(inputs) != len(outputs):
        raise ValueError("have 'inputs' and 'outputs', which must be two lists of the same length, and not empty")
    if not isinstance(entry, str):
        raise ValueError(f"have 'fn_name' = {entry!r}, which must be the name of a function")
    if not entry:
        return CodeTests(Submission("stdin", "", _texts(inputs, "inputs"), prefix=prefix), _texts(outputs, "outputs"))
    cases, expected = zip(*map(_call, inputs, outputs), strict=True)
    if not any(isinstance(given, str) for given in inputs) and all(_filled(v) and len(v) == 1 for v in expected):
        expected = tuple(value[0] for value in expected)  # APPS and TACO wrap every result in a list of one
    return CodeTests(Submission("call", "", cases, entry, prefix), expected)


def _filled(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes)) and len(value) > 0


def _texts(values: Sequence[Any], name: str) -> tuple[str, ...]:
    """Inputs or outputs of a program, a text for each case; some data sets have lists of lines."""
    for value in values:
        lines = [value] if isinstance(value, str) else value
        if not isinstance(lines, Sequence) or not all(isinstance(line, str) for line in lines):
            raise ValueError(f"have {name!r} with {value!r}, which must be text")
    return tuple(value if isinstance(value, str) else "\n".join(value) for value in values)


def _call(given: Any, result: Any) -> tuple[str, Any]:
    """The JSON of a function's arguments, and what it must return."""
    if isinstance(given, str):
        try:
            given = [json.loads(line) for line in given.split("\n") if line.strip()]
        except ValueError as error:
            raise ValueError(f"have 'inputs' with a line that is not JSON ({error})") from error
        with suppress(ValueError):
            result = json.loads(result) if isinstance(result, str) else result
    elif not isinstance(given, Sequence):
        raise ValueError(f"have 'inputs' with {given!r}, which must be the list of the function's arguments")
    try:
        return json.dumps(given), result
    except TypeError as error:  # bytes or a time, which parquet has
        raise ValueError(f"have 'inputs' with {given!r}, which JSON cannot express: {error}") from error


def same_text(output: str, expected: str) -> bool:
    """Whether an output is right: each line has the same words, and numbers are compared by value."""
    wanted = expected.rstrip().split("\n")
    given = output.rstrip().split("\n", len(wanted))  # one piece more than can be right, however many lines there are
    return given == wanted or (len(given) == len(wanted) and all(map(_same_line, given, wanted)))


def _same_line(line: str, expected: str) -> bool:
    wanted = expected.split()
    given = line.split(maxsplit=len(wanted))
    return given == wanted or (len(given) == len(wanted) and all(map(_same_word, given, wanted)))


def same_value(value: Any, expected: Any) -> bool:
    """Whether a value, read from JSON, is right; a close one is enough only where a fraction is expected."""
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
    """Whether two words are equal, or are equal numbers; a close one is enough only where a fraction is expected."""
    if word == expected or not (_NUMBER.fullmatch(expected) and _NUMBER.fullmatch(word)):
        return word == expected
    if not expected.lstrip("+-").isdecimal():
        return _close(float(word), float(expected))
    with suppress(InvalidOperation):  # an exponent of twenty digits
        return Decimal(word) == Decimal(expected)
    return False
