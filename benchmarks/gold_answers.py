"""Verdicts of the mathematics grader on the reference solutions of public benchmarks, which should all be right.

    python benchmarks/gold_answers.py --data DIR

DIR contains math500.jsonl, aime24.jsonl, amc23.jsonl, minerva_math.jsonl and gsm8k.jsonl with their published fields.
Missing files are left out. Each solution is graded against the answer of its problem. The answers of Minerva are the
last boxes of its solutions. The worked answers of GSM8K end in `#### N`, which the grader does not read as an answer,
so N is put into a box. Then each answer is graded in another spelling, and each solution against the answers of ten
other problems, where it should be wrong unless the two are equal.

Prints a table in Markdown and every exception.
"""

import argparse
import json
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from threepo.config import RewardConfig
from threepo.rewards.math import MathGrader, last_box
from threepo.types import Verdict

OTHERS = 10
Row = dict[str, Any]


@dataclass(frozen=True)
class Gold:
    """A reference solution and its answer."""

    name: str
    solution: str
    answer: str


def in_a_box(row: Row) -> str:
    """A worked answer of GSM8K with its number in a box."""
    return re.sub(r"####\s*(.+)\s*$", r"\\boxed{\1}", str(row["answer"]))


READERS: dict[str, Callable[[Row], tuple[str, str]]] = {
    "math500": lambda row: (row["solution"], row["answer"]),
    "aime24": lambda row: (row["solution"], row["answer"]),
    "amc23": lambda row: (rf"\boxed{{{row['answer']:g}}}", str(row["answer"])),
    "minerva_math": lambda row: (row["solution"], last_box(row["solution"]) or ""),
    "gsm8k": lambda row: (in_a_box(row), row["answer"].rpartition("####")[2].strip()),
}


def read(path: Path) -> list[Gold]:
    """The solutions and answers of a set."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    reader = READERS[path.stem]
    return [Gold(f"{path.stem} {number}", *reader(row)) for number, row in enumerate(rows)]


def respelled(answer: str) -> str:
    """The answer in another spelling, as models write: display fractions, plain brackets, spaces, dollars, a dot."""
    answer = answer.replace(r"\frac", r"\dfrac").replace(r"\left", "").replace(r"\right", "").replace("^{\\circ}", "°")
    answer = re.sub(r"(?<=[0-9])e(?=[-+]?[0-9])", r" \\times 10^", answer)
    answer = re.sub(r"10\^([-+]?[0-9]+)", r"10^{\1}", answer)
    return rf"The answer is $\boxed{{\, {answer.replace(',', ', ') if '(' in answer else answer} .}}$."


def others(golds: list[Gold]) -> list[Gold]:
    """Solutions with the answers of other problems in their set."""
    source = random.Random(0)
    pairs = []
    for gold in golds:
        choices = [other for other in golds if other is not gold]
        pairs += [
            Gold(f"{gold.name} with {other.name}", gold.solution, other.answer)
            for other in source.sample(choices, min(OTHERS, len(choices)))
        ]
    return pairs


def graded(grader: MathGrader, golds: list[Gold]) -> list[Verdict]:
    """A verdict for each solution."""
    return grader.grade([gold.solution for gold in golds], [gold.answer for gold in golds])


def said(gold: Gold, verdict: Verdict) -> str:
    """An exception as a line of Markdown."""
    return f"- {gold.name}: {verdict.answer!r} against {gold.answer!r}: {verdict.status} {verdict.detail}"


def share(count: int, total: int) -> str:
    """A count out of a total."""
    return f"{count} of {total} ({count / total:.2%})"


def main() -> None:
    """Grade, and print the table and the exceptions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder with the benchmarks' files")
    options = parser.parse_args()
    grader = MathGrader(RewardConfig(function="math"))
    exceptions: list[str] = []
    print("| set | solutions right | respelled answers right | others' answers right | errors | seconds |")
    print("| --- | --- | --- | --- | --- | --- |")
    for path in (options.data / f"{name}.jsonl" for name in READERS):
        if not path.is_file():
            continue
        golds = [gold for gold in read(path) if gold.answer]
        begin = time.perf_counter()
        own = graded(grader, golds)
        again = [Gold(f"{gold.name} respelled", respelled(gold.answer), gold.answer) for gold in golds]
        spelled = graded(grader, again)
        strangers = others(golds)
        strange = graded(grader, strangers)
        seconds = time.perf_counter() - begin
        errors = sum(verdict.status == "error" for verdict in (*own, *spelled, *strange))
        print(
            f"| {path.stem} | {share(sum(v.correct for v in own), len(own))} "
            f"| {share(sum(v.correct for v in spelled), len(spelled))} "
            f"| {share(sum(v.correct for v in strange), len(strange))} | {errors} | {seconds:.1f} |"
        )
        exceptions += [
            said(*case) for case in zip((*golds, *again), (*own, *spelled), strict=True) if not case[1].correct
        ]
        exceptions += [
            said(gold, verdict)
            for gold, verdict in zip(strangers, strange, strict=True)
            if verdict.status == "error" or (verdict.correct and verdict.answer != gold.answer)
        ]
    print("\n" + "\n".join(dict.fromkeys(exceptions)))


if __name__ == "__main__":
    main()
