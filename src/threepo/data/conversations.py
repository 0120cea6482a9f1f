"""Conversations to imitate: of a user's own source, or of a published data set."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from threepo.config.sources import KINDS
from threepo.data.published import CONVERSATIONS, read_published
from threepo.data.rows import BrokenRow, Row, Rows, chat_messages, is_source, open_rows
from threepo.data.source import split_copy, unknown

Messages = tuple[Mapping[str, Any], ...]
"""Chat messages of the form {"role": ..., "content": ...}; further keys reach the chat template."""


@dataclass(frozen=True)
class Conversations:
    """The rows of a source, and how a conversation is read from one."""

    rows: Rows
    read: Callable[[Row], Messages | str]
    """The messages of a row, or one word why the published set leaves it out; `BrokenRow` if it has none."""


def open_conversations(name: str) -> Conversations:
    """The conversations of a source; all splits of a published set."""
    published, copy = split_copy(name, CONVERSATIONS)
    if published:
        known = CONVERSATIONS[published]

        def read(row: Row) -> Messages | str:
            found = read_published(published, known.read, row)
            return found if isinstance(found, str) else chat_messages(found, "messages")

        return Conversations(open_rows(copy or known.hub, "all", known.configuration), read)
    if not is_source(name):
        raise unknown("conversations", name, CONVERSATIONS, f"{', '.join(CONVERSATIONS)}, {KINDS}")
    return Conversations(open_rows(name), _from_columns)


def _from_columns(row: Row) -> Messages:
    """Messages of a user's own row: its `messages`, or its `prompt` and `completion`, each text or messages."""
    if row.get("messages") is not None:
        messages: Messages = chat_messages(row["messages"], "messages")
    elif row.get("prompt") is not None and row.get("completion") is not None:
        messages = _turn(row, "prompt", "user") + _turn(row, "completion", "assistant")
    else:
        raise BrokenRow(f"has neither messages nor prompt and completion; its columns are {', '.join(map(repr, row))}")
    if not any(message["role"] == "assistant" for message in messages):
        raise BrokenRow("has no message of the assistant, so nothing to imitate")
    return messages


def _turn(row: Row, column: str, role: str) -> Messages:
    if isinstance(row[column], str):
        return ({"role": role, "content": row[column]},)
    return chat_messages(row[column], f"{column}, if it is not text,")
