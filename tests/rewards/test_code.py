"""Verdicts on programs: what is taken from a completion, how tests are read, what an output is compared with."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sortedcontainers  # type: ignore[import-untyped]
from hypothesis import given
from hypothesis import strategies as st

from factories import answered
from rewards.contained import why_not
from threepo.config import RewardConfig, SandboxConfig
from threepo.errors import UserError
from threepo.evaluation.livecodebench import PRELUDE
from threepo.rewards import code
from threepo.rewards.code import CodeGrader, extract_program
from threepo.rewards.code_tests import parse_tests, same_text, same_value
from threepo.rewards.grading import load_grader, what_lacks
from threepo.rewards.sandbox import Outcome, seccomp
from threepo.types import Problem, Verdict

REASON = why_not()
BACKENDS = [
    pytest.param("bubblewrap", marks=pytest.mark.skipif(bool(REASON), reason=REASON)),
    "unconfined",  # the programs of this file are harmless
]


def fenced(program: str) -> str:
    return f"<think>Let me see.</think> Here:\n```python\n{program}\n```\nThat is it."


@pytest.fixture(params=BACKENDS, scope="module")
def grader(request: pytest.FixtureRequest) -> CodeGrader:
    sandbox = SandboxConfig(backend=request.param, memory_mib=512)
    return CodeGrader(RewardConfig(function="code", sandbox=sandbox))


def verdict(grader: CodeGrader, program: str, tests: Any) -> Verdict:
    return grader.grade(fenced(program), parse_tests(tests))


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        ("```python\na\n```", "a\n"),
        ("```python\na\n``` or better\n```python\nb\n``` said", "b\n"),
        ("```\nx\n``` but\n```python3\nb\n```", "b\n"),
        ("```cpp\nint a;\n```\n```\nb\n```", "int a;\n"),
        ("```\na = 1\n```", "\na = 1\n"),
        ("```a = 1```", "a = 1"),
        ("  ```python\n  if a:\n    b\n  ```", "if a:\n  b\n"),
        ("```python\n    # a\n  if a:\n\n    b\n```", "  # a\nif a:\n\n  b\n"),
        ("```python\n\ta\n    b\n```", "\ta\n    b\n"),
        ('```python\na = """x\n  \n"""\n```', 'a = """x\n  \n"""\n'),
        ("```python\ncut off", "cut off"),
        ("```Python\na\n```", "a\n"),
        ("```\n5\n``` as in\n```py\na\n```", "a\n"),
        ("<think>```python\ndraft\n```</think>\n```\na\n```", "\na\n"),
        ("<think>```python\na\n```</think> as above", "a\n"),
        ("```python\na  # </think>\n```", "a  # </think>\n"),
        ("no code", None),
        ("```python\n\n```", None),
        ("", None),
    ],
)
def test_the_program_is_the_last_python_block_or_the_first_of_any(completion: str, program: str | None) -> None:
    assert extract_program(completion) == program


def test_no_program_is_no_answer() -> None:
    grader = CodeGrader(RewardConfig(function="code", sandbox=SandboxConfig(backend="unconfined")))
    found = grader.grade("I do not know", parse_tests({"inputs": [""], "outputs": [""]}))
    assert found == Verdict(correct=False, status="no_answer", answer=None, format_ok=False)


# Comparison


@pytest.mark.parametrize(
    ("output", "expected", "same"),
    [
        ("1 2 \n3\n\n", "1 2\n3", True),
        ("1\r\n2", "1\n2\n", True),
        ("1 2\n3", "1 2 3", False),
        ("\n1", "1", False),
        ("1  2", "1 2", True),
        ("0.333333", "0.33333333333", True),
        ("0.3333", "0.33333333333", False),
        ("0.0000001", "0.0", True),
        ("0.0000009", "0.0", True),
        ("0.0000011", "0.0", False),
        ("100000.9", "100000.0", True),
        ("100001.1", "100000.0", False),
        ("3.0", "3", True),
        ("3", "3.0", True),
        ("3e0", "+3", True),
        ("2.9999999", "3.0", True),
        ("2.9999999", "3", False),
        ("1e-7", "0", False),
        ("100000001", "100000002", False),
        ("1000000000.0", "1000000007", False),
        ("1e9", "1000000007", False),
        ("9007199254740993.0", "9007199254740992", False),
        ("1e99999999999999999999", "1", False),
        ("9" * 500, "9" * 499 + "8", False),
        ("nan", "inf", False),
        ("1_0", "10", False),
        ("11", "0011", False),
        ("0011", "0011", True),
        ("-5", "-05", False),
        ("Yes", "YES", False),
        ("", "", True),
        ("", "0", False),
    ],
)
def test_outputs_are_compared_by_lines_then_by_numbers(output: str, expected: str, same: bool) -> None:
    assert same_text(output, expected) is same


@given(st.lists(st.text(alphabet="ab1. ", max_size=6)), st.lists(st.integers(0, 3)))
def test_blanks_at_the_ends_of_lines_and_of_all_lines_never_matter(lines: list[str], blanks: list[int]) -> None:
    padded = [line + " " * (blanks[i % len(blanks)] if blanks else 0) for i, line in enumerate(lines)]
    assert same_text("\n".join(padded) + "\n" * len(blanks), "\n".join(lines))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(JSON)
def test_a_value_equals_what_json_makes_of_it(value: Any) -> None:
    assert same_value(json.loads(json.dumps(value)), value)


@given(st.floats(allow_nan=False, allow_infinity=False), st.integers(-(10**15), 10**15))
def test_where_an_integer_is_expected_only_its_own_value_is_right(value: float, expected: int) -> None:
    assert same_value([value], [expected]) == same_text(repr(value), str(expected)) == (value == expected)


@pytest.mark.parametrize(
    ("value", "expected", "same"),
    [
        ([1, 2], (1, 2), True),
        ([1, 2], [1, 2, 3], False),
        ({"1": 2}, {1: 2}, True),
        ({"1": 2}, {1: 3}, False),
        (0.1 + 0.2, 0.3, True),
        (10**8, 10**8 + 1, False),
        (3.0, 3, True),
        (3, 3.0, True),
        (2.9999999, 3.0, True),
        (2.9999999, 3, False),
        (1e9, 10**9 + 7, False),
        ({"a": [1e9]}, {"a": [10**9 + 7]}, False),
        (float("inf"), 10**400, False),
        (1.0, "1.0", False),
        (10**400, 1.0, False),
    ],
)
def test_values_are_compared_as_json_has_them(value: Any, expected: Any, same: bool) -> None:
    assert same_value(value, expected) is same


# What a completion or the output of its program may cost in this process, which has no limits

MIB = 1 << 20
COMPLETIONS = (
    "`",
    "```",
    "```python",
    "```python\n",
    "```python\n```",
    "```a\n```python3",
    "```python" + "1." * 8,
    "\n",
    " ",
    " \n",
    "\t\n",
    "```\n    x\n",
    "x",
    "1 ",
)
PARTS = ("\n", " ", "\t\n", "x", "1", "1 ", "1\n", "1.0 ", "9", "1e9", ".", "-", "[", "[]", "[],", '{"a":', "\x1c", "é")


def spent_s(work: Callable[[], object]) -> float:
    """Processor time of this thread and not the clock's, and the least of three: other processes must not matter."""
    times = []
    for _ in range(3):
        re.purge()  # else only the first of them makes its regular expressions
        start = time.thread_time()
        work()
        times.append(time.thread_time() - start)
    return min(times)


