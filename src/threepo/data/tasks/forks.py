from random import Random
from string import ascii_lowercase
from typing import ClassVar

from threepo.data.task import Task
from threepo.types import Problem


class Forks(Task):
    """Take the right arm at every fork of a tree: `b:dhof m:bagq h:kcei; m to e` -> `mbhe`. Level: how many forks.

    One arm of each fork leads on, so a walk at random arrives with chance 0.25 to the power of the level: the behaviour
    `guess`. Worked out by going back from the goal.
    """

    name = "forks"
    default_levels = (2, 3)
    min_level = 1
    behaviours = ("worked", "direct", "guess")
    only_answer = True
    arms: ClassVar[int] = 4

    def generate(self, rng: Random, level: int) -> tuple[str, str]:
        root, *letters = rng.sample(ascii_lowercase, 1 + self.arms * level)
        way, forks = root, []
        for fork in range(level):
            arms = letters[fork * self.arms : (fork + 1) * self.arms]
            forks.append(f"{way[-1]}:{''.join(arms)}")
            way += rng.choice(arms)
        rng.shuffle(forks)
        return f"{' '.join(forks)}; {way[0]} to {way[-1]}\n", way

    def work(self, prompt: str) -> str:
        arms, _, goal = self.read(prompt)
        heads = {arm: head for head in arms for arm in arms[head]}
        way = goal
        while way[-1] in heads:
            way += heads[way[-1]]
        return way

    def demonstrate(self, problem: Problem, behaviour: str) -> str:
        if behaviour != "guess":
            return super().demonstrate(problem, behaviour)
        arms, way, _ = self.read(str(problem.prompt))
        rng = Random(f"guess/{problem.id}")
        while way[-1] in arms:
            way += rng.choice(arms[way[-1]])
        return way

    def read(self, prompt: str) -> tuple[dict[str, str], str, str]:
        """The arms of every fork, the start, and the goal."""
        forks, _, question = prompt.partition(";")
        start, _, goal = question.split()
        return {fork[0]: fork[2:] for fork in forks.split()}, start, goal
