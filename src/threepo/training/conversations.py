"""Conversations for fine-tuning: read, tokenised once into a file on disk, and handed out by epoch (sft.md 3).

Reading streams: some hundred conversations are in memory at a time, whatever the size of the source. The file
(`cache`/conversations-KEY.arrow: tokens as int32, and the ranges to imitate) is memory-mapped, so a step touches only
its own rows. KEY is a digest of everything that the tokens follow from; a run with the same settings, or with another
optimizer, finds the file and reads nothing else.
"""

import hashlib
import json
import os
import sys
import time
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, Literal, TypeVar

import pyarrow

from threepo.config import ConversationConfig
from threepo.data.conversations import ConversationRow, ConversationSource
from threepo.errors import UserError
from threepo.files import atomic_file, read_json, write_text
from threepo.models.chat import ChatEncoder, EncodedChat, UnrenderableChat
from threepo.models.policy import Policy
from threepo.types import SupervisedRow

FORMAT = 2
"""Part of every key: raise it when the same source and settings would give other tokens."""
ROWS_AT_ONCE = 128
"""Conversations tokenised together, and in memory at a time."""
LINE_EVERY = 30.0
"""Seconds between lines on how far reading is."""
NAMED = 3
"""Broken rows that are left out with a line of their own; the others are only counted."""

_SCHEMA = pyarrow.schema({"tokens": pyarrow.list_(pyarrow.int32()), "taught": pyarrow.list_(pyarrow.int32())})
_Item = TypeVar("_Item")
Part = Literal["source", "eval"]
"""Which conversations of a recipe."""


@dataclass(frozen=True)
class ConversationReport:
    """What became of a source's rows."""

    source: str
    rows: int
    kept: int
    dropped: dict[str, int]
    """Rows left out, by reason."""
    split: int
    """Conversations where a token would have joined a prompt to its answer, and was split (sft.md 2)."""
    tokens: int
    taught_tokens: int
    """Those that the loss counts."""
    longest: int
    """Tokens of the longest conversation."""
    digest: str
    """Of the tokens kept, in their order."""

    def line(self) -> str:
        """The counts as messages show them."""
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in sorted(self.dropped.items()))
        split = f"; {self.split:,} with a token split where an answer begins" if self.split else ""
        return (
            f"conversations {self.source}: kept {self.kept:,} of {self.rows:,} rows"
            f"{f' (left out: {reasons})' if reasons else ''}, {self.tokens:,} tokens, {self.taught_tokens:,} of them "
            f"to imitate{split}"
        )


@dataclass(frozen=True)
class PreparedConversations:
    """Tokenised conversations on disk."""

    path: Path
    report: ConversationReport
    table: Any
    """A memory-mapped `pyarrow.Table` of `_SCHEMA`."""

    @classmethod
    def open(cls, path: Path) -> "PreparedConversations":
        """The conversations in `path`, whose report lies beside it."""
        with pyarrow.memory_map(str(path)) as file:
            table = pyarrow.ipc.open_file(file).read_all()
        return cls(path, ConversationReport(**read_json(path.with_suffix(".json"))), table)

    def row(self, number: int, index: int) -> SupervisedRow:
        """Conversation `number` as row `index` of a step."""
        taught = self.table["taught"][number].as_py()
        ranges = zip(taught[::2], taught[1::2], strict=True)
        return SupervisedRow(tuple(self.table["tokens"][number].as_py()), tuple(ranges), index)

    def all_rows(self) -> list[SupervisedRow]:
        """All conversations as one batch."""
        return [self.row(number, number) for number in range(self.report.kept)]


@dataclass(frozen=True)
class ConversationBatches:
    """Conversations by optimizer step: a function of (seed, epoch), so that a resumed run needs no state."""

    prepared: PreparedConversations
    batch_size: int
    seed: int

    def __post_init__(self) -> None:
        count = self.prepared.report.kept
        if count < self.batch_size:
            raise UserError(
                f"conversations {self.prepared.report.source}: {count} are left to train on, fewer than "
                f"conversations.batch_size = {self.batch_size}; lower it"
            )

    @property
    def steps_per_epoch(self) -> int:
        """Whole batches in an epoch; the rest of it is dropped."""
        return self.prepared.report.kept // self.batch_size

    def rows(self, step: int) -> list[SupervisedRow]:
        """The conversations of optimizer step `step`."""
        epoch, position = divmod(step, self.steps_per_epoch)
        order = epoch_order(self.prepared.report.kept, self.seed, epoch)
        numbers = order[position * self.batch_size : (position + 1) * self.batch_size]
        return [self.prepared.row(number, index) for index, number in enumerate(numbers)]


