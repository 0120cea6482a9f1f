"""Conversations for fine-tuning: tokenised once into a memory-mapped file, and read by epoch (sft.md 3).

The file is in the cache of `datasets`, or in `conversations.cache`, under a digest of everything that determines the
tokens, so later runs find it. The rows that are left out are in the file too, so all counts come from it.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from threepo.config import ConversationConfig
from threepo.data.finite import report_broken
from threepo.data.rows import BrokenRow, digest, tool_schemas
from threepo.data.rows import Row as SourceRow
from threepo.data.source import Conversations, open_conversations
from threepo.errors import UserError
from threepo.files import atomic_file
from threepo.models.chat import ChatEncoder, RenderedChat, Span, UnrenderableChat
from threepo.models.policy import Policy
from threepo.types import Row, integers

FORMAT = 9
"""Part of the file's digest. Raise it when the same source and settings give other tokens or columns than before."""
ROWS_AT_ONCE = 128
"""Rows that are tokenised together."""
Part = Literal["source", "eval"]
"""Setting that names the conversations: to train on, or held out."""


@dataclass(frozen=True)
class PreparedConversations:
    """Tokenised conversations on disk."""

    source: str
    """Name of their source, for messages."""
    table: Any
    """A memory-mapped `datasets.Dataset` (see `_tokenized`); slices of a column are far faster than its iterator."""

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

    def batch(self, numbers: Iterable[int]) -> list[Row]:
        """The rows of one step; `numbers` count the conversations that are kept."""
        columns = self.table[[self.kept[number] for number in numbers]]
        rows = zip(columns["tokens"], columns["loss_ranges"], strict=True)
        return [
            Row(index, integers(tokens), tuple(zip(bounds[::2], bounds[1::2], strict=True)))
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
        return Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"conversations.chat_template = {path!r}: cannot be read: {error}") from error


def prepare(policy: Policy, settings: ConversationConfig, part: Part, file: str) -> PreparedConversations:
    """The tokenised conversations of `settings.source` or `settings.eval`, from the cache if it has them.

    `file` is where a resumed run had them; it is used if it still exists. `UserError` if the settings refuse a row of
    the source, or if no row is left.
    """
    import datasets

    name = getattr(settings, part)
    file = file if Path(file).is_file() else _tokenized(policy, settings, part)
    prepared = PreparedConversations(name, datasets.Dataset.from_file(file))
    rows, kept, tokens, counted = (f"{prepared.record[key]:,}" for key in ("rows", "kept", "tokens", "loss_tokens"))
    dropped = ", ".join(f"{reason} {count:,}" for reason, count in sorted(prepared.record["dropped"].items()))
    counts = f"kept {kept} of {rows} rows{f' (left out: {dropped})' if dropped else ''}, {tokens} tokens"
    print(f"threepo: conversations {name}: {counts}, {counted} of them in the loss", file=sys.stderr)
    if not prepared.kept:
        raise UserError(f"conversations {name}: every row was left out; see the counts above")
    return prepared


def _tokenized(policy: Policy, settings: ConversationConfig, part: Part) -> str:
    """Path of the file of the tokens, which is written unless the cache has it."""
    import datasets
    from datasets.arrow_writer import ArrowWriter

    name, most_rows = getattr(settings, part), settings.eval_rows if part == "eval" else 0
    source, tokenizer = open_conversations(name), policy.tokenizer
    preparation = _Preparation(policy, settings, source)
    fingerprint = source.rows.table._fingerprint  # changes when the bytes of a local file change
    parts = (
        (FORMAT, source.published, fingerprint, most_rows),
        (tokenizer.backend_tokenizer.to_str(), tokenizer.chat_template, tokenizer.special_tokens_map),
        (policy.stop_tokens, settings.loss_on, preparation.limit, settings.too_long, settings.broken_rows),
        policy.model.get_input_embeddings().weight.shape[0],  # tokens are checked against them
    )
    key = digest([json.dumps(parts, default=str)])
    path = Path(settings.cache or datasets.config.HF_DATASETS_CACHE) / f"conversations-{key}.arrow"
    if not path.is_file():
        integer, text = datasets.Value("int32"), datasets.Value("string")
        integers = datasets.List(integer)
        columns = {"tokens": integers, "loss_ranges": integers, "length": integer, "loss_tokens": integer}
        features = datasets.Features(columns | {"dropped": text, "digest": text})
        rows = datasets.utils.tqdm(islice(source.rows, most_rows or None), name, unit=" rows", mininterval=10)
        with atomic_file(path) as temporary, ArrowWriter(path=str(temporary), features=features) as writer:
            for values in preparation.columns(rows):
                writer.write(dict(zip(features, values, strict=True)))
            writer.finalize()
    return str(path)


