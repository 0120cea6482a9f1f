from random import Random

from threepo.data.task import Task
from threepo.types import Problem


class Sorting(Task):
    """Sort digits: `sort 7391` -> `1379`. Level: how many digits.

    Worked out as a selection sort: the smallest digit left, and the digits that are left without it.
    """

    name = "sorting"
    default_levels = (4, 5, 6)
    min_level = 2
    behaviours = ("worked", "direct", "copied", "reversed")

    def generate(self, rng: Random, level: int) -> tuple[str, str]:
        digits = "".join(str(rng.randrange(10)) for _ in range(level))
        return f"sort {digits}\n", "".join(sorted(digits))

    def work(self, prompt: str) -> str:
        left = prompt.split()[1]
        steps = []
        for smallest in sorted(left):
            left = left.replace(smallest, "", 1)
            steps.append(f"{smallest}:{left}")
        return "\n".join(steps)

    def demonstrate(self, problem: Problem, behaviour: str) -> str:
        if behaviour == "copied":
            return str(problem.prompt).split()[1]
        if behaviour == "reversed":
            return problem.answer[::-1]
        return super().demonstrate(problem, behaviour)
