"""Overlap: rollouts of a step come from the weights of some steps before, and meanwhile the policy is updated."""

import shutil
import threading
from pathlib import Path

import pyarrow.parquet
import pytest

from runs import outcome, train_config
from threepo import api
from threepo.config import TrainConfig
from threepo.config.recipes import load_resumed
from threepo.errors import ThreepoWarning, UserError
from threepo.run_folder import RunFolder, checkpoints, read_metrics
from threepo.training import rlvr

C3PO = ("method.preset=c3po", "optimizer.lr=1e3", "optimizer.ess=1e6", "schedule.warmup_share=0")


def completions(run: Path, step: int) -> list[dict[str, object]]:
    found: list[dict[str, object]] = pyarrow.parquet.read_table(
        run / "completions" / f"step-{step:06d}.parquet"
    ).to_pylist()
    return found


@pytest.mark.parametrize("lag", [1, 3])
def test_rollouts_are_those_of_weights_so_many_steps_ago(lag: int, tmp_path: Path, learnable: list[str]) -> None:
    """They can be made again from the checkpoint of that time."""
    whole = tmp_path / "whole"
    settings = [*learnable, *C3PO, f"overlap.lag={lag}", "run.steps=6", "run.checkpoint_every=1"]
    api.train(train_config(whole, *settings, "run.keep_checkpoints=0"))
    for step in range(6):
        assert {row["policy_step"] for row in completions(whole, step)} == {max(step - lag, 0)}
    for before in range(1, 6 - lag):
        copy = tmp_path / f"from-{before}"
        shutil.copytree(whole, copy)
        for other, theirs in checkpoints(copy):
            if other != before:
                shutil.rmtree(theirs)
        with RunFolder(copy) as folder:
            run = rlvr.assemble(load_resumed(TrainConfig, copy), folder)
            again = rlvr.begin_rollouts(run, before + lag)().completions
            run.engine.close()
        rows = completions(whole, before + lag)
        assert [c.text for c in again] == [row["completion"] for row in rows]
        assert [sum(c.logprobs) for c in again] == pytest.approx([row["behaviour_logprob_sum"] for row in rows])
        assert {c.policy_step for c in again} == {before}


def test_the_correction_is_for_the_lag_too(tmp_path: Path, learnable: list[str]) -> None:
    """C3PO with one draw has it, too, though its rollouts are on-policy without a lag."""
    kl = {}
    for lag in (0, 1):
        run = tmp_path / str(lag)
        settings = [*C3PO, "method.draws=1", "run.steps=3", f"overlap.lag={lag}", "optimizer.ess=1e12"]
        api.train(train_config(run, *learnable, *settings))
        kl[lag] = [row["correction/kl"] for row in read_metrics(run)]
        rows = completions(run, 2)
        assert all((row["correction_weight"] != 1) == (lag == 1) for row in rows)
    assert max(kl[0]) < 1e-6 < 1e-5 < min(kl[1][1:])


def test_a_divergence_that_is_too_large_holds_rollouts_back(tmp_path: Path, learnable: list[str]) -> None:
    """Those of one step are begun before anything is measured; then each step's are of its own weights. Where nothing
    is too large, they get one step further ahead after each.
    """
    ages = {}
    for most_kl in (1e-9, 1e9):
        run = tmp_path / f"{most_kl:g}"
        settings = [*learnable, *C3PO, "overlap.lag=2", f"overlap.most_kl={most_kl}", "run.steps=6"]
        api.train(train_config(run, *settings))
        ages[most_kl] = [row["overlap/age"] for row in read_metrics(run)]
        assert ages[most_kl] == [step - completions(run, step)[0]["policy_step"] for step in range(6)]  # type: ignore[operator]
    assert ages == {1e-9: [0, 1, 0, 0, 0, 0], 1e9: [0, 1, 1, 2, 2, 2]}


def test_rollouts_are_made_while_the_policy_is_updated(
    tmp_path: Path, learnable: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The grader of the second step waits for the update of the first to have begun."""
    updating = threading.Event()
    inner = rlvr.update_policy

    def update(*arguments: object) -> object:
        updating.set()
        return inner(*arguments)  # type: ignore[arg-type]

    def patient(grade: object, world: object) -> object:
        calls = iter(range(100))

        def graded(found: object) -> object:
            if next(calls):
                assert updating.wait(30)
            return grade(found)  # type: ignore[operator]

        return graded

    monkeypatch.setattr(rlvr, "update_policy", update)
    monkeypatch.setattr(rlvr, "divide_grading", patient)
    api.train(train_config(tmp_path / "run", *learnable, *C3PO, "run.steps=3", "overlap.lag=1"))
    assert len(read_metrics(tmp_path / "run")) == 3


def test_without_progress_a_lag_changes_nothing(tmp_path: Path, learnable: list[str]) -> None:
    found = []
    for lag in (0, 2):
        run = tmp_path / str(lag)
        still = [*learnable, "run.steps=4", "optimizer.lr=1e-30", "eval.every=2", f"overlap.lag={lag}"]
        still.append("method.correction.kind=seq_mis")
        api.train(train_config(run, *still))
        found.append(outcome(run))
    assert [row.pop("overlap/age", 0) for row in found[1]["metrics"] if row["step"] >= 0] == [0, 1, 2, 2]
    assert found[0]["metrics"] == found[1]["metrics"]
    for step, rows in found[0]["completions"].items():
        for one, other in zip(rows, found[1]["completions"][step], strict=True):
            assert one | {"policy_step": 0} == other | {"policy_step": 0}


FAILING = """
import threading
calls = []
def reward(completions, **_):
    if threading.current_thread() is not threading.main_thread():
        calls.append(1)
        assert len(calls) != 4, "the judge is down"
    return [float(bool(c)) for c in completions]
"""


@pytest.mark.filterwarnings("ignore:.*earlier weights:threepo.errors.ThreepoWarning")
def test_rollouts_that_fail_leave_no_checkpoint_without_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reward of the fourth step fails when the first three are done, and evaluated."""
    monkeypatch.chdir(tmp_path)
    Path("failing.py").write_text(FAILING)
    settings = ["reward.function=failing:reward", "overlap.lag=1", "run.steps=6", "eval.every=3"]
    with pytest.raises(UserError, match="judge is down"):
        api.train(train_config(tmp_path / "run", *settings, "run.checkpoint_every=2"))
    assert [step for step, _ in checkpoints(tmp_path / "run")] == [2]


def test_nothing_corrects(tmp_path: Path, learnable: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.warns(ThreepoWarning, match="earlier weights"):
        rlvr.assemble(train_config(tmp_path / "run", *learnable, "overlap.lag=1")).folder.close()
    followed = ["method.preset=c3po", "ess_schedule.kind=controller", "overlap.lag=1"]
    rlvr.assemble(train_config(tmp_path / "followed", *learnable, *followed)).folder.close()
    assert "'controller': reads what noise and lag do together" in capsys.readouterr().err
    greedy = ["method.preset=thompson", "method.draws=8", "overlap.lag=1"]
    with pytest.warns(ThreepoWarning, match="earlier weights.*; greedy rollouts have no ratio to correct by"):
        rlvr.assemble(train_config(tmp_path / "greedy", *learnable, *greedy)).folder.close()
