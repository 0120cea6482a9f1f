"""Runs of episodes: every method, alone, killed and resumed, with evaluation; on ranks in tests/ranks."""

import json
from pathlib import Path

import pyarrow.parquet
import pytest

from runs import RLVR, kill_after, outcome, train_config
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
    "data.prompts_per_step=2",
    "run.steps=2",
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
    "pass_at_k": ("environment.factory=worlds:AllOrNothing",),
}
MEAN_OR_REPLAYED = {"grpo", "m3po", "c3po_replay", "pass_at_k"}
"""Methods whose gradient is taken at the weights that wrote the rollouts."""


@pytest.mark.parametrize("preset", METHODS)
def test_every_method_trains_on_episodes(preset: str, tmp_path: Path, model: str) -> None:
    run = tmp_path / "run"
    api.train(train_config(run, *EPISODES, model, f"method.preset={preset}", *METHODS[preset]))
    for row in read_metrics(run):
        assert 1 < row["episodes/turns_mean"] <= 3
        assert row["episodes/done_share"] + row["episodes/cut_share"] == pytest.approx(1)
        assert 1 <= row["environment/made"] <= 3
        assert row["reward/mean"] > 0
    for step in range(2):
        table = pyarrow.parquet.read_table(run / "completions" / f"step-{step:06d}.parquet").to_pylist()
        for row in table:
            episode = json.loads(row["episode"])
            assert row["num_tokens"] == sum(end - first for first, end in episode["own"])
            assert row["reward"] == episode["reward"]
            if preset in MEAN_OR_REPLAYED:
                assert row["gradient_logprob_sum"] == pytest.approx(row["behaviour_logprob_sum"], abs=1e-4)


def test_a_run_killed_in_the_middle_of_episodes_ends_like_one_never_killed(tmp_path: Path, model: str) -> None:
    settings = [*EPISODES, model, "method.preset=c3po", *IVON, "run.steps=4", "run.checkpoint_every=2"]
    api.train(train_config(tmp_path / "whole", *settings))
    killed = tmp_path / "killed"
    kill_after(3, killed, "train", *settings, f"run.folder={killed}")
    assert main(["train", "--resume", str(killed)]) == 0
    one, other = outcome(tmp_path / "whole"), outcome(killed)
    for key in one:
        assert other[key] == one[key], key


def test_pass_at_k_refuses_what_pays_fractions(tmp_path: Path, model: str) -> None:
    settings = [*EPISODES, model, "method.preset=pass_at_k", *METHODS["pass_at_k"]]
    with pytest.raises(UserError, match=r"environment.discount = 0.9: pass_at_k needs rewards of 0 and 1"):
        train_config(tmp_path, *settings, "environment.discount=0.9")


@pytest.mark.filterwarnings("ignore:environment. .* episodes have failed")
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
    with pytest.raises(UserError, match=r"environment.max_failed_share = 0: \d+ of 16 episodes have failed"):
        api.train(train_config(tmp_path / "strict", *settings, "environment.max_failed_share=0"))


def test_episodes_are_evaluated_and_explored(tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The commands play the episodes of a run's environment, and read those of its log."""
    scores, runs = tmp_path / "scores", [tmp_path / preset for preset in ("grpo", "c3po_replay")]
    for run in runs:
        api.train(train_config(run, *EPISODES, model, f"method.preset={run.name}", *METHODS[run.name], "eval.every=2"))
        assert [0 <= row["eval/pass_at_1"] <= 1 for row in read_metrics(run)[::2]] == [True, True]
    settings = ["data.train=sorting", "data.levels=[2, 3]", "reward.function=environment", "reward.correct_from=2"]
    settings += ["environment.factory=worlds:Echo", "eval.problems=4", "eval.samples=2", "sampling.max_new_tokens=8"]
    assert main(["eval", str(runs[0]), *settings, "--output", str(scores)]) == 0
    (file,) = scores.rglob("*.parquet")
    rows = pyarrow.parquet.read_table(file).to_pylist()
    assert len(rows) == 8
    for row in rows:
        episode = json.loads(row["episode"])
        replies = [text for role, text in episode["transcript"] if role == "assistant"]
        assert row["reward"] == sum(len(reply) % 3 == 0 for reply in replies[: int(episode["metrics"]["made"])])
        assert row["num_tokens"] == sum(end - first for first, end in episode["own"])
    explore = ["explore", *map(str, runs), "--verdict", "reward", "--right-above", "1.5"]
    assert main([*explore, "--output", str(tmp_path / "explored")]) == 0
    (found,) = json.loads((tmp_path / "explored" / "exploration.json").read_text())["runs"].values()
    for step in range(2):
        table = pyarrow.parquet.read_table(runs[0] / "completions" / f"step-{step:06d}.parquet").to_pylist()
        groups: dict[str, list[float]] = {}
        for row in table:
            groups.setdefault(row["problem_id"], []).append(row["reward"])
        wrong = sum(max(rewards) <= 1.5 for rewards in groups.values()) / len(groups)
        assert found["curves"]["all_wrong/baseline"][step] == wrong
