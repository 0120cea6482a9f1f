"""Evaluation: at the mean, over draws, from the command's side."""

import json
from pathlib import Path

import pyarrow.parquet
import pytest

from factories import completion
from runs import train_config
from threepo import jobs
from threepo.errors import UserError
from threepo.evaluation.evaluate import FIRST_EVAL_DRAW, score
from threepo.runs import read_metrics
from threepo.training.recipe import load_evaluation


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished C3PO run with an evaluation at its end."""
    config = train_config(
        tmp_path / "run", "method.preset=c3po", "optimizer.ess=1e6", "run.steps=2", "eval.every=2", "eval.problems=6"
    )
    return jobs.train(config)


def test_scores_by_hand() -> None:
    rows = [
        completion("a", 0, reward=1),
        completion("a", 1),
        completion("b", 0),
        completion("b", 1, status="no_answer"),
    ]
    result = score(rows, samples=2)
    assert (result.problems, result.samples) == (2, 2)
    assert result.pass_at == {1: 0.25, 2: 0.5}
    assert result.no_answer_share == 0.25
    assert result.metrics()["eval/pass_at_2"] == 0.5


def test_a_checkpoint_scores_as_it_did_while_training(run: Path) -> None:
    """The sampling of an evaluation is addressed by step; the run's last one was made after step 2."""
    logged = read_metrics(run)[-1]
    config = load_evaluation(str(run), "", [])
    result = jobs.evaluate(config, step=2)
    assert result.metrics()["eval/pass_at_1"] == logged["eval/pass_at_1"]
    assert result.metrics()["eval/cut_share"] == logged["eval/cut_share"]


def test_draws_of_the_posterior_share_the_completions(run: Path) -> None:
    result = jobs.evaluate(load_evaluation(str(run), "", ["eval.samples=4", "eval.draws=2"]))
    indices = [c.draw.index - FIRST_EVAL_DRAW for c in result.completions if c.draw]
    assert indices == [0, 0, 1, 1] * 6
    at_mean = jobs.evaluate(load_evaluation(str(run), "", ["eval.samples=4"]))
    assert {c.draw for c in at_mean.completions} == {None}
    assert [c.tokens for c in at_mean.completions] != [c.tokens for c in result.completions]


@pytest.mark.parametrize("cut", ["eval.temperature=0", "eval.top_p=1e-9", "eval.top_k=1"])
def test_decoding_is_the_evaluations_own(run: Path, cut: str) -> None:
    """Each of these leaves a problem one answer only; the rollouts of the run were sampled without any."""
    plain = ["eval.samples=4", "eval.temperature=1", "eval.top_p=1", "eval.top_k=0"]

    def answers(*settings: str) -> list[set[tuple[int, ...]]]:
        completions = jobs.evaluate(load_evaluation(str(run), "", [*plain, *settings])).completions
        return [{c.tokens for c in completions[i : i + 4]} for i in range(0, len(completions), 4)]

    assert all(len(different) == 1 for different in answers(cut))
    assert all(len(different) > 1 for different in answers())


def test_the_record_holds_scores_settings_and_every_completion(run: Path, tmp_path: Path) -> None:
    config = load_evaluation(str(run), "", ["eval.samples=4"])
    result = jobs.evaluate(config)
    jobs.write_evaluation(tmp_path / "out", config, result)
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["pass_at"].keys() == {"1", "2", "4"}
    assert summary["config"]["eval"]["temperature"] == 0.6
    assert summary["standard_errors_of_pass_at_1"].keys() == {"between", "sampling", "bootstrap"}
    rows = pyarrow.parquet.read_table(tmp_path / "out" / "completions.parquet").to_pylist()
    assert len(rows) == 6 * 4
    assert sum(row["correct"] for row in rows) / 24 == pytest.approx(summary["pass_at"]["1"])


def test_draws_need_a_posterior(tmp_path: Path) -> None:
    run = jobs.train(train_config(tmp_path / "run", "run.steps=1"))
    with pytest.raises(UserError, match="holds no posterior"):
        jobs.evaluate(load_evaluation(str(run), "", ["eval.draws=2"]))
