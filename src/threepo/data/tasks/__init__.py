"""The procedural tasks, one file each, and demonstrations of them for supervised fine-tuning."""

from dataclasses import dataclass
from random import Random

from threepo.config import DemonstrationConfig
from threepo.data.task import ProceduralProblems, Task
from threepo.data.tasks.choices import Choices, ChoicesZoo
from threepo.data.tasks.paths import Paths
from threepo.data.tasks.pointers import Pointers
from threepo.data.tasks.sorting import Sorting
from threepo.data.tasks.stack import Stack
from threepo.errors import UserError
from threepo.types import Problem

TASKS: dict[str, Task] = {
    task.name: task for task in (Choices(), ChoicesZoo(), Paths(), Pointers(), Sorting(), Stack())
}
Demonstration = tuple[Problem, str]
"""A problem of the training split, and a completion of it."""


@dataclass(frozen=True)
class Demonstrations:
    """Endless demonstrations for supervised fine-tuning; the i-th is a function of the settings and i."""

    settings: DemonstrationConfig

    def __post_init__(self) -> None:
        for name in self.settings.tasks:
            if name not in TASKS:
                raise UserError(f"demonstrations.tasks: unknown task {name!r}; there are {', '.join(TASKS)}")
            known = TASKS[name].behaviours
            for behaviour in self.settings.behaviours.keys() - set(known):
                raise UserError(f"demonstrations.behaviours.{behaviour}: {name} has only {', '.join(known)}")

    def demonstration(self, index: int) -> Demonstration:
        """Demonstration number `index`; tasks take turns, behaviours are drawn by their shares."""
        settings = self.settings
        task = TASKS[settings.tasks[index % len(settings.tasks)]]
        problems = ProceduralProblems(task, "train", settings.seed, settings.levels)
        problem = problems.problem(index // len(settings.tasks))
        rng = Random(f"demonstration/{settings.seed}/{index}")
        (behaviour,) = rng.choices(list(settings.behaviours), list(settings.behaviours.values()))
        return problem, task.demonstrate(problem, behaviour)

    def batch(self, step: int) -> list[Demonstration]:
        """The demonstrations of one optimizer step."""
        size = self.settings.batch_size
        return [self.demonstration(step * size + i) for i in range(size)]
