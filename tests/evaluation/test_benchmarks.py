"""Each benchmark from rows of the schema that it is published in, on the hub and as local files."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from local_benchmarks import opened

from threepo.config import BenchmarksConfig, DataConfig
from threepo.data.published import MATH_EVALUATION
from threepo.errors import UserError
from threepo.evaluation.benchmarks import open_benchmark, parse_names

URL = "https://example.org"
DATA = DataConfig(train="benchmarks")
SCHEMAS: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "aime24 on the hub": ("aime24", {"id": 60, "problem": "P", "solution": r"\boxed{204}", "url": URL}, "60", "204"),
    "aime24 as a file": (
        "aime24",
        {"id": 60, "problem": "P", "solution": "S", "answer": "204", "url": URL, "question": "P"},
        "60",
        "204",
    ),
    "aime25": ("aime25", {"problem": "P", "answer": "70", "id": "0"}, "0", "70"),
    "aime26": ("aime26", {"problem": "P", "answer": 70}, "0", "70"),
    "amc23 on the hub": ("amc23", {"id": 3, "question": "P", "answer": "27.0", "url": URL}, "3", "27"),
    "amc23 as a file": ("amc23", {"id": 3, "problem": "P", "answer": 27.0, "url": URL, "question": "P"}, "3", "27"),
    "math500": (
        "math500",
        {
            "problem": "P",
            "solution": "S",
            "answer": r"\left( 3, \frac{\pi}{2} \right)",
            "subject": "Precalculus",
            "level": 2,
            "unique_id": "test/precalculus/807.json",
        },
        "test/precalculus/807.json",
        r"\left( 3, \frac{\pi}{2} \right)",
    ),
    "minerva on the hub": ("minerva", {"question": "P", "answer": "1.6"}, "0", "1.6"),
    "minerva as a file": (
        "minerva",
        {"problem": "P", "solution": r"so $\boxed{1}$, thus \[ s=\boxed{1.6} \mathrm{~cm} \]", "type": "T", "idx": 0},
        "0",
        "1.6",
    ),
    "gsm8k": ("gsm8k", {"question": "P", "answer": "She has 2*617=<<2*617=1234>>1234.\n#### 1,234"}, "0", "1234"),
}


@pytest.mark.parametrize("schema", SCHEMAS)
def test_every_published_schema_is_read(schema: str, tmp_path: Path) -> None:
    name, row, identity, answer = SCHEMAS[schema]
    benchmark = opened(tmp_path, name, [row])
    (problem,) = benchmark.problems.known()
    assert problem.id == f"{name}/{identity}"
    assert problem.templated("") == MATH_EVALUATION.replace("{prompt}", "P")
    assert problem.answer == answer
    assert problem.columns["answer"] == answer
    assert (benchmark.label, benchmark.verifier) == (name, "math")
    assert benchmark.source == str(tmp_path / f"{name}.jsonl")


def test_only_the_first_problems_of_a_parquet_file(tmp_path: Path) -> None:
    row = {"problem": "P", "solution": r"\boxed{5}", "type": "T"}
    copy = str(tmp_path / "minerva_math.parquet")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row] * 3), copy)
    benchmark = open_benchmark("minerva", copy, BenchmarksConfig(names=("minerva",), problems=2), DATA)
    assert [problem.id for problem in benchmark.problems.known()] == ["minerva/0", "minerva/1"]


def test_folders_of_files_are_copies_too(tmp_path: Path) -> None:
    """The split is `test` unless the name says another."""
    for folder, split in (("tests", "test"), ("shards", "train")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{split}.jsonl").write_text(json.dumps(SCHEMAS["aime25"][1]) + "\n")
    settings = BenchmarksConfig(names=("aime25",))
    for copy in ("tests", "shards::train"):
        assert len(open_benchmark("aime25", f"{tmp_path}/{copy}", settings, DATA).problems.known()) == 1
    with pytest.raises(
        UserError, match=r"shards \(test\): has no split 'test', but train; name one as .*shards::SPLIT"
    ):
        open_benchmark("aime25", f"{tmp_path}/shards", settings, DATA)


def test_a_folder_may_have_the_hubs_configurations(tmp_path: Path) -> None:
    (tmp_path / "main").mkdir()
    (tmp_path / "main" / "test.jsonl").write_text(json.dumps(SCHEMAS["gsm8k"][1]) + "\n")
    files = "  data_files:\n  - split: test\n    path: main/test.jsonl\n"
    parts = "".join(f"- config_name: {name}\n{files}" for name in ("main", "socratic"))
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n{parts}---\n")
    found = open_benchmark("gsm8k", str(tmp_path), BenchmarksConfig(names=("gsm8k",)), DATA)
    assert len(found.problems.known()) == 1


def test_a_prompt_of_ones_own(tmp_path: Path) -> None:
    benchmark = opened(tmp_path, "aime25", [SCHEMAS["aime25"][1]], math_prompt="Q: {prompt}\nA: {x}")
    assert benchmark.problems.known()[0].templated("") == "Q: P\nA: {x}"
    assert benchmark.template == "Q: {prompt}\nA: {x}"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"text": "P", "answer": "1"}], "row 1: has no problem or question; its columns are 'text', 'answer'"),
        ([{"problem": "P"}], "row 1: has no answer"),
        ([{"problem": "P", "solution": "it is 5"}], "row 1: has no answer"),
        ([{"problem": "P", "answer": "1", "id": 4}] * 2, "row 2: has the id 'aime25/4' of benchmark aime25, .*, row 1"),
        ([], "is empty"),
    ],
)
def test_rows_that_are_none_of_its(rows: list[dict[str, Any]], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        opened(tmp_path, "aime25", rows)


def test_rows_that_are_none_of_its_can_be_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "aime25.jsonl"
    copy.write_text('{"text": "P"}\n{"problem": "P", "answer": "1"}\n{"cut\n')
    settings = BenchmarksConfig(names=("aime25",))
    with pytest.raises(UserError, match=r"row 1: has no problem or question; .*data.broken_rows = 'skip'"):
        open_benchmark("aime25", str(copy), settings, DATA)
    found = open_benchmark("aime25", str(copy), settings, DataConfig(train="benchmarks", broken_rows="skip"))
    assert [problem.id for problem in found.problems.known()] == ["aime25/1"]
    assert "left out 2 of 3 rows as broken: row 1: has no problem" in capsys.readouterr().err


def test_names() -> None:
    assert parse_names(["aime24", "math500=/my=file.jsonl"]) == {"aime24": "", "math500": "/my=file.jsonl"}
