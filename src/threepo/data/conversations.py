"""Conversations to imitate: of a user's own source, or of a published data set."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from threepo.data.published import CONVERSATIONS
from threepo.data.published_set import published_row
from threepo.data.rows import KINDS, BrokenRow, Row, Rows, chat_messages, is_file, is_source, open_rows
from threepo.data.source import resolved, split_copy
from threepo.errors import UserError

Messages = tuple[Mapping[str, Any], ...]
"""Chat messages of the form {"role": ..., "content": ...}; further keys reach the chat template."""


@dataclass(frozen=True)
class ConversationSource:
    """Where conversations are, and how they are read."""

    name: str
    address: str
    """A source of `data.rows`."""
    published: str
    """The published set whose columns it has; empty: it is a user's own."""

    @classmethod
    def named(cls, name: str) -> "ConversationSource":
        """The source of this name; `UserError` says what there is."""
        published, copy = split_copy(name, CONVERSATIONS)
        address = copy or (CONVERSATIONS[published].hub if published else name)
        if not is_source(address):
            near = difflib.get_close_matches(name.partition(":")[0], CONVERSATIONS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"name {', '.join(CONVERSATIONS)}, {KINDS}"
            raise UserError(f"conversations {name}: unknown; {hint}")
        if is_file(address) and "://" not in address and not Path(address).is_file():
            raise UserError(f"conversations {name}: {address}: no such file")
        return cls(name, address, published)

    def open(self) -> Rows:
        """The rows; of a published set those of all splits."""
        if not self.published:
            return open_rows(self.address)
        return open_rows(self.address, "all", CONVERSATIONS[self.published].configuration)

    def read(self, row: Row) -> Messages | str:
        """The messages of a row, or one word why the published set leaves it out; `BrokenRow` if it has none."""
        if not self.published:
            return _checked(_from_columns(row))
        found = published_row(self.published, CONVERSATIONS[self.published].read, row)
        return found if isinstance(found, str) else _checked(chat_messages(found, "messages"))


def resolved_conversations(name: str) -> str:
    """The same name with `~` and relative paths written out, so that it means the same in any directory."""
    return name and resolved(name, CONVERSATIONS)


def _from_columns(row: Row) -> Messages:
    """Messages of a user's own row: its `messages`, or its `prompt` and `completion`, each text or messages."""
    if row.get("messages") is not None:
        return chat_messages(row["messages"], "messages")
    if row.get("prompt") is None or row.get("completion") is None:
        raise BrokenRow(f"has neither messages nor prompt and completion; its columns are {', '.join(map(repr, row))}")
    return _turn(row, "prompt", "user") + _turn(row, "completion", "assistant")


def _turn(row: Row, column: str, role: str) -> Messages:
    value = row[column]
    if isinstance(value, str):
        return ({"role": role, "content": value},)
    return chat_messages(value, f"{column}, if it is not text,")


def _checked(messages: Messages) -> Messages:
    if not any(message["role"] == "assistant" for message in messages):
        raise BrokenRow("has no message of the assistant, so nothing to imitate")
    return messages
