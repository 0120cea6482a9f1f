"""What --dry-run says: the paper's table, the published model's size, and what an optimizer really keeps."""

import gc
import os
import re
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch
from transformers import AutoConfig

from published_shapes import OLMO3_7B, QWEN25_MATH_7B, write
from runs import train_config
from threepo.cli import main
from threepo.config import ModelConfig, SFTConfig, TrainConfig
from threepo.config.recipes import load
from threepo.errors import UserError
from threepo.lab import plan as planning
from threepo.lab.activations import activation_bytes
from threepo.lab.plan import plan
from threepo.models.loading import model_shape
from threepo.posterior.ivon import IVON
from threepo.rollout.memory import bytes_per_token, layers_without_keys
from threepo.run_folder import read_metrics
from threepo.training import rlvr
from threepo.training.metrics import step_flops
from threepo.types import Draw

LAYERS = 2
"""Of the model below, which is Olmo-3 otherwise: tests of 32 would take long."""
LAYER = 4 * 4096**2 + 3 * 4096 * 11008 + 4 * 4096
"""Weights of one: attention, the MLP, and four norms."""
WEIGHTS = 2 * 100278 * 4096 + LAYERS * LAYER + 4096
PASS = 2 * WEIGHTS * 512 * 1800 / 1e12
"""TFLOP of a forward pass of 512 rows of 1,800 tokens."""


_counted: dict[object, int] = {}


def counted_once(model: Any, *arguments: Any, **settings: Any) -> int:
    """`activation_bytes`, computed once for equal models and arguments: it takes a second."""
    weights = tuple((name, p.shape, p.dtype, p.requires_grad) for name, p in model.named_parameters())
    key = (model.config.to_json_string(), weights, arguments, tuple(settings.items()))
    if key not in _counted:
        _counted[key] = activation_bytes(model, *arguments, **settings)
    return _counted[key]


@pytest.fixture(autouse=True)
def _counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("threepo.lab.plan.activation_bytes", counted_once)


@pytest.fixture
def olmo3(tmp_path: Path) -> str:
    """A model directory without weights."""
    return write(tmp_path, OLMO3_7B | {"num_hidden_layers": LAYERS})


@pytest.mark.parametrize(
    ("rollouts", "prefills", "tera"),
    [(16, 1, 51_719.04), (16, 4, 52_139.5), (64, 4, 206_876.2)],
    ids=["GRPO and B3PO", "C3PO, N = 4", "M3PO, M = 4, G = 16"],
)
def test_the_papers_table(rollouts: int, prefills: int, tera: float) -> None:
    """Spec 12.1. The row of M3PO with G = 4 is that of two prefills, and not of its four (spec 12.2)."""
    tokens = 32 * prefills * 300, 32 * rollouts * 1500, 32 * rollouts * 1800
    assert step_flops(7.3e9, *tokens) == pytest.approx(tera * 1e12, rel=1e-6)


def test_a_shape_needs_no_weights(tmp_path: Path) -> None:
    found = model_shape(ModelConfig(path=write(tmp_path, OLMO3_7B)))
    config, weights = found.config, found.weights
    assert config.num_hidden_layers == 32
    assert weights == WEIGHTS + (32 - LAYERS) * LAYER
    assert weights == pytest.approx(7.3e9, rel=1e-3), "the paper's W"


def said(lines: dict[str, list[str]], words: str) -> float:
    """The number in front of these words."""
    found = [value for values in lines.values() for value in values if value.partition(" ")[2].startswith(words)]
    assert len(found) == 1, (words, lines)
    return float(found[0].split()[0].replace(",", ""))


def test_a_plan_of_the_papers_c3po(olmo3: str) -> None:
    settings = [
        f"model.path={olmo3}",
        "method.preset=c3po",
        "data.train=sorting",
        "data.prompts_per_step=32",
        "sampling.max_new_tokens=3072",
        "engine.dtype=bfloat16",
        "model.gradient_checkpointing=true",
    ]
    lines = plan(load(TrainConfig, "", settings), prompt_tokens=300, response_tokens=1500)
    assert said(lines, "TFLOP a step, 1.008 times GRPO's") == pytest.approx(52_139.5 * WEIGHTS / 7.3e9, rel=1e-3)
    assert said(lines, "GiB in all") == pytest.approx(5 * 4 * WEIGHTS / 2**30, rel=1e-3)
    assert said(lines, "GiB weights of 4 draws, bfloat16") == pytest.approx(4 * 2 * WEIGHTS / 2**30, rel=1e-3)


