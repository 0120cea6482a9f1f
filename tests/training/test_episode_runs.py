"""Runs of episodes: every method, alone, killed and resumed, with evaluation; on ranks in tests/ranks."""

import json
import signal
import time
from pathlib import Path

import pyarrow.parquet
import pytest

from runs import RLVR, forked, outcome, train_config
from threepo import api
from threepo.cli import main
from threepo.config import ModelConfig, TinyConfig
from threepo.errors import UserError
from threepo.models.policy import load_policy
from threepo.run_folder import read_metrics

EPISODES = (
    *(setting for setting in RLVR if not setting.startswith("model.")),
    "run.threads=1",
    "reward.function=environment",
    "environment.factory=worlds:Echo",
    "schedule.warmup_share=0",
    "run.steps=3",
)


def talkative_model(folder: Path) -> Path:
    """A tiny model of which a quarter of all tokens end a reply."""
    policy = load_policy(
        ModelConfig(path="tiny-qwen2", tiny=TinyConfig(hidden_size=32, layers=1, heads=2, kv_heads=1, tied=False))
    )
    policy.model.generation_config.eos_token_id = [policy.tokenizer.eos_token_id, *range(0, 250, 4)]
    policy.model.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"model.path={talkative_model(tmp_path_factory.mktemp('model'))}"


IVON = ("optimizer.lr=10", "optimizer.ess=1e8")
METHODS = {
    "grpo": (),
    "m3po": IVON,
    "c3po": IVON,
    "c3po_replay": IVON,
    "auto": ("method.draws=4",),
    "es": ("noise.size=0.05", "method.draws=8"),
}


@pytest.mark.parametrize("preset", METHODS)
def test_every_method_trains_on_episodes(preset: str, tmp_path: Path, model: str) -> None:
    run = tmp_path / "run"
    api.train(train_config(run, *EPISODES, model, f"method.preset={preset}", *METHODS[preset], "eval.every=3"))
    rows = read_metrics(run)
    assert 0 <= rows[0]["eval/pass_at_1"] <= 1
    for row in rows[1:]:
        assert 1 < row["episodes/turns_mean"] < 3
        assert row["episodes/done_share"] + row["episodes/cut_share"] == pytest.approx(1)
        assert 1 <= row["environment/made"] <= 3
        assert row["reward/mean"] > 0
    for step in range(3):
        table = pyarrow.parquet.read_table(run / "completions" / f"step-{step:06d}.parquet").to_pylist()
        for row in table:
            episode = json.loads(row["episode"])
            assert row["num_tokens"] == sum(end - first for first, end in episode["own"])
            assert row["reward"] == episode["reward"]
            if preset in ("grpo", "m3po", "c3po_replay"):  # their gradients are taken where the rollouts came from
                assert row["gradient_logprob_sum"] == pytest.approx(row["behaviour_logprob_sum"], abs=1e-4)


def test_a_run_killed_in_the_middle_of_episodes_ends_like_one_never_killed(tmp_path: Path, model: str) -> None:
    settings = [*EPISODES, model, "method.preset=c3po", *IVON, "run.steps=6", "run.checkpoint_every=2"]
    api.train(train_config(tmp_path / "whole", *settings))
    killed = tmp_path / "killed"
    command = ["train", *settings, f"run.folder={killed}"]
    for steps in (1, 4):
        process = forked(*command)
        deadline = time.monotonic() + 120
        while len(read_metrics(killed)) < steps and process.is_alive() and time.monotonic() < deadline:
            time.sleep(0.005)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        command = ["train", "--resume", str(killed)]
    assert main(command) == 0
    one, other = outcome(tmp_path / "whole"), outcome(killed)
    for key in one:
        assert other[key] == one[key], key


def test_failed_episodes_are_counted_and_pay_nothing(tmp_path: Path, model: str) -> None:
    settings = [*EPISODES, model, "method.preset=grpo", "environment.factory=threepo_worlds:Half"]
    with pytest.raises(UserError, match="no module 'threepo_worlds'"):
        api.train(train_config(tmp_path / "missing", *settings))
    settings[-1] = "environment.factory=worlds:FailsSometimes"
    api.train(train_config(tmp_path / "run", *settings))
    for step, row in enumerate(read_metrics(tmp_path / "run")):
        table = pyarrow.parquet.read_table(tmp_path / "run" / "completions" / f"step-{step:06d}.parquet").to_pylist()
        failed = [r for r in table if json.loads(r["episode"])["status"] == "failed"]
        assert row["episodes/failed_share"] == row["reward/environment_failed_share"] == len(failed) / len(table) > 0
        for one in failed:
            assert one["status"] == "error"
            assert one["detail"] == "environment failed"
            assert "no such key" in json.loads(one["episode"])["reason"]
    with pytest.raises(UserError, match=r"environment.max_failed_share = 0: \d+ of 32 episodes have failed"):
        api.train(train_config(tmp_path / "strict", *settings, "environment.max_failed_share=0"))
