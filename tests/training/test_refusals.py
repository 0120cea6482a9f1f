"""Errors that a user can fix are refused before a run has a folder, or cost at most one step."""

import importlib.util
import json
import math
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch

from published_rows import gsm8k_row, write_rows
from runs import TINY, resume, train_config
from threepo import api
from threepo.cli import main
from threepo.config import TrainConfig
from threepo.config.recipes import load, load_evaluation
from threepo.errors import ThreepoWarning, UserError
from threepo.models import policy
from threepo.models.policy import load_policy
from threepo.models.prompts import tokenized
from threepo.rollout.ensemble import Ensemble
from threepo.rollout.memory import GIB, bytes_per_token, sampling_bytes
from threepo.run_folder import checkpoints, read_metrics
from threepo.training import rlvr
from threepo.types import Problem

SETTINGS = (
    *TINY,
    "model.tiny.context=64",
    "data.train=problems.jsonl",
    "data.prompts_per_step=2",
    "method.rollouts_per_prompt=2",
    "sampling.max_new_tokens=4",
    "reward.function=exact",
    "run.folder=run",
    "run.steps=4",
)
ROWS: list[dict[str, object]] = [{"prompt": f"{i} + {i} = ", "answer": 2 * i} for i in range(6)]
HELDOUT: list[dict[str, object]] = [row | {"prompt": f"{row['prompt']}".replace("+", "*")} for row in ROWS]
LONG: dict[str, object] = {"prompt": "x" * 61, "answer": 1}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write("problems.jsonl", ROWS)


def write(name: str, rows: list[dict[str, object]]) -> None:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def config(*settings: str) -> TrainConfig:
    return load(TrainConfig, "", [*SETTINGS, *settings])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (LONG, r"bad.jsonl, row 4: prompt of 61 tokens and max_new_tokens = 4 .* context of 64; .*too_long = 'drop'"),
        ({"prompt": "a"}, "bad.jsonl, row 4: has no answer"),
        ({"prompt": "", "answer": 1}, "bad.jsonl, row 4: its prompt is empty"),
        ({"prompt": "a", "gold": 1}, r"its columns are .*'gold'.*; set data.answer_column, .* = 'skip'"),
        ({"prompt": "a", "answer": None}, "row 4: has no answer, .*; set data.answer_column, fix the data"),
        ({"prompt": "a", "answer": math.nan}, "row 4: has no answer, "),
        ({"prompt": "a", "answer": ["1"]}, r"row 4: has a list as its answer, \['1'\]; it must be text or a number"),
        ({"prompt": "a", "answer": 1, "completions": "b"}, "has a column 'completions'"),
    ],
)
@pytest.mark.parametrize("split", ["train", "eval"])
def test_one_bad_row_anywhere_is_refused_before_a_folder_is_made(
    split: str, row: dict[str, object], message: str
) -> None:
    write("bad.jsonl", [*ROWS[:3], row, *ROWS[3:]])
    with pytest.raises(UserError, match=message):
        api.train(config(f"data.{split}=bad.jsonl", *(["eval.every=1"] if split == "eval" else [])))
    assert not Path("run").exists()


def test_rows_that_the_reward_cannot_grade_can_be_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    write("bad.jsonl", [ROWS[0], {"prompt": ""}, {"prompt": "a"}, {"prompt": "a", "answer": " "}, *ROWS[1:]])
    run = api.train(config("data.train=bad.jsonl", "data.broken_rows=skip", "run.steps=1"))
    said = capsys.readouterr().err
    assert "bad.jsonl: left out 1 of 9 rows as broken: row 2: its prompt is empty" in said
    assert "bad.jsonl: left out 2 of 9 rows as broken: row 3: has no answer, " in said
    assert json.loads((run / "summary.json").read_text())["data"]["broken"] == 3
    write("bad.jsonl", [{"prompt": "a"}])
    with pytest.raises(UserError, match="bad.jsonl: holds no problems .*row 1: has no answer, .* data.answer_column"):
        api.train(config("data.train=bad.jsonl", "data.broken_rows=skip", "run.folder=other"))
    assert "left out" not in capsys.readouterr().err


