"""Conversations: of a user's own file in any of its forms, and of the paper's data set with what it leaves out."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from threepo.data.conversations import ConversationSource, resolved_conversations
from threepo.data.llama_nemotron import conversation
from threepo.data.rows import BrokenRow
from threepo.errors import UserError

HI, OK = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ok"}


def write(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [HI, OK], "other": 1},
        {"prompt": "hi", "completion": "ok"},
        {"prompt": [HI], "completion": [OK]},
        {"prompt": [HI], "completion": "ok", "messages": None},
    ],
)
def test_the_forms_of_a_users_row(row: dict[str, Any], tmp_path: Path) -> None:
    (read,) = ConversationSource.open(write(tmp_path / "a.jsonl", row)).rows()
    assert read.messages == (HI, OK)
    assert (read.dropped, read.broken) == ("", "")
    assert read.place == f"{tmp_path / 'a.jsonl'}, row 1"


def test_parquet_and_keys_that_only_some_messages_have(tmp_path: Path) -> None:
    rows = [{"messages": [HI, OK | {"reasoning_content": "hm"}]}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    (read,) = ConversationSource.open(str(tmp_path / "a.parquet")).rows()
    assert read.messages == (HI, OK | {"reasoning_content": "hm"})


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"text": "hi"}, "has no messages; its columns are 'text'"),
        ({"messages": None}, "has no messages"),
        ({"messages": "hi"}, "its messages are no list"),
        ({"messages": ["hi"]}, "the role of one of its messages is no text"),
        ({"messages": [{"role": "user"}]}, "the content of one"),
        ({"messages": [{"role": "user", "content": ["hi"]}]}, "the content of one"),
        ({"messages": [HI]}, "no message of the assistant"),
        ({"messages": []}, "no message of the assistant"),
        ({"prompt": "hi", "completion": None}, "has no completion"),
        ({"prompt": 3, "completion": "ok"}, "its prompt is neither text nor a list"),
        ([1], "must be an object"),
    ],
)
def test_broken_rows_say_why(row: Any, reason: str, tmp_path: Path) -> None:
    good = {"messages": [HI, OK]}
    read = list(ConversationSource.open(write(tmp_path / "a.jsonl", good, row, good)).rows())
    assert [bool(each.messages) for each in read] == [True, False, True]
    assert reason in read[1].broken
    assert read[1].place.endswith(("row 2", "line 2"))


def test_rows_of_the_papers_set_of_another_schema_are_broken() -> None:
    answer = "<think>so</think>Two."
    for asked, output, reason in ((3, answer, "its input is neither"), (HI, answer, "its input"), ("hi", 3, "no text")):
        with pytest.raises(BrokenRow, match=reason):
            conversation({"input": asked, "output": output})


@pytest.mark.parametrize(
    ("output", "kept"),
    [
        ("<think>\nso\n</think>\n\nTwo.", True),
        ("<think>a</think>b <think>c</think>", True),
        ("<think>a</think>", False),
        ("<think>a</think>\n \n", False),
        ("<think>\n\n</think>Two.", False),
        ("<think>endless", False),
        ("Two.", False),
        ("So: <think>a</think>Two.", False),
        ("", False),
    ],
)
def test_the_paper_keeps_an_answer_after_a_thought(output: str, kept: bool) -> None:
    row = {"input": [HI], "output": output, "system_prompt": "detailed thinking on", "generator": "DeepSeek-R1"}
    assert conversation(row) == ([HI, {"role": "assistant", "content": output}] if kept else "no_thought")


def test_the_paper_keeps_one_question_and_one_answer() -> None:
    output = "<think>a</think>b"
    answer = {"role": "assistant", "content": output}
    assert conversation({"input": "hi", "output": output}) == [HI, answer]
    system = {"role": "system", "content": "be"}
    for asked in ([system, HI], [HI, OK, HI], [], [OK], ["hi"]):
        assert conversation({"input": asked, "output": output}) == "not_two_messages"
    for broken in ({"input": [HI]}, {"input": None, "output": output}, {"input": [HI], "output": 3}):
        with pytest.raises(BrokenRow):
            conversation(broken)


def test_a_copy_of_the_papers_set_in_the_hubs_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All splits of the configuration SFT, read by the `datasets` library itself."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    hub = tmp_path / "hub"
    (hub / "SFT").mkdir(parents=True)
    splits = "".join(f"  - split: {name}\n    path: SFT/{name}.jsonl\n" for name in ("code", "math"))
    (hub / "README.md").write_text(f"---\nconfigs:\n- config_name: SFT\n  data_files:\n{splits}---\n")
    for name, output in (("code", "<think>a</think>b"), ("math", "no thought")):
        write(hub / "SFT" / f"{name}.jsonl", {"input": [HI], "output": output, "category": name})
    datasets.disable_progress_bars()
    read = list(ConversationSource.open(f"llama-nemotron:{hub}").rows())
    assert [(row.messages[-1:], row.dropped) for row in read] == [
        (({"role": "assistant", "content": "<think>a</think>b"},), ""),
        ((), "no_thought"),
    ]


def test_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.jsonl", {"input": "hi", "output": "<think>a</think>b"})
    (row,) = ConversationSource.open("llama-nemotron:a.jsonl").rows()
    assert len(row.messages) == 2
    assert ConversationSource.open("llama-nemotron").place == "nvidia/Llama-Nemotron-Post-Training-Dataset"
    assert ConversationSource.open("llama-nemotron:other/copy").place == "other/copy"
    for name, message in (
        ("llama-nemotrn", "did you mean llama-nemotron?"),
        ("xyz", "unknown; name a .jsonl or .jsonl.gz or .parquet file, or llama-nemotron"),
        ("b.jsonl", "b.jsonl: no such file"),
        ("llama-nemotron:", "names no place"),
        ("llama-nemotron:b.jsonl", "b.jsonl: no such file"),
    ):
        with pytest.raises(UserError, match=message):
            ConversationSource.open(name)
    assert resolved_conversations("a.jsonl") == str(tmp_path / "a.jsonl")
    assert resolved_conversations("llama-nemotron:./a.jsonl") == f"llama-nemotron:{tmp_path / 'a.jsonl'}"
    for name in ("llama-nemotron", "llama-nemotron:other/copy", ""):
        assert resolved_conversations(name) == name
