"""Files, reasoning-gym and demonstrations as sources of problems."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from published_rows import write_rows
from threepo.config import DataConfig, DemonstrationConfig
from threepo.data.finite import column_problems
from threepo.data.source import Demonstrations, open_heldout, open_source, open_training
from threepo.data.task import split_of
from threepo.errors import UserError
from threepo.plugins.reasoning_gym import ReasoningGymProblems
from threepo.types import Problem

ROWS = [{"prompt": f"{i} + {i}", "answer": 2 * i, "difficulty": i % 3} for i in range(10)]


def write_jsonl(path: Path, rows: list[dict]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return path


def settings(path: Path, **fields: object) -> DataConfig:
    return DataConfig(train=str(path), **fields)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_rows_become_problems(suffix: str, tmp_path: Path) -> None:
    path = write_rows(tmp_path / f"problems{suffix}", ROWS)
    problems = column_problems(str(path), settings(path)).problems
    assert len(problems) == 10
    assert problems[3] == Problem(
        id=f"problems{suffix}:4", prompt="3 + 3", answer="6", columns={"answer": 6, "difficulty": 0}
    )


def test_columns_can_have_other_names_and_prompts_can_be_chats(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "Hi"}]
    path = write_jsonl(tmp_path / "p.jsonl", [{"question": chat, "gold": "x", "id": "one"}])
    source = column_problems(str(path), settings(path, prompt_column="question", answer_column="gold"))
    assert source.problems[0].prompt == tuple(chat)
    assert (source.problems[0].id, source.problems[0].answer) == ("one", "x")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n\n", "holds no problems"),
        ('{"prompt": "a"}\n{"prompt": \n', "row 2: is not valid JSON"),
        (
            '{"prompt": "a"}\n{"question": "b"}\n',
            "row 2: no column 'prompt'; it has 'question'; set data.prompt_column",
        ),
        (
            '{"prompt": ""}\n',
            "row 1: its prompt is empty",
        ),
        ('{"prompt": 3}\n', "row 1: its prompt, if it is not text, must be"),
        ('{"prompt": [{"role": "user", "content": 3}]}\n', "row 1: its prompt, if it is not text, must be"),
        ('{"prompt": "a", "completions": "b"}\n', "has a column 'completions', .*; rename the column"),
        ('{"prompt": "a"}\n{"prompt": "b", "prompts": 1}\n', "has a column 'prompts'"),
        ('{"prompt": "a", "completion_ids": [1]}\n', "has a column 'completion_ids'"),
        (
            '{"prompt": "a", "id": 1}\n{"prompt": "b", "id": 1}\n',
            "row 2: has the id '1' of data file .*p.jsonl, row 1; ids must differ",
        ),
    ],
)
def test_broken_rows_are_refused_with_their_location(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        column_problems(str(path), settings(path))


def test_every_row_has_all_columns_and_the_answer_as_the_file_has_it(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "a", "gold": 3, "unit": "m"}, {"prompt": "b", "gold": 4}])
    problems = column_problems(str(path), settings(path, answer_column="gold")).problems
    assert [dict(p.columns) for p in problems] == [
        {"gold": 3, "unit": "m", "answer": 3},
        {"gold": 4, "unit": None, "answer": 4},
    ]
    assert [p.answer for p in problems] == ["3", "4"]
    path = write_jsonl(tmp_path / "both.jsonl", [{"prompt": "a", "gold": 3, "answer": "long"}])
    problem = column_problems(str(path), settings(path, answer_column="gold")).problems[0]
    assert (problem.columns["answer"], problem.answer) == ("long", "3"), "a column keeps its own name"


def test_only_tasks_have_levels(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "p.jsonl", ROWS)
    for name in (str(path), "reasoning-gym:chain_sum"):
        with pytest.raises(UserError, match=r"data.levels = \[2\]: is only for procedural tasks, not for"):
            open_training(DataConfig(train=name, levels=(2,)))
    assert open_heldout(DataConfig(train="sorting", eval=str(path), levels=(2,))).verifier is None


def test_settings_that_no_source_reads_are_refused(tmp_path: Path) -> None:
    path = str(write_jsonl(tmp_path / "p.jsonl", ROWS))
    for fields in ({"max_prompt_tokens": 9}, {"broken_rows": "skip"}):
        for name in ("sorting", "reasoning-gym:chain_sum"):
            with pytest.raises(
                UserError, match=f"data.{next(iter(fields))} = .* is only for data sets, not for {name}"
            ):
                open_training(DataConfig(train=name, **fields))
        assert open_heldout(DataConfig(train=path, eval="sorting", **fields)).verifier is not None
    assert open_training(DataConfig(train="sorting", eval=path, broken_rows="skip")).verifier is not None


def test_templates_around_chat_messages_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chat = {"prompt": [{"role": "user", "content": "Hi"}]}
    for fields in ({"prompt_template": "Q: {prompt}"}, {"system_prompt": "Be brief."}):
        path = write_jsonl(tmp_path / "p.jsonl", [chat])
        with pytest.raises(UserError, match=f"data.{next(iter(fields))} = .* has lists of chat messages; leave it out"):
            open_training(settings(path, **fields))
        write_jsonl(path, [chat, {"prompt": "plain"}])
        assert len(open_training(settings(path, **fields)).problems.known()) == 2
        write_jsonl(path, [chat])
        assert open_heldout(DataConfig(train="sorting", eval=str(path), **fields)).template == ""
        assert "are read without them" in capsys.readouterr().err


def test_a_folder_of_shards_is_a_source_and_its_split_can_be_named(tmp_path: Path) -> None:
    """Data sets on the hub are read in the same way."""
    for split, rows in (("train", ROWS[:4]), ("test", ROWS[4:])):
        (tmp_path / "sums").mkdir(exist_ok=True)
        write_jsonl(tmp_path / "sums" / f"{split}.jsonl", rows)
    sources = (
        open_training(settings(tmp_path / "sums")),
        open_heldout(settings(tmp_path, eval=f"{tmp_path}/sums::test")),
    )
    assert [[p.answer for p in source.problems.known()] for source in sources] == [
        [str(row["answer"]) for row in rows] for rows in (ROWS[:4], ROWS[4:])
    ]
    assert sources[0].problems.first(1)[0].id == "sums:1"
    assert sources[0].problems.first(1)[0].label == f"data set {tmp_path}/sums (train), row 1"


def test_names_are_resolved_or_refused_with_a_hint(tmp_path: Path) -> None:
    assert open_training(DataConfig(train="sums")).verifier is not None
    path = write_jsonl(tmp_path / "p.jsonl", ROWS)
    assert open_training(settings(path)).verifier is None
    with pytest.raises(UserError, match="did you mean sorting"):
        open_training(DataConfig(train="sortin"))
    with pytest.raises(
        UserError,
        match=r"name a task \(choices, choices_near, .*, sorting, sums\)",
    ):
        open_training(DataConfig(train="zzz"))
    with pytest.raises(UserError, match="has no held-out problems of its own"):
        open_heldout(settings(path))
    heldout = open_heldout(settings(path, eval=str(path)))
    assert len(heldout.problems.first(4)) == 4
    assert split_of(str(open_heldout(DataConfig(train="sums")).problems.first(1)[0].prompt)) == "heldout"


@pytest.mark.parametrize("name", ["chain_sum(min_terms=2, max_terms=3)", "gsm_symbolic", "maze"])
def test_reasoning_gym_data_sets_keep_the_promises_of_our_own(name: str) -> None:
    """Also where a generator gives up, as that of mazes does for an item before number 200."""
    train, heldout = (ReasoningGymProblems(name, split, seed=0) for split in ("train", "heldout"))
    again = ReasoningGymProblems(name, "train", seed=0)
    for index in (0, 7, 200):
        problem = train.problem(index)
        assert again.problem(index) == problem
        assert split_of(str(problem.prompt)) == "train"
        assert train.verify(problem, f"<think>hm</think>{problem.answer}").correct
        assert train.verify(problem, f"<answer>{problem.answer}</answer> or so").correct
        assert not train.verify(problem, "no idea").correct
        assert train.verify(problem, "").status == "no_answer"
    for problem in heldout.first(9):
        assert split_of(str(problem.prompt)) == "heldout"
    assert ReasoningGymProblems(name, "train", seed=2).problem(0).prompt != train.problem(0).prompt


@pytest.mark.parametrize(("error", "expected"), [(RuntimeError, UserError), (NotImplementedError, NotImplementedError)])
def test_a_generator_that_never_succeeds_says_why(
    error: type[Exception], expected: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a plain RuntimeError says that the generator gave up."""

    class Broken(dict[int, Any]):
        def __missing__(self, index: int) -> Any:
            raise error("no room for a maze")

    monkeypatch.setattr("reasoning_gym.create_dataset", lambda *_, **__: Broken())
    with pytest.raises(expected, match="no room for a maze"):
        ReasoningGymProblems("maze", "train", seed=0)


