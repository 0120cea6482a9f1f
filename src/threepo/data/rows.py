"""Rows of data sets, which Hugging Face `datasets` reads, maps into memory and caches (HF_DATASETS_CACHE).

Local JSON and CSV files come from `datasets` as text, and Python's own parsers read them. The JSON reader of `datasets`
gives each column one type, which changes values silently: the text "2024-01-01" becomes a date, the text "[1]" next to
an object becomes a list, 1 next to 1.5 becomes 1.0, and an integer above 64 bits becomes a float.
"""

import csv
import glob
import hashlib
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from threepo.config.sources import HUB_FILE, is_file, is_local, split_source
from threepo.errors import UserError

Row = dict[str, Any]
Messages = tuple[Mapping[str, Any], ...]
"""Chat messages of the form {"role": ..., "content": ...}; further keys reach the chat template."""


class BrokenRow(Exception):
    """A row that cannot be used; the text says why."""


@dataclass(frozen=True)
class Rows:
    """The rows of a source in their order, without empty lines, read lazily."""

    name: str
    """The source's name in messages."""
    table: Any
    """A memory-mapped `datasets.Dataset`: of the rows' columns, or of text that `parse` turns into rows."""
    parse: Callable[[str], Iterable[Row | BrokenRow]] | None = None
    """The rows of one text of the table; None: the table has the columns of the rows."""

    @property
    def typed(self) -> bool:
        """True if the columns have types, so that None may stand for a key that a row does not have."""
        return self.parse is None

    def __iter__(self) -> Iterator[Row | BrokenRow]:
        for batch in self.table.iter(1000):
            if self.parse is None:
                yield from (dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True))
                continue
            try:
                for text in batch["text"]:
                    yield from self.parse(text.removeprefix("\ufeff"))  # some programs begin a file with this mark
            except (ValueError, csv.Error) as error:
                raise UserError(f"{self.name}: is not valid: {error}") from error


def open_rows(source: str, split: str = "train", configuration: str | None = None) -> Rows:
    """The rows of `source`; a configuration or split in its name overrides these. The split `all` joins all splits.

    `configuration` is taken where the source has it. A configuration or split in the name has to be there.

    `UserError` if the source is missing or cannot be read.
    """
    import datasets  # takes seconds, and most commands need none

    path, own_configuration, own_split = split_source(source)
    split = own_split or split
    name = f"data file {path}" if is_file(path) else f"data set {path} ({split})"
    try:
        return _open(datasets, name, path, split, own_configuration, configuration)
    except UserError:
        raise
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        cause = error.__cause__ or error  # `datasets` wraps the errors of its readers
        if isinstance(cause, UnicodeDecodeError):
            raise UserError(f"{name}: is not UTF-8: {cause}; save it as UTF-8, or convert it with iconv") from error
        reason = f"{type(cause).__name__}: {' '.join(str(cause).splitlines()[:2])}"
        hint = "check the name and the connection, or name a local copy"
        if is_local(path):
            hint = "check the file"
            if isinstance(cause, OSError) and str(Path(path).expanduser()) not in str(cause):
                hint += ", and that the cache of datasets (HF_DATASETS_CACHE, HF_HOME) can be written and has room"
        raise UserError(f"{name}: cannot be read: {reason}; {hint}") from error


def _open(datasets: Any, name: str, path: str, split: str, own: str, usual: str | None) -> Rows:
    local = Path(path).expanduser()
    if path.startswith(HUB_FILE):  # for data sets that `datasets` refuses, such as those with a loading script
        import huggingface_hub

        organization, dataset, file = path.removeprefix(HUB_FILE).split("/", 2)
        local = Path(huggingface_hub.hf_hub_download(f"{organization}/{dataset}", file, repo_type="dataset"))
    if is_file(path) and local.is_file():
        return _open_files(datasets, name, [str(local)])
    if local.is_dir():
        return _open_folder(datasets, name, local, split, own, usual)
    if is_local(path):
        raise UserError(f"{name}: no such file or folder")
    try:
        return Rows(name, datasets.load_dataset(path, own or usual, split=split))
    except ValueError as error:
        if own or not usual or "BuilderConfig" not in str(error):
            raise
        return Rows(name, datasets.load_dataset(path, split=split))


def _open_folder(datasets: Any, name: str, folder: Path, split: str, own: str, usual: str | None) -> Rows:
    """The rows of a split, whose files `datasets` chooses; `UserError` if it would leave out some without a word."""
    if any((folder / written).is_file() for written in ("state.json", "dataset_dict.json")):
        fix = "write its rows with to_parquet, and name that file"
        raise UserError(f"{name}: was written by save_to_disk, which cannot be read here; {fix}")
    path = str(folder.absolute())
    if glob.has_magic(path):
        fix = "rename the folder, or name one file"
        raise UserError(f"{name}: `datasets` reads *, ? and [ in the path of a folder as a pattern; {fix}")
    has_usual = not own and usual and usual in datasets.get_dataset_config_names(path)
    builder = datasets.load_dataset_builder(path, usual if has_usual else own or None)
    splits = {str(known): files for known, files in builder.config.data_files.items()}
    if split not in ("all", *splits):
        raise UserError(f"{name}: has no split {split!r}, but {', '.join(splits)}; name one as {folder}::SPLIT")
    files = [file for known, its_files in splits.items() if split in (known, "all") for file in its_files]
    # A README.md says which files belong to the data set. Without one, `datasets` takes only files of one kind, and
    # once a name has a split in it, only files of such names.
    offered = files if (folder / "README.md").is_file() else _offered(datasets, folder)
    kinds = set(map(_kind, offered))
    if len(kinds) > 1 and kinds != {".json", ".jsonl"}:
        found = " and ".join(sorted(kinds))
        raise UserError(f"{name}: has {found} files; name one file, or keep one kind in the folder")
    taken = {os.path.realpath(file) for its_files in splits.values() for file in its_files}
    if left := [file for file in offered if os.path.realpath(file) not in taken]:
        names = f"{len(left)} files are in no split, such as {os.path.basename(left[0])}"
        raise UserError(f"{name}: {names}: name one file, or move those of another split elsewhere")
    return _open_files(datasets, name, files)