def test_a_plan_of_adapters(olmo3: str) -> None:
    """r = 32 on the seven kinds of matrices: B has 32 numbers for each output, A for each input."""
    settings = [f"model.path={olmo3}", "model.lora.rank=32"]
    lines = plan(load(TrainConfig, "paper/olmo3_7b/c3po", settings))
    outputs, inputs = 4 * 4096 + 2 * 11008 + 4096, 6 * 4096 + 11008
    b, a = LAYERS * 32 * outputs, LAYERS * 32 * inputs
    assert lines["model"][1].startswith(f"adapters of {a + b:,} numbers, of which {b:,} are trained")
    whole = WEIGHTS
    gib = 4 / 2**30
    assert said({"trainer": lines["trainer"]}, "GiB weights") == pytest.approx((whole + a + b) * gib, rel=1e-3)
    assert said(lines, "GiB gradients") == pytest.approx(b * gib, rel=1e-3)
    own = ["method.preset=c3po", "data.train=sorting", "engine.dtype=bfloat16"]
    local = plan(load(TrainConfig, "", [*settings, *own]))
    assert said(local, "GiB weights of 4 draws, bfloat16") == pytest.approx((whole + a + 4 * b) * 2 / 2**30, rel=1e-3)
    rounded = ["model.lora.base_dtype=bfloat16", "model.compute_dtype=bfloat16"]
    local = plan(load(TrainConfig, "", [*settings, *own, *rounded]))
    linear = whole - 100278 * 4096 - LAYERS * 4 * 4096 - 4096  # without embedding and norms
    trainer = (4 * (whole + a + b - linear) + 2 * linear) / 2**30
    assert said({"trainer": local["trainer"]}, "GiB weights") == pytest.approx(trainer, rel=1e-3)
    engine = (whole - linear + a + 4 * b) * 2 / 2**30  # linear layers are the trainer's
    assert said(local, "GiB weights of 4 draws, bfloat16") == pytest.approx(engine, rel=1e-3)
    held = said(local, "GiB at most of a GPU") + engine
    assert local["each GPU"][2] == f"80 GB: {79 - held:.3g} GiB left for keys and values"
    served = (whole + 8 * (a + b)) * 2 / 2**30
    assert said(lines, "GiB weights of 1 replica, bfloat16") == pytest.approx(served, rel=1e-3)
    assert said(lines, "GiB momentum and Hessian") == pytest.approx(2 * b * gib, rel=1e-3)
    full = plan(load(TrainConfig, "paper/olmo3_7b/c3po", settings[:1]))
    steps = [said(lines, "TFLOP a step") for lines in (full, lines)]
    tokens = 32 * 16 * (1024 + 3072)
    assert steps[0] - steps[1] == pytest.approx(2 * WEIGHTS * tokens / 1e12, rel=1e-3), (
        "frozen weights have no gradient"
    )
    with pytest.raises(UserError, match="computed for one process only"):
        plan(load(TrainConfig, "paper/olmo3_7b/c3po", settings), ranks=2)


