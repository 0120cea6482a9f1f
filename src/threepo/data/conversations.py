"""Conversations to imitate: of a user's own source, or of a published data set."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from threepo.config.sources import KINDS
from threepo.data.published import CONVERSATIONS
from threepo.data.published_set import published_row
from threepo.data.rows import BrokenRow, Row, Rows, chat_messages, is_source, open_rows
from threepo.data.source import split_copy
from threepo.errors import UserError

Messages = tuple[Mapping[str, Any], ...]
"""Chat messages of the form {"role": ..., "content": ...}; further keys reach the chat template."""


@dataclass(frozen=True)
class Conversations:
    """The rows of a source, and how a conversation is read from one."""

    rows: Rows
    published: str
    """The published set whose columns the rows have; empty: a user's own."""

    @classmethod
    def open(cls, name: str) -> "Conversations":
        """The source of this name; of a published set all splits. `UserError` says what there is."""
        published, copy = split_copy(name, CONVERSATIONS)
        if published:
            known = CONVERSATIONS[published]
            return cls(open_rows(copy or known.hub, "all", known.configuration), published)
        if not is_source(name):
            near = difflib.get_close_matches(name.partition(":")[0], CONVERSATIONS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"name {', '.join(CONVERSATIONS)}, {KINDS}"
            raise UserError(f"conversations {name}: unknown; {hint}")
        return cls(open_rows(name), "")

    def read(self, row: Row) -> Messages | str:
        """The messages of a row, or one word why the published set leaves it out; `BrokenRow` if it has none."""
        if self.published:
            found = published_row(self.published, CONVERSATIONS[self.published].read, row)
            return found if isinstance(found, str) else chat_messages(found, "messages")
        messages = _from_columns(row)
        if not any(message["role"] == "assistant" for message in messages):
            raise BrokenRow("has no message of the assistant, so nothing to imitate")
        return messages


def _from_columns(row: Row) -> Messages:
    """Messages of a user's own row: its `messages`, or its `prompt` and `completion`, each text or messages."""
    if row.get("messages") is not None:
        return chat_messages(row["messages"], "messages")
    if row.get("prompt") is None or row.get("completion") is None:
        raise BrokenRow(f"has neither messages nor prompt and completion; its columns are {', '.join(map(repr, row))}")
    return _turn(row, "prompt", "user") + _turn(row, "completion", "assistant")


def _turn(row: Row, column: str, role: str) -> Messages:
    if isinstance(row[column], str):
        return ({"role": role, "content": row[column]},)
    return chat_messages(row[column], f"{column}, if it is not text,")
