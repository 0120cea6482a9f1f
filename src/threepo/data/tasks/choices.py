from collections.abc import Mapping
from random import Random
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