def test_a_model_whose_activations_cannot_be_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Products of experts do not take autocast's dtypes there, of which torch would show a traceback."""
    shape = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    sizes = {"vocab_size": 500, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    path = write(tmp_path, shape | sizes | {"num_key_value_heads": 2})
    settings = [f"model.path={path}", "model.compute_dtype=bfloat16", "data.train=sorting", "method.preset=c3po"]
    lines = plan(load(TrainConfig, "", settings))
    assert lines["trainer"][-1].startswith("activations come on top, which cannot be counted for this model (Runtime")
    assert not caplog.records
    assert len(lines["each GPU"]) == 4


def test_only_layers_with_attention_keep_keys_and_values(tmp_path: Path) -> None:
    hybrid = AutoConfig.for_model("qwen3_5_text", num_hidden_layers=8, num_key_value_heads=2, head_dim=16)
    assert layers_without_keys(hybrid) == 6
    assert bytes_per_token(hybrid, torch.bfloat16) == 2 * 2 * 2 * 16 * 2, "of two layers in eight"
    sizes = {"vocab_size": 500, "hidden_size": 64, "num_heads": 8, "head_dim": 16, "num_hidden_layers": 1}
    path = write(tmp_path, {"model_type": "mamba2", "expand": 2, "n_groups": 1, **sizes})
    engine = plan(load(TrainConfig, "", [f"model.path={path}", "data.train=sorting", "batching.tokens=8"]))["engine"]
    assert engine[-1] == "states of the rows come on top, which are not counted, of layers without attention (1)"


def test_every_gradient_draw_trains_on_all_rows(olmo3: str) -> None:
    """Training takes three passes for each of K draws."""
    settings = [f"model.path={olmo3}", "method.preset=c3po", "data.train=sorting", "data.prompts_per_step=32"]
    settings += ["sampling.max_new_tokens=3072"]
    once, thrice = (
        said(plan(load(TrainConfig, "", [*settings, f"method.gradient_draws={draws}"]), 300, 1500), "TFLOP a step")
        for draws in (1, 3)
    )
    assert thrice - once == pytest.approx(2 * 3 * PASS, rel=1e-3)


def test_a_reference_costs_its_weights(olmo3: str) -> None:
    settings = [f"model.path={olmo3}", "method.preset=c3po", "data.train=sorting", "data.prompts_per_step=32"]
    settings += ["sampling.max_new_tokens=3072"]
    alone, compared = (
        [plan(load(TrainConfig, "", [*settings, *more]), 300, 1500, ranks) for ranks in (1, 8)]
        for more in ([], ["objective.reference_kl=0.01"])
    )
    size = said(alone[0], "GiB gradients")
    assert said(compared[0], "GiB weights of the reference") == size
    assert said(compared[0], "GiB in all") - said(alone[0], "GiB in all") == pytest.approx(size, rel=1e-2)
    assert said(compared[1], "GiB weights of the reference") == pytest.approx(size / 8, rel=1e-3)
    assert said(compared[1], "GiB at most") - said(alone[1], "GiB at most") == pytest.approx(size / 8, rel=2e-2)
    assert not any("reference" in line for lines in alone for line in lines.values())


def alive(size: int) -> int:
    """Tensors of so many elements that exist."""
    return sum(issubclass(type(x), torch.Tensor) and x.numel() == size for x in gc.get_objects())


@pytest.mark.parametrize("ranks", [1, 8])
def test_an_evolution_strategy_holds_the_weights_alone(olmo3: str, ranks: int) -> None:
    """It also trains with no backward pass; the strategy's own step is not counted."""
    settings = [f"model.path={olmo3}", "method.preset=es", "data.train=sorting", "data.prompts_per_step=32"]
    settings += ["sampling.max_new_tokens=3072"]
    lines = plan(load(TrainConfig, "", settings), 300, 1500, ranks)
    assert said(lines, "GiB in all") == pytest.approx(4 * WEIGHTS / ranks / 2**30, rel=1e-3)
    rollouts = 2 * WEIGHTS * 32 * 30 * (300 + 1500) / 1e12  # each of 30 draws reads every prompt and answers once
    assert said(lines, "TFLOP a step") == pytest.approx(rollouts, rel=1e-3)
    assert not any("micro-batches" in line or "at most" in line for line in lines["trainer"])


@pytest.mark.parametrize(("preset", "tensors"), [("psn", 4), ("grpo", 4), ("c3po", 5)])
def test_noise_around_adamw_is_free_unless_a_gradient_is_taken_there(preset: str, tensors: int) -> None:
    """Weights, gradients and moments; IVON also keeps the mean while the weights are perturbed."""
    settings = ["model.path=tiny-qwen2", "data.train=sorting", f"method.preset={preset}"]
    lines = plan(load(TrainConfig, "", settings))
    assert said(lines, "GiB in all") == pytest.approx(tensors * said(lines, "GiB gradients"), rel=1e-3)
    replay = ["method.draws=2", "method.gradient_at=generator", "noise.unit=rms", "ess_schedule.kind=constant"]
    if preset == "psn":
        lines = plan(load(TrainConfig, "", [*settings, *replay, "method.correction.kind=none"]))
        assert said(lines, "GiB in all") == pytest.approx(5 * said(lines, "GiB gradients"), rel=1e-3)


@pytest.mark.parametrize("draws", [1, 3])
def test_memory_is_what_the_optimizer_keeps(draws: int) -> None:
    """Counted in the last draw of a real IVON, while the weights are perturbed and have their gradient."""
    settings = ["model.path=tiny-qwen2", "data.train=sorting", "method.preset=m3po", f"method.draws={draws}"]
    lines = plan(load(TrainConfig, "", [*settings, f"method.rollouts_per_prompt={4 * draws}"]))
    size = 12_347  # no other tensor has it
    p = torch.nn.Parameter(torch.zeros(size))
    optimizer = IVON([("p", p)])
    for index in range(draws):
        optimizer.zero_grad()
        with optimizer.perturbed(Draw(0, 0, index)):
            p.grad = torch.ones_like(p)
            peak = alive(size)
        optimizer.observe(Draw(0, 0, index))
    assert said(lines, "GiB in all") == pytest.approx(peak * said(lines, "GiB gradients"), rel=1e-3)


def test_a_plan_of_the_papers_warm_start(olmo3: str) -> None:
    config = load(SFTConfig, "paper/olmo3_7b/sft", [f"model.path={olmo3}"])
    for tokens, lines in ((4096, plan(config)), (1760, plan(config, 260, 1500))):
        assert said(lines, "TFLOP a step") == pytest.approx(6 * WEIGHTS * 128 * tokens / 1e12, rel=1e-3)
    for ranks in (1, 8):
        states = said(plan(config, ranks=ranks), "GiB momentum and Hessian")
        assert states == pytest.approx(2 * 4 * WEIGHTS / ranks / 2**30, rel=1e-3)


PLANNED = "demo/c3po --dry-run model.path=tiny-qwen2"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--dry-run --resume runs/x", "--dry-run --resume: .* leave out one"),
        ("demo/c3po --dry-run --prompt-tokens -5", "--prompt-tokens -5: must be above 0"),
        ("demo/c3po --ranks 8", "--ranks 8: .* with --dry-run only"),
        (
            f"{PLANNED} --response-tokens 999",
            "--response-tokens 999: must be at most sampling.max_new_tokens = 64, where responses are cut",
        ),
        (
            f"{PLANNED} reward.function=nowhere_to_be:found",
            "reward.function = 'nowhere_to_be:found': no module 'nowhere_to_be' in",
        ),
        (
            f"{PLANNED} reward.function=['task','mth']",
            "reward.function = 'mth': set it to 'task', 'exact', 'math', 'code', 'environment'",
        ),
        (
            f"{PLANNED} parallel.offload=true model.compute_dtype=bfloat16 model.lora={{rank=1,base_dtype='bfloat16'}}",
            "model.lora.base_dtype = 'bfloat16': is for one process that does not offload; remove it",
        ),
        (f"{PLANNED} --ranks 8 parallel.replicate=3", "parallel.replicate = 3: must divide the number of ranks, 8"),
        (
            f"{PLANNED} --ranks 8 engine.kind=vllm engine.vllm.tensor_parallel=3",
            "engine.vllm.tensor_parallel = 3: must divide the number of ranks, 8",
        ),
    ],
)
def test_nothing_is_trained_or_reckoned_by_mistake(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *arguments.split()]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_each_gpu_of_eight_holds_an_eighth(olmo3: str) -> None:
    """By hand, for the paper's C3PO; replicas of the weights share none, and offloading moves them to the CPUs."""
    recipe = ["model.path=" + olmo3]
    gib = 2**30
    lines = plan(load(TrainConfig, "paper/olmo3_7b/c3po", recipe), ranks=8)
    each = {"trainer": lines["trainer"]}
    assert said(each, "GiB weights") == pytest.approx(4 * WEIGHTS / 8 / gib, rel=1e-3)
    assert said(lines, "GiB momentum and Hessian") == pytest.approx(8 * WEIGHTS / 8 / gib, rel=1e-3)
    assert said(lines, "GiB in all") == pytest.approx(20 * WEIGHTS / 8 / gib, rel=1e-3)
    assert said(lines, "GiB weights of 1 replica, bfloat16") == pytest.approx(2 * WEIGHTS / gib, rel=1e-3)
    gathered = 2 * 100278 * 4096 + 4096 + 2 * LAYER
    assert said(lines, "GiB gathered weights") == pytest.approx(2 * gathered / gib, rel=1e-3)
    probed = 3 * 4 * WEIGHTS / 8 + 2 * WEIGHTS  # beside this rank's weights, momentum and Hessian
    assert said(lines, "GiB between two updates") == pytest.approx(probed / gib, rel=1e-3)

    peak = said(lines, "GiB at most")
    copies = plan(load(TrainConfig, "paper/olmo3_7b/c3po", [*recipe, "parallel.replicate=2"]), ranks=8)
    assert said(copies, "GiB at most") - peak == pytest.approx(20 * WEIGHTS * (1 / 4 - 1 / 8) / gib, rel=1e-2)
    offloaded = plan(load(TrainConfig, "paper/olmo3_7b/c3po", [*recipe, "parallel.offload=true"]), ranks=8)
    assert peak - said(offloaded, "GiB at most") == pytest.approx(20 * WEIGHTS / 8 / gib, rel=1e-2)
    assert said(offloaded, "GiB in all, in the memory of its CPU") > 0
    alone = plan(load(TrainConfig, "paper/olmo3_7b/c3po", [*recipe, "parallel.offload=true"]))
    assert said(alone, "GiB in all, in the memory of its CPU") == pytest.approx(20 * WEIGHTS / gib, rel=1e-3)
    assert said(alone, "GiB at most") == pytest.approx(said(offloaded, "GiB at most"), rel=1e-3)
    halves = plan(load(TrainConfig, "paper/olmo3_7b/c3po", [*recipe, "engine.vllm.tensor_parallel=2"]), ranks=8)
    assert said(halves, "GiB weights of 1 replica on 2 GPUs") == pytest.approx(WEIGHTS / gib, rel=1e-3)


