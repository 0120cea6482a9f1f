"""The paper's baselines, as their recipes have them: what a recipe adds to GRPO changes what is learned."""

from pathlib import Path

import pytest

from runs import TINY, outcome
from threepo import api
from threepo.config import TrainConfig
from threepo.config.recipes import load
from threepo.run_folder import read_metrics

SMALL = (
    *TINY,
    "model.tiny.tied=false",
    "model.compute_dtype=float32",
    "model.gradient_checkpointing=false",
    "engine.kind=local",
    "engine.dtype=float32",
    "data.train=sorting",
    "data.levels=[2, 3]",
    "data.max_prompt_tokens=0",
    "data.prompts_per_step=4",
    "method.rollouts_per_prompt=4",
    "sampling.max_new_tokens=4",
    "reward.function=first_character:reward",
    "run.steps=3",
    "schedule.warmup_share=0",
    "optimizer.lr=3e-2",  # ratios leave the clip bounds, and entropy falls, within these steps
)
REWARD = "def reward(completions, **_):\n    return [float(bool(c) and c[0] < 'P') for c in completions]\n"
STEEP = ["optimizer.lr=0.1", "data.prompts_per_step=8"]
BASELINES = {
    "entreg": ([], ["objective.entropy_coefficient=0"]),
    "polaris": (["sampling.raise_below=1"], ["sampling.raised_temperature=0", "sampling.raise_below=0.85"]),
    "kl_cov": ([], ["objective.loss=ppo"]),
    "clip_cov": (["objective.clip_cov_bounds=[0.01, 5]"], ["objective.loss=ppo"]),  # covariances are small at random
    "clip_higher": (STEEP, [*STEEP, "objective.clip_high=0.2"]),
    "dapo": (
        ["sampling.prompts_per_round=8"],
        ["sampling.prompts_per_round=0", "sampling.dynamic_rounds=0"],
    ),
}
"""Settings with which each acts on a tiny model, and settings that make GRPO of it."""


@pytest.mark.parametrize("name", BASELINES)
def test_what_a_baselines_recipe_adds_changes_the_update(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("first_character.py").write_text(REWARD)
    needed, without = BASELINES[name]
    found = {}
    for folder, settings in (("with", needed), ("without", without)):
        config = load(TrainConfig, f"paper/olmo3_7b/{name}", [*SMALL, *settings, f"run.folder={folder}"])
        api.train(config)
        assert any(row["optimizer/grad_norm"] > 0 for row in read_metrics(Path(folder)))
        found[folder] = outcome(Path(folder))["tensors"]
    assert found["with"] != found["without"]
