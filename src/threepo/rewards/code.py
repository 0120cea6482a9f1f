"""Verdicts on programs: the code in a completion runs in a sandbox and must pass the tests (`code_tests`).

    grade("```python\\nprint(int(input()) + 1)\\n```", {"inputs": ["1\\n"], "outputs": ["2\\n"]}).correct

A verdict's `detail` is `passed`, or how the first failed test ended: `wrong`, `runtime error`, `time-out`, `memory` or
`compile error`; or `sandbox error`, which is not the program's fault.
"""

import functools
import re
import textwrap
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from multiprocessing.pool import ThreadPool
from typing import Any

from threepo.config import RewardConfig
from threepo.rewards.code_tests import COLUMN, CodeTests, parse_tests
from threepo.rewards.sandbox import open_sandbox
from threepo.types import THINK_END, Completion, Verdict

_PYTHON = re.compile("```(?:python|py)(?![A-Za-z])", re.IGNORECASE)
"""Begins a block of Python."""


class CodeGrader:
    """Grades programs, several at a time; the tests of a problem are in its column `tests`."""

    def __init__(self, settings: RewardConfig) -> None:
        self._binary = settings.scoring != "passed_share"
        self._sandbox = open_sandbox(settings.sandbox)
        self._pool = ThreadPool(self._sandbox.workers)  # whose threads a process does not wait for when it ends
        weakref.finalize(self, self._pool.terminate)  # or Python complains about an open pool when it ends

    def __call__(self, completions: Sequence[Completion]) -> list[Verdict]:
        """A verdict for each completion."""
        problems = {id(completion.problem): completion.problem for completion in completions}  # most come many times
        tests = {key: parse_tests(problem.columns.get(COLUMN)) for key, problem in problems.items()}
        return self.grade_all([(completion.text, tests[id(completion.problem)]) for completion in completions])

    def grade_all(self, pairs: Sequence[tuple[str, CodeTests]]) -> list[Verdict]:
        """The verdict on each text under its tests."""
        return self._pool.map(lambda pair: self.grade(*pair), pairs, chunksize=1)

    def grade(self, text: str, tests: CodeTests) -> Verdict:
        """The verdict on the text of one completion."""
        if (program := extract_program(text)) is None:
            return Verdict(correct=False, status="no_answer", answer=None, format_ok=False)
        endings: list[str] = []
        with closing(self._sandbox.run(replace(tests.submission, program=program))) as outcomes:
            for index, outcome in enumerate(outcomes):
                endings.append(tests.judge(index, outcome))
                if endings[-1] == "sandbox error" or (self._binary and endings[-1] != "passed"):
                    break  # no other test can change the verdict
        if endings[-1] == "sandbox error":
            return Verdict(False, "error", program, 0.0, "sandbox error", format_ok=True)
        detail = next((ending for ending in endings if ending != "passed"), "passed")
        right = detail == "passed"
        reward = float(right) if self._binary else endings.count("passed") / len(endings)
        return Verdict(right, "right" if right else "wrong", program, reward, detail, format_ok=True)


def extract_program(completion: str) -> str | None:
    """The last block marked as Python, or else the first of any kind; None if there is none, or nothing in it.

    A program after the last `</think>` counts before those in the thought.
    """
    return _program(completion.rpartition(THINK_END)[2]) or _program(completion)


def _program(text: str) -> str | None:
    last = deque(_PYTHON.finditer(text), maxlen=1)
    marked = bool(last)
    inside = text[last[0].end() :] if marked else text.partition("```")[2]
    inside = inside.partition("```")[0]
    rest_of_line = re.match(r"[\d.]*[ \t]*\n" if marked else r"[ \t]*[A-Za-z]+[ \t]*\n", inside)
    program = inside[rest_of_line.end() :] if rest_of_line else inside
    if not program.strip():
        return None
    # Else there is nothing to take away, and `dedent` would still empty blank lines, also in a program's texts.
    return textwrap.dedent(program) if program.lstrip("\n")[0] in " \t" else program


def grade(completion: str, tests: Any) -> Verdict:
    """The verdict on one completion under the default settings; `ValueError` for tests in an unknown form."""
    return _default_grader().grade(completion, parse_tests(tests))


def reward(completions: Sequence[Any], tests: Sequence[Any], **_: Any) -> list[float | None]:
    """A reward function for TRL: 1.0 where a completion passes all tests of its row, None where the sandbox failed."""
    texts = [text if isinstance(text, str) else text[-1]["content"] for text in completions]
    verdicts = _default_grader().grade_all(list(zip(texts, map(parse_tests, tests), strict=True)))
    return [None if verdict.status == "error" else verdict.reward for verdict in verdicts]


_default_grader = functools.cache(lambda: CodeGrader(RewardConfig(function="code")))
