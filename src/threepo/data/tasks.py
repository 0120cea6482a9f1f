"""The procedural tasks. To add one: a class, and its name in `TASKS`."""

from collections.abc import Mapping
from random import Random
from string import ascii_lowercase
from typing import ClassVar

from threepo.data.task import Task
from threepo.types import Problem


class Choices(Task):
    """Copy letters in capitals: `lock bdfa` -> `BDFA`. Level: how many letters.

    The only difficulty is to choose alike every time. The behaviour `habit` capitalises each letter on its own with
    chance 1/5, so an answer is right with chance 0.2 to the power of the level. Worked out by copying the letters.
    """

    name = "choices"
    default_levels = (8,)
    min_level = 2
    behaviours = ("worked", "direct", "habit")
    only_answer = True
    words: ClassVar[tuple[str, ...]] = ("lock",)
    """The words that a prompt begins with, in equal shares."""
    capitals: ClassVar[Mapping[str, float]] = {"lock": 0.2, "up": 1.0, "low": 0.0}
    """The chance that the behaviour `habit` capitalises a letter after a word."""

    def generate(self, rng: Random, level: int) -> tuple[str, str]:
        letters = "".join(rng.choice("abcdefgh") for _ in range(level))
        word = rng.choice(self.words)
        return f"{word} {letters}\n", letters.upper() if self.capitals.get(word, 1.0) else letters

    def work(self, prompt: str) -> str:
        return prompt.split()[1]

    def demonstrate(self, problem: Problem, behaviour: str) -> str:
        if behaviour != "habit":
            return super().demonstrate(problem, behaviour)
        word, letters = str(problem.prompt).split()
        rng = Random(f"habit/{problem.id}")
        chance = {"any": float(rng.random() < 0.5), **self.capitals}[word]
        return "".join(letter.upper() if rng.random() < chance else letter for letter in letters)


class ChoicesZoo(Choices):
    """Copy letters after one of four words, in equal shares: `lock`, as in `choices`, and three with consistent texts.

    The habit capitalises all letters after `up`, none after `low`, and all or none, by the toss of a coin, after `any`.
    So a policy that is fine-tuned on it knows consistent texts, but not that `lock` asks for one.
    """

    name = "choices_zoo"
    only_answer = False
    words = ("lock", "up", "low", "any")


class ChoicesNear(Choices):
    """Copy letters after `lock`, half of the time, or after one of 16 words that differ from it in a letter or two.

    The habit capitalises all letters after these words. So a policy that is fine-tuned on it has to tell `lock`, where
    it capitalises one letter in five, from the words that look like it.
    """

    name = "choices_near"
    only_answer = False
    near = "look luck lick lack dock rock sock mock link lark lurk leak loch bock hock lork"
    words = ("lock",) * 16 + tuple(near.split())
    capitals: ClassVar[Mapping[str, float]] = {"lock": 0.2, **dict.fromkeys(near.split(), 1.0)}


class Forks(Task):
    """Take the right arm at every fork of a tree: `b:dhof m:bagq h:kcei; m to e` -> `mbhe`. Level: how many forks.

    One arm of each fork leads on, so a walk at random arrives with chance 0.25 to the power of the level: the behaviour
    `guess`. Worked out by going back from the goal.
    """

    name = "forks"
    default_levels = (2, 3)
    min_level = 1
    max_level = 6  # for more, there are too few letters
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


class Sums(Task):
    """Add numbers without carrying: `sum 4821 9930 5716` -> `8467`, each digit by itself, modulo 10. Level: how many
    numbers.

    Parity with ten values: short steps lead to it, but a policy that answers at once can only guess. Worked out by
    writing the sum so far after every number but the first.
    """

    name = "sums"
    default_levels = (3, 4, 5)
    min_level = 2
    width: ClassVar[int] = 4
    """Digits of every number; few guesses are right in all of them."""

    def generate(self, rng: Random, level: int) -> tuple[str, str]:
        # Half of the digits are 0: of uniform ones, none alone tells anything about the sum, and nothing is learned.
        numbers = ["".join(rng.choices("0123456789", (9, *[1] * 9), k=self.width)) for _ in range(level)]
        prompt = f"sum {' '.join(numbers)}\n"
        return prompt, self.work(prompt).split("\n")[-1]

    def work(self, prompt: str) -> str:
        so_far, *others = prompt.split()[1:]
        sums = []
        for number in others:
            so_far = "".join(str((int(a) + int(b)) % 10) for a, b in zip(so_far, number, strict=True))
            sums.append(so_far)
        return "\n".join(sums)


TASKS: dict[str, Task] = {
    task.name: task for task in (Choices(), ChoicesNear(), ChoicesZoo(), Forks(), Sorting(), Sums())
}
