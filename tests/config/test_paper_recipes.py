"""The paper's recipes have its settings."""

import pytest

from threepo.config import AdamWConfig, Correction, IVONConfig, SFTConfig, TrainConfig
from threepo.config.recipes import load
from threepo.config.records import differences, to_dict
from threepo.errors import UserError

MODELS = {"olmo3_7b": ("allenai/Olmo-3-1025-7B", 1e9), "qwen25_math_7b": ("Qwen/Qwen2.5-Math-7B", 1e10)}
METHODS = {
    "grpo": (0, 16, "mean", "none"),
    "b3po": (1, 16, "generator", "none"),
    "m3po": (4, 16, "generator", "none"),
    "m3po_unconstrained": (4, 64, "generator", "none"),
    "c3po": (4, 16, "fresh", "seq_mis"),
    "c3po_replay": (4, 16, "generator", "none"),
}
"""Draws, completions of a prompt over all of them, where the gradient is taken, and the correction."""


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("method", METHODS)
def test_reinforcement_learning_is_the_papers(model: str, method: str) -> None:
    config = load(TrainConfig, f"paper/{model}/{method}")
    draws, rollouts, gradient_at, correction = METHODS[method]
    found, data = config.method, config.data
    assert (found.draws, found.rollouts_per_prompt) == (draws, rollouts)
    assert (found.gradient_at, found.correction) == (gradient_at, Correction(kind=correction, low=0.5, high=2.0))
    assert (data.train, data.prompts_per_step, data.max_prompt_tokens) == ("dapo-math-17k", 32, 1024)
    assert (config.sampling.temperature, config.sampling.top_p, config.sampling.top_k) == (1.0, 1.0, 0)
    assert config.sampling.max_new_tokens == 3072
    objective = config.objective
    assert (objective.clip_low, objective.clip_high, objective.dual_clip, objective.mini_batches) == (0.2, 0.2, 3, 1)
    assert objective.entropy_coefficient == 0
    assert (config.schedule.kind, config.schedule.warmup_share, config.run.steps) == ("constant", 0.06, 543)
    assert config.reward.scoring == "binary"
    assert config.model.path == f"runs/paper/{model}/sft"
    optimizer = config.optimizer
    if method == "grpo":
        assert optimizer == AdamWConfig(lr=1e-6, betas=(0.9, 0.999), weight_decay=0.1, max_grad_norm=1.0)
    else:
        assert optimizer == IVONConfig(
            lr=1.0, ess=MODELS[model][1], hess_init=1e-3, betas=(0.9, 0.9999), weight_decay=1e-8, clip_radius=1e-3
        )


@pytest.mark.parametrize("method", ["grpo", "b3po", "m3po", "c3po"])
def test_code_is_the_papers(method: str) -> None:
    config = load(TrainConfig, f"paper/olmo3_7b/code_{method}")
    data = config.data
    assert (data.train, data.max_prompt_tokens, config.sampling.max_new_tokens) == ("code-r1-12k", 2048, 2048)
    assert config.method == load(TrainConfig, f"paper/olmo3_7b/{method}").method
    assert config.run.steps == 12_000 // config.data.prompts_per_step, "one epoch"
    assert config.schedule.warmup_share == 0.06
    assert config.reward.sandbox.backend == "sandbox_fusion"


@pytest.mark.parametrize("model", MODELS)
def test_the_entropy_bonus_is_all_that_its_baseline_adds(model: str) -> None:
    grpo, bonus = load(TrainConfig, f"paper/{model}/grpo"), load(TrainConfig, f"paper/{model}/entreg")
    changed = {name for name, _, _ in differences(to_dict(grpo), to_dict(bonus))}
    assert changed == {"objective.entropy_coefficient", "run.folder"}
    assert bonus.objective.entropy_coefficient == 1e-3


def test_recipes_of_the_other_command_are_refused() -> None:
    with pytest.raises(UserError, match="recipe paper/olmo3_7b/sft: is a warm start; `threepo sft` takes it"):
        load(TrainConfig, "paper/olmo3_7b/sft")
    with pytest.raises(UserError, match="recipe demo/c3po: is reinforcement learning; `threepo train` takes it"):
        load(SFTConfig, "demo/c3po")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", ["sft", "sft_adamw"])
def test_the_warm_start_is_the_papers(model: str, name: str) -> None:
    config = load(SFTConfig, f"paper/{model}/{name}")
    assert config.model.path == MODELS[model][0]
    assert config.conversations is not None
    chats = config.conversations
    assert (chats.source, chats.batch_size, chats.epochs, chats.max_tokens) == ("llama-nemotron", 128, 2, 4096)
    assert (config.schedule.kind, config.schedule.warmup_share, config.schedule.floor) == ("cosine", 0.1, 0.1)
    if name == "sft":
        assert config.optimizer == IVONConfig(
            lr=50, ess=1e10, hess_init=1e-3, betas=(0.9, 0.9999), weight_decay=1e-8, clip_radius=1e-3
        )
    else:
        assert config.optimizer == AdamWConfig(lr=1e-5, betas=(0.9, 0.999), weight_decay=0.1, max_grad_norm=1.0)
