"""Conversations to imitate, one after another: of a user's own file, or of a data set known by name."""

import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from threepo.data import llama_nemotron
from threepo.data.published_set import absolute_place
from threepo.data.rows import SUFFIXES, BrokenRow, Row, iterate_rows, value_at, where, without_nulls
from threepo.errors import UserError

Messages = tuple[Mapping[str, Any], ...]
"""Chat messages of the form {"role": ..., "content": ...}; further keys reach the chat template."""


@dataclass(frozen=True)
class ConversationSet:
    """A data set as its makers published it, and how its rows become conversations."""

    hub: str
    """Its id on the Hugging Face hub."""
    configuration: str
    """Of several that the hub has under this id."""
    convert: Callable[[Row], list[Any] | str]
    """Messages, or why rows like this one are left out, in one word to count by; raises `BrokenRow`."""


SETS = {
    "llama-nemotron": ConversationSet(llama_nemotron.HUB, llama_nemotron.CONFIGURATION, llama_nemotron.conversation)
}


@dataclass(frozen=True)
class ConversationRow:
    """A row that was read: a conversation, or what is left out and why."""

    place: str
    """Where it stands, for messages."""
    messages: Messages = ()
    dropped: str = ""
    """Why the data set leaves it out."""
    broken: str = ""
    """What is wrong with it."""


@dataclass(frozen=True)
class ConversationSource:
    """Where conversations are."""

    name: str
    place: str
    """A file, a folder in the hub's layout, or an id of the hub."""
    kind: ConversationSet | None
    """None: a user's own file."""

    @classmethod
    def open(cls, name: str) -> "ConversationSource":
        """The source of this name; `UserError` says what there is."""
        known, colon, place = name.partition(":")
        kind = SETS.get(known)
        if kind and colon and not place:
            raise UserError(f"conversations {name}: names no place; write {known}, or {known}:PLACE")
        place = (place or kind.hub) if kind else name
        if place.endswith(SUFFIXES):
            if not Path(place).is_file():
                raise UserError(f"conversations {name}: {place}: no such file")
        elif not kind:
            near = difflib.get_close_matches(known, SETS, n=1)
            names = f"name a {' or '.join(SUFFIXES)} file, or {', '.join(SETS)}"
            raise UserError(f"conversations {name}: unknown; {f'did you mean {near[0]}?' if near else names}")
        return cls(name, place, kind)

    def rows(self) -> Iterator[ConversationRow]:
        """All rows in the order of the source, read as they are asked for."""
        convert = self.kind.convert if self.kind else _from_columns
        raw = iterate_rows(self.place, None, self.kind.configuration if self.kind else None)
        for number, row in enumerate(raw, start=1):
            try:
                if isinstance(row, BrokenRow):
                    raise row
                converted = convert(row)
                messages, dropped = ((), converted) if isinstance(converted, str) else (_checked(converted), "")
                yield ConversationRow(f"{self.place}, row {number}", messages, dropped)
            except BrokenRow as error:
                yield ConversationRow(f"{self.place}, {where(error, number)}", broken=str(error))


def resolved_conversations(name: str) -> str:
    """The same name with `~` and relative paths spelt out, so that it means the same in any directory."""
    known, colon, place = name.partition(":")
    if known in SETS:
        return f"{known}{colon}{place and absolute_place(place)}"
    return name and absolute_place(name)


def _from_columns(row: Row) -> list[Any]:
    """Messages of a user's own row: its `messages`, or its `prompt` and `completion`, each text or messages."""
    if "prompt" in row and "completion" in row and row.get("messages") is None:
        return [*_as_messages(row, "prompt", "user"), *_as_messages(row, "completion", "assistant")]
    messages = value_at(row, "messages")
    if not isinstance(messages, list):
        raise BrokenRow("its messages are no list")
    return messages


def _as_messages(row: Row, column: str, role: str) -> list[Any]:
    value = value_at(row, column)
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, list):
        raise BrokenRow(f"its {column} is neither text nor a list of messages")
    return value


def _checked(messages: list[Any]) -> Messages:
    """Messages without empty keys; `BrokenRow` if they are none."""
    checked = []
    for message in messages:
        kept = without_nulls(message) if isinstance(message, dict) else {}
        for key in ("role", "content"):
            if not isinstance(kept.get(key), str):
                raise BrokenRow(f"the {key} of one of its messages is no text")
        checked.append(kept)
    if not any(message["role"] == "assistant" for message in checked):
        raise BrokenRow("it has no message of the assistant, so nothing to imitate")
    return tuple(checked)
