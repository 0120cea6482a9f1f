"""The procedural tasks, one file each, and demonstrations of them for supervised fine-tuning."""

from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import Any

from threepo.config import DataConfig, DemonstrationConfig
from threepo.data.installed import installed_kinds, installed_source
from threepo.data.task import Endless, ProceduralProblems, Task
from threepo.data.tasks.choices import Choices, ChoicesNear, ChoicesZoo
from threepo.data.tasks.forks import Forks
from threepo.data.tasks.sorting import Sorting
from threepo.data.tasks.sums import Sums
from threepo.errors import UserError
from threepo.types import Problem

TASKS: dict[str, Task] = {
    task.name: task for task in (Choices(), ChoicesNear(), ChoicesZoo(), Forks(), Sorting(), Sums())
}
Demonstration = tuple[Problem, str]
"""A problem of the training split, and a completion of it."""


@dataclass(frozen=True)
class Demonstrations:
    """Endless demonstrations for supervised fine-tuning; the i-th is a function of the settings and i."""

    settings: DemonstrationConfig

    def __post_init__(self) -> None:
        for name in self.settings.tasks:
            if not is_endless(name):
                kinds = [f"{kind}:NAME" for kind in installed_kinds() if is_endless(f"{kind}:")]
                raise UserError(f"demonstrations.tasks: unknown task {name!r}; there are {', '.join([*TASKS, *kinds])}")
            known = TASKS[name].behaviours if name in TASKS else ("direct",)
            for behaviour in self.settings.behaviours.keys() - set(known):
                raise UserError(f"demonstrations.behaviours.{behaviour}: {name} has only {', '.join(known)}")

    @cached_property
    def _problems(self) -> list[Endless]:
        """The problems of each task."""
        seed, levels = self.settings.seed, self.settings.levels
        problems: list[Any] = []
        for name in self.settings.tasks:
            if installed := installed_source(name):
                problems.append(installed.open(name, "train", DataConfig(train=name, seed=seed)).problems)
            else:
                problems.append(ProceduralProblems(TASKS[name], "train", seed, levels))
        return problems

    def demonstration(self, index: int) -> Demonstration:
        """Demonstration number `index`; tasks take turns, behaviours are drawn by their shares."""
        settings = self.settings
        number, place = divmod(index, len(settings.tasks))
        name, problem = settings.tasks[place], self._problems[place].problem(number)
        rng = Random(f"demonstration/{settings.seed}/{index}")
        (behaviour,) = rng.choices(list(settings.behaviours), list(settings.behaviours.values()))
        return problem, TASKS[name].demonstrate(problem, behaviour) if name in TASKS else problem.answer

    def batch(self, step: int) -> list[Demonstration]:
        """The demonstrations of one optimizer step."""
        size = self.settings.batch_size
        return [self.demonstration(step * size + i) for i in range(size)]


def is_endless(name: str) -> bool:
    """True if the problems of a source are generated without end, and held-out ones too."""
    installed = installed_source(name)
    return name in TASKS or (installed is not None and installed.endless)
