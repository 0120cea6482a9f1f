"""The paper's recipes have its settings."""

import re
from pathlib import Path

import pytest

from threepo.config import AdamWConfig, Correction, IVONConfig, SFTConfig, TrainConfig
from threepo.config.recipes import load
from threepo.config.records import differences, to_dict
from threepo.errors import UserError

PAGE = Path(__file__).resolve().parents[2] / "docs" / "paper_index.md"
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


@pytest.mark.parametrize(("model", "context"), [("olmo3_7b", 8192), ("qwen25_math_7b", 4096)])
@pytest.mark.parametrize("method", ["grpo", "b3po", "m3po", "c3po"])
def test_code_is_the_papers(method: str, model: str, context: int) -> None:
    config = load(TrainConfig, f"paper/{model}/code_{method}")
    data = config.data
    assert (data.train, data.max_prompt_tokens, config.sampling.max_new_tokens) == ("code-r1-12k", 2048, 2048)
    mathematics = load(TrainConfig, f"paper/{model}/{method}")
    assert (config.method, config.optimizer) == (mathematics.method, mathematics.optimizer)
    assert (config.model, config.engine.vllm.max_model_len) == (mathematics.model, context)
    assert config.run.steps == 12_000 // config.data.prompts_per_step, "one epoch"
    assert config.schedule.warmup_share == 0.06
    assert config.reward.sandbox.backend == "sandbox_fusion"


BASELINES = {
    "entreg": {"objective.entropy_coefficient": 1e-3},
    "polaris": {"sampling.raised_temperature": 1.4},  # below 0.85 of the entropy, the default
    "kl_cov": {
        "objective.loss": "kl_cov",
        "objective.mini_batches": 4,
        "objective.kl_cov_share": 0.002,
        "objective.kl_cov_coefficient": 1.0,
    },
    "clip_cov": {
        "objective.loss": "clip_cov",
        "objective.clip_low": 1.0,
        "objective.clip_high": 1.0,
        "objective.mini_batches": 4,
        "objective.clip_cov_share": 0.0002,
        "objective.clip_cov_bounds": [1.0, 5.0],
    },
    "clip_higher": {"objective.clip_high": 0.28, "objective.mini_batches": 4},
    "dapo": {
        "objective.clip_high": 0.28,
        "objective.mini_batches": 4,
        "sampling.dynamic_rounds": 10,
        "sampling.prompts_per_round": 3 * 32,
    },
}
"""All in which a baseline differs from GRPO."""


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", BASELINES)
def test_a_baseline_is_grpo_with_these_settings(name: str, model: str) -> None:
    grpo, baseline = load(TrainConfig, f"paper/{model}/grpo"), load(TrainConfig, f"paper/{model}/{name}")
    recorded = to_dict(baseline)
    changed = {key: value for key, _, value in differences(to_dict(grpo), recorded) if value is not None}
    assert changed == {**BASELINES[name], "method.name": name, "run.folder": f"runs/paper/{model}/{name}"}
    assert baseline.sampling.raise_below == 0.85


def test_recipes_say_what_is_not_their_authors() -> None:
    texts = {path.stem: path.read_text() for path in (PAGE.parents[1] / "recipes").glob("*/olmo3_7b/*.toml")}
    for name in ("kl_cov", "clip_cov"):
        assert "the authors have 5e-7 and 8" in texts[name]
    assert "Prompts, steps and lengths are those of the runs in paper/" in texts["es"]
    assert "share their noise" in texts["es"]


def sweeps() -> dict[str, list[tuple[str, list[str]]]]:
    """Each row of the page's table of sweeps: recipes with the settings that go on top of them."""
    section = PAGE.read_text(encoding="utf-8").split("## Sweeps and ablations")[1].split("\n## ")[0]
    found = {}
    for line in section.splitlines():
        if line.startswith("| ") and "`" in line:
            study, recipes, settings = line.strip("| ").split(" | ")
            found[study] = [
                (recipe.replace("MODEL", model), text.replace("MODEL", model).split())
                for model in MODELS
                for recipe in re.findall("`(.*?)`", recipes)
                for text in re.findall("`(.*?)`", settings)
            ]
    return found


SWEEPS = sweeps()


@pytest.mark.parametrize("study", SWEEPS)
def test_every_run_of_a_sweep_is_one_of_its_recipe_with_other_settings(study: str) -> None:
    runs = []
    for recipe, settings in SWEEPS[study]:
        config, base = (to_dict(load(TrainConfig, recipe, more)) for more in (settings, []))
        named = {text.partition("=")[0] for text in settings} - {"method.preset"}
        changed = {key for key, _, _ in differences(base, config)}
        of_preset = "method." if any(text.startswith("method.preset") for text in settings) else "nothing"
        named |= {key for key in changed if f"{key.partition('.')[0]}.kind" in named}  # another kind has other keys
        assert all(key in named or key.startswith(of_preset) for key in changed), (recipe, settings)
        runs.append(config)
    assert all(one != other for i, one in enumerate(runs) for other in runs[:i]), "no run stands there twice"


def sizes(study: str) -> set[tuple[int, int, int]]:
    """Draws, completions of a prompt, and of an advantage group, of the runs of one model."""
    methods = [load(TrainConfig, recipe, more).method for recipe, more in SWEEPS[study] if "olmo" in recipe]
    return {(method.draws, method.rollouts_per_prompt, method.group_size) for method in methods}


def test_the_sweeps_are_the_papers() -> None:
    """Lambda on Qwen, too, where the paper uses 5e9 and 1e10; M and N as in figure 4."""
    assert {float(text.partition("=")[2]) for _, (text,) in SWEEPS["$\\lambda$ (5.1, appendix)"]} >= {1e8, 1e9, 1e10}
    assert sizes("M at $G = 16 / M$ (5.2)") == {(m, 16, 16 // m) for m in (1, 2, 4, 8)}
    assert sizes("M at $G = 16$ (5.2)") == {(m, 16 * m, 16) for m in (1, 2, 4, 8)}
    assert sizes("N (5.3); with one draw, C3PO is B3PO") == {(n, 16, 16) for n in (1, 2, 4, 8, 16)}
    assert sizes("Thompson limit (appendix)") == {(16, 16, 16)}


def test_the_pages_example_of_a_sweep_is_one_of_its_runs() -> None:
    (command,) = re.findall(r"^threepo train (.*run\.folder.*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    recipe, setting, folder = command.split()
    assert (recipe, [setting]) in SWEEPS["N (5.3); with one draw, C3PO is B3PO"]
    assert load(TrainConfig, recipe, [setting, folder]).run.folder == folder.partition("=")[2]


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
