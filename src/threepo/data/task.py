"""Procedural tasks, and the endless problems that they generate.

A task generates problems of a given difficulty, verifies answers exactly, and writes demonstrations of several
behaviours for supervised fine-tuning, such as working step by step or answering at once. Training and held-out problems
are disjoint: the split of a problem is a function of its prompt alone, the same for all seeds, indices and levels.
tasks.py has the tasks.
"""

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from random import Random
from typing import ClassVar, Literal

from threepo.errors import UserError
from threepo.types import THINK_END, Problem, Verdict, exact_match

Split = Literal["train", "heldout"]
HELDOUT_SHARE = 8
"""One prompt in this many is held out."""
_MOST_ATTEMPTS = 10_000


class Task(ABC):
    """One family of problems. Tasks have no state; all randomness comes from the generator `rng`."""

    name: ClassVar[str]
    default_levels: ClassVar[tuple[int, ...]]
    min_level: ClassVar[int]
    """The lowest difficulty."""
    max_level: ClassVar[float] = math.inf
    """The highest difficulty, if there is one."""
    behaviours: ClassVar[tuple[str, ...]] = ("worked", "direct")
    """Ways to solve a problem that `demonstrate` can show. Every task has `worked` (step by step) and `direct` (the
    answer at once)."""
    only_answer: ClassVar[bool] = False
    """True if the answer at once is the only right completion worth counting, so that its probability is the policy's
    chance (`threepo probe --exact`). A right text in another layout, such as with more blanks, is not counted."""

    @abstractmethod
    def generate(self, rng: Random, level: int) -> tuple[str, str]:
        """A prompt, and the reference answer."""

    @abstractmethod
    def work(self, prompt: str) -> str:
        """The steps from the prompt to the answer, as a policy would think them."""

    def verify(self, problem: Problem, completion: str) -> Verdict:
        """Exact: the final answer must equal the reference, up to the width of blanks."""
        return exact_match(problem, completion)

    def demonstrate(self, problem: Problem, behaviour: str) -> str:
        """A completion of the problem that shows one of the `behaviours`."""
        if behaviour == "direct":
            return problem.answer
        assert behaviour == "worked", behaviour
        return f"<think>{self.work(str(problem.prompt))}{THINK_END}{problem.answer}"


def split_of(prompt: str) -> Split:
    """The split of a prompt, the same in every run."""
    digest = hashlib.blake2b(prompt.encode(), digest_size=8, person=b"threepo-split").digest()
    return "heldout" if int.from_bytes(digest) % HELDOUT_SHARE == 0 else "train"


def hashed_seed(address: str) -> int:
    """A 31-bit seed from a text, for libraries in which neighbouring integer seeds share random numbers."""
    return int.from_bytes(hashlib.blake2b(address.encode(), digest_size=4).digest()) >> 1


class Endless(ABC):
    """Numbered problems without end; problem i is a function of the source's settings and i."""

    @abstractmethod
    def problem(self, index: int) -> Problem:
        """Problem number `index`."""

    def batch(self, step: int, size: int) -> list[Problem]:
        """The problems of one training step: the next `size` of the sequence."""
        return [self.problem(step * size + i) for i in range(size)]

    def untried(self, drawn: int, count: int, _: Collection[str]) -> tuple[list[Problem], int]:
        """The next `count` problems after the first `drawn`, and the new `drawn`; no problem comes twice."""
        return [self.problem(drawn + i) for i in range(count)], drawn + count

    def first(self, count: int) -> Sequence[Problem]:
        """The first `count` problems, for evaluation."""
        return [self.problem(i) for i in range(count)]

    def known(self) -> Sequence[Problem]:
        """The problems that can be checked before training: the first, as an example."""
        return self.first(1)


@dataclass(frozen=True)
class ProceduralProblems(Endless):
    """Problems of a task; the levels take turns."""

    task: Task
    split: Split
    seed: int
    levels: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for level in self.levels:
            if level < self.task.min_level:
                raise UserError(f"data.levels: {self.task.name} starts at level {self.task.min_level}, not {level}")
            if level > self.task.max_level:
                raise UserError(f"data.levels: {self.task.name} ends at level {self.task.max_level}, not {level}")

    def problem(self, index: int) -> Problem:
        """Problem number `index`; `UserError` if the level has too few problems to find one of this split."""
        levels = self.levels or self.task.default_levels
        level = levels[index % len(levels)]
        address = f"{self.task.name}/{self.split}/{self.seed}/{level}/{index}"
        rng = Random(address)
        for _ in range(_MOST_ATTEMPTS):
            prompt, answer = self.task.generate(rng, level)
            if split_of(prompt) == self.split:
                columns = {"task": self.task.name, "level": level}
                return Problem(id=address, prompt=prompt, answer=answer, columns=columns)
        raise UserError(
            f"{self.task.name} at level {level}: too few different problems for a {self.split} split; raise data.levels"
        )
