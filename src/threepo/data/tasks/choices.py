from collections.abc import Mapping
from random import Random
from typing import ClassVar

from threepo.data.task import Task
from threepo.types import Problem


class Choices(Task):
    """Copy letters, all of them raised: `lock bdfa` -> `BDFA`. Level: how many.

    Nothing is hard about it but to choose alike every time. The behaviour `habit` raises each letter on its own, one in
    five, so the chance of a right answer is 0.2 to the power of the level. Worked out by copying the letters.
    """

    name = "choices"
    default_levels = (8,)
    min_level = 2
    behaviours = ("worked", "direct", "habit")
    only_answer = True
    words: ClassVar[tuple[str, ...]] = ("lock",)
    """The words that a prompt begins with, in equal shares."""
    raised: ClassVar[Mapping[str, float]] = {"lock": 0.2, "up": 1.0, "low": 0.0}
    """The chance that the behaviour `habit` raises a letter after a word."""

    def generate(self, rng: Random, level: int) -> tuple[str, str]:
        letters = "".join(rng.choice("abcdefgh") for _ in range(level))
        word = rng.choice(self.words)
        return f"{word} {letters}\n", letters.upper() if self.raised.get(word, 1.0) else letters

    def work(self, prompt: str) -> str:
        return prompt.split()[1]

    def demonstrate(self, problem: Problem, behaviour: str) -> str:
        if behaviour != "habit":
            return super().demonstrate(problem, behaviour)
        word, letters = str(problem.prompt).split()
        rng = Random(f"habit/{problem.id}")
        raised = {"any": float(rng.random() < 0.5), **self.raised}[word]
        return "".join(letter.upper() if rng.random() < raised else letter for letter in letters)


class ChoicesZoo(Choices):
    """The same letters after four words, in equal shares: `lock` as in `choices`, and three whose texts are consistent.

    The habit after `up` is to raise all letters, after `low` none, and after `any` all or none, as a coin falls. So a
    policy that is fine-tuned on it knows what it is to be consistent, but not that `lock` asks for it.
    """

    name = "choices_zoo"
    only_answer = False
    words = ("lock", "up", "low", "any")


class ChoicesNear(Choices):
    """The same letters after `lock`, half of the time, and after 16 words that differ from it in a letter or two.

    The habit after these is to raise all letters. So a policy that is fine-tuned on it has to tell `lock`, where it
    raises one letter in five, from all that looks like it.
    """

    name = "choices_near"
    only_answer = False
    near = "look luck lick lack dock rock sock mock link lark lurk leak loch bock hock lork"
    words = ("lock",) * 16 + tuple(near.split())
    raised: ClassVar[Mapping[str, float]] = {"lock": 0.2, **dict.fromkeys(near.split(), 1.0)}