def test_the_ranks_of_torchrun_are_planned_for_and_the_first_speaks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        assert main(["train", "demo/c3po", "model.path=tiny-qwen2", "--dry-run"]) == 0
        assert ("4 ranks, each with 1/4 of the weights" in capsys.readouterr().out) == (rank == 0)


QWEN25_32B = QWEN25_MATH_7B | {
    "hidden_size": 5120,
    "intermediate_size": 27648,
    "num_hidden_layers": 64,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
}


@pytest.mark.parametrize(
    ("shape", "ranks", "settings", "shares"),
    [
        # 7,615,616,512 weights: the probe takes 14.19 GiB, and weights, momentum and Hessian of a rank 3 x 0.443.
        (QWEN25_MATH_7B, 64, [], {"80 GB": 0.80, "141 GB": 0.88}),
        # 32,763,876,352 weights: 61.03 GiB and 3 x 1.907.
        (QWEN25_32B, 64, [], {"80 GB": None, "141 GB": 0.52}),
        # A quarter: 5 x 7.093 GiB between two updates, and 8.2 more while it trains, when a replica may sleep.
        (QWEN25_MATH_7B, 4, [], {"48 GB": None, "80 GB": 0.44}),
        (QWEN25_MATH_7B, 4, ["engine.vllm.sleep=true"], {"48 GB": None, "80 GB": 0.55}),
        # The shards are in the memory of CPUs: 14.19 GiB alone, and less while it trains.
        (QWEN25_MATH_7B, 64, ["parallel.offload=true"], {"80 GB": 0.82, "141 GB": 0.89}),
        # 28.37 GiB of weights, which an evolution strategy moves in place, and their copy while a draw is compared.
        (QWEN25_MATH_7B, 1, ["method.preset=es"], {"24 GB": None, "48 GB": None, "80 GB": 0.28}),
    ],
    ids=["7B", "32B", "a quarter", "a quarter, asleep", "offloaded", "evolution"],
)
def test_the_share_of_the_engine_leaves_room_for_the_probe(
    shape: dict[str, object],
    ranks: int,
    settings: list[str],
    shares: dict[str, float | None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By hand: the probe of a push holds all weights in bfloat16, beside what the trainer keeps between two updates."""
    monkeypatch.setattr(planning, "activation_bytes", lambda *_, **__: 4 << 30)  # gone between two updates
    own = ["data.train=sorting", "engine.kind=vllm", "engine.dtype=bfloat16", "model.compute_dtype=bfloat16"]
    own += ["method.preset=c3po", "model.gradient_checkpointing=true", f"model.path={write(tmp_path, shape)}"]
    lines = plan(load(TrainConfig, "", [*own, *settings]), 150, 500, ranks)
    said = {line.partition(":")[0]: line for line in lines["each GPU"]}
    for gpu, share in shares.items():
        words = f"engine.vllm.gpu_memory_utilization at most {share:.2f}" if share else "GiB too much"
        assert said[gpu].endswith(words), said[gpu]


@pytest.mark.parametrize(("activations", "expected"), [(30, "29.4 GiB left"), (40, "0.66")])
def test_what_an_update_leaves_is_not_lost_to_a_replica_that_sleeps(
    activations: int, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By hand, of 79 GiB: 35.46 of the trainer and 14.19 of the engine, or 39.66 and the activations."""
    monkeypatch.setattr(planning, "activation_bytes", lambda *_, **__: activations << 30)
    own = ["data.train=sorting", "engine.kind=vllm", "engine.dtype=bfloat16", "model.compute_dtype=bfloat16"]
    own += ["method.preset=c3po", "model.gradient_checkpointing=true", f"model.path={write(tmp_path, QWEN25_MATH_7B)}"]
    lines = plan(load(TrainConfig, "", [*own, "engine.vllm.sleep=true"]), 150, 500, 4)["each GPU"]
    assert f"80 GB: {expected}" in next(line for line in lines if line.startswith("80 GB"))


def test_a_plan_says_which_tokens_it_assumes() -> None:
    own = ["model.path=tiny-qwen2", "method.preset=grpo", "data.train=sorting", "sampling.max_new_tokens=64"]
    assumed, given = (plan(load(TrainConfig, "", own), *tokens)["compute"][1] for tokens in ((), (20, 30)))
    assert assumed.startswith("for 448 prompt and 64 response tokens a row, assumed: give means by --prompt-tokens")
    assert given == "for 20 prompt and 30 response tokens a row"


def test_a_dry_run_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "demo/c3po", "model.path=tiny-qwen2", "--dry-run", "--response-tokens", "32"]) == 0
    assert "32 response tokens" in capsys.readouterr().out
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("recipe", ["demo/c3po", "demo/warm_start"])
def test_a_model_that_a_recipe_is_still_to_make_has_the_shape_it_begins_with(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    weights = model_shape(ModelConfig(path="tiny-qwen2")).weights
    record = SFTConfig if recipe == "demo/warm_start" else TrainConfig
    assert f"{weights:,} weights" in plan(load(record, recipe))["model"][0]
    (tmp_path / "runs" / "demo" / "warm_start").mkdir(parents=True)
    if record is TrainConfig:
        with pytest.raises(UserError, match="runs/demo/warm_start': holds no config.json"):
            plan(load(record, recipe))


@pytest.mark.parametrize(("preset", "draws", "gradients"), [("grpo", 1, 1), ("c3po", 4, 2), ("es", 8, 0)])
def test_a_step_logs_the_operations_of_its_tokens(tmp_path: Path, preset: str, draws: int, gradients: int) -> None:
    """Every draw reads 4 prompts, each has 8 completions, and their gradient is taken at so many draws."""
    own = {"es": ["method.draws=8"], "c3po": ["optimizer.ess=1e9", "method.gradient_draws=2"]}.get(preset, [])
    run = rlvr.assemble(train_config(tmp_path / "run", f"method.preset={preset}", "run.steps=1", *own))
    prompts = [len(run.policy.encode_prompt(p, run.config.data, 8)) for p in run.source.batch(0, 4)]
    with run.folder, closing(run.engine):
        rlvr.train(run)
    table = pyarrow.parquet.read_table(tmp_path / "run" / "completions" / "step-000000.parquet")
    generated = sum(table["num_tokens"].to_pylist())
    assert len(set(zip(*(table[f"draw_{part}"].to_pylist() for part in ("index", "mirrored")), strict=True))) == draws
    weights = model_shape(run.config.model).weights
    hand = 2 * weights * (draws * sum(prompts) + generated) + 6 * weights * gradients * (8 * sum(prompts) + generated)
    assert read_metrics(tmp_path / "run")[-1]["compute/flops"] == hand
