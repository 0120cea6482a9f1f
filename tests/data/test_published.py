"""Published data sets, from files and folders of their published schema."""

from pathlib import Path

import pytest

from published_rows import Row, code_row, dapo_row, gsm8k_row, write_rows
from threepo.config import DataConfig
from threepo.data.finite import FiniteProblems
from threepo.data.published import CODE, CODE_R1_INSTRUCTIONS, CODE_STDIN, DAPO_AFTER, DAPO_BEFORE, MATH_TRAINING
from threepo.data.source import open_heldout, open_source, open_training
from threepo.errors import UserError

GSM8K = [gsm8k_row(f"What is {i} + {i}?", f"{i} + {i} = <<{i}+{i}={2 * i}>>{2 * i}\n#### {2 * i}") for i in range(5)]


def opened(name: str, path: Path, rows: list[Row], **fields: object) -> FiniteProblems:
    settings = DataConfig(train=f"{name}:{write_rows(path, rows)}", **fields)
    problems = open_training(settings).problems
    assert isinstance(problems, FiniteProblems)
    return problems


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_dapo_keeps_the_first_row_of_each_index_without_the_published_instructions(suffix: str, tmp_path: Path) -> None:
    rows = [
        dapo_row("What is $1 + 1$?", "2", "a"),
        dapo_row("Name\n\nthe answer: Answer: what is $x^2$ for $x = 3$?", "9", "b"),
        dapo_row("What is $1 + 1$?", "3", "a"),
    ] * 3
    problems = opened("dapo-math-17k", tmp_path / f"dapo{suffix}", rows)
    found = [(p.id, p.answer) for p in problems.problems]
    assert found == [("dapo-math-17k/train/a", "2"), ("dapo-math-17k/train/b", "9")]
    assert problems.problems[1].prompt == "Name\n\nthe answer: Answer: what is $x^2$ for $x = 3$?"
    assert problems.counts() == {"problems": 2, "rows": 9, "duplicates": 7, "broken": 0, "too_long": 0}
    templated = problems.problems[0].templated("")
    assert templated == MATH_TRAINING.replace("{prompt}", "What is $1 + 1$?")
    assert "Answer:" not in templated
    assert problems.problems[0].templated("{prompt} Go.") == "What is $1 + 1$? Go.", "a template of the user's own wins"


GOOD = dapo_row("What is $1 + 1$?", "2", "good")
BROKEN_DAPO: list[tuple[Row, str]] = [
    ({**GOOD, "prompt": [{"role": "user", "content": "What is $1$?"}]}, "not a problem between the instructions"),
    ({**GOOD, "prompt": [{"role": "user", "content": f"{DAPO_BEFORE}\n\nWhat is $1$?"}]}, "not a problem between"),
    ({**GOOD, "prompt": [{"role": "user", "content": f"What is $1$?\n\n{DAPO_AFTER}"}]}, "not a problem between"),
    ({**GOOD, "prompt": [{"role": "user", "content": f"{DAPO_BEFORE}\n\n{DAPO_AFTER}"}]}, "not a problem between"),
    ({**GOOD, "prompt": GOOD["prompt"] * 2}, "is not a row of dapo-math-17k as published: ValueError"),
    ({**GOOD, "reward_model": {"style": "rule", "ground_truth": 2}}, "is not a row of dapo-math-17k"),
    ({**GOOD, "extra_info": None}, "is not a row of dapo-math-17k"),
    ({"problem": "What is $1$?", "answer": "1"}, "is not a row of dapo-math-17k as published: KeyError: 'prompt'"),
]


@pytest.mark.parametrize(("row", "reason"), BROKEN_DAPO)
def test_rows_of_another_schema_are_broken(
    row: Row, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [GOOD, row]
    with pytest.raises(UserError, match=rf"^data file .*dapo.jsonl, row 2: .*{reason}.*; .*data.broken_rows = 'skip'"):
        opened("dapo-math-17k", tmp_path / "dapo.jsonl", rows)
    problems = opened("dapo-math-17k", tmp_path / "dapo.jsonl", rows, broken_rows="skip")
    assert (len(problems.problems), problems.broken) == (1, 1)
    assert "left out 1 of 2 rows as broken: row 2: " in capsys.readouterr().err


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_code_tests_reach_the_column_tests(suffix: str, tmp_path: Path) -> None:
    functional = "def check(candidate):\n    assert candidate(1) == 2\n\ncheck(Solution().add)"
    cases = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}
    prefixed = code_row("Write add.", {"functional": functional}, CODE_R1_INSTRUCTIONS[0] + "\n")
    rows = [
        prefixed | {"extra_info": {"prefix": "import re"}},
        code_row("Add two numbers.", cases),
        code_row("Subtract.", cases, "Please."),
    ]
    problems = opened("code-r1-12k", tmp_path / f"code{suffix}", rows)
    add, stdin, other = problems.problems
    assert add.prompt == "Write add."
    assert add.columns == {"tests": {"functional": functional, "prefix": "import re"}}
    assert (stdin.prompt, stdin.columns["tests"]) == (f"Add two numbers.\n\n{CODE_STDIN}", cases)
    assert str(other.prompt).startswith("Please.\nSubtract."), "only what is known to be the instruction is taken off"
    assert stdin.templated("") == CODE.replace("{prompt}", str(stdin.prompt))
    assert [p.id for p in problems.problems] == [f"code-r1-12k/train/{i}" for i in (1, 2, 3)]


