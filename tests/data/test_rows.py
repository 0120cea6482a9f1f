"""Rows of every kind of source, with the values that the files have; and what is refused."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from threepo.data.rows import BrokenRow, chat_messages, open_rows
from threepo.errors import UserError

ROWS: list[dict[str, Any]] = [{"prompt": f"{i}", "answer": 2 * i, "notes": ["a", None]} for i in range(3)]
README = """---
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
- config_name: other
  data_files: other/*
---
"""


def rows_of(*source: Any, **options: Any) -> list[Any]:
    return list(open_rows(*source, **options))


def lines(rows: list[Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def write_parquet(path: Path, rows: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize("name", ["p.jsonl", "p.jsonl.gz", "p.json", "p.json.gz", "many.json", "p.parquet"])
def test_every_kind_of_file_gives_the_same_rows(name: str, tmp_path: Path) -> None:
    path = tmp_path / "[odd] *name?" / name
    if path.suffix == ".parquet":
        write_parquet(path, ROWS)
    else:
        write(path, lines(ROWS) if name in ("p.jsonl", "p.jsonl.gz", "p.json") else json.dumps(ROWS, indent=1).encode())
    assert rows_of(str(path)) == ROWS
    assert open_rows(str(path)).name == f"data file {path}"


@pytest.mark.parametrize("suffix", [".csv", ".csv.gz"])
def test_cells_of_csv_are_text(suffix: str, tmp_path: Path) -> None:
    """007, 1.50, NA and True are answers that a reader of types would change."""
    content = 'prompt,answer\n"two\nlines, ""quoted""",007\nb,1.50\nc,NA\nd,True\ne\n'
    path = write(tmp_path / f"p{suffix}", b"\xef\xbb\xbf" + content.encode())
    rows = rows_of(str(path))
    assert [row["answer"] for row in rows] == ["007", "1.50", "NA", "True", None]
    assert rows[0]["prompt"] == 'two\nlines, "quoted"'


VALUES = [
    {"answer": "2024-01-01"},
    {"answer": "2024-01-02", "extra": {}},
    {"answer": "12", "tests": {"inputs": ["1"], "outputs": ["2"]}},
    {"answer": 12, "tests": {"functional": "f(1)"}},
    {"answer": 12.5, "tests": "[1, 2]"},
    {"answer": 10**30, "tests": [1, "1", [1.5]]},
    {"answer": None, "tests": {"inputs": [1, "1"], "outputs": []}},
    {"answer": True, "text": "a\u2028b\u0085c"},
]


def test_values_of_json_are_those_of_the_file(tmp_path: Path) -> None:
    """The JSON reader of `datasets` changes all of these: to dates, to one number type, to parsed text, to nulls."""
    path = write(tmp_path / "p.jsonl", json.dumps(VALUES[7], ensure_ascii=False).encode() + b"\r\n" + lines(VALUES[:7]))
    found = rows_of(str(path))
    assert found == [VALUES[7], *VALUES[:7]]
    assert [type(row["answer"]) for row in found] == [bool, str, str, str, int, float, int, type(None)]


def test_a_byte_order_mark_and_empty_lines_are_passed_over(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", b'\xef\xbb\xbf{"a": 1}\n\n  \n{"a": 2}\n\n')
    assert rows_of(str(path)) == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"a": 1', "is not valid JSON"),
        (b"{}{}", "is not valid JSON"),
        (b"[1]", "must be an object with named columns, not [1]"),
        (b'{"a": "\xe9"}', "is not valid JSON in UTF-8"),
        (b'{"a": "\\ud800"}', "surrogates not allowed"),
        (b'{"a": ' + b"9" * 5000 + b"}", "is not valid JSON"),
        (b'{"a": ' + b"[" * 200_000, "is not valid JSON"),
    ],
)
def test_a_broken_line_breaks_its_own_row(line: bytes, reason: str, tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", b'{"a": 1}\n' + line + b'\n{"a": 3}\n')
    first, broken, last = rows_of(str(path))
    assert (first, last) == ({"a": 1}, {"a": 3})
    assert isinstance(broken, BrokenRow)
    assert reason in str(broken)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.parquet", b"PAR1 but not really", r"p.parquet: cannot be read: ArrowInvalid"),
        ("p.jsonl", b"", r"p.jsonl: is empty"),
        ("p.json", b'[{"a": 1}', r"p.json: is not valid: "),
        ("p.csv", b'a,b\n"open,1\n', r"p.csv: is not valid: unexpected end"),
        ("p.csv", b"a,b,a,\n1,2,3,\n", r"p.csv: is not valid: its header names 'a' more than once; rename the"),
        ("p.csv", "a\né\n".encode("latin-1"), r"p.csv: is not UTF-8: .* byte 0xe9 .*; save it as UTF-8, or .* iconv$"),
    ],
)
def test_damaged_files_are_refused(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    path = write(tmp_path / name, content)
    with pytest.raises(UserError, match=f"^data file .*{message}"):
        rows_of(str(path))


def test_a_parquet_file_without_rows_is_empty(tmp_path: Path) -> None:
    table = pyarrow.table({"prompt": pyarrow.array(["a"])})
    pyarrow.parquet.write_table(table[:0], tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"^data file .*a.parquet: is empty$"):
        rows_of(str(tmp_path / "a.parquet"))
    pyarrow.parquet.write_table(table, tmp_path / "b.parquet")
    assert rows_of(f"{tmp_path}/") == [{"prompt": "a"}]


def test_damaged_gzip_files_are_refused(tmp_path: Path) -> None:
    packed = gzip.compress(lines(ROWS))
    for damaged in (b"no gzip", packed[:-9], packed[:20] + b"\0\0\0\0" + packed[24:]):
        (tmp_path / "p.jsonl.gz").write_bytes(damaged)
        with pytest.raises(UserError, match=r"^data file .*p.jsonl.gz: cannot be read: \w+: "):
            open_rows(str(tmp_path / "p.jsonl.gz"))


def test_a_row_with_more_cells_than_columns_is_broken(tmp_path: Path) -> None:
    broken, row = rows_of(str(write(tmp_path / "p.csv", b"a,b\n1,2,3\n4,5\n")))
    assert isinstance(broken, BrokenRow)
    assert row == {"a": "4", "b": "5"}


def test_a_folder_of_shards_is_one_source(tmp_path: Path) -> None:
    write(tmp_path / "b.jsonl.gz", lines(ROWS[2:]))
    write(tmp_path / "a.jsonl", lines(ROWS[:2]))
    assert rows_of(str(tmp_path)) == ROWS
    write_parquet(tmp_path / "p" / "0.parquet", ROWS[:1])
    write_parquet(tmp_path / "p" / "1.parquet", ROWS[1:])
    assert rows_of(f"{tmp_path}/p") == ROWS
    write(tmp_path / "c" / "0.csv", b"a\n1\n")
    write(tmp_path / "c" / "1.csv", b"a\n2\n")
    assert rows_of(f"{tmp_path}/c/") == [{"a": "1"}, {"a": "2"}]


def test_files_that_datasets_would_leave_out_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a name has a split in it, it takes only such names."""
    for name in ("train", "part1", "part2"):
        write(tmp_path / f"{name}.jsonl", lines(ROWS[:1]))
    with pytest.raises(UserError, match=r": 2 files are in no split, such as part1\.jsonl: name one file, or move"):
        rows_of(str(tmp_path))
    (tmp_path / "part1.jsonl").rename(tmp_path / "test.jsonl")
    (tmp_path / "part2.jsonl").rename(tmp_path / ".part2.jsonl")
    write(tmp_path / ".ipynb_checkpoints" / "train-checkpoint.jsonl", lines(ROWS))
    write(tmp_path / "dataset_infos.json", b"{}")
    monkeypatch.chdir(tmp_path.parent)
    (tmp_path.parent / "linked").symlink_to(tmp_path)
    for name in (str(tmp_path), tmp_path.name, f"./{tmp_path.name}/../{tmp_path.name}", "linked"):
        assert rows_of(name) == ROWS[:1], name


def test_a_folder_with_files_of_two_kinds_is_refused(tmp_path: Path) -> None:
    """Unless its README.md says which of them are the data."""
    write(tmp_path / "a.csv", b"a\n1\n")
    write(tmp_path / "b.jsonl.gz", lines(ROWS))
    write(tmp_path / "notes.txt", b"notes")
    with pytest.raises(UserError, match=r": has .csv and .jsonl files; name one file, or keep one kind in the folder$"):
        open_rows(str(tmp_path))
    readme = "---\nconfigs:\n- config_name: default\n  data_files: {}\n---\n"
    write(tmp_path / "README.md", readme.format("a.csv").encode())
    assert rows_of(str(tmp_path)) == [{"a": "1"}]
    write(tmp_path / "README.md", readme.format("['a.csv', 'b.jsonl.gz']").encode())
    with pytest.raises(UserError, match="has .csv and .jsonl files"):
        open_rows(str(tmp_path))


def test_splits_and_configurations_of_a_folder(tmp_path: Path) -> None:
    """The folder has the hub's layout."""
    write(tmp_path / "README.md", README.encode())
    write(tmp_path / "main" / "train-0.jsonl", lines(ROWS[:1]))
    write(tmp_path / "main" / "train-1.jsonl", lines(ROWS[1:2]))
    write(tmp_path / "main" / "test-0.jsonl", lines(ROWS[2:]))
    write(tmp_path / "other" / "x.jsonl", lines(ROWS[:1]))
    assert rows_of(f"{tmp_path}:main") == ROWS[:2]
    assert rows_of(f"{tmp_path}:main:test") == ROWS[2:]
    assert rows_of(f"{tmp_path}:main", "all") == ROWS
    assert rows_of(str(tmp_path), configuration="other") == ROWS[:1]
    write_parquet(tmp_path / "plain" / "0.parquet", ROWS)
    assert rows_of(str(tmp_path / "plain"), configuration="main") == ROWS, "it has no configurations"
    with pytest.raises(UserError, match="'main' not found"):
        open_rows(f"{tmp_path}/plain:main")
    with pytest.raises(UserError, match=r"has no split 'dev', but train, test; name one as .*::SPLIT"):
        open_rows(f"{tmp_path}:main:dev")
    with pytest.raises(UserError, match=r"Config name is missing. .*\['main', 'other'\]"):
        open_rows(str(tmp_path))


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_changed_file_gives_its_new_rows_and_nothing_is_written_next_to_it(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / "data" / f"p{suffix}"
    for rows in (ROWS, ROWS[:2], ROWS[::-1]):
        write_parquet(path, rows) if suffix == ".parquet" else write(path, lines(rows))
        assert rows_of(str(path)) == rows_of(str(path)) == rows
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".csv", ".parquet"])
def test_a_replaced_file_is_read_even_with_the_old_time_of_modification(suffix: str, tmp_path: Path) -> None:
    """tar -x, rsync -t and cp -p leave such a file. The tokenised conversations are cached under the fingerprint."""
    path, fingerprints = tmp_path / f"p{suffix}", set()
    for value in ("1", "2", "333"):
        rows = [{"a": value}]
        content = f"a\n{value}\n".encode() if suffix == ".csv" else lines(rows)
        write_parquet(path, rows) if suffix == ".parquet" else write(path, content)
        os.utime(path, (1e9, 1e9))
        assert rows_of(str(path)) == rows
        fingerprints.add(open_rows(str(path)).table._fingerprint)
    assert len(fingerprints) == 3


WITHOUT_NETWORK = """
import socket, sys
attempts = []
def refuse(*arguments, **options):
    attempts.append(arguments)
    raise OSError("no network")
socket.getaddrinfo = socket.socket.connect = refuse
from threepo.data.rows import open_rows
print([len(list(open_rows(source))) for source in sys.argv[1:]], attempts)
"""


def test_local_sources_never_use_the_network(tmp_path: Path) -> None:
    """The hub is allowed here: `load_dataset("json", ...)` would report to it that a file is read."""
    sources = [write(tmp_path / name, lines(ROWS)) for name in ("p.jsonl", "p.json.gz", "folder/0.jsonl")]
    sources += [write_parquet(tmp_path / "p.parquet", ROWS), write(tmp_path / "p.csv", b"a\n1\n2\n3\n")]
    sources[2] = sources[2].parent
    environment = {
        key: value for key, value in os.environ.items() if key not in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
    }
    command = [sys.executable, "-c", WITHOUT_NETWORK, *map(str, sources)]
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert printed == "[3, 3, 3, 3, 3] []\n"


def test_folders_that_datasets_reads_otherwise_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    (tmp_path / "a[1]").mkdir()
    write(tmp_path / "a[1]" / "train.jsonl", lines(ROWS))
    for folder, message in (("saved", "was written by save_to_disk.*to_parquet"), ("a[1]", "as a pattern; rename")):
        with pytest.raises(UserError, match=message):
            open_rows(f"{tmp_path / folder}/")
    blocked = tmp_path / "blocked"
    blocked.write_text("")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(blocked))
    file = write(tmp_path / "p.jsonl", lines(ROWS))
    with pytest.raises(UserError, match=r"check the file, and that the cache of datasets \(HF_DATASETS_CACHE"):
        open_rows(str(file))


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    for name in ("none.jsonl", f"{tmp_path}/none", "./none", "~/none.csv"):
        with pytest.raises(UserError, match="no such file or folder"):
            open_rows(name)
    with pytest.raises(UserError, match=r"data set some/set \(train\): cannot be read: .*; check the name"):
        open_rows("some/set")
    with pytest.raises(UserError, match=r"data file hf://datasets/a/b/c.jsonl: cannot be read"):
        open_rows("hf://datasets/a/b/c.jsonl")


def test_chat_messages_have_the_keys_that_they_were_written_with(tmp_path: Path) -> None:
    """Parquet gives every message the keys of all, and templates ask whether a message has such a key as tool_calls."""
    chats = [[{"role": "user", "content": "a"}], [{"role": "user", "content": "b", "name": "Ada"}]]
    rows = rows_of(str(write_parquet(tmp_path / "p.parquet", [{"chat": chat} for chat in chats])))
    assert [list(chat_messages(row["chat"], "chat")) for row in rows] == chats
