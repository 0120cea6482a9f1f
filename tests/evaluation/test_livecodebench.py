"""LiveCodeBench's packed tests, and what a pickle that is not just text comes to."""

import base64
import json
import os
import pickle
import zlib
from pathlib import Path
from typing import Any

import pytest
from local_benchmarks import opened

from threepo.data.rows import BrokenRow
from threepo.evaluation.benchmarks import BENCHMARKS
from threepo.evaluation.livecodebench import PRELUDE

problem = BENCHMARKS["livecodebench"].item
STDIN = [{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}]
FUNCTIONAL = [{"input": '[1, 2]\n"a"', "output": "3", "testtype": "functional"}]


def packed(value: object) -> str:
    """The published form of private test cases."""
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


def row(**fields: Any) -> dict[str, Any]:
    """A row with the published columns."""
    private = [{"input": "5 5\n", "output": "10\n", "testtype": "stdin"}]
    return {
        "question_title": "Sum",
        "question_content": "Add two numbers.\n",
        "platform": "atcoder",
        "question_id": "abc387_b",
        "contest_id": "abc387",
        "contest_date": "2025-01-04T00:00:00",
        "starter_code": "",
        "difficulty": "easy",
        "public_test_cases": json.dumps(STDIN),
        "private_test_cases": packed(json.dumps(private)),
        "metadata": "{}",
        **fields,
    }


def test_programs_that_read_and_write() -> None:
    result = problem(row())
    assert result.columns["tests"] == {"prefix": PRELUDE, "inputs": ["1 2\n", "5 5\n"], "outputs": ["3\n", "10\n"]}
    assert result.prompt == "Add two numbers.\n\nThe program reads standard input and writes standard output."
    assert result.columns["difficulty"] == "easy"
    assert "private_test_cases" not in result.columns


def test_functions_that_are_called() -> None:
    starter = "class Solution:\n    def add(self, numbers, name):\n        "
    fields = {
        "starter_code": starter,
        "public_test_cases": json.dumps(FUNCTIONAL),
        "private_test_cases": json.dumps(FUNCTIONAL),  # short ones are published as they are
        "metadata": json.dumps({"func_name": "add"}),
    }
    result = problem(row(**fields))
    assert result.columns["tests"] == {
        "prefix": PRELUDE,
        "inputs": ['[1, 2]\n"a"'] * 2,
        "outputs": ["3", "3"],
        "fn_name": "add",
    }
    assert isinstance(result.prompt, str)
    assert result.prompt.endswith(f"```python\n{starter.rstrip()}\n```")


class Malicious:
    """Calls a function when it is unpickled the ordinary way."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_a_pickle_that_calls_something_is_refused_unread(tmp_path: Path) -> None:
    data = packed(Malicious(tmp_path / "owned"))
    with pytest.raises(BrokenRow, match=r"is not a row of livecodebench as published: .* asks for \w+.mkdir"):
        problem(row(private_test_cases=data))
    assert not (tmp_path / "owned").exists()
    pickle.loads(zlib.decompress(base64.b64decode(data)))
    assert (tmp_path / "owned").exists(), "the attack itself works"


@pytest.mark.parametrize(
    "private", ["not base 64", base64.b64encode(b"not zlib").decode(), packed(["no text"]), "[no JSON"]
)
def test_what_cannot_be_decoded_is_named(private: str) -> None:
    with pytest.raises(BrokenRow, match="is not a row of livecodebench as published"):
        problem(row(private_test_cases=private))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"public_test_cases": json.dumps(FUNCTIONAL)}, r"tests are of the kinds \['functional', 'stdin'\]"),
        ({"private_test_cases": "[]", "public_test_cases": "[]"}, r"of the kinds \[\]"),
        (
            {"private_test_cases": "[]", "public_test_cases": json.dumps(FUNCTIONAL)},
            "is not a row of livecodebench as published: KeyError: 'func_name'",
        ),
    ],
)
def test_rows_that_do_not_fit(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(BrokenRow, match=message):
        problem(row(**fields))


def test_the_benchmark_is_put_as_code(tmp_path: Path) -> None:
    benchmark = opened(tmp_path, "livecodebench", [row()])
    assert benchmark.verifier == "code"
    assert "```python\nyour program\n```" in benchmark.problems.known()[0].templated("")
