"""Verdicts on programs: what is taken from a completion, how tests are read, what an output is compared with."""

import json
import shutil
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewards.contained import why_not
from threepo.config import RewardConfig, SandboxConfig
from threepo.errors import UserError
from threepo.evaluation.livecodebench import PRELUDE
from threepo.rewards import code
from threepo.rewards.code import CodeGrader, extract_program
from threepo.rewards.code_tests import parse_tests, same_text, same_value
from threepo.rewards.grading import load_grader
from threepo.types import Problem, Verdict

REASON = why_not()
BACKENDS = [
    pytest.param("bubblewrap", marks=pytest.mark.skipif(bool(REASON), reason=REASON)),
    "unconfined",  # the programs of this file are harmless
]


def fenced(program: str) -> str:
    return f"<think>Let me see.</think> Here:\n```python\n{program}\n```\nThat is it."


@pytest.fixture(params=BACKENDS)
def grader(request: pytest.FixtureRequest) -> CodeGrader:
    sandbox = SandboxConfig(backend=request.param, memory_mib=512)
    return CodeGrader(RewardConfig(function="code", sandbox=sandbox), ())


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
        ("```python\ncut off", "cut off"),
        ("no code", None),
        ("```python\n\n```", None),
        ("", None),
    ],
)
def test_the_program_is_the_last_python_block_or_the_first_of_any(completion: str, program: str | None) -> None:
    assert extract_program(completion) == program


def test_no_program_is_no_answer() -> None:
    grader = CodeGrader(RewardConfig(function="code", sandbox=SandboxConfig(backend="unconfined")), ())
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
        ("1e-7", "0", True),
        ("3.0", "3", True),
        ("100000001", "100000002", False),
        ("9" * 500, "9" * 499 + "8", False),
        ("nan", "inf", False),
        ("1_0", "10", False),
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


@given(JSON, JSON)
def test_equality_of_values_is_symmetric(value: Any, other: Any) -> None:
    assert same_value(value, other) == same_value(other, value)


@pytest.mark.parametrize(
    ("value", "expected", "same"),
    [
        ([1, 2], (1, 2), True),
        ([1, 2], [1, 2, 3], False),
        ({"1": 2}, {1: 2}, True),
        ({"1": 2}, {1: 3}, False),
        (0.1 + 0.2, 0.3, True),
        (10**8, 10**8 + 1, False),
        (1.0, "1.0", False),
        (10**400, 1.0, False),
    ],
)
def test_values_are_compared_as_json_has_them(value: Any, expected: Any, same: bool) -> None:
    assert same_value(value, expected) is same


# Forms of tests


