"""Rows of a data set: of a local file, JSONL or parquet, or of the Hugging Face hub.

They come as a stream, since a published data set can be a hundred times what is left of it once repetitions are gone.
"""

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from threepo.errors import UserError

Row = dict[str, Any]
SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")
_BATCH = 4096
"""Rows that are turned into Python objects at a time."""


class BrokenRow(Exception):
    """A row that is not what it should be; its text says why. `line` is where it stands, where a file has lines."""

    def __init__(self, reason: str, line: int | None = None) -> None:
        super().__init__(reason)
        self.line = line


def iterate_file(path: Path) -> Iterator[Row | BrokenRow]:
    """The rows of a file; lines without a row in them come as what is wrong with them.

    `UserError` where the file as a whole cannot be read.
    """
    if not path.is_file():
        raise UserError(f"data file {path}: no such file")
    if not path.name.endswith(SUFFIXES):
        raise UserError(f"data file {path}: must end in {' or '.join(SUFFIXES)}")
    return _parquet_rows(path) if path.suffix == ".parquet" else _jsonl_rows(path)


def iterate_rows(source: str, split: str | None, name: str | None = None) -> Iterator[Row | BrokenRow]:
    """The rows of `source`: a local file, or a data set on the hub with its `split` and configuration `name`.

    Without a split, those of all splits, one split after another.
    What ends in a suffix of `SUFFIXES` is a file; a folder that is here is taken for a data set of the hub's layout.
    `UserError` if it is not there or cannot be read.
    """
    if source.endswith(SUFFIXES):
        return iterate_file(Path(source).expanduser())
    return _hub_rows(source, split, name)


def read_file(path: Path) -> list[Row]:
    """All rows of a file; `UserError` names the file, the line and what is wrong with it."""
    return _all(f"data file {path}", iterate_file(path))


def read_rows(source: str, split: str, name: str | None = None) -> list[Row]:
    """All rows of `iterate_rows`; `UserError` for the first that is broken."""
    return _all(f"data set {source}", iterate_rows(source, split, name))


def read_hub_file(source: str, file: str) -> list[dict[str, Any]]:
    """All rows of one file of a data set on the hub, for those that `datasets` cannot load without running a script."""
    import huggingface_hub

    try:
        path = huggingface_hub.hf_hub_download(source, file, repo_type="dataset")
    except (OSError, ValueError) as error:
        first = next(iter(str(error).splitlines()), "")
        raise UserError(
            f"data set {source}: its {file} cannot be loaded from the Hugging Face hub: {type(error).__name__}: "
            f"{first}; check the connection, or name a local {' or '.join(SUFFIXES)} file"
        ) from error
    return read_file(Path(path))


def stem(path: str) -> str:
    """The name of a file without its folder and suffix."""
    return Path(path.removesuffix(".gz")).stem


def value_at(row: Mapping[str, Any], *keys: str) -> Any:
    """What stands under the keys of a row, one inside the other; `BrokenRow` if there is nothing."""
    value: Any = row
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    if value is None:
        raise BrokenRow(f"has no {'.'.join(keys)}; its columns are {', '.join(map(repr, row)) or 'none'}")
    return value


def text_at(row: Mapping[str, Any], *keys: str) -> str:
    """The text under the keys of a row, without blanks around it; `BrokenRow` if there is none."""
    value = value_at(row, *keys)
    if not isinstance(value, str) or not value.strip():
        raise BrokenRow(f"its {'.'.join(keys)} is {'empty' if isinstance(value, str) else 'no text'}")
    return value.strip()


def without_nulls(message: Mapping[str, Any]) -> dict[str, Any]:
    """A chat message without empty keys, which parquet gives to all as soon as one has them: templates ask for them."""
    return {key: value for key, value in message.items() if value is not None}


def _all(source: str, rows: Iterable[Row | BrokenRow]) -> list[Row]:
    found = []
    for number, row in enumerate(rows, start=1):
        if isinstance(row, BrokenRow):
            raise UserError(f"{source}, {where(row, number)}: {row}")
        found.append(row)
    return found


def where(broken: BrokenRow, number: int) -> str:
    """What messages call the place of a broken row, the `number`-th."""
    return f"row {number}" if broken.line is None else f"line {broken.line}"


def _jsonl_rows(path: Path) -> Iterator[Row | BrokenRow]:
    for number, line in enumerate(_lines(path), start=1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
        except UnicodeDecodeError as error:
            yield BrokenRow(f"is no UTF-8 text ({error.reason}); save the file as UTF-8", number)
            continue
        if text:
            yield _parse(text, number)


def _lines(path: Path) -> Iterator[bytes]:
    """Only "\\n" ends one: JSON strings may hold the other characters that text files take for line ends."""
    if path.suffix != ".gz":
        with open(path, "rb") as file:
            yield from file
        return
    try:
        with gzip.open(path) as unpacked:
            yield from unpacked
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"data file {path}: not a whole gzip file: {error}; make or copy it again") from error


def _parse(text: str, number: int) -> Row | BrokenRow:
    try:
        row = json.loads(text)
    except RecursionError:
        return BrokenRow("its values are nested too deeply", number)
    except ValueError as error:  # JSONDecodeError, or a number of more digits than Python reads
        return BrokenRow(f"not valid JSON: {error}", number)
    if not isinstance(row, dict):
        return BrokenRow(f"must be an object with named columns, not {text[:40]}", number)
    if "\\u" in text and not _can_be_encoded(row):
        return BrokenRow("has half of a character: \\ud800 to \\udfff come in pairs", number)
    return row


def _can_be_encoded(row: Row) -> bool:
    """Whether its texts are texts: JSON can escape the two halves of a character one without the other."""
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _parquet_rows(path: Path) -> Iterator[Row | BrokenRow]:
    import pyarrow
    import pyarrow.parquet

    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(_BATCH):
            yield from _arrow_rows(batch)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"data file {path}: not a valid parquet file: {error}") from error


def _arrow_rows(table: Any) -> Iterable[Row | BrokenRow]:
    """The rows of a `pyarrow.RecordBatch` or `Table`."""
    try:
        return table.to_pylist()  # type: ignore[no-any-return]
    except ValueError:  # at a row that is to be named
        return [_arrow_row(table.slice(number, 1)) for number in range(table.num_rows)]


def _arrow_row(table: Any) -> Row | BrokenRow:
    try:
        return table.to_pylist()[0]  # type: ignore[no-any-return]
    except ValueError as error:  # texts that are no UTF-8, or a time that Python has none for
        return BrokenRow(f"has a value that cannot be read: {error}")


def _hub_rows(source: str, split: str | None, name: str | None) -> Iterator[Row | BrokenRow]:
    place = str(Path(source).expanduser()) if Path(source).expanduser().is_dir() else source
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            f"data set {source}: loading it from the Hugging Face hub needs the package datasets; run "
            f"pip install 'threepo[hub]', or name a local {' or '.join(SUFFIXES)} file"
        ) from error
    try:
        found = datasets.load_dataset(place, name, split=split)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        first = next(iter(str(error).splitlines()), "")
        raise UserError(
            f"data set {source}: {f'its split {split!r}' if split else 'it'} cannot be loaded from the Hugging Face "
            f"hub: {type(error).__name__}: {first}; check the name and the connection, or name a local "
            f"{' or '.join(SUFFIXES)} file"
        ) from error
    for part in (found,) if split else found.values():
        for table in part.with_format("arrow").iter(_BATCH):  # ten times as fast as row by row
            yield from _arrow_rows(table)