@lru_cache(maxsize=1)
def epoch_order(count: int, seed: int, epoch: int) -> Sequence[int]:
    """The numbers below `count` in the order of an epoch. Two million take a second or two, and 16 MB."""
    numbers = array("L", range(count))
    Random(f"epoch/{seed}/{epoch}").shuffle(numbers)
    return numbers


def refuse_missing(settings: ConversationConfig) -> None:
    """Raise `UserError` for a source or a template that is not there: what can be known without a model."""
    for name in filter(None, (settings.source, settings.eval)):
        ConversationSource.open(name)
    if settings.chat_template:
        read_template(settings.chat_template)


def prepare(
    policy: Policy, settings: ConversationConfig, part: Part, earlier: Mapping[str, Any] | None
) -> PreparedConversations:
    """The conversations of `settings.source` or `settings.eval` as tokens: from the cache, or read now and put there.

    `earlier` is what a run that is resumed has kept of them: its file is taken where it still lies, and others are
    refused. `UserError` too if the source has rows that its settings refuse, or if none are left.
    """
    if earlier and _complete(Path(earlier["file"])):
        prepared = PreparedConversations.open(Path(earlier["file"]))
    else:
        prepared = _from_cache(policy, settings, part)
    report = prepared.report
    if earlier and earlier["digest"] != report.digest:
        raise UserError(
            f"conversations {report.source}: are not those that the run began with ({report.kept:,} of "
            f"{report.rows:,} rows now, {earlier['kept']:,} of {earlier['rows']:,} then); put the old ones back, or "
            f"begin a new run"
        )
    print(f"threepo: {report.line()}", file=sys.stderr)
    if not report.kept:
        raise UserError(f"conversations {report.source}: none is left; see the counts above")
    return prepared


def _from_cache(policy: Policy, settings: ConversationConfig, part: Part) -> PreparedConversations:
    source = ConversationSource.open(getattr(settings, part))
    encoder = ChatEncoder(policy.tokenizer, frozenset(policy.stop_tokens), settings.loss_on)
    limit = min(settings.max_tokens, policy.context)
    most_rows = settings.eval_rows if part == "eval" else 0
    path = _cache_folder(settings) / f"conversations-{_key(source, encoder, settings, limit, most_rows)}.arrow"
    if not _complete(path):
        preparation = _Preparation(policy, encoder, source.name, settings, limit)
        rows = source.rows()
        report = preparation.write(islice(rows, most_rows) if most_rows else rows, path)
        write_text(path.with_suffix(".json"), json.dumps(asdict(report), indent=2) + "\n")
    return PreparedConversations.open(path)


def _complete(path: Path) -> bool:
    """Whether the tokens are on disk; their report is written after them."""
    return path.is_file() and path.with_suffix(".json").is_file()