@pytest.mark.parametrize("what", ["eval.max_new_tokens=20", "data.train=long.jsonl", "data.eval=long.jsonl"])
def test_memory_for_whatever_will_be_asked_is_checked_before_a_folder_is_made(what: str) -> None:
    write("heldout.jsonl", HELDOUT)
    write("long.jsonl", [*(ROWS if "train" in what else HELDOUT), LONG | {"prompt": "x" * 30}])
    model = load_policy(config().model, 0).model
    weights = Ensemble(model, torch.float32, torch.device("cpu")).bytes_for(1)
    row = 16 * bytes_per_token(model.config, torch.float32)  # 8 tokens of a prompt, and 4 new ones
    row += sampling_bytes(model.config.vocab_size)
    memory = max(config().method.draws, 1) * (weights + row) + 1
    small = ("data.eval=heldout.jsonl", "eval.every=4", "eval.samples=4", f"engine.memory_gib={memory / GIB}")
    with pytest.raises(UserError, match="engine: . policies of .* need"):
        api.train(config(*small, what))
    assert not Path("run").exists()
    api.train(config(*small, "run.steps=1"))
    if what.startswith("eval"):
        with pytest.raises(UserError, match="engine: . policies of .* need"):
            api.evaluate(load_evaluation("run", "", [what]), Path("scores"))
        assert not Path("scores").exists()


def test_problems_that_are_too_long_can_be_left_out(capfd: pytest.CaptureFixture[str]) -> None:
    write("some.jsonl", [LONG, *ROWS, LONG])
    write("bad.jsonl", [LONG, *HELDOUT, LONG])
    api.train(config("data.train=some.jsonl", "data.eval=bad.jsonl", "data.too_long=drop", "eval.every=4"))
    said = capfd.readouterr().err
    assert all(f"{name}.jsonl: left out 2 of 8 problems" in said for name in ("some", "bad"))
    assert len(read_metrics(Path("run"))) == 5
    config_of_six = load_evaluation("run", "", ["eval.samples=1", "eval.problems=6"])
    scores = api.evaluate(config_of_six, Path("scores"))["benchmarks"]["bad"]
    assert scores["problems"] == 6, "the places of those left out are filled"
    assert scores["left_out"] == ["bad.jsonl:1"], "of the first six"
    write("none.jsonl", [LONG])
    with pytest.raises(UserError, match="no prompt fits into the model's context of 64"):
        api.train(config("data.train=none.jsonl", "data.too_long=drop", "run.folder=other"))


def test_held_out_problems_that_training_does_not_use_are_named_once(capfd: pytest.CaptureFixture[str]) -> None:
    write("heldout.jsonl", HELDOUT)
    run = api.train(config("data.eval=heldout.jsonl", "run.steps=1"))
    assert [row["step"] for row in read_metrics(run)] == [0]
    unused = f"threepo: data.eval = '{Path.cwd() / 'heldout.jsonl'}' is not used in training, as eval.every = 0; "
    assert unused + "set eval.every to score the run as it trains, or" in capfd.readouterr().err
    resume(run, run={"steps": 2})
    api.train(config("data.eval=heldout.jsonl", "run.steps=1", "eval.every=1", "run.folder=other"))
    assert "not used" not in capfd.readouterr().err
    assert api.evaluate(load_evaluation("run", "", ["eval.samples=1"]), Path("scores"))["benchmarks"]["heldout"]


def test_long_prompts_are_left_out_of_training_alone_and_counted(capfd: pytest.CaptureFixture[str]) -> None:
    long: dict[str, object] = {"prompt": "x" * 20, "answer": 1}
    write("some.jsonl", [long, *ROWS, {"prompt": 3}])
    write("heldout.jsonl", [long, *HELDOUT])
    limited = ["data.train=some.jsonl", "data.eval=heldout.jsonl", "data.max_prompt_tokens=12", "data.broken_rows=skip"]
    api.train(config(*limited, "eval.every=4"))
    assert "some.jsonl: left out 1 of 7 problems, too long for data.max_prompt_tokens = 12" in capfd.readouterr().err
    counts = json.loads(Path("run/summary.json").read_text())["data"]
    assert counts == {"problems": 6, "rows": 8, "duplicates": 0, "broken": 1, "too_long": 1}
    scores = api.evaluate(load_evaluation("run", "", ["eval.samples=1"]), Path("scores"))["benchmarks"]["heldout"]
    assert scores["problems"] == 7, "a score leaves no problem out"
    with pytest.raises(UserError, match="max_prompt_tokens = 9: `threepo eval` does not read it"):
        load_evaluation("run", "", ["data.max_prompt_tokens=9"])
    with pytest.raises(UserError, match="some.jsonl: no prompt fits into data.max_prompt_tokens = 3 or the model's"):
        api.train(config(*limited, "data.max_prompt_tokens=3", "run.folder=other"))


def test_a_file_is_tokenised_once_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def counting(problems: Sequence[Problem], *arguments: Any) -> list[tuple[int, ...]]:
        read.extend(problem.id for problem in problems)
        return tokenized(problems, *arguments)

    monkeypatch.setattr(policy, "tokenized", counting)
    run = rlvr.assemble(config())
    with run.folder:
        first = [problem.id for problem in run.source.batch(0, 2)]
    assert Counter(read) == Counter([*(problem.id for problem in run.source.known()), *first])


