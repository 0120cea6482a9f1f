"""Conversations for fine-tuning: tokenised once into a memory-mapped file, and read by epoch (sft.md 3).

`datasets` keeps the file in its cache, or in `conversations.cache`, under a digest of everything that determines the
tokens, so later runs find it. The rows that are left out are in the file too, so all counts come from it.
"""

import json
import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from threepo.config import ConversationConfig
from threepo.data.digest import digest
from threepo.data.published import CONVERSATIONS
from threepo.data.rows import Batch, BrokenRow, Row
from threepo.data.source import Conversations, open_conversations, split_copy
from threepo.errors import UserError
from threepo.files import disk_errors
from threepo.models.chat import ChatEncoder, EncodedChat, RenderedChat, UnrenderableChat
from threepo.models.policy import Policy
from threepo.types import SupervisedRow

FORMAT = 3
"""Part of the file's digest. Raise it when the same source and settings give other tokens or columns than before."""
ROWS_AT_ONCE = 128
"""Rows that are read and tokenised together."""
LINE_EVERY = 30.0
"""Seconds between lines about the progress."""
NAMED = 3
"""Number of broken rows that are reported one by one; later ones are only counted."""
COLUMNS = ("tokens", "loss_ranges", "length", "loss_tokens", "dropped", "digest")
"""The file's columns. `loss_ranges` is a flat list of bounds; `dropped` is why a row is left out, or empty."""
Part = Literal["source", "eval"]
"""Conversations to train on, or held-out ones."""


@dataclass(frozen=True)
class PreparedConversations:
    """Tokenised conversations on disk."""

    source: str
    """Their name in messages."""
    table: Any
    """A memory-mapped `datasets.Dataset` with `COLUMNS`; slices of a column are far faster than its iterator."""

    @cached_property
    def kept(self) -> list[int]:
        """The rows of the table that are not left out."""
        return [number for number, reason in enumerate(self.table["dropped"][:]) if not reason]

    @cached_property
    def digests(self) -> list[str]:
        """A digest of the tokens and loss ranges of each conversation that is kept."""
        return list(filter(None, self.table["digest"][:]))

    @cached_property
    def record(self) -> dict[str, Any]:
        """The entry in the run folder: the file of the tokens, a digest of them, and counts of the source's rows."""
        return {
            "source": self.source,
            "file": self.table.cache_files[0]["filename"],
            "rows": len(self.table),
            "kept": len(self.kept),
            "dropped": dict(Counter(filter(None, self.table["dropped"][:]))),
            "tokens": sum(self.table["length"][:]),
            "loss_tokens": sum(self.table["loss_tokens"][:]),
            "longest": max(self.table["length"][:], default=0),
            "digest": digest(self.digests),
        }

    def line(self) -> str:
        """The counts in one line."""
        rows, kept, tokens, counted = (f"{self.record[key]:,}" for key in ("rows", "kept", "tokens", "loss_tokens"))
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in sorted(self.record["dropped"].items()))
        counts = f"kept {kept} of {rows} rows{f' (left out: {reasons})' if reasons else ''}, {tokens} tokens"
        return f"conversations {self.source}: {counts}, {counted} of them to imitate"

    def batch(self, numbers: Iterable[int]) -> list[SupervisedRow]:
        """The rows of one step: conversations by their numbers among those that are kept."""
        columns = self.table[[self.kept[number] for number in numbers]]
        rows = zip(columns["tokens"], columns["loss_ranges"], strict=True)
        return [
            SupervisedRow(tuple(tokens), tuple(zip(bounds[::2], bounds[1::2], strict=True)), index)
            for index, (tokens, bounds) in enumerate(rows)
        ]


def refuse_unreadable(settings: ConversationConfig) -> None:
    """Raise `UserError` for a source or template that cannot be read, before a model takes minutes to load."""
    for name in filter(None, (settings.source, settings.eval)):
        open_conversations(name)
    if settings.chat_template:
        read_template(settings.chat_template)


