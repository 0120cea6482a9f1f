"""Verdicts on programs: what is taken from a completion, how tests are read, what an output is compared with."""

import json
import re
import shutil
import subprocess
import sys
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
from threepo.rewards.grading import lack, load_grader
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
        ("```python\ncut off", "cut off"),
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
        ({"functional": "-" * 100_000 + "1"}, "'functional', which must be Python code"),
        ("[" * 100_000, "are nested too deeply"),
        ({"inputs": ["[" * 100_000], "outputs": ["1"], "fn_name": "f"}, "are nested too deeply"),
        ({"inputs": [[b"1"]], "outputs": [1], "fn_name": "f"}, "which JSON cannot say: .*bytes"),
    ],
)
def test_tests_in_no_known_form_are_refused(tests: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_tests(tests)
    problem = Problem(id="p", prompt="", columns={"tests": tests}, location="problems.jsonl, row 3")
    message = (
        r"problems.jsonl, row 3: its tests \(column 'tests'\) .*" + reason + ".*; set data.tests_column, mend the data$"
    )
    with pytest.raises(UserError, match=message):
        load_grader(RewardConfig(function="code"), None, [problem])
    assert re.search(reason, lack(RewardConfig(function="code"), None, problem))


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
    "numbers of the standard library": (
        "from decimal import Decimal\nfrom fractions import Fraction\n"
        "def half(x): return Fraction(x, 2)\ndef quarter(x): return Decimal(x) / 4\ndef twice(x): return x * 2",
        "import math\nfrom decimal import Decimal\n"
        "assert abs(half(1) - 0.5) < 1e-6 and half(1) == 0.5 and half(3) > 1 and math.isclose(half(1), 0.5)\n"
        "assert quarter(1) == Decimal('0.25') and f'{quarter(1):.1f}' == '0.2' and round(quarter(1), 1) < 1\n"
        "assert twice(Decimal('1.5')) == 3 and isinstance(quarter(1), Decimal)",
    ),
    "containers of the standard library": (
        "from array import array\nfrom collections import *\ndef count(x): return Counter(x)\n"
        "def last(x): return deque(x, 2)\ndef turn(x): x.rotate()\ndef lists(): return defaultdict(list, a=[1])\n"
        "def seven(): return defaultdict(lambda: 7)\ndef pairs(x): return OrderedDict(x)\n"
        "def upto(n): return range(n)\ndef more(x): x.append(1); return x\ndef ints(x): return array('i', x)",
        "from array import array\nfrom collections import deque, OrderedDict\n"
        "assert count('aab').most_common(1) == [('a', 2)] and count('a')['z'] == 0 and count('a') == {'a': 1}\n"
        "d = deque([1, 2, 3])\nturn(d)\nassert d == deque([3, 1, 2]) and last(d) == deque([1, 2]) and 3 in d\n"
        "assert lists() == {'a': [1]} and lists()[5] == [] and seven()[5] == 7\n"
        "assert pairs([(1, 2), (0, 3)]) == OrderedDict([(1, 2), (0, 3)]) and upto(3) == range(3)\n"
        "b = bytearray(b'a')\nassert more(b) == b'a\\1' == b and ints([1]) == array('i', [1])",
    ),
    "dates": (
        "from datetime import *\ndef day(y): return datetime(y, 1, 2, 3, tzinfo=timezone.utc)\n"
        "def between(a, b): return b - a",
        "from datetime import *\n"
        "assert day(2020) == datetime(2020, 1, 2, 3, tzinfo=timezone.utc) < day(2021) and day(2020).time() == time(3)\n"
        "assert between(date(2020, 1, 1), date(2020, 1, 3)) == timedelta(days=2)",
    ),
    "containers with methods": (
        "from collections import OrderedDict, namedtuple\nP = namedtuple('P', 'x y')\n"
        "class Stack(list):\n    def peek(self): return self[-1]\n"
        "class Cache(OrderedDict):\n    def get(self, key): return self[key] if key in self else -1\n"
        "    def put(self, key, value): self[key] = value\n"
        "def x_of(p): return p.x",
        "s = Stack([1])\ns.append(2)\nassert s.peek() == 2 and s == [1, 2] and len(s) == 2 and 2 in s and s != [1]\n"
        "c = Cache()\nc.put(1, 5)\nassert c.get(1) == 5 and c.get(2) == -1 and c == {1: 5} and 1 in c\n"
        "p = P(1, 2)\nx, y = p\nassert (p.x, y) == (1, 2) == p and p in {(1, 2)} and x_of(p) == 1 and p[1] == 2",
    ),
    "views": ("def f(d): return d.keys()", "assert f({1: 2}) == {1} and list(f({1: 2})) == [1] and 1 in f({1: 2})"),
    "built-in types": (
        "def f(xs, t): return [x for x in xs if isinstance(x, t)]",
        "assert f([1, 'a'], int) == [1] and f([1, 'a', 2.0], (int, float)) == [1, 2.0]",
    ),
    "classes of its own": (
        "class A: pass\nclass B(A): pass\ndef f(): return B()",
        "assert isinstance(f(), A) and not isinstance(3, A) and not isinstance(A(), B) and issubclass(B, A)\n"
        "assert B.__name__ == 'B'",
    ),
    "objects that are one": ("class A: pass\na = A()\ndef f(): return a", "assert f() is f() and f() is not A()"),
    "objects in sets": (
        "from dataclasses import dataclass\n@dataclass(frozen=True, order=True)\nclass P:\n    x: int\n"
        "def f(): return {P(1), P(2)}",
        "assert f() == {P(2), P(1)} and sorted(f()) == [P(1), P(2)] and {P(1): 3}[P(1)] == 3",
    ),
    "its objects with plain numbers": (
        "class V:\n    def __init__(self, x): self.x = x\n    def __mul__(self, n): return V(self.x * n)\n"
        "    __rmul__ = __mul__\n    def __eq__(self, o): return self.x == o.x\n"
        "    def __abs__(self): return abs(self.x)\n    def __float__(self): return float(self.x)\n"
        "    def __or__(self, o): return V(self.x | o.x)",
        "assert 2 * V(3) == V(6) == V(3) * 2 and abs(V(-3)) == 3 and float(V(2)) == 2 and V(1) | V(2) == V(3)",
    ),
    "what has no end": (
        "class All:\n    def __iter__(self):\n        n = 0\n        while True: yield n; n += 1\n"
        "def f(): return iter(All())",
        "from itertools import islice\nassert list(islice(f(), 3)) == list(islice(All(), 3)) == [0, 1, 2]\n"
        "g = f()\nfor x in g:\n    if x == 3: break\nassert next(g) == 4 and iter(g) is g and 7 in All()",
    ),
    "what has no items to look at": (
        "class Words:\n    def __init__(self): self.words = set()\n    def add(self, w): self.words.add(w)\n"
        "    def __contains__(self, w): return w in self.words",
        "w = Words()\nw.add('a')\nassert 'a' in w and 'b' not in w",
    ),
    "contexts": (
        "class C:\n    def __enter__(self): self.left = False; return 5\n    def __exit__(self, *_): self.left = True",
        "c = C()\nwith c as x: assert x == 5 and not c.left\nassert c.left",
    ),
    "exceptions of its own": (
        "class Low(ValueError):\n    def __init__(self, n): super().__init__(f'low: {n}'); self.n = n\n"
        "class Lower(Low): pass\ndef f(n): raise Lower(n)",
        "import unittest\ntry: f(3)\nexcept Low as e: assert e.n == 3 and str(e) == 'low: 3'\nelse: assert False\n"
        "with unittest.TestCase().assertRaises(Lower): f(3)\nwith unittest.TestCase().assertRaises(ValueError): f(3)",
    ),
    "exceptions with more to them": (
        "import json\ndef f(d, k): return d[k]\ndef g(b): return b.decode()\ndef h(s): return json.loads(s)",
        "import json\ntry: f({}, 'a')\nexcept KeyError as e: assert e.args == ('a',)\nelse: assert False\n"
        "try: g(b'\\xff')\nexcept UnicodeDecodeError as e: assert e.start == 0\nelse: assert False\n"
        "try: h('{')\nexcept json.JSONDecodeError as e: assert e.pos == 1\nelse: assert False",
    ),
    "exceptions of the tests": (
        "class Low(Exception): pass\ndef f(n): raise Low(n)",
        "class Low(Exception): pass\ntry: f(3)\nexcept Low: pass\nelse: assert False",
    ),
    "objects of a class that it does not have": (
        "def f(p): p.x += 1; return p",
        "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\nassert f(P(1)) == P(2)",
    ),
    "tests that run as a program": ("def f(x): return x", "if __name__ == '__main__': assert f(1) == 1"),
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


def test_tests_that_fail_only_as_a_program_are_run_as_one(grader: CodeGrader) -> None:
    tests = {"functional": "if __name__ == '__main__': assert f(1) == 2"}
    assert verdict(grader, "def f(x): return x", tests).detail == "wrong"


def test_a_program_that_does_not_load_passes_nothing(grader: CodeGrader) -> None:
    tests = {"functional": "try: f(1)\nexcept Exception: pass"}
    for error in ("AssertionError", "ValueError", "SystemExit(0)"):
        assert verdict(grader, f"def f(x): return x\nraise {error}", tests).detail == "runtime error"


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


INTERRUPTED = """
import os, signal
from threepo.config import SandboxConfig
from threepo.rewards.sandbox.interface import Job
from threepo.rewards.sandbox.open import open_sandbox
signal.signal(signal.SIGINT, lambda *_: None)  # as a trainer that first ends its step
program = "import time\\ntime.sleep(int(input()) / 4)"
outcomes = open_sandbox(SandboxConfig()).run(Job(kind="stdin", program=program, cases=("0", "1")))
next(outcomes)
os.killpg(0, signal.SIGINT)
print(next(outcomes).ending)
"""


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