def test_a_published_data_set_is_trained_on_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows(Path("gsm8k.parquet"), [gsm8k_row(f"How many are {i} and {i}?", f"#### {2 * i}") for i in range(4)])
    settings = ["data.train=gsm8k:gsm8k.parquet", "model.tiny.context=512", "run.steps=2"]
    api.train(config(*settings))
    row = pyarrow.parquet.read_table("run/completions/step-000000.parquet").to_pylist()[0]
    number = int(row["problem_id"].removeprefix("gsm8k/train/")) - 1
    assert (row["prompt"], row["reference_answer"]) == (f"How many are {number} and {number}?", f"{2 * number}")
    Path("elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert main(["train", "--resume", "../run"]) == 0


def test_held_out_problems_of_a_task_are_checked_too() -> None:
    settings = ["data.train=sorting", "data.levels=[2]", "eval.every=1", "eval.max_new_tokens=60"]
    with pytest.raises(UserError, match="problem sorting/heldout/.* exceed the model's context of 64"):
        api.train(config(*settings, "reward.function=task"))
    assert not Path("run").exists()


def test_a_reward_that_fails_at_once_leaves_no_folder_and_can_be_mended() -> None:
    Path("failing_at_once.py").write_text(
        "def reward(completions): return [1 / 0]\ndef mended(completions): return [0, 1] * 2\n"
    )
    with pytest.raises(UserError, match="failing_at_once:reward': raised ZeroDivisionError"):
        api.train(config("reward.function=failing_at_once:reward"))
    assert not Path("run").exists()
    api.train(config("reward.function=failing_at_once:mended"))
    assert len(read_metrics(Path("run"))) == 4


def test_a_reward_that_fails_later_loses_no_step() -> None:
    Path("failing_later.py").write_text(
        "from pathlib import Path\n"
        "def reward(completions):\n"
        "    log = Path('run/metrics.jsonl')\n"
        "    if log.is_file() and len(log.read_text().splitlines()) == 3 and not Path('mended').exists():\n"
        "        raise OSError('judge is away')\n"
        "    return [0, 1] * 2\n"
    )
    with pytest.raises(UserError, match=r"raised OSError: judge is away \(.*failing_later.py:5\)"):
        api.train(config("reward.function=failing_later:reward"))
    assert [step for step, _ in checkpoints(Path("run"))] == [3]
    Path("mended").touch()
    assert main(["train", "--resume", "run"]) == 0
    assert [row["step"] for row in read_metrics(Path("run"))] == [0, 1, 2, 3]


def test_a_reward_that_the_credit_rule_is_not_defined_for_loses_no_step() -> None:
    """pass@k pays 0 and 1; the reward of the third step is one half."""
    Path("half.py").write_text(
        "calls = []\n"
        "def reward(completions, **_):\n"
        "    calls.append(1)\n"
        "    return [0.5 if len(calls) == 3 else float(i % 4 == 0) for i in range(len(completions))]\n"
    )
    credit = ("method.rollouts_per_prompt=4", "method.advantage.rule=pass_at_k", "method.advantage.k=2")
    with pytest.raises(UserError, match="method.advantage.rule = 'pass_at_k': needs rewards of 0 and 1, .* earned 0.5"):
        api.train(config("reward.function=half:reward", *credit))
    assert [step for step, _ in checkpoints(Path("run"))] == [2]


def test_no_code_is_imported_from_a_run_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Somebody may have sent it, with a module that its config.json names."""
    Path("sent.py").write_text("def reward(completions):\n    return [0.0] * len(completions)\n")
    api.train(config("reward.function=sent:reward", "run.steps=1"))
    Path("run/sent.py").write_text("raise SystemExit('ran')\n")
    for place in ("run", "run/checkpoints"):
        monkeypatch.chdir(tmp_path / place)
        heldout = f"data.eval={tmp_path / 'problems.jsonl'}"
        for command in (["train", "--resume", str(tmp_path / "run")], ["eval", str(tmp_path / "run"), heldout]):
            monkeypatch.delitem(sys.modules, "sent", raising=False)
            assert main(command) == 2
            assert f"directory is in the run folder {tmp_path / 'run'}, and no code" in capsys.readouterr().err


def test_relative_paths_mean_the_same_when_a_run_is_resumed_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.train(config("run.steps=2"))
    Path("elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert main(["train", "--resume", "../run"]) == 0


def test_a_run_is_not_resumed_with_other_problems(capsys: pytest.CaptureFixture[str]) -> None:
    files = {"problems": ROWS, "heldout": HELDOUT}
    write("heldout.jsonl", HELDOUT)
    api.train(config("run.steps=2", "data.eval=heldout.jsonl", "eval.every=2", "eval.samples=1"))
    before = Path("run/metrics.jsonl").read_bytes()
    changes: list[dict[str, object]] = [{"prompt": "new"}, {"answer": 7}, {"hint": "column of a reward function"}]
    for name, change in product(files, changes):
        write(f"{name}.jsonl", [*files[name][:-1], files[name][-1] | change])
        assert main(["train", "--resume", "run"]) == 2
        said = capsys.readouterr().err
        assert f"{name}.jsonl have changed since the run began (6 now, 6 then); restore the old ones, or start" in said
        assert Path("run/metrics.jsonl").read_bytes() == before
        write(f"{name}.jsonl", files[name])
    assert main(["train", "--resume", "run"]) == 0


def test_what_no_reward_and_no_policy_sees_may_change() -> None:
    api.train(config("data.train=problems.jsonl", "data.too_long=drop", "run.steps=1"))
    Path("problems.jsonl").write_text("".join(json.dumps(row, indent=None) + "\n\n" for row in [*ROWS, LONG]))
    assert main(["train", "--resume", "run"]) == 0


def test_training_problems_among_the_held_out_ones_are_told_when_a_run_begins() -> None:
    """Only evaluated and trained problems count: none beyond eval.problems, none too long to train on."""
    write("heldout.jsonl", [*ROWS[2:4], *HELDOUT, ROWS[0]])
    small = ["data.eval=heldout.jsonl", "eval.every=1", "eval.problems=8", "run.steps=1"]
    with pytest.warns(ThreepoWarning, match="data.eval: 2 of the 8 held-out ones are also trained on"):
        api.train(config(*small))
    write("heldout.jsonl", [*HELDOUT, ROWS[0]])
    api.train(config(*small, "eval.problems=6", "run.folder=other"))


def test_a_run_without_a_record_of_its_problems_is_resumed_as_it_was_before_there_were_any() -> None:
    api.train(config("run.steps=1"))
    Path("run/problems.json").unlink()
    write("problems.jsonl", ROWS[:-1])
    assert main(["train", "--resume", "run"]) == 0
    assert not Path("run/problems.json").exists(), "it would say that the run began with these"


def test_problems_without_end_can_always_be_gone_on_with() -> None:
    api.train(train_config(Path("endless"), "run.steps=1", "eval.every=1"))
    record = json.loads(Path("endless/problems.json").read_text())
    assert [(part, record[part]["source"], record[part]["problems"]) for part in record] == [
        ("train", "sorting", 1),
        ("eval", "sorting", 4),
    ]
    assert main(["train", "--resume", "endless"]) == 0


def test_an_evaluation_needs_no_training_data_and_is_never_written_over(capsys: pytest.CaptureFixture[str]) -> None:
    api.train(train_config(Path("m"), "run.steps=1"))
    load_model = ["eval", "m/checkpoints/step-000001"]
    small = ["eval.samples=1", "sampling.max_new_tokens=4"]
    data = ["data.eval=problems.jsonl", "reward.function=exact", *small]
    Path("recipe.toml").write_text("[data]\neval = 'problems.jsonl'\n[reward]\nfunction = 'exact'\n")
    assert main([*load_model, "--recipe", "recipe.toml", *small]) == 0
    assert [path.name.rpartition("-")[0] for path in Path("runs").iterdir()] == ["eval-m-step-000001-problems"]
    assert main([*load_model, "--output", "scores", *data]) == 0
    before = Path("scores/summary.json").read_bytes()
    for folder, message in (
        ("scores", "--output scores: holds an evaluation under other settings (eval.samples = 1 there, 2 here)"),
        ("m", "--output m: holds the config.json of something else"),
        ("/proc/x", "cannot write /proc/x"),
    ):
        assert main([*load_model, "--output", folder, *data, "eval.samples=2"]) == 2
        assert message in capsys.readouterr().err
    assert main([*load_model, "--output", "scores", *data]) == 0, "the same again is only read"
    assert Path("scores/summary.json").read_bytes() == before
    assert not Path("m/eval.lock").exists()
    assert main([*load_model, "--output", "new", *data, "reward.function=task"]) == 2
    assert not Path("new").exists(), "made for an evaluation that failed"


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")
def test_an_engine_that_is_not_installed_is_named_before_the_run_has_a_folder() -> None:
    with pytest.raises(UserError, match=r"vLLM is not installed; in a clone, pip install '.\[vllm\]'"):
        api.train(config("engine.kind=vllm"))
    assert not Path("run").exists()
