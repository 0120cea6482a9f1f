"""What a published data set is: where it is, and how one of its rows becomes a problem or a conversation.

The name of a set stands for the hub; `NAME:COPY` reads the same columns from any other source (data.rows).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from threepo.config import DataConfig
from threepo.data.finite import FiniteProblems, collect
from threepo.data.rows import BrokenRow, Row, open_rows
from threepo.types import Problem, VerifierName

Found = TypeVar("Found")


@dataclass(frozen=True)
class PublishedSet:
    """Problems as their makers published them."""

    name: str
    summary: str
    """A few words for `threepo data list`."""
    hub: str
    """Its id on the Hugging Face hub."""
    read: Callable[[Row], Problem]
    """The problem in a row; its id is what rows of the same problem share, or empty. Raises anything for other rows."""
    template: str
    """How a problem is put to a policy; `{prompt}` marks its place."""
    verifier: VerifierName
    configuration: str | None = None
    """The configuration on the hub, where there are several."""
    heldout: str | None = None
    """The hub's split with held-out problems, if there is one."""

    def open(self, copy: str, part: Literal["train", "heldout"], settings: DataConfig) -> FiniteProblems:
        """The problems of a part, from a copy or from the hub where that is empty; a file is read whole."""
        split = self.heldout if part == "heldout" and self.heldout else "train"

        def problem(row: Row, number: int) -> Problem:
            found = published_row(self.name, self.read, row)
            return replace(found, id=f"{self.name}/{part}/{found.id or number}", template=self.template)

        rows = open_rows(copy or self.hub, split, self.configuration)
        return collect(rows.name, rows, problem, settings, deduplicate=True)


@dataclass(frozen=True)
class ConversationSet:
    """Conversations as their makers published them, for supervised fine-tuning."""

    name: str
    summary: str
    hub: str
    configuration: str
    read: Callable[[Row], list[Any] | str]
    """The messages of a row, or one word why it is left out, to count by. Raises anything for other rows."""


def published_row(name: str, read: Callable[[Row], Found], row: Row) -> Found:
    """What `read` makes of a row; `BrokenRow` if the row does not have the published columns."""
    try:
        return read(row)
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise BrokenRow(f"is not a row of {name} as published: {type(error).__name__}: {error}") from error
