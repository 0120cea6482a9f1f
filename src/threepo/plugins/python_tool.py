"""A tool that runs the policy's Python programs in the sandbox of docs/rewards.md, and returns what they print.

[environment]
factory = "threepo.plugins.python_tool:PythonTool"
settings = { sandbox = { timeout_s = 5.0, memory_mib = 512 } }
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from threepo.config import SandboxConfig
from threepo.errors import UserError
from threepo.rewards.sandbox import Submission, open_sandbox

# Prints the traceback, of which the harness needs nothing, and leaves our own frame out of it.
PROGRAM = """
import sys
sys.stderr = sys.stdout
try:
    exec(compile({code!r}, "<code>", "exec"), {{"__name__": "__main__"}})
except SystemExit as ending:
    if isinstance(ending.code, str):
        print(ending.code)
    raise
except MemoryError:
    raise
except BaseException as error:
    import traceback
    traceback.print_exception(type(error), error, error.__traceback__.tb_next)
    sys.exit(1)
"""
_open_once = cache(open_sandbox)
"""Opens a sandbox; the processes of episodes inherit those that are open."""
NOTES = {"time-out": "the program took too long", "memory": "it needed too much memory", "wrong": "too much output"}
"""Notes for the policy on endings that the output does not show."""


class PythonTool:
    """Has the tool `python`; the first reply that does not call it is the answer."""

    def __init__(self, sandbox: Mapping[str, Any] | None = None, longest: int = 4000) -> None:
        """`sandbox`: settings as in [reward.sandbox]. Of an output, the policy reads `longest` characters."""
        try:
            self._sandbox = _open_once(SandboxConfig(**sandbox or {}))
        except UserError as error:
            raise UserError(str(error).replace("reward.sandbox", "environment.settings.sandbox")) from error
        self._longest = longest
        self.tools: list[Callable[..., object]] = [self.python]

    def python(self, code: str) -> str:
        """Run a Python program. Returns what it prints, or its error.

        Args:
            code: The whole program; nothing is left of earlier ones.
        """
        submission = Submission(kind="stdin", program=PROGRAM.format(code=code), cases=("",))
        (outcome,) = self._sandbox.run(submission)
        if outcome.ending == "sandbox error":
            raise SystemExit(f"sandbox: {outcome.message}")  # fails the episode; an `Exception` would go to the policy
        text = outcome.output
        over = len(text) - self._longest
        if over > 0:  # errors are at the end
            half = self._longest // 2
            text = f"{text[:half]}\n[{over} characters left out]\n{text[-half:]}"
        if note := NOTES.get(outcome.ending):
            text = f"{text.rstrip()}\n[{note}]".lstrip()
        if text:
            return text
        return "[no output]" if outcome.ending == "ok" else f"[{outcome.ending}, no output]"
