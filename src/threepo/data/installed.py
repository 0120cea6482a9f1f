"""Sources of problems that installed packages bring, such as `reasoning-gym:NAME` and `verifiers:NAME`.

A package names one in its entry points, group `threepo.sources`: the name before the colon, and an `InstalledSource`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from threepo.config import DataConfig
from threepo.data.task import Split

if TYPE_CHECKING:
    from threepo.data.source import ProblemSet

GROUP = "threepo.sources"


@dataclass(frozen=True)
class InstalledSource:
    """Opens the sources `KIND:NAME` of one kind."""

    open: Callable[[str, Split, DataConfig], "ProblemSet"]
    """Gets the whole name, `KIND:NAME`; `UserError` if it cannot be opened."""
    endless: bool
    """True if problems are generated without end, and held-out ones too."""


def installed_source(name: str) -> InstalledSource | None:
    """The source that an installed package has for `KIND:NAME`; None if there is none."""
    kind, colon, _ = name.partition(":")
    return _load(kind) if colon else None


def installed_kinds() -> list[str]:
    """The kinds of sources that installed packages have."""
    return sorted({entry.name for entry in entry_points(group=GROUP)})


@cache
def _load(kind: str) -> InstalledSource | None:
    found = [entry.load() for entry in entry_points(group=GROUP, name=kind)]
    return found[0] if found else None