@pytest.mark.parametrize(
    "tests",
    [
        {},
        "check(add)",
        {"functional": ""},
        {"inputs": ["1"], "outputs": ["1", "2"]},
        {"inputs": [1], "outputs": [1]},
    ],
)
def test_code_without_tests_is_broken(tests: object, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match="row 1: (its ground_truth holds neither|is not a row of code-r1-12k as published)"
    ):
        opened("code-r1-12k", tmp_path / "code.jsonl", [code_row("Add.", tests)])


def test_code_rows_of_another_schema_are_broken(tmp_path: Path) -> None:
    good = code_row("Add.", {"functional": "check(add)"})
    system, user = good["prompt"]
    truncated = {**good, "reward_model": {"ground_truth": '{"functional": "ch', "style": "rule"}}
    for row, reason in (
        ({**good, "prompt": [system]}, "is not a row of code-r1-12k"),
        ({**good, "prompt": [user, user]}, "is not a row of code-r1-12k"),
        (code_row("", {"functional": "check(add)"}), "an instruction, but no problem"),
        (truncated, "is not a row of code-r1-12k as published: JSONDecodeError"),
    ):
        with pytest.raises(UserError, match=f"row 1: .*{reason}"):
            opened("code-r1-12k", tmp_path / "code.jsonl", [row])


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        ("2 + 2 = <<2+2=4>>4\n#### 4", "4"),
        ("#### 1,234,567", "1234567"),
        ("He owes $1,000.\n#### -1,000.50", "-1000.50"),
        ("#### 3\nno, rather\n####  5 ", "5"),
        ("#### 1, 2 and 3", "1, 2 and 3"),
    ],
)
def test_gsm8k_answers_stand_after_the_last_mark(answer: str, reference: str, tmp_path: Path) -> None:
    problem = opened("gsm8k", tmp_path / "gsm8k.jsonl", [gsm8k_row("How many?", answer)]).problems[0]
    assert (problem.answer, problem.prompt, problem.template) == (reference, "How many?", MATH_TRAINING)
    assert problem.columns == {"solution": answer.strip()}


@pytest.mark.parametrize("answer", ["4", "####", "#### \n", ""])
def test_gsm8k_answers_without_the_mark_are_broken(answer: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="row 1: its answer has no ####"):
        opened("gsm8k", tmp_path / "gsm8k.jsonl", [gsm8k_row("How many?", answer)])


# Where they are read from


@pytest.fixture
def gsm8k_folder(tmp_path: Path) -> Path:
    """A folder as the hub lays it out."""
    folder = tmp_path / "gsm8k"
    write_rows(folder / "main" / "train-00000-of-00001.parquet", GSM8K)
    write_rows(folder / "main" / "test-00000-of-00001.parquet", GSM8K[:2])
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: main/train-*\n"
        "  - split: test\n    path: main/test-*\n---\n"
    )
    return folder


def test_a_downloaded_folder_has_the_hubs_splits(gsm8k_folder: Path) -> None:
    settings = DataConfig(train=f"gsm8k:{gsm8k_folder}")
    train, heldout = open_training(settings), open_heldout(settings)
    assert train.verifier == heldout.verifier == "math"
    assert [p.answer for p in train.problems.known()] == ["0", "2", "4", "6", "8"]
    assert [p.id for p in heldout.problems.known()] == ["gsm8k/heldout/1", "gsm8k/heldout/2"]
    assert train.problems.known()[1].label == f"data set {gsm8k_folder} (train), row 2"


def test_folders_that_lack_what_is_named_are_refused(gsm8k_folder: Path) -> None:
    (gsm8k_folder / "main" / "train-00000-of-00001.parquet").write_bytes(b"PAR1 but not really")
    with pytest.raises(UserError, match=r"data set .*gsm8k \(train\): cannot be read: ArrowInvalid"):
        open_training(DataConfig(train=f"gsm8k:{gsm8k_folder}"))


def test_only_what_has_a_test_split_has_a_held_out_half(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "gsm8k.jsonl", GSM8K)
    for name in (f"gsm8k:{path}", "dapo-math-17k", "dapo-math-17k:someone/copy"):
        with pytest.raises(UserError, match=f"{name} has no held-out problems of its own"):
            open_heldout(DataConfig(train=name))
    heldout = open_heldout(DataConfig(train="sorting", eval=f"gsm8k:{path}"))
    assert len(heldout.problems.known()) == 5


def test_names_of_copies_that_are_missing_are_refused() -> None:
    with pytest.raises(UserError, match=r"'gsm8k:': names no copy; write gsm8k, or gsm8k:COPY"):
        open_source("gsm8k:", "train", DataConfig(train="gsm8k:"))
    with pytest.raises(UserError, match="did you mean dapo-math-17k"):
        open_source("dapo-math:someone/copy", "train", DataConfig(train="x"))
    with pytest.raises(UserError, match=r"a data set \(code-r1-12k, dapo-math-17k, gsm8k\)"):
        open_source("zzz", "train", DataConfig(train="x"))
    with pytest.raises(UserError, match="none.jsonl: no such file"):
        open_source("gsm8k:none.jsonl", "train", DataConfig(train="x"))
