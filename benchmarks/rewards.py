"""Completions that the mathematics grader judges per second, by kind of answer.

    python benchmarks/rewards.py [--rounds N] [--workers N]

Plain answers are decided by their spelling. Symbolic answers need algebra, and no pair of an answer and a reference
occurs twice. A group has the same answer sixteen times, as rollouts of one prompt often do. The processes are started
before the first measured round. Rounds take turns; the table shows medians over rounds with their range.
"""

import argparse
import os
import platform
import random
import statistics
import time
from collections.abc import Callable

from threepo.config import RewardConfig
from threepo.rewards.math import MathGrader

THOUGHTS = "First we note that $x_1 = \\frac{3}{4}$, hence {so} by the lemma; then the sum is at most 10. " * 20
Pairs = list[tuple[str, str]]


def plain(source: random.Random, count: int) -> Pairs:
    """Whole numbers, decimals and fractions: the answers of most training problems."""
    pairs = []
    for _ in range(count):
        number = source.randrange(2, 10**6)
        spellings = [f"{number}", f"{number:,}", f"{number}.0", rf"\frac{{{2 * number}}}{{2}}", f"{number + 1}"]
        given = source.choice(spellings)
        pairs.append((given, str(number)))
    return pairs


def symbolic(source: random.Random, count: int) -> Pairs:
    """Roots, polynomials and intervals; half of them wrong."""
    pairs = []
    for _ in range(count):
        a, b, wrong = source.randrange(2, 10**4), source.randrange(2, 10**4), source.randrange(2)
        pairs.append(
            source.choice(
                [
                    (rf"\sqrt{{{4 * a + wrong}}}+{b}", rf"{b}+2\sqrt{{{a}}}"),
                    (f"(x+{a})(x+{b})", f"x^2+{a + b + wrong}x+{a * b}"),
                    (rf"\frac{{{a}\pi}}{{{2 * b}}}", rf"\frac{{{a}}}{{{b + wrong}}}\cdot\frac{{\pi}}{{2}}"),
                    (rf"\left({a}, \frac{{\sqrt{{{b}}}}}{{2}}\right]", rf"({a}, \sqrt{{\frac{{{b + wrong}}}{{4}}}}]"),
                ]
            )
        )
    return pairs


def groups(source: random.Random, count: int) -> Pairs:
    """Symbolic answers, each sixteen times."""
    return [pair for pair in symbolic(source, count // 16) for _ in range(16)]


CASES: dict[str, tuple[Callable[[random.Random, int], Pairs], int]] = {
    "plain": (plain, 20_000),
    "symbolic": (symbolic, 1000),
    "symbolic, in groups of 16": (groups, 16_000),
}


def main() -> None:
    """Measure, and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    grader = MathGrader(RewardConfig(function="math", workers=options.workers))
    source = random.Random(0)
    rates: dict[str, list[float]] = {name: [] for name in CASES}
    for measured in (False, *[True] * options.rounds):
        for name, (make, count) in CASES.items():
            pairs = make(source, count)
            completions = [rf"<think>{THOUGHTS}</think> The answer is \boxed{{{given}}}." for given, _ in pairs]
            begin = time.perf_counter()
            verdicts = grader.grade(completions, [reference for _, reference in pairs])
            seconds = time.perf_counter() - begin
            assert not any(verdict.status in ("error", "no_answer") for verdict in verdicts)
            if measured:
                rates[name].append(len(pairs) / seconds)
    print(f"{platform.processor() or platform.machine()}, {options.workers} processes, {options.rounds} rounds\n")
    print("| answers | completions a second (range) |")
    print("| --- | --- |")
    for name, values in rates.items():
        print(f"| {name} | {statistics.median(values):,.0f} ({min(values):,.0f} to {max(values):,.0f}) |")


if __name__ == "__main__":
    main()