class _Preparation:
    """Makes the columns of the file from the rows of a source."""

    def __init__(self, policy: Policy, settings: ConversationConfig, source: Conversations) -> None:
        self.policy, self.settings, self.source = policy, settings, source
        self.encoder = ChatEncoder(policy.tokenizer, frozenset(policy.stop_tokens), settings.loss_on)
        self.limit = min(settings.max_tokens, policy.context)
        self.broken: list[str] = []

    def columns(self, rows: Iterable[SourceRow | BrokenRow]) -> Iterator[tuple[Any, ...]]:
        """The file's columns for each row: `loss_ranges` as a list of bounds; `dropped` says why a row is left out."""
        numbered, number = enumerate(rows, start=1), 0
        while batch := list(islice(numbered, ROWS_AT_ONCE)):
            chats = [self._rendered(row, number) for number, row in batch]
            encoded = iter(self.encoder.encode([chat for chat in chats if isinstance(chat, RenderedChat)]))
            for chat in chats:
                found = chat if isinstance(chat, str) else self._encoded(*next(encoded), chat.location)
                yield ([], [], 0, 0, found, "") if isinstance(found, str) else found
            number = batch[-1][0]
        report_broken(self.source.rows.name, self.broken, number)

    def _rendered(self, row: SourceRow | BrokenRow, number: int) -> RenderedChat | str:
        """The text of a row, or why it is left out."""
        location = f"{self.source.rows.name}, row {number}"
        try:
            if isinstance(row, BrokenRow):
                raise row
            messages = self.source.read(row)
            if isinstance(messages, str):
                return messages
            plain = row.get("messages") is None and all(isinstance(row.get(k), str) for k in ("prompt", "completion"))
            tools = tool_schemas(row.get("tools"), typed=self.source.rows.typed)
            return self.encoder.render(messages, location, plain=plain, tools=tools)
        except (BrokenRow, UnrenderableChat) as error:
            return self._broken(str(error), location)

    def _encoded(self, tokens: list[int], ranges: list[Span], location: str) -> tuple[Any, ...] | str:
        """The columns of a conversation, or why it is left out."""
        if not ranges:
            return self._broken("the chat template marks no part of it as the assistant's", location)
        if len(tokens) > self.limit:
            if self.settings.too_long == "error":
                limit = f"{self.limit}, which is conversations.max_tokens or the model's context"
                fix = "set conversations.too_long = 'drop' to leave such rows out"
                raise UserError(f"{location}: {len(tokens)} tokens, more than {limit}; {fix}")
            return "too_long"
        counted = sum(end - first for first, end in ranges)
        if not counted:
            return self._broken("prompt and completion are empty, so there is nothing to learn", location)
        self.policy.check_vocabulary(location, tokens)
        bounds = [bound for span in ranges for bound in span]
        return tokens, bounds, len(tokens), counted, "", digest([repr((tokens, bounds))])

    def _broken(self, reason: str, location: str) -> str:
        if self.settings.broken_rows == "error":
            raise UserError(f"{location}: {reason}; fix the row, or set conversations.broken_rows = 'skip'")
        self.broken.append(f"{location}: {reason}")
        return "broken"
