"""An interrupted evaluation ends like one that was never interrupted; a folder holds one evaluation."""

import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

import pyarrow.parquet
import pytest

from runs import TINY, forked, train_config
from threepo import api
from threepo.cli import main
from threepo.config import DataConfig, EvalConfig, ModelConfig, RewardConfig, TinyConfig
from threepo.config.recipes import load_evaluation
from threepo.errors import UserError
from threepo.evaluation.records import default_folder
from threepo.files import lock
from threepo.models.policy import load_policy

JUDGE = """
import os
from pathlib import Path
def reward(completion_ids, answer):
    with open("calls", "a") as log:
        log.write("called\\n")
    stop = Path("signal")
    if Path("calls").stat().st_size == 4 * len("called\\n") and stop.exists():
        number = int(stop.read_text())
        stop.unlink()
        os.kill(os.getpid(), number)
    return [ids[0] % 2 for ids in completion_ids]
"""
"""Right is a completion whose first token is odd. In the fourth of six parts, it sends the signal that a file names."""
AMC, GSM = "amc23=files/amc23.jsonl", "gsm8k=files/gsm8k.jsonl"
COMMAND = (
    "eval",
    "tiny-qwen2",
    "--benchmarks",
    f"{AMC},{GSM}",
    *TINY[1:],
    "reward.function=judge:reward",
    "eval.samples=2",
    "eval.part_size=4",
    "eval.max_new_tokens=3",
)