def test_part_of_the_score_is_not_enough() -> None:
    """reasoning-gym pays 0.5 and more for an answer that contains the right one; that would be learned at once."""
    gym = open_source("reasoning-gym:chain_sum", "train", DataConfig(train="x"))
    problem = gym.problems.first(1)[0]
    assert gym.verifier is not None
    assert not gym.verifier(problem, f"{problem.answer} or 1").correct


def test_an_answer_that_a_scorer_runs_as_python_costs_only_itself() -> None:
    """binary_matrix calls `eval`. The tag that nothing closes would take hours with a pattern that backtracks."""
    gym = ReasoningGymProblems("binary_matrix", "train", 0)
    problem = gym.problem(0)
    ended = gym.verify(problem, "<answer>exit()</answer>")
    assert (ended.status, ended.detail) == ("error", "SystemExit: None")
    assert not gym.verify(problem, "<answer>" + "\n" * 100_000).correct
    assert gym.verify(problem, f"<answer>1</answer> no: <answer>\n{problem.answer} </answer>").correct
    assert gym.verify(problem, f"<answer>{problem.answer}</answer> done </answer>").correct


def test_data_sets_without_answers_are_not_imitated() -> None:
    name = "reasoning-gym:rubiks_cube(cube_size=2, min_scramble_steps=1, max_scramble_steps=2)"
    with pytest.raises(UserError, match=r"rubiks_cube\(.*\) has no answers to imitate; leave it out"):
        Demonstrations(DemonstrationConfig(tasks=(name,), behaviours={"direct": 1.0})).demonstration(0)