def assert_linear(work: Callable[[int], object]) -> None:
    """Eight times the size takes eight times as long, and 64 times if the work is quadratic; 24 tells them apart.

    Less than 50 ms is never too long, as other costs may count there. What is quadratic is seen before 128 KiB, of
    which it would work for a minute.
    """
    before = 0.0
    for size in (MIB >> 9, MIB >> 6, MIB >> 3):
        spent = spent_s(lambda size=size: work(size))  # type: ignore[misc]
        assert spent < max(0.05, 24 * before), size
        before = spent


def test_what_is_quadratic_is_seen() -> None:
    with pytest.raises(AssertionError):
        assert_linear(lambda size: re.search(r" +x", " " * size))
    assert_linear(lambda size: re.search(r"x", " " * size))


def repeated(part: str, size: int) -> str:
    return part * (size // len(part.encode()))


@pytest.mark.parametrize("start", ["", "```python\n", "```1 a"])
@pytest.mark.parametrize("part", COMPLETIONS)
def test_the_program_is_found_in_linear_time(part: str, start: str) -> None:
    for end in ("", "x"):
        assert_linear(lambda size, end=end: extract_program(start + repeated(part, size) + end))  # type: ignore[misc]


FORMS_COMPARED = {
    "text": ({"inputs": [""], "outputs": ["1 2\n3.5 4"]}, "1"),
    "value": ({"fn_name": "f", "inputs": [[1]], "outputs": [[[1.5, 2], {"a": "b"}]]}, "[1.5"),
}


@pytest.mark.parametrize("form", FORMS_COMPARED)
@pytest.mark.parametrize("part", PARTS)
def test_outputs_are_judged_in_linear_time(part: str, form: str) -> None:
    tests, right = FORMS_COMPARED[form]
    parsed = parse_tests(tests)
    for start in ("", right):
        assert_linear(lambda size, start=start: parsed.judge(0, Outcome("ok", start + repeated(part, size) + "x")))  # type: ignore[misc]


@pytest.mark.parametrize("part", PARTS)
def test_long_outputs_that_are_right_are_judged_in_linear_time(part: str) -> None:
    def judged(size: int) -> None:
        text = repeated(part, size // 4)
        assert parse_tests({"inputs": [""], "outputs": [text + "1"]}).judge(0, Outcome("ok", text + " 1")) in DETAILS

    assert_linear(judged)


@pytest.mark.parametrize("form", FORMS_COMPARED)
@pytest.mark.parametrize("part", ["1 ", "[],"])
def test_wrong_outputs_are_judged_in_little_memory(part: str, form: str) -> None:
    """An output of the most that a program may write is a few copies of itself, and not a million lists."""
    parsed = parse_tests(FORMS_COMPARED[form][0])
    start, end = ("[", "1]") if form == "value" else ("1", "1")
    output = Outcome("ok", start + repeated(part, 16 * MIB - 4) + end)
    tracemalloc.start()
    try:
        assert parsed.judge(0, output) in ("wrong", "runtime error")
        assert tracemalloc.get_traced_memory()[1] < 40 * MIB
    finally:
        tracemalloc.stop()


def test_a_right_value_may_be_spelled_longer_than_the_expected_one() -> None:
    parsed = parse_tests({"fn_name": "f", "inputs": [[1], [1]], "outputs": [1e300, ["é", 0.1]]})
    assert parsed.judge(0, Outcome("ok", json.dumps(10**300))) == "passed"
    assert parsed.judge(1, Outcome("ok", json.dumps(["é", 0.1 + 1e-17]))) == "passed"


# Forms of tests


@pytest.mark.parametrize(
    ("tests", "reason"),
    [
        (None, "are NoneType; they must have"),
        ("{", "have text that is not JSON"),
        ({}, "have nothing; they must have"),
        ({"inputs": ["1"]}, "have 'inputs'; they must have"),
        ({"inputs": [], "outputs": []}, "two lists of the same length, and not empty"),
        ({"inputs": ["1"], "outputs": ["1", "2"]}, "two lists of the same length"),
        ({"inputs": "1", "outputs": "1"}, "two lists"),
        ({"inputs": [1], "outputs": ["1"]}, "'inputs' with 1, which must be text"),
        ({"inputs": [1], "outputs": [1], "fn_name": "f"}, "must be the list of the function's arguments"),
        ({"inputs": ["x"], "outputs": ["1"], "fn_name": "f"}, "have text that is not JSON"),
        ({"inputs": [[1]], "outputs": [1], "fn_name": 3}, "must be the name of a function"),
        ({"assert_case": []}, "'assert_case', which must be Python code"),
        ({"assert_case": ["assert f("]}, "'assert_case', which must be Python code: "),
        ({"functional": 3}, "'functional', which must be Python code"),
        ({"functional": "check(f)", "prefix": 3}, "'prefix', which must be Python code"),
        ({"inputs": [[b"1"]], "outputs": [1], "fn_name": "f"}, "that JSON cannot express .*bytes"),
    ],
)
def test_tests_in_no_known_form_are_refused(tests: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_tests(tests)
    problem = Problem(id="p", prompt="", columns={"tests": tests}, location="problems.jsonl, row 3")
    message = (
        r"problems.jsonl, row 3: its tests \(column 'tests'\) .*" + reason + ".*; set data.tests_column, fix the data$"
    )
    with pytest.raises(UserError, match=message):
        load_grader(RewardConfig(function="code"), None, [problem])
    assert re.search(reason, what_lacks(RewardConfig(function="code"), None)(problem))


ADD = "def add(a, b):\n    return a + b"
FORMS: dict[str, tuple[str, Any]] = {
    "stdin": ("a, b = map(int, input().split())\nprint(a + b)", {"inputs": ["1 2\n", "3 4"], "outputs": ["3", "7\n"]}),
    "stdin by lines": ("print(int(input()) + int(input()))", {"inputs": [["1", "2"]], "outputs": [["3"]]}),
    "function": (ADD, {"fn_name": "add", "inputs": [[1, 2], ["a", "b"]], "outputs": [3, "ab"]}),
    "function, results in lists of one": (ADD, {"fn_name": "add", "inputs": [[1, 2]], "outputs": [[3]]}),
    "function that returns lists of one": (
        ADD,
        {"fn_name": "add", "inputs": [[[], [1]], [[2], []]], "outputs": [[1], [2]]},
    ),
    "function, arguments on lines": (
        ADD,
        {"fn_name": "add", "inputs": ["1\n2", "[1]\n[2]"], "outputs": ["3", "[1, 2]"]},
    ),
    "function of a class": (
        "class Solution:\n    def add(self, a, b):\n        return a + b",
        {"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]},
    ),
    "assertions": (ADD, {"assert_case": ["assert add(1, 2) == 3", "assert add([1], b=[2]) == [1, 2]"]}),
    "code": (ADD, {"functional": "def check(f):\n    assert f(1, 2) == 3\ncheck(add)"}),
    "all keys, as tables have them": (
        ADD,
        {"inputs": None, "outputs": None, "fn_name": None, "assert_case": None, "functional": "assert add(1, 2) == 3"},
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_tests_passes_what_is_right_and_fails_what_is_wrong(form: str, grader: CodeGrader) -> None:
    program, tests = FORMS[form]
    for form_of_it in (tests, json.dumps(tests)):
        found = verdict(grader, program, form_of_it)
        assert (found.correct, found.status, found.reward, found.detail) == (True, "right", 1.0, "passed")
    assert found.answer == program + "\n"
    assert found.format_ok is True
    found = verdict(grader, program.replace("+", "*", 1).replace("(int(input()) *", "(7 +"), tests)
    assert (found.correct, found.status, found.reward) == (False, "wrong", 0.0)


# Tests that are code run after an honest program, with its names: (program, tests)
SCRIPTS = {
    "change a list in place": ("def f(x): x.reverse()", "x = [1, 2]\nf(x)\nassert x == [2, 1]"),
    "exceptions": (
        "class Low(ValueError):\n    def __init__(self, n): super().__init__(f'low: {n}'); self.n = n\n"
        "def f(n): raise Low(n)",
        "import unittest\ntry: f(3)\nexcept ValueError as e: assert e.n == 3 and str(e) == 'low: 3'\n"
        "else: assert False\n"
        "with unittest.TestCase().assertRaises(Low): f(3)",
    ),
    "classes with an equality of their own": (
        "class V:\n    def __init__(self, x): self.x = x\n    def __add__(self, o): return V(self.x + o.x)\n"
        "    def __eq__(self, o): return self.x == (o.x if isinstance(o, V) else o)\n"
        "    def __lt__(self, o): return self.x < o.x",
        "assert V(1) + V(2) == V(3) == 3 and V(1) < V(2) and V(1) != V(2) and abs(V(3).x - 3) < 1e-6",
    ),
    "iterators": ("def f(n):\n    yield from range(n)", "assert list(f(3)) == [0, 1, 2] and next(f(3)) == 0"),
    "constants of the program": ("LIMIT = 7\ndef f(x): return LIMIT", "assert f(0) == LIMIT == 7"),
    "modules of the program": ("import math\ndef f(x): return x", "assert math.sqrt(f(4)) == 2"),
    "functions of the tests": (
        "def f(xs, key): return sorted(xs, key=key)",
        "assert f([1, 2], lambda x: -x) == [2, 1]",
    ),
    "what the program prints": (
        "def f(): print('said')",
        "import io, sys\nsys.stdout = io.StringIO()\nf()\nassert sys.stdout.getvalue() == 'said\\n'",
    ),
    "numbers and containers of the standard library": (
        "from collections import *\nfrom fractions import Fraction\ndef half(x): return Fraction(x, 2)\n"
        "def count(x): return Counter(x)\ndef last(x): return deque(x, 2)\nP = namedtuple('P', 'x y')",
        "from collections import deque\nassert half(1) == 0.5 and abs(half(1) - 0.5) < 1e-6\n"
        "assert count('aab') == {'a': 2, 'b': 1} and last([1, 2, 3]) == deque([2, 3]) and P(1, 2) == (1, 2)",
    ),
    "dataclasses": (
        "from dataclasses import dataclass\n@dataclass(frozen=True, order=True)\nclass P:\n    x: int\n"
        "def f(): return {P(1), P(2)}",
        "assert f() == {P(2), P(1)} and sorted(f()) == [P(1), P(2)] and {P(1): 3}[P(1)] == 3",
    ),
    "contexts": (
        "class C:\n    def __enter__(self): self.left = False; return 5\n    def __exit__(self, *_): self.left = True",
        "c = C()\nwith c as x: assert x == 5 and not c.left\nassert c.left",
    ),
    "tests that run as a program": ("def f(x): return x", "if __name__ == '__main__': assert f(1) == 1"),
    "programs with a part to run by itself": (
        "def f(x): return x\nif __name__ == '__main__': print(1 / 0)",
        "assert f(1) == 1",
    ),
    "unittest": (
        ADD,
        "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(add(1, 2), 3)\n"
        "unittest.main()",
    ),
    "unittest by another name, with arguments": (
        ADD,
        "from unittest import TestCase, main as go\nclass T(TestCase):\n"
        "    def test(self): self.assertEqual(add(1, 2), 3)\nif __name__ == '__main__': go(argv=[''], verbosity=2)",
    ),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_tests_that_are_code_use_an_honest_program_as_their_own(name: str, grader: CodeGrader) -> None:
    program, tests = SCRIPTS[name]
    assert verdict(grader, program, {"functional": tests}).detail == "passed"


def test_a_test_that_ends_the_program_does_not_take_the_next_with_it() -> None:
    """Each case is a process of its own: what it ends, or leaves behind, the next does not find."""
    program = "import os\nseen = []\ndef f(x):\n    seen.append(x)\n    if x == 1: os._exit(0)\n    return len(seen)"
    cases = ["assert f(0) == 1", "assert f(1) == 1", "assert f(2) == 1", "assert f(3) == 2", "assert f(4) == 1"]
    sandbox = SandboxConfig(backend="unconfined")
    grader = CodeGrader(RewardConfig(function="code", scoring="passed_share", sandbox=sandbox))
    found = verdict(grader, program, {"assert_case": cases})
    assert (found.reward, found.detail) == (3 / 5, "runtime error")


def test_tests_that_fail_only_as_a_program_are_run_as_one(grader: CodeGrader) -> None:
    tests = {"functional": "if __name__ == '__main__': assert f(1) == 2"}
    assert verdict(grader, "def f(x): return x", tests).detail == "wrong"


def test_a_program_that_does_not_load_passes_nothing(grader: CodeGrader) -> None:
    tests = {"functional": "try: f(1)\nexcept Exception: pass"}
    for error in ("AssertionError", "ValueError", "SystemExit(0)"):
        assert verdict(grader, f"def f(x): return x\nraise {error}", tests).detail == "runtime error"


def test_programs_and_tests_share_the_classes_of_a_problem(grader: CodeGrader) -> None:
    prefix = "class Node:\n    def __init__(self, val=0, next=None):\n        self.val, self.next = val, next"
    tests = (
        "def chain(values):\n    head = None\n    for v in reversed(values): head = Node(v, head)\n    return head\n"
        "def check(f):\n    node, seen = f(chain(range(2000))), []\n"
        "    while node: seen.append(node.val); node = node.next\n    assert seen == list(range(2000))[::-1]\n"
        "check(Solution().turn)"
    )
    program = (
        "class Solution:\n    def turn(self, head):\n        last = None\n"
        "        while head: last = Node(head.val, last); head = head.next\n        return last"
    )
    assert verdict(grader, program, {"functional": tests, "prefix": prefix}).detail == "passed"
    wrong = program.replace("Node(head.val", "Node(-head.val")
    assert verdict(grader, wrong, {"functional": tests, "prefix": prefix}).detail == "wrong"


def test_what_comes_before_programs_of_every_kind(grader: CodeGrader) -> None:
    """Solutions to LiveCodeBench use names that its grader imports; the function here has one of them."""
    called = {"fn_name": "add", "inputs": [[[1, 2]]], "outputs": [3], "prefix": PRELUDE}
    method = "class Solution:\n    def add(self, xs: List[int]) -> int:\n        return reduce(lambda a, b: a + b, xs)"
    assert verdict(grader, method, called).detail == "passed"
    assert verdict(grader, method, {**called, "prefix": ""}).detail == "runtime error"
    read = {"inputs": ["4\n"], "outputs": ["24\n"], "prefix": PRELUDE}
    assert verdict(grader, "print(factorial(int(input())))", read).detail == "passed"
    absent = {
        **read,
        "prefix": "try:\n    import nothing_of_this_name\nexcept ImportError:\n    from math import factorial",
    }
    assert verdict(grader, "print(factorial(int(input())))", absent).detail == "passed"
    assert verdict(grader, "print(1)", {**read, "prefix": "import nothing_of_this_name"}).detail == "runtime error"


def test_tests_that_end_themselves_fail(grader: CodeGrader) -> None:
    for tests in ("import sys\nassert f(1) == 1\nsys.exit()", "exit('wrong')", "raise SystemExit(0)"):
        assert verdict(grader, "def f(x): return x", {"functional": tests}).detail == "runtime error"


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name.startswith("unittest")])
def test_unittest_fails_where_the_program_does(name: str, grader: CodeGrader) -> None:
    tests = SCRIPTS[name][1]
    assert verdict(grader, ADD.replace("+", "-"), {"functional": tests}).detail == "wrong"


DETAILS = {
    "wrong": "print(3)",
    "runtime error": "print(1 / 0)",
    "compile error": "print(",
    "memory": "x = [0] * 10**9",
    "passed": "import sys\nsys.stdout = open(1, 'w')\nprint(4)",  # not closed, as many do
}


@pytest.mark.parametrize("detail", DETAILS)
def test_a_verdict_says_what_happened(detail: str, grader: CodeGrader) -> None:
    found = verdict(grader, DETAILS[detail], {"inputs": [""], "outputs": ["4"]})
    assert (found.detail, found.status) == (detail, "right" if detail == "passed" else "wrong")


def test_a_program_is_a_script_with_all_that_belongs_to_one(grader: CodeGrader) -> None:
    program = (
        "import atexit, pickle, sys, threading\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass A:\n    x: int\n"
        "sys.setrecursionlimit(10**6)\ndef deep(n): return n and deep(n - 1) + 1\n"
        "def main():\n    print(deep(50_000), pickle.loads(pickle.dumps(A(3))), sys.stdin.read())\n"
        "atexit.register(print, 'bye')\n"
        "if __name__ == '__main__':\n"
        "    threading.stack_size(1 << 26)\n    threading.Thread(target=main).start()"
    )
    assert verdict(grader, program, {"inputs": ["é"], "outputs": ["50000 A(x=3) é\nbye"]}).detail == "passed"


ENDS = {
    "exit()": "print(4)\nexit()\nprint(5)",
    "quit()": "print(4)\nquit()",
    "exit(0)": "print(4)\nexit(0)",
    "sys.exit()": "import sys\nprint(4)\nsys.exit()",
    "raise SystemExit": "print(4)\nraise SystemExit",
    "os._exit(0)": "import os\nprint(4, flush=True)\nos._exit(0)",
}


@pytest.mark.parametrize("name", ENDS)
def test_a_program_may_end_in_every_way_that_python_has(name: str, grader: CodeGrader) -> None:
    assert verdict(grader, ENDS[name], {"inputs": [""], "outputs": ["4"]}).detail == "passed"
    failing = ENDS["exit(0)"].replace("exit(0)", "exit(3)")
    assert verdict(grader, failing, {"inputs": [""], "outputs": ["4"]}).detail == "runtime error"


READS = {
    "input": "while True:\n    try: print(int(input()) * 2)\n    except EOFError: break",
    "stdin": "import sys\nfor line in sys.stdin: print(int(line) * 2)",
    "readline": "import sys\ninput = sys.stdin.readline\nwhile line := input(): print(int(line) * 2)",
    "buffer": "import sys\nfor n in sys.stdin.buffer.read().split(): print(int(n) * 2)",
    "descriptor": "import os, io\nfor n in io.BytesIO(os.read(0, os.fstat(0).st_size)): print(int(n) * 2)",
    "open": "for n in open(0): print(int(n) * 2)",
}


@pytest.mark.parametrize("name", READS)
def test_a_program_may_read_in_every_way_that_python_has(name: str, grader: CodeGrader) -> None:
    numbers = list(range(5000))
    tests = {"inputs": ["\n".join(map(str, numbers))], "outputs": ["\n".join(str(2 * n) for n in numbers)]}
    assert verdict(grader, READS[name], tests).detail == "passed"


def test_asyncio_and_threads_work(grader: CodeGrader) -> None:
    """An event loop wakes itself by a pair of sockets, the only ones that there are."""
    program = (
        "import asyncio\nfrom concurrent.futures import ThreadPoolExecutor\n"
        "async def main():\n    loop = asyncio.get_running_loop()\n    with ThreadPoolExecutor(4) as pool:\n"
        "        print(sum(await asyncio.gather(*(loop.run_in_executor(pool, abs, -n) for n in range(9)))))\n"
        "asyncio.run(main())"
    )
    assert verdict(grader, program, {"inputs": [""], "outputs": ["36"]}).detail == "passed"


def test_outputs_of_many_megabytes_arrive(grader: CodeGrader) -> None:
    """Or are stopped at 16 MiB."""
    program = "print('x' * int(input()))"
    assert verdict(grader, program, {"inputs": ["9000000"], "outputs": ["x" * 9_000_000]}).detail == "passed"
    assert verdict(grader, program, {"inputs": ["17000000"], "outputs": ["x" * 17_000_000]}).detail == "wrong"
    assert verdict(grader, "print(len(input()))", {"inputs": ["x" * 9_000_000], "outputs": ["9000000"]}).correct


def test_what_one_test_leaves_the_next_does_not_find(grader: CodeGrader) -> None:
    program = "import sys\nsys.count = getattr(sys, 'count', 0) + 1\nprint(sys.count)"
    assert verdict(grader, program, {"inputs": ["", ""], "outputs": ["1", "1"]}).correct


def test_passed_share_counts_all_tests_and_binary_stops_at_the_first_failure(tmp_path: Any) -> None:
    program = f"n = int(input())\nopen({str(tmp_path)!r} + f'/{{n}}', 'w').close()\nprint(n if n % 2 else 1 / n)"
    tests = {"inputs": ["1", "0", "3", "2"], "outputs": ["1", "0", "3", "2"]}
    sandbox = SandboxConfig(backend="unconfined")
    problem = Problem(id="p", prompt="", columns={"tests": tests})
    for scoring, reward, ran in (("binary", 0.0, 2), ("passed_share", 0.5, 4)):
        settings = RewardConfig(function="code", scoring=scoring, sandbox=sandbox)  # type: ignore[arg-type]
        (found,) = load_grader(settings, None, [problem])([answered(problem, fenced(program))])
        assert (found.reward, found.correct, found.detail) == (reward, False, "runtime error")
        assert len(list(tmp_path.iterdir())) == ran
        for file in tmp_path.iterdir():
            file.unlink()


def test_verdicts_come_in_the_order_of_the_completions(grader: CodeGrader) -> None:
    problems = [
        Problem(id=str(i), prompt="", columns={"tests": {"inputs": [""], "outputs": [str(i)]}}) for i in range(4)
    ]
    texts = [fenced(f"import time\ntime.sleep({(4 - i) / 50})\nprint({i % 3})") for i in range(4)]
    assert [v.correct for v in grader(list(map(answered, problems, texts)))] == [True, True, True, False]


INTERRUPTED = """
import os, signal
from threepo.config import SandboxConfig
from threepo.rewards.sandbox import Submission, open_sandbox
signal.signal(signal.SIGINT, lambda *_: None)  # as a trainer that first ends its step
program = "import time\\ntime.sleep(int(input()) / 4)"
outcomes = open_sandbox(SandboxConfig()).run(Submission(kind="stdin", program=program, cases=("0", "1")))
next(outcomes)
os.killpg(0, signal.SIGINT)
print(next(outcomes).ending)
"""


KILLED = """
import os, signal
from threepo.config import SandboxConfig
from threepo.rewards.sandbox import Submission, open_sandbox
next(open_sandbox(SandboxConfig()).run(Submission(kind="stdin", program="print(input())", cases=("0", "1"))))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_python_ends_without_a_complaint_about_a_grader_that_is_kept() -> None:
    """The one of `code.grade` is kept by its module, as `threepo doctor` uses it."""
    program = (
        "import torch; from threepo.config import RewardConfig, SandboxConfig; from threepo.rewards import code\n"
        "settings = RewardConfig(function='code', sandbox=SandboxConfig(backend='unconfined'))\n"
        "code.kept = code.CodeGrader(settings)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert ended.stderr == b""


@pytest.mark.skipif(bool(REASON), reason=REASON)
def test_a_killed_process_leaves_nothing_of_its_programs(tmp_path: Path) -> None:
    ran = subprocess.run([sys.executable, "-c", KILLED], env=os.environ | {"TMPDIR": str(tmp_path)}, check=False)
    assert ran.returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(bool(REASON), reason=REASON)
def test_what_interrupts_threepo_does_not_fail_the_programs_that_it_waits_for() -> None:
    ran = subprocess.run([sys.executable, "-c", INTERRUPTED], start_new_session=True, capture_output=True, check=True)
    assert ran.stdout == b"ok\n"


@pytest.mark.skipif(bool(REASON), reason=REASON)
def test_the_public_functions_need_no_configuration() -> None:
    tests = {"inputs": ["1\n"], "outputs": ["2\n"]}
    right, wrong = fenced("print(int(input()) + 1)"), fenced("print(0)")
    assert code.grade(right, tests).correct
    chat = [{"role": "assistant", "content": right}]
    assert code.reward([right, wrong, chat], tests=[tests] * 3, prompts=[""] * 3) == [1.0, 0.0, 1.0]


def test_without_bubblewrap_code_rewards_do_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match=r"there is no bwrap .*apt-get install bubblewrap.* 'unconfined'"):
        load_grader(RewardConfig(function="code"), None, [])


@pytest.mark.skipif(bool(REASON), reason=REASON)
def test_without_filters_of_system_calls_code_rewards_do_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seccomp, "LIBRARY", "libnowhere.so.2")
    with pytest.raises(UserError, match=r"there is no libseccomp .*apt-get install libseccomp2.* 'unconfined'"):
        load_grader(RewardConfig(function="code"), None, [])


@pytest.mark.skipif(bool(REASON), reason=REASON)
def test_where_the_kernel_refuses_code_rewards_do_not_start(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """bwrap itself, in a place where it may make no more namespaces."""
    wrapped = tmp_path / "bwrap"
    wrapped.write_text(
        f"#!/bin/sh\nexec {shutil.which('bwrap')} --dev-bind / / --unshare-user --disable-userns -- "
        f'{shutil.which("bwrap")} "$@"\n'
    )
    wrapped.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(
        UserError, match=r"'bubblewrap': bwrap: .*the kernel must let this process make user namespaces"
    ):
        load_grader(RewardConfig(function="code"), None, [])


@pytest.mark.parametrize("backend", BACKENDS)
def test_programs_import_the_packages_of_the_folder_and_no_others(backend: Any, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    shutil.copytree(Path(sortedcontainers.__file__).parent, tmp_path / "sortedcontainers")
    program = "from sortedcontainers import SortedList\nprint(*SortedList(input().split()))"
    tests = {"inputs": ["3 1 2"], "outputs": ["1 2 3"]}
    for packages, detail in ((str(tmp_path), "passed"), ("", "runtime error")):
        sandbox = SandboxConfig(backend=backend, packages=packages)
        grader = CodeGrader(RewardConfig(function="code", sandbox=sandbox))
        assert verdict(grader, program, tests).detail == detail
        absent = "try: import numpy\nexcept ImportError: print('none')"
        assert verdict(grader, absent, {"inputs": [""], "outputs": ["none"]}).detail == "passed"


@pytest.mark.skipif(bool(REASON), reason=REASON)
def test_the_folder_of_packages_can_be_read_and_not_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    settings = RewardConfig(function="code", sandbox=SandboxConfig(packages=str(tmp_path)))
    program = "import os\nos.listdir('/packages')\ntry: open('/packages/x', 'w')\nexcept OSError as e: print(e.errno)"
    read_only = {"inputs": [""], "outputs": [str(errno.EROFS)]}
    assert verdict(CodeGrader(settings), program, read_only).detail == "passed"
    if os.geteuid() == 0:
        tmp_path.chmod(0o700)
        with pytest.raises(UserError, match=r"packages = .*programs run as nobody.*chmod -R o\+rX"):
            CodeGrader(settings)


def test_a_folder_of_packages_must_be_there_and_is_not_for_a_server(tmp_path: Path) -> None:
    settings = RewardConfig(function="code", sandbox=SandboxConfig(backend="unconfined", packages="/nowhere"))
    with pytest.raises(UserError, match=r"packages = '/nowhere': there is no such folder; make it with pip install"):
        load_grader(settings, None, [])
    with pytest.raises(UserError, match=r"reward.sandbox.packages = '/nowhere': a server has packages of its own"):
        SandboxConfig(backend="sandbox_fusion", url="http://x", packages="/nowhere")


def test_a_limit_in_which_nothing_runs_is_said_at_the_start() -> None:
    sandbox = SandboxConfig(backend="unconfined", memory_mib=8)
    with pytest.raises(UserError, match=r"reward.sandbox.memory_mib = 8|see whether Python starts here"):
        load_grader(RewardConfig(function="code", sandbox=sandbox), None, [])
