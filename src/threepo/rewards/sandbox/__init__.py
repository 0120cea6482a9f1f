"""Sandboxes: what they take and return, and the table of them. Each is a file of this folder."""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Literal, Protocol

from threepo.config import SandboxConfig
from threepo.config.reward import SANDBOXES
from threepo.errors import UserError

TestKind = Literal["stdin", "call", "script"]
Ending = Literal["ok", "wrong", "runtime error", "time-out", "memory", "compile error", "sandbox error"]


@dataclass(frozen=True)
class Submission:
    """A program and the cases to run it on."""

    kind: TestKind
    """`stdin`: a case is what the program reads. `call`: a case is JSON, the arguments of the function `entry`.
    `script`: a case is Python code that runs after the program, with its names, and passes if it does not raise."""
    program: str
    cases: tuple[str, ...]
    entry: str = ""
    """Method of the program's class `Solution`, or function of the program, that `call` calls."""
    prefix: str = ""
    """Code of the data set that runs before the program, with the same names."""


@dataclass(frozen=True)
class Outcome:
    """Outcome of one case."""

    ending: Ending
    """`ok`: without an error; for `stdin` and `call` the output is still to be compared. `wrong`: an assertion of a
    script failed, or there was more output than the limit."""
    output: str = ""
    """Standard output for `stdin`; the returned value as JSON for `call`."""
    message: str = ""
    """The cause of a sandbox error."""


class Sandbox(Protocol):
    """Runs programs that nobody has read; made from the settings."""

    workers: int
    """Number of programs that it runs well at the same time."""
    advice: str
    """Advice for a user for whom it does not work."""

    def run(self, submission: Submission) -> Generator[Outcome, None, None]:
        """The outcome of each case, in order; `next` runs a case. Closing the generator ends the program."""


def open_sandbox(settings: SandboxConfig) -> Sandbox:
    """The sandbox that the settings name; `UserError` if it cannot run a program of one line."""
    sandbox: Sandbox = SANDBOXES[settings.backend].load()(settings)
    (outcome,) = sandbox.run(Submission(kind="stdin", program="print(input())", cases=("hello\n",)))
    settings.check("backend", outcome.ending != "sandbox error", f"{outcome.message}; {sandbox.advice}")
    if outcome.ending != "ok":
        raise UserError(
            f"reward.sandbox: a program of one line ended with {outcome.ending!r} under reward.sandbox.memory_mib = "
            f"{settings.memory_mib} and reward.sandbox.timeout_s = {settings.timeout_s}; raise them"
        )
    return sandbox
