"""What a published data set is: where it lies, and what is made of a row of it.

Its name in a recipe stands for its place on the Hugging Face hub; `NAME:PLACE` reads the same columns from a local
.jsonl, .jsonl.gz or .parquet file, from a folder that was downloaded from the hub, or from another data set there.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from threepo.config import DataConfig
from threepo.data.finite import FiniteProblems, collect
from threepo.data.rows import SUFFIXES, Row, iterate_rows
from threepo.data.task import Split
from threepo.types import Problem, VerifierName


@dataclass(frozen=True)
class Content:
    """What a row says."""

    problem: str
    answer: str = ""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """For reward functions, by name."""
    key: str = ""
    """Rows with the same key are one problem; empty: every row is one of its own."""


@dataclass(frozen=True)
class PublishedSet:
    """A data set as its makers published it."""

    name: str
    summary: str
    """In a few words, for the list of data sets."""
    hub: str
    """Its id on the Hugging Face hub."""
    read: Callable[[Row], Content]
    """What a row says; raises `BrokenRow` where it is not as published."""
    template: str
    """How a problem is put to a policy; `{prompt}` marks its place."""
    verifier: VerifierName
    configuration: str | None = None
    """Of several that the hub has under this id."""
    heldout: str | None = None
    """The hub's split with held-out problems, where there is one."""

    def open(self, place: str, split: Split, settings: DataConfig) -> FiniteProblems:
        """The problems at `place`, or on the hub where that is empty; a file has one split, whatever is asked for."""
        where = place or self.hub
        hub_split = self.heldout if split == "heldout" and self.heldout else "train"
        source = f"data set {self.name} ({where if where.endswith(SUFFIXES) else f'{where}, {hub_split}'})"

        def problem(row: Row, number: int) -> Problem:
            content = self.read(row)
            return Problem(
                id=f"{self.name}/{split}/{content.key or number}",
                prompt=content.problem,
                answer=content.answer,
                columns=content.columns,
                place=f"{source}, row {number}",
                template=self.template,
            )

        rows = iterate_rows(where, hub_split, self.configuration)
        return collect(source, rows, problem, settings, deduplicate=True)


def absolute_place(place: str) -> str:
    """A place with `~` and relative paths spelt out; the id of another data set on the hub as it is."""
    local = place.endswith(SUFFIXES) or place.startswith(("~", ".")) or Path(place).is_dir()
    return os.path.abspath(os.path.expanduser(place)) if local else place
