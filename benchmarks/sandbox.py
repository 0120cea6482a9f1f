"""Programs that the sandbox runs per second, confined and unconfined, and Python processes without a harness.

    python benchmarks/sandbox.py [--programs 100] [--rounds 5] [--workers 0]

All contenders take turns in one process, on the same programs, with as many at a time as there are cores. The table
shows medians over rounds with their range.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from threepo.config import RewardConfig, SandboxConfig
from threepo.rewards.code import CodeGrader
from threepo.rewards.code_tests import parse_tests
from threepo.workers import cores

PROGRAM = "import sys\nvalues = sorted(map(int, sys.stdin.read().split()))\nprint(*values)\n"
FUNCTION = "def arrange(values):\n    return sorted(values)\n"

Work = Callable[[int], None]


def kinds(cases: int) -> Iterator[tuple[str, str, dict[str, object]]]:
    """Name, program and tests of each kind of test, with `cases` cases."""
    values = [[(i * 7 + j * 3) % 101 for j in range(50)] for i in range(cases)]
    texts = [" ".join(map(str, row)) for row in values]
    ordered = [sorted(row) for row in values]
    yield "stdin", PROGRAM, {"inputs": texts, "outputs": [" ".join(map(str, row)) for row in ordered]}
    yield "function", FUNCTION, {"fn_name": "arrange", "inputs": [[row] for row in values], "outputs": ordered}
    asserts = [f"assert arrange({row}) == {want}" for row, want in zip(values, ordered, strict=True)]
    yield "assertions", FUNCTION, {"assert_case": asserts}


def graded(backend: str, workers: int, program: str, tests: dict[str, object]) -> Work:
    """Grade the program repeatedly; exit if a verdict is not right."""
    sandbox = SandboxConfig(backend=backend, workers=workers)
    grader = CodeGrader(RewardConfig(function="code", sandbox=sandbox))
    pair = (f"```python\n{program}```", parse_tests(tests))

    def work(programs: int) -> None:
        verdicts = grader.grade_all([pair] * programs)
        wrong = [verdict for verdict in verdicts if not verdict.correct]
        if wrong:
            raise SystemExit(f"{len(wrong)} of {programs} judged {wrong[0].detail}")

    return work


def plain(workers: int, program: str, inputs: list[str]) -> Work:
    """One Python process per input and nothing else: the least that a judge without a sandbox must do."""
    pool = ThreadPoolExecutor(workers)

    def run(_: int) -> None:
        for text in inputs:
            subprocess.run([sys.executable, "-I", "-S", "-c", program], input=text, text=True, stdout=-3, check=True)

    def work(programs: int) -> None:
        list(pool.map(run, range(programs)))

    return work


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=100, help="programs in each round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=0, help="programs at a time; 0: one for each core")
    arguments = parser.parse_args()
    workers = arguments.workers or cores()

    contenders: dict[str, Work] = {}
    for cases in (1, 8):
        for kind, program, tests in kinds(cases):
            for backend in ("bubblewrap", "unconfined"):
                contenders[f"{kind}, {cases} | {backend}"] = graded(backend, workers, program, tests)
            if kind == "stdin":
                contenders[f"{kind}, {cases} | plain python"] = plain(workers, program, list(tests["inputs"]))  # type: ignore[call-overload]
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(arguments.rounds):
        for name, work in contenders.items():
            start = time.perf_counter()
            work(arguments.programs)
            rates[name].append(arguments.programs / (time.perf_counter() - start))
    print(f"{workers} at a time, {arguments.rounds} rounds of {arguments.programs} programs\n")
    print("| tests, cases | runs in | programs a second | range |\n| --- | --- | --- | --- |")
    for name, values in rates.items():
        print(f"| {name} | {statistics.median(values):.0f} | {min(values):.0f} to {max(values):.0f} |")


if __name__ == "__main__":
    main()
