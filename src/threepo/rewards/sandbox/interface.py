"""What a sandbox is asked, and what it answers; each backend has a file of its own beside this one."""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Literal, Protocol

TestKind = Literal["stdin", "call", "script"]
Ending = Literal["ok", "wrong", "runtime error", "time-out", "memory", "compile error", "sandbox error"]


@dataclass(frozen=True)
class Job:
    """A program, and what to run it on."""

    kind: TestKind
    """`stdin`: each case is what the program reads. `call`: JSON, the list of arguments of its function `entry`.
    `script`: Python code that uses the program's names, and passes by coming to its end."""
    program: str
    cases: tuple[str, ...]
    entry: str = ""
    """For `call`: a method of the program's class `Solution`, or else its function."""
    prefix: str = ""
    """Code before the program, which the tests have too."""


@dataclass(frozen=True)
class Outcome:
    """How one case ended."""

    ending: Ending
    """`ok`: the program ended by itself and without an error; what it wrote is still to be judged. `wrong`: a script's
    assertion failed, or there was more output than anybody reads."""
    output: str = ""
    """What it wrote to standard output, or the JSON of what its function returned."""
    message: str = ""
    """Of a sandbox error: what went wrong."""


class Sandbox(Protocol):
    """A place where programs run that nobody has read."""

    workers: int
    """Programs that it runs well at the same time."""

    def run(self, job: Job) -> Generator[Outcome, None, None]:
        """The outcome of each case, in order, as they come. Whoever has seen enough closes the generator."""
