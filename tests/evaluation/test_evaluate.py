"""Evaluation of held-out problems: at the mean, over draws, from the command's side."""

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from safetensors import safe_open
from safetensors.torch import save_file

from runs import train_config
from threepo import api
from threepo.config.recipes import load_evaluation
from threepo.errors import UserError
from threepo.evaluation import run as evaluation
from threepo.models.policy import Policy
from threepo.run_folder import checkpoints, read_evaluation, read_metrics
from threepo.types import Purpose


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished C3PO run with an evaluation at its end."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    config = train_config(
        folder, "method.preset=c3po", "optimizer.ess=1e6", "run.steps=2", "eval.every=2", "eval.problems=6"
    )
    return api.train(config)


def evaluated(run: Path, *settings: str) -> list[dict[str, Any]]:
    """Rows of an evaluation's completions."""
    folder = run.parent / "-".join(["eval", *settings])
    api.evaluate(load_evaluation(str(run), "", settings), folder)
    rows: list[dict[str, Any]] = pyarrow.parquet.read_table(folder / "completions" / "sorting.parquet").to_pylist()
    return rows


@pytest.mark.parametrize(
    "noise",
    [
        ["method.preset=c3po", "optimizer.ess=1e6", "noise.size=2", "noise.where={mlp=1.0, embedding=2.0}"],
        ["method.preset=qerl", "noise.size=0.5", "ess_schedule.stages=3", "run.steps=3"],
        ["method.preset=c3po", "optimizer.ess=1e6", "eval.draws=0"],
    ],
    ids=["a learned posterior that is scaled", "noise of a given size that has fallen", "the mean"],
)
def test_a_checkpoint_scores_as_it_did_while_training(
    noise: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its noise is neither scaled once more, nor as large as when the run began; sampling is addressed by the step."""
    monkeypatch.chdir(tmp_path)
    Path("parity_of_characters.py").write_text(
        "def reward(completions, **_):\n    return [float(sum(map(ord, c)) % 2) for c in completions]\n"
    )
    settings = ["run.steps=2", "eval.every=3", "eval.draws=8", "eval.samples=8", "eval.problems=16", *noise]
    config = train_config(tmp_path / "run", "reward.function=parity_of_characters:reward", *settings)
    logged = read_metrics(api.train(config))[-1]
    summary = api.evaluate(load_evaluation(str(tmp_path / "run"), "", []), tmp_path / "eval", step=config.run.steps)
    scores = summary["benchmarks"]["sorting"]
    assert 0 < scores["pass_at"]["1"] < 1, "any two would agree"
    assert scores["pass_at"]["1"] == logged["eval/pass_at_1"]
    assert scores["cut_share"] == logged["eval/cut_share"]
    assert scores["standard_errors_of_pass_at_1"]["bootstrap"] == logged["eval/se_bootstrap"]


def test_draws_of_the_posterior_share_the_completions(run: Path) -> None:
    rows = evaluated(run, "eval.samples=4", "eval.draws=2")
    assert [row["draw_index"] - Purpose.EVALUATION for row in rows] == [0, 0, 1, 1] * 6
    at_mean = evaluated(run, "eval.samples=4")
    assert {row["draw_index"] for row in at_mean} == {None}
    assert [row["tokens"] for row in at_mean] != [row["tokens"] for row in rows]


@pytest.mark.parametrize("cut", ["eval.temperature=0", "eval.top_p=1e-9", "eval.top_k=1"])
def test_decoding_is_the_evaluations_own(run: Path, cut: str) -> None:
    """Each of these leaves a problem one answer only; the rollouts of the run were sampled without any."""
    plain = ["eval.samples=4", "eval.temperature=1", "eval.top_p=1", "eval.top_k=0"]

    def answers(*settings: str) -> list[set[tuple[int, ...]]]:
        rows = evaluated(run, *plain, *settings)
        return [{tuple(row["tokens"]) for row in rows[i : i + 4]} for i in range(0, len(rows), 4)]

    assert all(len(different) == 1 for different in answers(cut))
    assert all(len(different) > 1 for different in answers())


def test_the_record_holds_scores_settings_and_every_completion(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    returned = api.evaluate(load_evaluation(str(run), "", ["eval.samples=4", "eval.draws=2"]), folder)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary == returned
    scores = summary["benchmarks"]["sorting"]
    assert (scores["problems"], scores["samples"]) == (6, 4)
    assert scores["pass_at"].keys() == {"1", "2", "3", "4"}
    assert scores["majority_at"].keys() == {"1", "2", "4"}
    assert scores["pass_at_1_by_draw"].keys() == {"0", "1"}
    assert scores["first_prompt"].startswith("sort ")
    assert summary["average"]["pass_at"] == scores["pass_at"]
    assert summary["config"]["eval"]["temperature"] == 0.6
    assert scores["standard_errors_of_pass_at_1"].keys() == {"between", "sampling", "bootstrap"}
    assert summary["versions"].keys() >= {"threepo", "torch", "transformers"}
    assert {path.name for path in folder.iterdir()} == {"summary.json", "evaluation.json", "completions", "eval.lock"}
    rows = pyarrow.parquet.read_table(folder / "completions" / "sorting.parquet").to_pylist()
    assert len(rows) == 6 * 4
    assert sum(row["correct"] for row in rows) / 24 == pytest.approx(scores["pass_at"]["1"])
    assert {row["format_ok"] for row in rows} == {None}


def test_draws_are_made_from_one_checkpoint_of_a_run_that_goes_on(
    run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = ["eval.samples=4", "eval.draws=2"]
    run = Path(shutil.copytree(run, tmp_path / "run"))
    expected = evaluated(run, *settings)
    load = evaluation.load_sharded

    def slow(*arguments: Any) -> Policy:
        policy = load(*arguments)
        newest = checkpoints(run)[-1][1]
        newer = shutil.copytree(newest, newest.with_name("step-000009"))
        file = newer / "posterior.safetensors"
        with safe_open(file, framework="pt") as kept:
            tensors, metadata = {name: 100 * kept.get_tensor(name) for name in kept.keys()}, kept.metadata()  # noqa: SIM118
        save_file(tensors, file, metadata)
        return policy

    monkeypatch.setattr(evaluation, "load_sharded", slow)
    folder = tmp_path / "meanwhile"
    api.evaluate(load_evaluation(str(run), "", settings), folder)
    rows = pyarrow.parquet.read_table(folder / "completions" / "sorting.parquet").to_pylist()
    assert [row["tokens"] for row in rows] == [row["tokens"] for row in expected]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["noise.unit=absolute", "noise.size=0.1"], "noise.unit = 'absolute': no draws are made"),
        (["eval.draws=2", "noise.unit=rms", "noise.size=0"], "noise.size = 0.0: every draw would be the mean"),
    ],
)
def test_noise_that_would_do_nothing_is_refused(settings: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_evaluation("some/model", "", ["data.train=sorting", *settings])


def test_a_run_in_the_home_folder_is_evaluated_with_its_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.train(train_config(tmp_path / "run", "run.steps=1"))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_evaluation("~/run", "", {}).data == load_evaluation(str(tmp_path / "run"), "", {}).data


def test_held_out_problems_that_are_not_asked_may_be_too_long(tmp_path: Path) -> None:
    problems = [{"prompt": "sort 2 1 ->", "answer": "1 2"}, {"prompt": "long " * 500, "answer": "1"}]
    (tmp_path / "heldout.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    settings = [f"data.eval={tmp_path / 'heldout.jsonl'}", "reward.function=exact", "eval.every=1"]
    run = api.train(train_config(tmp_path / "one", "run.steps=1", *settings, "eval.problems=1", "eval.samples=4"))
    for row, done in zip(read_metrics(run), (0, 1), strict=True):
        assert list(read_evaluation(run, done).values()) == [row["eval/pass_at_1"]], "of the only problem"
    assert read_evaluation(run, 2) == {}
    with pytest.raises(UserError, match="row 2: prompt of .* exceed the model's context"):
        api.train(train_config(tmp_path / "both", "run.steps=1", *settings, "eval.problems=2"))


def test_draws_need_a_posterior(tmp_path: Path) -> None:
    run = api.train(train_config(tmp_path / "run", "run.steps=1"))
    with pytest.raises(UserError, match="holds no posterior"):
        api.evaluate(load_evaluation(str(run), "", ["eval.draws=2"]), tmp_path / "out")
    assert not (tmp_path / "out").exists()