def _offered(datasets: Any, folder: Path) -> list[str]:
    """The files of rows that `datasets` finds in a folder: none that are hidden, and none that describe others."""
    return [
        str(path)
        for path in sorted(folder.rglob("*"))
        if is_file(path.name)
        and path.name not in datasets.data_files.FILES_TO_IGNORE
        and not any(part.startswith((".", "__")) for part in path.relative_to(folder).parts)
    ]


def _open_files(datasets: Any, name: str, files: Sequence[str]) -> Rows:
    """Rows of local files of one kind. Unlike `load_dataset`, these readers never use the network."""
    files = list(filter(_has_rows, files))  # `datasets` fails at a parquet file without any
    if not files:
        raise UserError(f"{name}: is empty")
    paths, kind = [glob.escape(path) for path in files], _kind(files[0])
    # The name is part of the key of the cache. Without it, the key has only the path and the time of modification.
    content = {"config_name": digest(map(_file_digest, files))}
    if kind not in (".jsonl", ".json", ".csv"):
        return Rows(name, datasets.Dataset.from_parquet(paths, **content))
    options = content | {"features": datasets.Features({"text": datasets.Value("string")})}
    if all(path.endswith((".jsonl", ".jsonl.gz")) for path in files):
        # A byte that is not UTF-8 becomes \x.., which JSON refuses: it breaks its own row and no other (but in a .gz).
        table = datasets.Dataset.from_text(paths, **options, encoding_errors="backslashreplace")
        return Rows(name, table, _json_lines)
    table = datasets.Dataset.from_text(paths, **options, sample_by="document")
    return Rows(name, table, _csv_document if kind == ".csv" else _json_document)


def _has_rows(path: str) -> bool:
    if _kind(path) != ".parquet":
        return os.path.getsize(path) > 0
    from pyarrow.parquet import read_metadata

    return bool(read_metadata(path).num_rows)


def _kind(path: str) -> str:
    return Path(path.removesuffix(".gz")).suffix


def _file_digest(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest(parts: Iterable[str]) -> str:
    """A digest of texts in their order, which shows whether data have changed."""
    total = hashlib.blake2b(digest_size=16)
    for part in parts:
        total.update(part.encode() + b"\0")
    return total.hexdigest()


def _json_lines(text: str) -> Iterator[Row | BrokenRow]:
    return (_json_row(line) for line in text.split("\n") if line.strip())


def _json_row(text: str) -> Row | BrokenRow:
    try:
        row = json.loads(text)
        if "\\u" in text:
            json.dumps(row, ensure_ascii=False).encode()  # refuses half of a surrogate pair
    except (ValueError, RecursionError) as error:
        return BrokenRow(f"is not valid JSON in UTF-8: {error}")
    return row if isinstance(row, dict) else BrokenRow(f"must be an object with named columns, not {text[:40]}")


def _json_document(text: str) -> Iterator[Row | BrokenRow]:
    """A .json file holds an array of objects, or an object in each line."""
    if text.lstrip().startswith("["):
        return map(_json_row, map(json.dumps, json.loads(text)))
    return _json_lines(text)


def _csv_document(text: str) -> Iterator[Row | BrokenRow]:
    """Every cell of a .csv file is text; a row that is too short lacks its last columns."""
    csv.field_size_limit((1 << 31) - 1)
    rows = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    names = list(filter(None, rows.fieldnames or ()))
    if twice := [repr(column) for column in dict.fromkeys(names) if names.count(column) > 1]:
        raise csv.Error(f"its header names {', '.join(twice)} more than once; rename the columns")
    for row in rows:
        yield BrokenRow("has more cells than the file has columns") if None in row else row


def chat_messages(value: Any, name: str, role: str = "", *, typed: bool = False) -> Messages:
    """The chat messages in `value`, without keys that are None; with a `role`, a text is its message.

    `typed`: their columns have a type, as in parquet, which gives every message, and the arguments of every tool call,
    the keys of all; chat templates test which keys there are. `BrokenRow` calls the value `name`. It is an error unless
    `value` is a list of messages with role and content as text.
    """
    if role and isinstance(value, str):
        return ({"role": role, "content": value},)
    messages = value if isinstance(value, list) and all(isinstance(message, dict) for message in value) else []
    texts = [message.get(key) for message in messages for key in ("role", "content")]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise BrokenRow(f"its {name} must be a list of chat messages, each with its role and content as text")
    if typed:
        return tuple(_without_none(messages))
    return tuple({key: part for key, part in message.items() if part is not None} for message in messages)


def tool_schemas(value: Any, *, typed: bool = False) -> list[Row]:
    """The schemas of tools in a column, which may be JSON as text; `typed` as in `chat_messages`. Else `BrokenRow`."""
    written = isinstance(value, str)
    try:
        found = (json.loads(value) if written and value else value) or []
    except ValueError as error:
        raise BrokenRow(f"its tools are not valid JSON: {error}") from error
    if not isinstance(found, list) or not all(isinstance(tool, dict) for tool in found):
        raise BrokenRow("its tools must be a list of JSON schemas")
    return _without_none(found) if typed and not written else found


def _without_none(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_none(part) for part in value]
    return {k: _without_none(v) for k, v in value.items() if v is not None} if isinstance(value, dict) else value
