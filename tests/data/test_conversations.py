"""Conversations: of a user's own source in any of its forms, and of the paper's data set with what it leaves out."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from threepo.data.published import CONVERSATIONS
from threepo.data.rows import BrokenRow, Messages, Row, tool_schemas
from threepo.data.source import open_conversations
from threepo.errors import UserError

deepseek_r1, any_generator = (CONVERSATIONS[name].read for name in ("llama-nemotron", "llama-nemotron-any"))
HI, OK = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ok"}


def write(path: Path, *rows: Any) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def messages_of(name: str) -> list[Messages | str]:
    """The conversations of a source, or why its rows are left out."""
    source = open_conversations(name)
    return [source.read(row) for row in source.rows if not isinstance(row, BrokenRow)]


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
    assert messages_of(write(tmp_path / "a.jsonl", row)) == [(HI, OK)]


def test_parquet_and_keys_that_only_some_messages_have(tmp_path: Path) -> None:
    rows = [{"messages": [HI, OK | {"reasoning_content": "hm"}]}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert messages_of(str(tmp_path / "a.parquet")) == [(HI, OK | {"reasoning_content": "hm"})]
    calls = [
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {key: "x"}}}]}
        for key in ("item", "city")  # of which Arrow gives each call both
    ]
    rows = [{"messages": [HI, call]} for call in calls]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "b.parquet")
    assert messages_of(str(tmp_path / "b.parquet")) == [(HI, call) for call in calls]
    call = {"role": "assistant", "content": "", "tool_calls": [{"arguments": {"item": "x", "unit": None}}]}
    assert messages_of(write(tmp_path / "c.jsonl", {"messages": [HI, call]})) == [(HI, call)], "as the user wrote it"


def test_tools_are_a_list_or_json() -> None:
    tools = [{"name": "price", "strict": None}]
    assert tool_schemas(tools) == tool_schemas(json.dumps(tools)) == tools
    assert tool_schemas(tools, typed=True) == [{"name": "price"}]
    assert tool_schemas(json.dumps(tools), typed=True) == tools, "in a text, nobody has filled in keys"
    assert tool_schemas(None) == tool_schemas("") == tool_schemas("null") == []
    for wrong in ("{", '{"name": "price"}', [3]):
        with pytest.raises(BrokenRow, match="its tools"):
            tool_schemas(wrong)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"text": "hi"}, "has neither messages nor prompt and completion; its columns are 'text'"),
        ({"messages": None}, "has neither messages nor"),
        ({"messages": "hi"}, "its messages must be a list of chat messages"),
        ({"messages": ["hi"]}, "its messages must be"),
        ({"messages": [{"role": "user"}]}, "its messages must be"),
        ({"messages": [{"role": "user", "content": ["hi"]}]}, "its messages must be"),
        ({"messages": []}, "its messages must be"),
        ({"messages": [HI]}, "no message of the assistant"),
        ({"prompt": "hi", "completion": None}, "has neither messages nor"),
        ({"prompt": 3, "completion": "ok"}, "its prompt, if it is not text, must be a list"),
    ],
)
def test_broken_rows_say_why(row: Row, reason: str, tmp_path: Path) -> None:
    source = open_conversations(write(tmp_path / "a.jsonl", row))
    with pytest.raises(BrokenRow, match=reason):
        source.read(row)


@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("change", [{"input": 3}, {"input": ["hi"]}, {"output": 3}, {"output": None}])
def test_rows_of_the_papers_set_of_another_schema_are_broken(name: str, change: Row, tmp_path: Path) -> None:
    row = {"input": [HI], "output": "<think>so</think>Two.", "generator": "DeepSeek-R1"}
    source = open_conversations(f"{name}:{write(tmp_path / 'a.jsonl', row)}")
    assert len(source.read(row)) == 2
    with pytest.raises(BrokenRow, match=f"is not a row of {name} as published: "):
        source.read(row | change)


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
    assert deepseek_r1(row) == ((HI, {"role": "assistant", "content": output}) if kept else "no_thought")


def test_the_paper_keeps_one_question_and_one_answer() -> None:
    row = {"output": "<think>a</think>b", "generator": "DeepSeek-R1"}
    answer = {"role": "assistant", "content": "<think>a</think>b"}
    assert deepseek_r1({"input": "hi", **row}) == (HI, answer)
    for messages in ([{"role": "system", "content": "be"}, HI], [HI, OK, HI], [], [OK]):
        assert deepseek_r1({"input": messages, **row}) == "not_two_messages"


@pytest.mark.parametrize(
    ("generator", "kept"),
    [
        ("DeepSeek-R1", True),
        ("DeepSeek-R1, Qwen-2.5-72B-Instruct", True),
        ("Llama-3.1-Nemotron-70B-Instruct, ITS models", False),
        ("DeepSeek-R1-Distill-Qwen-32B", False),
    ],
)
def test_the_paper_keeps_answers_of_deepseek_r1_and_its_released_code_those_of_all(generator: str, kept: bool) -> None:
    """Generators have the published set's names."""
    row = {"input": "hi", "output": "<think>a</think>b", "generator": generator}
    messages = (HI, {"role": "assistant", "content": "<think>a</think>b"})
    assert deepseek_r1(row) == (messages if kept else "other_generator")
    assert any_generator(row) == messages
    assert deepseek_r1(row | {"output": "b"}) == "no_thought", "other_generator counts only what the check leaves out"


def test_a_copy_without_the_generators_is_refused_unless_all_are_wanted() -> None:
    row = {"input": "hi", "output": "<think>a</think>b"}
    assert len(any_generator(row)) == 2
    with pytest.raises(BrokenRow, match="has no generator; llama-nemotron-any reads copies without that column"):
        deepseek_r1(row)


def test_a_copy_of_the_papers_set_in_the_hubs_layout(tmp_path: Path) -> None:
    """All splits of the configuration SFT."""
    splits = "".join(f"  - split: {name}\n    path: SFT/{name}.jsonl\n" for name in ("code", "math"))
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n- config_name: SFT\n  data_files:\n{splits}---\n")
    for name, output in (("code", "<think>a</think>b"), ("math", "no thought")):
        row = {"input": [HI], "output": output, "category": name, "generator": "DeepSeek-R1"}
        write(tmp_path / "SFT" / f"{name}.jsonl", row)
    answer = {"role": "assistant", "content": "<think>a</think>b"}
    assert messages_of(f"llama-nemotron:{tmp_path}") == [(HI, answer), "no_thought"]


def test_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.jsonl", {"input": "hi", "output": "<think>a</think>b"})
    assert [len(row) for row in messages_of("llama-nemotron-any:a.jsonl")] == [2]
    for name, message in (
        ("llama-nemotrn", "did you mean llama-nemotron?"),
        ("xyz", "unknown; name llama-nemotron, llama-nemotron-any, a .jsonl, .json, .csv or .parquet file"),
        ("b.jsonl", "b.jsonl: no such file"),
        ("llama-nemotron:", "names no copy"),
        ("llama-nemotron:b.jsonl", "b.jsonl: no such file"),
        ("llama-nemotron", r"data set nvidia/Llama-Nemotron-Post-Training-Dataset \(all\): cannot be read"),
        ("llama-nemotron:other/copy", r"data set other/copy \(all\): cannot be read"),
    ):
        with pytest.raises(UserError, match=message):
            open_conversations(name)
