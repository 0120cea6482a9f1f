"""Procedural tasks, the endless problems that they generate, and demonstrations of them.

A task generates problems of a given difficulty, verifies answers exactly, and writes demonstrations of several
behaviours for supervised fine-tuning, such as working step by step or answering at once. Training and held-out problems
are disjoint: the split of a problem is a function of its prompt alone, the same for all seeds, indices and levels.
To add a task: a class here, and a line in `TASKS`.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from string import ascii_lowercase
from typing import ClassVar, Literal

from threepo.answers import THINK_END, exact_match, final_answer, judge
from threepo.config import DemonstrationConfig
from threepo.errors import UserError
from threepo.types import Problem, Verdict

Split = Literal["train", "heldout"]
HELDOUT_SHARE = 8
"""One prompt in this many is held out."""
_MOST_ATTEMPTS = 10_000


class Task(ABC):
    """One family of problems. Tasks have no state; all randomness comes from the generator `rng`."""

    name: ClassVar[str]
    default_levels: ClassVar[tuple[int, ...]]
    min_level: ClassVar[int]
    """The lowest difficulty; there is no highest."""
    behaviours: ClassVar[tuple[str, ...]] = ("worked", "direct")
    """What `demonstrate` can show. Every task has `worked` (step by step) and `direct` (the answer at once)."""

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


class Endless(ABC):
    """Numbered problems without end; problem i is a function of the source's settings and i."""

    @abstractmethod
    def problem(self, index: int) -> Problem:
        """Problem number `index`."""

    def batch(self, step: int, size: int) -> list[Problem]:
        """The problems of one training step: the next `size` of the sequence."""
        return [self.problem(step * size + i) for i in range(size)]

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


class Paths(Task):
    """Find a way through a directed graph: `ab bc ad cf de; a to e` -> `a d e`, or any other along the given edges.

    Level: edges on the way; as many dead ends branch off. Worked out as a depth-first search that writes down every
    stop, also when it goes back.
    """

    name = "paths"
    default_levels = (2, 3, 4)
    min_level = 1

    def generate(self, rng: Random, level: int) -> tuple[str, str]:
        letters = rng.sample(ascii_lowercase, 2 * level + 1)
        way, others = letters[: level + 1], letters[level + 1 :]
        edges = [a + b for a, b in pairwise(way)]
        reached = way[:-1]  # dead ends branch off anything but the goal, and never lead back
        for letter in others:
            edges.append(rng.choice(reached) + letter)
            reached.append(letter)
        rng.shuffle(edges)
        return f"{' '.join(edges)}; {way[0]} to {way[-1]}\n", " ".join(way)

    def verify(self, problem: Problem, completion: str) -> Verdict:
        given = final_answer(completion)
        edges, start, goal = _read(str(problem.prompt))
        stops = given.split()
        right = len(stops) > 1 and stops[0] == start and stops[-1] == goal
        return judge(given, right and all(a + b in edges for a, b in pairwise(stops)))

    def work(self, prompt: str) -> str:
        edges, start, goal = _read(prompt)
        visits: list[str] = []

        def search(at: str) -> bool:
            visits.append(at)
            for edge in edges:
                if at != goal and edge[0] == at:
                    if search(edge[1]):
                        return True
                    visits.append(at)
            return at == goal

        search(start)
        return "".join(visits)


class Pointers(Task):
    """Every letter points to another; where does a number of hops lead? `a>c b>e c>b d>a e>d; 3 from a` -> `e`.

    Level: how many hops. Worked out by naming each stop.
    """

    name = "pointers"
    default_levels = (2, 3, 4, 5)
    min_level = 1

    def generate(self, rng: Random, level: int) -> tuple[str, str]:
        # One cycle through all letters: a walk shorter than it never repeats, so no hop can be skipped.
        letters = rng.sample(ascii_lowercase, level + 2)
        target = dict(zip(letters, letters[1:] + letters[:1], strict=True))
        listing = " ".join(f"{letter}>{target[letter]}" for letter in rng.sample(letters, len(letters)))
        prompt = f"{listing}; {level} from {rng.choice(letters)}\n"
        return prompt, self.work(prompt)[-1]

    def work(self, prompt: str) -> str:
        pointers, hops, start = _read(prompt)
        target = dict(pair.split(">") for pair in pointers)
        stops = start
        for _ in range(int(hops)):
            stops += target[stops[-1]]
        return stops


def _read(prompt: str) -> tuple[list[str], str, str]:
    """What stands before the semicolon, and the words around the middle one after it: `ab bc; a to c`."""
    listing, _, question = prompt.partition(";")
    first, _, last = question.split()
    return listing.split(), first, last


class Sorting(Task):
    """Sort digits: `sort 7391` -> `1379`. Level: how many.

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


class Stack(Task):
    """Run a stack machine: `stack 3 5 swap dup over pop` -> `5 3 3`, the final stack, bottom first.

    A digit pushes itself; `pop` drops the top, `dup` doubles it, `swap` exchanges the top two, `over` pushes the
    second. Level: how many operations. Worked out by writing the stack after every operation.
    """

    name = "stack"
    default_levels = (4, 5, 6, 7)
    min_level = 2
    top_two: ClassVar = {"dup": (0, 1, 1), "pop": (0,), "swap": (1, 0), "over": (0, 1, 0)}
    """What each operation makes of the second (0) and the top (1)."""

    def generate(self, rng: Random, level: int) -> tuple[str, str]:
        operations: list[str] = []
        stack: list[str] = []
        for _ in range(level):
            known = ["push", "push", *(self.top_two if len(stack) > 1 else ())]  # the final stack must not be empty
            operation = rng.choice(known)
            operations.append(str(rng.randrange(10)) if operation == "push" else operation)
            stack = self.after(stack, operations[-1])
        return f"stack {' '.join(operations)}\n", " ".join(stack)

    def work(self, prompt: str) -> str:
        stacks: list[list[str]] = [[]]
        for operation in prompt.split()[1:]:
            stacks.append(self.after(stacks[-1], operation))
        return "\n".join(map(" ".join, stacks[1:]))

    def after(self, stack: list[str], operation: str) -> list[str]:
        """The stack after one operation."""
        if operation not in self.top_two:
            return [*stack, operation]
        return stack[:-2] + [stack[-2:][i] for i in self.top_two[operation]]


TASKS: dict[str, Task] = {task.name: task for task in (Paths(), Pointers(), Sorting(), Stack())}
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
