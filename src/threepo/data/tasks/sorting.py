"""Sort digits. Level: how many.

    sort 7 3 9 1        ->  1 3 7 9
"""

from random import Random

from threepo.data.task import Task
from threepo.types import Problem


class Sorting(Task):
    """Worked out as a selection sort: name the smallest digit left, and what is left without it."""

    name = "sorting"
    default_levels = (4, 5, 6)
    min_level = 2
    behaviours = ("worked", "direct", "copied", "reversed")

    def generate(self, rng: Random, level: int) -> tuple[str, str]:
        digits = [rng.randrange(10) for _ in range(level)]
        return f"sort {_text(digits)}\n", _text(sorted(digits))

    def work(self, prompt: str) -> str:
        left = [int(digit) for digit in prompt.split()[1:]]
        steps = []
        while left:
            smallest = min(left)
            left.remove(smallest)
            steps.append(f"{smallest}:{_text(left)}" if left else str(smallest))
        return "\n".join(steps)

    def demonstrate(self, problem: Problem, behaviour: str, rng: Random) -> str:
        if behaviour == "copied":
            return " ".join(str(problem.prompt).split()[1:])
        if behaviour == "reversed":
            return " ".join(reversed(problem.answer.split()))
        return super().demonstrate(problem, behaviour, rng)


def _text(digits: list[int]) -> str:
    return " ".join(map(str, digits))