def read_template(path: str) -> str:
    """The chat template in a file."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"conversations.chat_template = {path!r}: cannot be read: {error}") from error


@dataclass
class _Preparation:
    """Reading a source into a file, and what is counted on the way."""

    policy: Policy
    encoder: ChatEncoder
    source: str
    settings: ConversationConfig
    limit: int
    counts: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    longest: int = 0

    def write(self, rows: Iterator[ConversationRow], path: Path) -> ConversationReport:
        """Write the tokens of all rows that are kept; returns what became of them."""
        digest, said = hashlib.blake2b(digest_size=16), time.monotonic()
        with (
            atomic_file(path) as temporary,
            pyarrow.OSFile(str(temporary), "wb") as file,
            pyarrow.ipc.new_file(file, _SCHEMA) as writer,
        ):
            for chunk in _chunks(rows, ROWS_AT_ONCE):
                batch = _as_batch(self._encode(chunk))
                writer.write_batch(batch)
                for column in batch.columns:
                    digest.update(column.value_lengths().to_numpy())
                    digest.update(column.flatten().to_numpy())
                if time.monotonic() - said > LINE_EVERY:
                    said = time.monotonic()
                    print(f"threepo: {self._report('').line()}; reading on", file=sys.stderr)
        return self._report(digest.hexdigest())

    def _report(self, digest: str) -> ConversationReport:
        names = ("rows", "kept", "split", "tokens", "taught_tokens")
        counts = {name: self.counts[name] for name in names}
        return ConversationReport(
            self.source, dropped=dict(self.dropped), longest=self.longest, digest=digest, **counts
        )

    def _encode(self, rows: Sequence[ConversationRow]) -> list[EncodedChat]:
        """The conversations of these rows that are kept, as tokens."""
        self.counts["rows"] += len(rows)
        rendered, places = [], []
        for row in rows:
            if row.dropped:
                self.dropped[row.dropped] += 1
            elif row.broken:
                self._break(row.place, row.broken)
            else:
                try:
                    rendered.append(self.encoder.render(row.messages, row.place))
                    places.append(row.place)
                except UnrenderableChat as error:
                    self._break(row.place, str(error))
        chats = self.encoder.encode(rendered, places) if rendered else []
        return [chat for chat, place in zip(chats, places, strict=True) if self._keep(chat, place)]

    def _break(self, place: str, reason: str) -> None:
        if self.settings.broken_rows == "error":
            raise UserError(f"{place}: {reason}; mend the row, or set conversations.broken_rows = 'skip'")
        self.dropped["broken"] += 1
        if self.dropped["broken"] <= NAMED:
            print(f"threepo: left out: {place}: {reason}", file=sys.stderr)

    def _keep(self, chat: EncodedChat, place: str) -> bool:
        """Whether a conversation is short enough, with something to imitate; counts it."""
        length, taught = len(chat.tokens), sum(end - first for first, end in chat.taught)
        if not taught:
            self._break(place, "nothing in it is to be imitated: the chat template marks none of it as the assistant's")
            return False
        if length > self.limit:
            if self.settings.too_long == "error":
                raise UserError(
                    f"{place}: {length} tokens, more than {self.limit}, which is conversations.max_tokens or the "
                    f"model's context; set conversations.too_long = 'drop' to leave such rows out"
                )
            self.dropped["too_long"] += 1
            return False
        self.policy.check_vocabulary(place, chat.tokens)
        self.longest = max(self.longest, length)
        self.counts["kept"] += 1
        self.counts["split"] += chat.split
        self.counts["tokens"] += length
        self.counts["taught_tokens"] += taught
        return True


def _as_batch(chats: Sequence[EncodedChat]) -> Any:
    taught = [[bound for span in chat.taught for bound in span] for chat in chats]
    columns = zip(([chat.tokens for chat in chats], taught), _SCHEMA.types, strict=True)
    return pyarrow.record_batch([pyarrow.array(column, kind) for column, kind in columns], schema=_SCHEMA)


def _chunks(items: Iterator[_Item], size: int) -> Iterator[list[_Item]]:
    while chunk := list(islice(items, size)):
        yield chunk


def _cache_folder(settings: ConversationConfig) -> Path:
    if settings.cache:
        return Path(settings.cache)
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "threepo"


def _key(
    source: ConversationSource, encoder: ChatEncoder, settings: ConversationConfig, limit: int, most_rows: int
) -> str:
    """A digest of all that the tokens follow from. A file goes by path, size and time of change; the rest by name."""
    file = Path(source.place)
    version = (file.stat().st_size, file.stat().st_mtime_ns) if file.is_file() else ()
    tokenizer = encoder.tokenizer
    parts = (
        FORMAT,
        (source.name, source.place, version, most_rows),
        (tokenizer.backend_tokenizer.to_str(), tokenizer.get_chat_template(), tokenizer.special_tokens_map),
        (sorted(encoder.stop_tokens), encoder.turns, limit, settings.too_long, settings.broken_rows),
    )
    return hashlib.blake2b(json.dumps(parts, default=str).encode(), digest_size=12).hexdigest()
