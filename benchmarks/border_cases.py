"""Verdicts of math-verify alone and of threepo on answers at the border of what counts as equal.

    python benchmarks/border_cases.py

Grades each answer of border_cases.toml and structure_cases.toml in tests/rewards against its reference. "math-verify
alone" is its `parse` and `verify` with their default settings, with answer and reference in a box. Prints a table in
Markdown and every wrong case.
"""

import logging
import tomllib
from dataclasses import dataclass
from pathlib import Path

from math_verify import parse, verify

from threepo.config import RewardConfig
from threepo.rewards.math import MathGrader

TESTS = Path(__file__).parent.parent / "tests" / "rewards"


@dataclass(frozen=True)
class Case:
    """An answer, its reference, and whether they are equal."""

    kind: str
    answer: str
    reference: str
    same: bool
    unseen: bool
    """Whether it was written before the code that judges it."""


def read() -> list[Case]:
    """All cases."""
    files = [TESTS / "border_cases.toml", TESTS / "structure_cases.toml"]
    kinds = {kind: lists for file in files for kind, lists in tomllib.loads(file.read_text(encoding="utf-8")).items()}
    return [
        Case(kind, answer, reference, label.startswith("equal"), label.endswith("unseen"))
        for kind, lists in kinds.items()
        for label, pairs in lists.items()
        for answer, reference in pairs
    ]


def counts(cases: list[Case], verdicts: dict[Case, bool]) -> str:
    """The number of equal answers that are rejected, and of others that are accepted."""
    rejected = sum(case.same and not verdicts[case] for case in cases)
    accepted = sum(verdicts[case] and not case.same for case in cases)
    return f"{rejected} | {accepted}"


def main() -> None:
    """Grade the cases and print the table."""
    logging.disable(logging.WARNING)
    cases = read()
    grader = MathGrader(RewardConfig(function="math"))
    graded = grader.grade([rf"\boxed{{{case.answer}}}" for case in cases], [case.reference for case in cases])
    ours = {case: verdict.correct for case, verdict in zip(cases, graded, strict=True)}
    alone = {
        case: bool(verify(parse(rf"\boxed{{{case.reference}}}"), parse(rf"\boxed{{{case.answer}}}"))) for case in cases
    }
    print(
        "| kind | cases | math-verify: equal rejected | others accepted | threepo: equal rejected | others accepted |"
    )
    print("| --- | --- | --- | --- | --- | --- |")
    groups = {
        kind: [case for case in cases if case.kind == kind] for kind in dict.fromkeys(case.kind for case in cases)
    }
    groups |= {"all": cases, "of these, unseen": [case for case in cases if case.unseen]}
    for name, group in groups.items():
        print(f"| {name} | {len(group)} | {counts(group, alone)} | {counts(group, ours)} |")
    for name, verdicts in (("math-verify alone", alone), ("threepo", ours)):
        print(f"\nWrong by {name}:\n")
        for case in cases:
            if verdicts[case] != case.same:
                print(f"- {case.kind}: `{case.answer}` {'is' if case.same else 'is not'} `{case.reference}`")


if __name__ == "__main__":
    main()