@pytest.mark.parametrize(
    ("tests", "reason"),
    [
        (None, "are NoneType; they must have"),
        ("{", "are text, but not JSON"),
        ({}, "have nothing; they must have"),
        ({"inputs": ["1"]}, "have 'inputs'; they must have"),
        ({"inputs": [], "outputs": []}, "two lists of the same length, and not empty"),
        ({"inputs": ["1"], "outputs": ["1", "2"]}, "two lists of the same length"),
        ({"inputs": "1", "outputs": "1"}, "two lists"),
        ({"inputs": [1], "outputs": ["1"]}, "'inputs' with 1, which must be text"),
        ({"inputs": [1], "outputs": [1], "fn_name": "f"}, "must be the list of the function's arguments"),
        ({"inputs": ["x"], "outputs": ["1"], "fn_name": "f"}, "a line that is no JSON"),
        ({"inputs": [[1]], "outputs": [1], "fn_name": 3}, "must be the name of a function"),
        ({"assert_case": []}, "'assert_case', which must be Python code"),
        ({"assert_case": ["assert f("]}, "'assert_case', which must be Python code: "),
        ({"functional": 3}, "'functional', which must be Python code"),
        ({"functional": "check(f)", "prefix": 3}, "'prefix', which must be Python code"),
    ],
)
def test_tests_in_no_known_form_are_refused(tests: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_tests(tests)
    problem = Problem(id="p", prompt="", columns={"tests": tests}, place="problems.jsonl, row 3")
    with pytest.raises(UserError, match=r"problems.jsonl, row 3: its tests \(column 'tests'\) .*" + reason):
        load_grader(RewardConfig(function="code"), None, [problem])


ADD = "def add(a, b):\n    return a + b"
FORMS: dict[str, tuple[str, Any]] = {
    "stdin": ("a, b = map(int, input().split())\nprint(a + b)", {"inputs": ["1 2\n", "3 4"], "outputs": ["3", "7\n"]}),
    "stdin by lines": ("print(int(input()) + int(input()))", {"inputs": [["1", "2"]], "outputs": [["3"]]}),
    "function": (ADD, {"fn_name": "add", "inputs": [[1, 2], ["a", "b"]], "outputs": [3, "ab"]}),
    "function, results in lists of one": (ADD, {"fn_name": "add", "inputs": [[1, 2]], "outputs": [[3]]}),
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


# What tests that are code can do with what a program makes: (program, tests)
CROSSING = {
    "change a list in place": ("def f(x): x.reverse()", "x = [1, 2]\nf(x)\nassert x == [2, 1]"),
    "change a dictionary in place": ("def f(x): x.clear(); x[1] = {2}", "x = {}\nf(x)\nassert x == {1: {2}}"),
    "all plain data": (
        "def f(x): return x",
        "x = [None, True, 1, 10**5000, 1.5, float('inf'), 'é\\n', b'b', 1j, (1, (2,)), {1, 2}, frozenset([3]),\n"
        "     {(1,): [2]}]\n"
        "assert f(x) == x and all(type(a) is type(b) for a, b in zip(f(x), x))",
    ),
    "a list that holds itself": ("def f(x): x.append(x); return x", "y = f([1])\nassert y[1][1][0] == 1 and y[1] is y"),
    "exceptions": (
        "def f(x):\n    if x < 0: raise ValueError('below')\n    return x",
        "try:\n    f(-1)\nexcept ValueError as e:\n    assert str(e) == 'below'\nelse:\n    assert False",
    ),
    "objects of its own": (
        "class Stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x)\n"
        "    def __len__(self): return len(self.items)\n    def __getitem__(self, i): return self.items[i]",
        "s = Stack()\ns.push(4)\ns.push(5)\n"
        "assert len(s) == 2 and s[1] == 5 and s.items == [4, 5] and list(s) == [4, 5]",
    ),
    "its objects with each other": (
        "class V:\n    def __init__(self, x): self.x = x\n    def __add__(self, o): return V(self.x + o.x)\n"
        "    def __eq__(self, o): return self.x == o.x\n    def __lt__(self, o): return self.x < o.x",
        "assert V(1) + V(2) == V(3) and V(1) < V(2) and V(1) != V(2)",
    ),
    "iterators": ("def f(n):\n    yield from range(n)", "assert list(f(3)) == [0, 1, 2] and next(f(3)) == 0"),
    "dictionaries with more to them": (
        "from collections import Counter, OrderedDict\ndef f(x): return Counter(x)",
        "assert f('aab') == {'a': 2, 'b': 1}",
    ),
    "modules that it forgot": ("import math\ndef f(x): return x", "assert math.sqrt(f(4)) == 2"),
    "constants of the program": ("LIMIT = 7\ndef f(x): return LIMIT", "assert f(0) == LIMIT == 7"),
    "unittest": (
        ADD,
        "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(add(1, 2), 3)\n"
        "unittest.main()",
    ),
}


@pytest.mark.parametrize("name", CROSSING)
def test_tests_use_a_program_that_runs_in_another_process_as_if_it_were_here(name: str, grader: CodeGrader) -> None:
    program, tests = CROSSING[name]
    assert verdict(grader, program, {"functional": tests}).detail == "passed"


def test_classes_of_the_tests_cross_as_what_they_hold(grader: CodeGrader) -> None:
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
    """Solutions to LiveCodeBench use names that its grader imports; one of them is that of the function here."""
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


def test_unittest_fails_where_the_program_does(grader: CodeGrader) -> None:
    tests = CROSSING["unittest"][1]
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
        (found,) = load_grader(settings, None, [problem])([problem], [fenced(program)], [()])
        assert (found.reward, found.correct, found.detail) == (reward, False, "runtime error")
        assert len(list(tmp_path.iterdir())) == ran
        for file in tmp_path.iterdir():
            file.unlink()


def test_verdicts_come_in_the_order_of_the_completions(grader: CodeGrader) -> None:
    problems = [
        Problem(id=str(i), prompt="", columns={"tests": {"inputs": [""], "outputs": [str(i)]}}) for i in range(4)
    ]
    texts = [fenced(f"import time\ntime.sleep({(4 - i) / 50})\nprint({i % 3})") for i in range(4)]
    assert [v.correct for v in grader(problems, texts, [()] * 4)] == [True, True, True, False]


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


def test_a_limit_in_which_nothing_runs_is_said_at_the_start() -> None:
    sandbox = SandboxConfig(backend="unconfined", memory_mib=8)
    with pytest.raises(UserError, match=r"reward.sandbox.memory_mib = 8|see whether Python starts here"):
        load_grader(RewardConfig(function="code", sandbox=sandbox), None, [])