def read_template(path: str) -> str:
    """The chat template in a file."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"conversations.chat_template = {path!r}: cannot be read: {error}") from error


def prepare(policy: Policy, settings: ConversationConfig, part: Part, file: str) -> PreparedConversations:
    """The tokens of `settings.source` or `settings.eval`: from the cache, or made now and cached.

    `file` is where a resumed run had them; it is used if it still exists. `UserError` if the settings refuse a row of
    the source, or if no row is left.
    """
    import datasets

    name = getattr(settings, part)
    table = datasets.Dataset.from_file(file) if Path(file).is_file() else _tokenized(policy, settings, part)
    prepared = PreparedConversations(name, table)
    print(f"threepo: {prepared.line()}", file=sys.stderr)
    if not prepared.kept:
        raise UserError(f"conversations {name}: none is left; see the counts above")
    return prepared


def _tokenized(policy: Policy, settings: ConversationConfig, part: Part) -> Any:
    """A `datasets.Dataset` of the tokens."""
    import datasets

    name, most_rows = getattr(settings, part), settings.eval_rows if part == "eval" else 0
    source = open_conversations(name)
    preparation = _Preparation(policy, settings, source, most_rows or sys.maxsize)
    table, tokenizer = source.rows.table, policy.tokenizer
    parts = (
        (FORMAT, split_copy(name, CONVERSATIONS)[0], table._fingerprint, most_rows),  # which changes when a file does
        (tokenizer.backend_tokenizer.to_str(), tokenizer.get_chat_template(), tokenizer.special_tokens_map),
        (policy.stop_tokens, settings.loss_on, preparation.limit, settings.too_long, settings.broken_rows),
    )
    key = digest([json.dumps(parts, default=str)])
    integer, text = datasets.Value("int32"), datasets.Value("string")
    kinds = (datasets.List(integer), datasets.List(integer), integer, integer, text, text)
    with disk_errors(Path(settings.cache or datasets.config.HF_DATASETS_CACHE)):
        return table.select(range(min(preparation.most_rows, len(table)))).map(
            preparation,
            batched=True,
            batch_size=ROWS_AT_ONCE,
            remove_columns=table.column_names,
            features=datasets.Features(dict(zip(COLUMNS, kinds, strict=True))),
            cache_file_name=str(Path(settings.cache) / f"conversations-{key}.arrow") if settings.cache else None,
            load_from_cache_file=True,
            new_fingerprint=key,
        )


class _Preparation:
    """Makes the columns of the file from the rows of a source, batch by batch and in their order."""

    def __init__(self, policy: Policy, settings: ConversationConfig, source: Conversations, most_rows: int) -> None:
        self.policy, self.settings, self.source, self.most_rows = policy, settings, source, most_rows
        self.encoder = ChatEncoder(policy.tokenizer, frozenset(policy.stop_tokens), settings.loss_on)
        self.limit = min(settings.max_tokens, policy.context)
        self.read, self.broken, self.last_line = 0, 0, time.monotonic()

    def __call__(self, batch: Batch) -> dict[str, list[Any]]:
        if time.monotonic() - self.last_line > LINE_EVERY:
            self.last_line = time.monotonic()
            print(f"threepo: {self.source.rows.name}: {self.read:,} rows read so far", file=sys.stderr)
        rows = self.source.rows.parsed(batch)[: self.most_rows - self.read]
        chats = [self._rendered(row) for row in rows]
        encoded = iter(self.encoder.encode([chat for chat in chats if isinstance(chat, RenderedChat)]))
        columns = [
            self._columns(next(encoded), chat.location) if isinstance(chat, RenderedChat) else _left_out(chat)
            for chat in chats
        ]
        return {name: [row[i] for row in columns] for i, name in enumerate(COLUMNS)}

    def _rendered(self, row: Row | BrokenRow) -> RenderedChat | str:
        """The text of a row, or the reason why it is left out."""
        self.read += 1
        location = f"{self.source.rows.name}, row {self.read}"
        try:
            if isinstance(row, BrokenRow):
                raise row
            messages = self.source.read(row)
            return messages if isinstance(messages, str) else self.encoder.render(messages, location)
        except (BrokenRow, UnrenderableChat) as error:
            return self._broken(str(error), location)

    def _columns(self, chat: EncodedChat, location: str) -> tuple[Any, ...]:
        length = len(chat.tokens)
        if not chat.loss_ranges:
            return _left_out(self._broken("the chat template marks no part of it as the assistant's", location))
        if length > self.limit:
            if self.settings.too_long == "error":
                raise UserError(
                    f"{location}: {length} tokens, more than {self.limit}, which is conversations.max_tokens or the "
                    f"model's context; set conversations.too_long = 'drop' to leave such rows out"
                )
            return _left_out("too_long")
        self.policy.check_vocabulary(location, chat.tokens)
        bounds = [bound for span in chat.loss_ranges for bound in span]
        counted = sum(end - first for first, end in chat.loss_ranges)
        return chat.tokens, bounds, length, counted, "", digest([repr((chat.tokens, bounds))])

    def _broken(self, reason: str, location: str) -> str:
        if self.settings.broken_rows == "error":
            raise UserError(f"{location}: {reason}; fix the row, or set conversations.broken_rows = 'skip'")
        self.broken += 1
        if self.broken <= NAMED:
            print(f"threepo: left out: {location}: {reason}", file=sys.stderr)
        return "broken"


def _left_out(reason: str) -> tuple[Any, ...]:
    return [], [], 0, 0, reason, ""
