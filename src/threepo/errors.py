"""Errors and warnings for what a user can fix: a recipe, a path, an impossible combination.

The command line prints the one line of a `UserError` and exits with 2. All else that goes wrong is a bug, ours or a
caller's, and keeps its traceback.
"""

import importlib
from typing import Any


class UserError(ValueError):
    """Bad input. The message names the field or file, the value found, and how to fix it.

    Examples:
        >>> threepo.pass_at_k(n=4, c=5, k=1)
        Traceback (most recent call last):
        threepo.errors.UserError: pass_at_k(n=4, c=5, k=1): needs 0 <= c <= n and 1 <= k <= n
    """

    exit_status = 2
    """Of a command that it ends."""


def import_extra(module: str, extra: str, needed_for: str) -> Any:
    """Import a package that one of threepo's extras installs; `UserError` if it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise UserError(f"{needed_for}: needs {package}; in a clone, pip install '.[{extra}]'") from error


class ThreepoWarning(UserWarning):
    """Something legal that is probably not what was meant, such as a correction that never acts."""


class Interrupted(Exception):
    """A signal asked training to stop, and its state is saved."""

    def __init__(self, signal_number: int, message: str) -> None:
        super().__init__(message)
        self.signal_number = signal_number
