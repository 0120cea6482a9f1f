"""Environments for tests, well-behaved and hostile."""

import os
import random
import subprocess
import sys
import time
from typing import Any

from threepo.environment import Turn
from threepo.types import Problem


class Echo:
    """Answers each reply with its number and something random, and ends after so many moves."""

    def __init__(self, moves: int = 3) -> None:
        self.moves, self.made = moves, 0

    def reset(self, problem: Problem) -> str:
        return f"go {problem.id}: "

    def step(self, reply: str) -> Turn:
        self.made += 1
        told = f"<{self.made} {random.randrange(100)}>"
        reward = float(len(reply) % 3 == 0)
        return Turn(told, reward, self.made == self.moves, {"made": self.made})


class AllOrNothing(Echo):
    """Pays 1 or 0, for the last reply alone."""

    def step(self, reply: str) -> Turn:
        turn = super().step(reply)
        return turn if turn.done else Turn(turn.observation, 0.0, False, turn.metrics)


class Late(Echo):
    """Takes a random time, which no seed decides, for its answers."""

    def step(self, reply: str) -> Turn:
        time.sleep(0.03 * random.SystemRandom().random())
        return super().step(reply)


class Ends(Echo):
    """Pays 10 when its episode is over, and records the length of what it had not read until then; may fail then."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__(3)
        self.fails = fails

    def end(self, reply: str) -> Turn | None:
        if self.fails and self.made == 3:
            raise KeyError("no such key")
        return Turn(reward=10.0, metrics={"unheard": len(reply)})


class FailsOnOneRank(Echo):
    """Fails in all episodes of the second rank."""

    def step(self, reply: str) -> Turn:
        if os.environ.get("RANK") == "1":
            raise RuntimeError("not here")
        return super().step(reply)


class Grows(Echo):
    """Tells more in every turn, or much at the beginning."""

    def __init__(self, first: int = 1) -> None:
        super().__init__(99)
        self.first = first

    def reset(self, problem: Problem) -> str:
        return "a" * self.first

    def step(self, reply: str) -> Turn:
        self.made += 1
        return Turn("ab" * 4**self.made, 0.0)


class Closes:
    """Closes what it has used at the end, and has no `step`."""

    def __init__(self, told: float | None = None) -> None:
        self.told = told

    def end(self, reply: str) -> Any:
        return self.told


class Calculator:
    """Has tools, of which one takes its time, and no `step`: a reply that calls nothing is the answer."""

    def __init__(self) -> None:
        self.used = 0
        self.tools = [self.add, self.wait]

    def add(self, a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        self.used += 1
        return a + b

    def wait(self, seconds: float) -> str:
        """Wait.

        Args:
            seconds: How long.
        """
        time.sleep(seconds)
        return "waited"


class Shop:
    """Answers calls of a tool that it describes itself, and pays for each."""

    tools = ({"type": "function", "function": {"name": "buy", "description": "Buy.", "parameters": {}}},)

    def call_tools(self, calls: list[tuple[str, Any]], reply: str) -> Turn:
        return Turn([{"role": "tool", "content": "bought"}], float(len(calls)))


class Draws:
    """Draws in its constructor, with Python and numpy, and from a set, whose order is not the same in every process."""

    def __init__(self) -> None:
        self.first = random.random()

    def reset(self, problem: Problem) -> str:
        import numpy as np

        return f"{self.first} {np.random.random()} {list({'alpha', 'beta', 'gamma', 'delta', problem.id})}"  # noqa: NPY002

    def step(self, reply: str) -> Turn:
        return Turn("half a pair: \ud800", done=False)


class Threads:
    """Multiplies matrices with torch, which starts threads: in the first process, and in that of each episode."""

    def __init__(self) -> None:
        self.product()

    def reset(self, problem: Problem) -> str:
        return self.product()

    def product(self) -> str:
        import torch

        return str(float((torch.ones(300, 300) @ torch.ones(300, 300)).sum()))

    def step(self, reply: str) -> Turn:
        return Turn(done=True)


class Hostile(Echo):
    """Does something bad at its second step, where the prompt's id ends in an even number, and begins with the deed."""

    def __init__(self, deed: str = "", when: str = "step") -> None:
        super().__init__(3)
        self.deed, self.when, self.bad = deed, when, False

    def reset(self, problem: Problem) -> Any:
        self.deed = self.deed or problem.id[:-2]
        self.bad = int(problem.id[-1]) % 2 == 0
        if self.bad and self.when == "reset":
            return DEEDS[self.deed]()
        return super().reset(problem)

    def step(self, reply: str) -> Any:
        if self.bad and self.made == 1:
            return DEEDS[self.deed]()
        return super().step(reply)


def _raise() -> None:
    raise KeyError("no such key")


def _leak() -> None:
    hoard = []
    while True:
        hoard.append(bytearray(1 << 28))  # more than the limit: no time goes by until it is refused


def _children() -> None:
    for _ in range(3):
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)", "threepo-child"])
    time.sleep(1000)


def _daemons() -> None:
    """Two processes with sessions of their own; the parent of the second has ended."""
    sleeping = "import time; time.sleep(1000)"
    subprocess.Popen([sys.executable, "-c", sleeping], start_new_session=True)
    starting = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {sleeping!r}], start_new_session=True)"
    subprocess.run([sys.executable, "-c", starting], start_new_session=True)
    _raise()


DEEDS = {
    "raise": _raise,
    "leave": lambda: sys.exit(3),
    "die": lambda: os._exit(0),
    "kill": lambda: os.kill(os.getpid(), 9),
    "hang": lambda: time.sleep(1000),
    "leak": _leak,
    "children": _children,
    "daemons": _daemons,
    "recurse": lambda: (lambda f: f(f))(lambda f: f(f)),
    "none": lambda: None,
    "number": lambda: 7,
    "nan": lambda: Turn("x", float("nan")),
    "words for reward": lambda: Turn("x", "much"),  # type: ignore[arg-type]
    "words for metric": lambda: Turn("x", metrics={"a": "b"}),  # type: ignore[dict-item]
    "word for done": lambda: Turn("x", done="false"),  # type: ignore[arg-type]
    "long": lambda: Turn("x" * 10_000_000),
    "messages without role": lambda: Turn([{"content": "x"}]),
    "bytes": lambda: Turn(b"x"),  # type: ignore[arg-type]
    "no messages": lambda: Turn([]),
}


REASONS = {
    "leak": "step: memory" if sys.platform == "linux" else "",  # macOS has no such limit
    "hang": "time-out",
    "die": "process ended",
    "word for done": "'false' as done",
}
"""Words of the reason why an episode has failed."""


class FailsSometimes(Echo):
    """Raises at its second step in one episode of four, chosen by the reply."""

    def step(self, reply: str) -> Turn:
        if self.made == 1 and len(reply) % 4 == 0:
            _raise()
        return super().step(reply)


def doubled_hint(observation: dict[str, Any]) -> str:
    """An observation of OpenEnv as text."""
    return str(observation["hint"]) * 2


def number_action(reply: str, schema: dict[str, Any]) -> dict[str, Any]:
    """A reply as an action of OpenEnv."""
    return {"number": {"one": 1, "two": 2}[reply]}
