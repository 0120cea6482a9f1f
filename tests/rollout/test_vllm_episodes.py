"""Episodes with the vLLM engine, run for real: one draw through all turns, in turn and as adapters, and whole runs."""

import importlib.util
import json
from pathlib import Path

import pyarrow.parquet
import pytest
import torch

from rollout.asked import differences
from rollout.test_episodes import DATA, DRAWS, SAMPLING, requests
from runs import VLLM, kill_after, outcome
from threepo.cli import main
from threepo.config import EnvironmentConfig, ModelConfig, TinyConfig
from threepo.config.engine import VLLMConfig, VLLMEngineConfig
from threepo.models.policy import Policy, load_policy
from threepo.posterior.ivon import IVON
from threepo.rollout.environments import Environments
from threepo.rollout.episodes import EpisodeEngine
from threepo.rollout.vllm import VLLMEngine
from threepo.run_folder import read_metrics

NO_VLLM = importlib.util.find_spec("vllm") is None
pytestmark = [
    pytest.mark.skipif(NO_VLLM, reason="vLLM is not installed; `make test-vllm` installs it"),
    pytest.mark.usefixtures("forked_replicas"),
]


def talkative() -> Policy:
    """A tiny policy that ends its replies after some tokens, since a quarter of its vocabulary are stop tokens."""
    shape = TinyConfig(hidden_size=64, intermediate_size=96, layers=2, heads=2, kv_heads=1)
    policy = load_policy(ModelConfig(path="tiny-qwen2", tiny=shape), seed=2)
    policy.model.generation_config.eos_token_id = [policy.tokenizer.eos_token_id, *range(0, 250, 4)]
    return policy


def test_one_draw_writes_all_replies_of_an_episode() -> None:
    """With two replicas, each of which has two draws in turn, where there is a GPU for each."""
    policy, replicas = talkative(), 1 if torch.cuda.device_count() == 1 else 2
    optimizer = IVON(policy.model.named_parameters(), ess=1e5)
    own = VLLMConfig(kv_cache_memory_bytes=1 << 28, enforce_eager=True, replicas=replicas)
    inner = VLLMEngine(policy, VLLMEngineConfig(vllm=own))
    echo = EnvironmentConfig(factory="worlds:Late", answer_steps=2)
    engine = EpisodeEngine(inner, policy, echo, DATA, Environments(echo))
    draws = [*DRAWS, None]
    made = []
    try:
        for _ in range(3):  # the environments take different times each time
            engine.load(optimizer, draws, 0)
            made.append(engine.generate(requests(draws), SAMPLING, 1))
    finally:
        engine.close()
    completions = made[0]
    assert made[1] == made[2] == completions
    assert sum(len(c.own) for c in completions) > 1.5 * len(completions)
    for (draw, other), difference in differences(policy, optimizer, completions).items():
        assert difference < 1e-5 if draw == other else difference > 1e-2


@pytest.fixture
def settings(tmp_path: Path) -> list[str]:
    """A recipe of episodes with vLLM."""
    policy = talkative()
    policy.model.save_pretrained(tmp_path / "model")
    policy.tokenizer.save_pretrained(tmp_path / "model")
    return [
        *(setting for setting in VLLM if not setting.startswith("model.")),
        f"model.path={tmp_path / 'model'}",
        "method.draws=2",
        "reward.function=environment",
        "environment.factory=worlds:Echo",
        "engine.vllm.kv_cache_memory_bytes=268435456",
    ]


def test_a_run_of_episodes(tmp_path: Path, settings: list[str]) -> None:
    settings += ["method.preset=m3po", "model.lora.rank=4", "run.steps=2", f"run.folder={tmp_path / 'run'}"]
    assert main(["train", *settings]) == 0
    for step, row in enumerate(read_metrics(tmp_path / "run")):
        assert row["episodes/turns_mean"] > 1
        table = pyarrow.parquet.read_table(tmp_path / "run" / "completions" / f"step-{step:06d}.parquet").to_pylist()
        for one in table:
            assert one["num_tokens"] == sum(end - first for first, end in json.loads(one["episode"])["own"])
            assert one["gradient_logprob_sum"] == pytest.approx(one["behaviour_logprob_sum"], abs=1e-3)


def test_a_run_killed_in_the_middle_of_episodes_ends_like_one_never_killed(tmp_path: Path, settings: list[str]) -> None:
    settings += ["run.steps=5", "run.checkpoint_every=2", "engine.vllm.enforce_eager=true", "optimizer.lr=10"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert main(["train", *settings, f"run.folder={whole}"]) == 0
    kill_after(3, killed, "train", *settings, f"run.folder={killed}", seconds=300)
    assert len(read_metrics(killed)) < 5
    assert main(["train", "--resume", str(killed)]) == 0
    one, other = outcome(whole), outcome(killed)
    for key in one:
        assert other[key] == one[key], key