def test_reasoning_gym_mistakes_are_refused() -> None:
    for spec, message in (
        ("chainsum", "not registered"),
        ("chain_sum(terms=3)", "unexpected keyword"),
        ("chain_sum(min_terms=9, max_terms=3)", "max_terms"),
        ("chain_sum(3)", "write reasoning-gym:NAME"),
        ("chain sum", "write reasoning-gym:NAME"),
    ):
        with pytest.raises(UserError, match=message):
            ReasoningGymProblems(spec, "train", 0)


def test_demonstrations_follow_their_shares_and_stay_in_the_training_split() -> None:
    config = DemonstrationConfig(tasks=("sorting", "sums"), behaviours={"worked": 0.25, "direct": 0.75}, batch_size=50)
    source = Demonstrations(config)
    shown = [d for step in range(20) for d in source.batch(step)]
    assert Counter(problem.columns["task"] for problem, _ in shown) == {"sorting": 500, "sums": 500}
    assert sum(completion.startswith("<think>") for _, completion in shown) / 1000 == pytest.approx(0.25, abs=0.05)
    assert {split_of(str(problem.prompt)) for problem, _ in shown} == {"train"}
    assert Demonstrations(config).demonstration(77) == source.demonstration(77)


def test_demonstrations_of_reasoning_gym_are_its_answers() -> None:
    name = "reasoning-gym:spell_backward(min_word_len=5, max_word_len=7)"
    source = Demonstrations(DemonstrationConfig(tasks=(name, "sorting"), behaviours={"direct": 1.0}))
    for problem, completion in (source.demonstration(i) for i in range(0, 20, 2)):
        word = str(problem.prompt).rsplit(" ", 1)[1]
        assert completion == word[::-1]
        assert split_of(str(problem.prompt)) == "train"
    with pytest.raises(UserError, match=r"behaviours.worked: reasoning-gym:chain_sum has only direct"):
        Demonstrations(DemonstrationConfig(tasks=("reasoning-gym:chain_sum",)))


def test_demonstrations_that_do_not_exist_are_refused() -> None:
    with pytest.raises(UserError, match="unknown task 'sort'"):
        Demonstrations(DemonstrationConfig(tasks=("sort",)))
    with pytest.raises(UserError, match=r"behaviours.copied: sums has only worked, direct"):
        Demonstrations(DemonstrationConfig(tasks=("sorting", "sums"), behaviours={"copied": 1.0}))