@pytest.fixture(autouse=True)
def _in_a_folder_with_benchmarks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("judge.py").write_text(JUDGE)
    Path("files").mkdir()
    amc = [{"id": i, "problem": f"{i} + 1?", "answer": i + 1.0, "url": "", "question": f"{i} + 1?"} for i in range(5)]
    gsm = [{"question": f"Twice {i}?", "answer": f"It is {2 * i}.\n#### {2 * i}"} for i in range(6)]
    for name, rows in (("amc23", amc), ("gsm8k", gsm)):
        Path(f"files/{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def killed() -> None:
    """The command in a process of its own, which is killed while it grades its fourth part of six."""
    Path("signal").write_text(str(int(signal.SIGKILL)))
    process = forked(*COMMAND, "--output", "stopped")
    process.join()
    assert process.exitcode == -signal.SIGKILL


def interrupted() -> None:
    """The same with ctrl-c, which saves the part at hand and says how to go on."""
    Path("signal").write_text(str(int(signal.SIGINT)))
    with redirect_stderr(StringIO()) as said:
        assert evaluated("stopped") == 128 + signal.SIGINT
    assert "SIGINT after problem 7 of 11; the same command continues it, in stopped" in said.getvalue()


def evaluated(folder: str, *settings: str) -> int:
    """The exit status of the same command in this process."""
    return main([*COMMAND, "--output", folder, *settings])


def calls() -> int:
    """Number of calls of the judge: one a part."""
    return len(Path("calls").read_text().splitlines())


def contents(folder: str) -> dict[str, object]:
    """All that must not depend on interruptions."""
    paths = sorted((Path(folder) / "completions").glob("*.parquet"))
    rows: dict[str, object] = {path.stem: pyarrow.parquet.read_table(path).to_pylist() for path in paths}
    return rows | {"summary": (Path(folder) / "summary.json").read_text()}


@pytest.mark.parametrize(("stop", "saved"), [(killed, 3), (interrupted, 4)])
def test_a_stopped_evaluation_that_is_continued_ends_like_a_whole_one(stop: Callable[[], None], saved: int) -> None:
    stop()
    assert not Path("stopped/summary.json").exists()
    assert len(list(Path("stopped/parts").rglob("*.parquet"))) == saved
    assert calls() == 4
    assert evaluated("stopped") == 0
    assert calls() == 4 + 6 - saved, "what was saved is not made again"
    assert evaluated("whole") == 0
    assert contents("stopped") == contents("whole")
    assert not Path("stopped/parts").exists()
    scores = json.loads(Path("whole/summary.json").read_text())["benchmarks"]
    assert [(name, scores[name]["problems"]) for name in scores] == [("amc23", 5), ("gsm8k", 6)]
    assert 0 < scores["gsm8k"]["pass_at"]["1"] < 1, "a judge of more than one opinion"
    Path("whole/parts").mkdir()  # as a kill leaves it between the writing of the scores and its removal
    assert evaluated("whole") == 0
    assert calls() == 4 + 6 - saved + 6, "a finished evaluation is only read"
    assert not Path("whole/parts").exists()


def test_the_parts_of_an_evaluation_make_no_difference() -> None:
    """Random numbers belong to the benchmark, the problem and the rollout, and not to the company they come in."""
    assert evaluated("small") == 0
    assert evaluated("large", "eval.part_size=1000") == 0
    small, large = contents("small"), contents("large")
    assert [row["tokens"] for row in small["gsm8k"]] == [row["tokens"] for row in large["gsm8k"]]  # type: ignore[attr-defined]
    assert calls() == 6 + 2


def test_a_folder_is_not_continued_with_anything_else(capsys: pytest.CaptureFixture[str]) -> None:
    shape = TinyConfig(hidden_size=32, intermediate_size=64, layers=1, heads=2, kv_heads=1)
    for seed, model in ((0, "model"), (1, "other")):
        load_policy(ModelConfig(path="tiny-qwen2", tiny=shape), seed=seed).save(Path(model))
    command = ["eval", "model", *COMMAND[2:4], *COMMAND[4 + len(TINY[1:]) :], "--output", "out"]
    assert main(command) == 0
    (Path("out") / "summary.json").unlink()  # as if it had been stopped before the end

    def refusal(*changes: str) -> str:
        assert main([*command, *changes]) == 2
        return capsys.readouterr().err

    assert "other settings (eval.temperature = 0.6 there, 1.0 here)" in refusal("eval.temperature=1.0")
    rows = Path("files/gsm8k.jsonl").read_text()
    Path("files/gsm8k.jsonl").write_text(rows.replace("#### 4", "#### 5"))
    assert "other problems of gsm8k" in refusal()
    Path("files/gsm8k.jsonl").write_text(rows)
    os.rename("model", "before")
    os.rename("other", "model")
    assert "other weights" in refusal()
    os.rename("model", "other")
    os.rename("before", "model")
    judge = Path(str(sys.modules["judge"].__file__))  # of the first test of this process
    judge.write_text(JUDGE + "\n")
    assert "other code of judge:reward, which changed since it began" in refusal()
    judge.write_text(JUDGE)
    assert main([*command, "engine.max_batch_rows=3", "engine.memory_gib=0.5"]) == 0, "may be continued elsewhere"
    assert Path("out/summary.json").is_file()


def test_a_folder_in_use_is_refused() -> None:
    config = load_evaluation("tiny-qwen2", "", COMMAND[4:], {"names": [AMC]})
    Path("out").mkdir()
    with (
        lock(Path("out/eval.lock")),
        pytest.raises(UserError, match="folder out: is in use by another process"),
    ):
        api.evaluate(config, Path("out"))


def test_default_folders_differ_where_settings_do() -> None:
    def folder(*settings: str, names: tuple[str, ...] = (AMC,)) -> str:
        return str(default_folder(load_evaluation("tiny-qwen2", "", settings, {"names": names})))

    assert folder().startswith("runs/eval-tiny-qwen2-amc23-")
    assert folder() == folder()
    assert folder() != folder("eval.samples=4")
    assert folder(names=(AMC, GSM)).startswith("runs/eval-tiny-qwen2-amc23+gsm8k-")
    for file in ("mine.jsonl", "mine.jsonl.gz", "mine.parquet"):
        assert str(default_folder(load_evaluation("tiny-qwen2", "", [f"data.eval={file}"]))).startswith(
            "runs/eval-tiny-qwen2-mine-"
        )


def test_benchmarks_are_evaluated_as_in_the_paper_and_not_as_in_training() -> None:
    training = ["data.prompt_template=x {prompt}", "reward.function=exact", "eval.samples=2", "sampling.temperature=1"]
    run = api.train(train_config(Path("run"), "run.steps=1", *training))
    config = load_evaluation(str(run), "", [], {"names": [AMC]})
    wanted = EvalConfig(temperature=0.6, top_p=0.95, top_k=50, samples=8, max_new_tokens=3072)
    assert (config.eval, config.reward) == (wanted, RewardConfig())
    assert config.data == DataConfig(train="benchmarks")
    assert config.model.tiny.hidden_size == 32, "how to run the model is the run's"
    Path("recipe.toml").write_text(
        "[benchmarks]\nnames = ['amc23']\n[reward]\nfunction = 'exact'\n[eval]\nsamples = 3\n"
    )
    config = load_evaluation(str(run), "recipe.toml", [])
    assert (config.reward.function, config.eval.samples) == ("exact", 3), "a recipe for benchmarks says it all"


def test_problems_too_long_for_the_model_are_named_or_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    with open("files/amc23.jsonl", "a") as file:
        file.write(json.dumps({"id": 9, "question": "long " * 200, "answer": "1"}) + "\n")
    assert evaluated("out") == 2
    assert "benchmark amc23, " in capsys.readouterr().err
    assert not Path("out").exists()
    assert evaluated("out", "data.too_long=drop") == 0
    assert "left out 1 of 6 problems" in capsys.readouterr().err
    assert json.loads(Path("out/summary.json").read_text())["benchmarks"]["amc23"]["left_out"] == ["amc23/9"]


def test_a_reward_setting_that_no_benchmark_reads_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ("reward.function=math", "reward.scoring=passed_share")
    assert evaluated("refused", *settings) == 2
    assert "'passed_share': this reward knows 'binary' and 'format_penalty' only" in capsys.readouterr().err
    assert not Path("refused").exists()
