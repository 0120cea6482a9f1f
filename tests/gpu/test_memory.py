"""The memory of --dry-run against what a GPU holds, for models of published shapes with random weights."""

import re
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from gpu.conftest import Figure
from published_shapes import QWEN25_MATH_7B, write
from threepo.config import TrainConfig
from threepo.config.recipes import load
from threepo.lab.plan import plan
from threepo.models.attention import takes_packed_rows
from threepo.models.logprobs import Scorer
from threepo.models.packing import GPU_TOKENS
from threepo.models.policy import Policy, recompute_activations
from threepo.posterior.policy_optimizer import PolicyOptimizer
from threepo.rollout.memory import SharedTensors
from threepo.training.optimizers import build_optimizer
from threepo.types import Draw, MicroBatch

GIB = 1 << 30
ROW = 1024
SHAPES = {
    "0.1B": {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 8},
    "0.5B": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "1.5B": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
    "3B": {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16},
    "7B": {},
}
"""What differs from Qwen2.5-Math-7B; the heads of the smaller ones are tied, with two of keys and values."""


@pytest.mark.parametrize("preset", ["grpo", "c3po"])
@pytest.mark.parametrize("recomputed", [False, True], ids=["", "recomputed"])
@pytest.mark.parametrize("name", SHAPES)
def test_a_step_takes_what_the_plan_says(
    name: str, recomputed: bool, preset: str, tmp_path: Path, figure: Figure
) -> None:
    small = {"tie_word_embeddings": True, "num_key_value_heads": 2} if SHAPES[name] else {}
    shape = QWEN25_MATH_7B | SHAPES[name] | small
    settings = [
        *(f"model.path={write(tmp_path / 'model', shape)}", "model.compute_dtype=bfloat16", "data.train=sums"),
        *(f"model.gradient_checkpointing={str(recomputed).lower()}", f"method.preset={preset}"),
        *("data.max_prompt_tokens=24", f"sampling.max_new_tokens={ROW - 24}"),
    ]
    config = load(TrainConfig, "", settings)
    lines = "\n".join(plan(config)["trainer"])
    said = float(re.search(r"([\d.]+) GiB at most of a GPU", lines)[1])  # type: ignore[index]
    if said * GIB > 0.95 * torch.cuda.get_device_properties(0).total_memory:
        figure("plan, GiB", said)
        pytest.skip(f"the plan says {said:.1f} GiB, more than this card has")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape), dtype=torch.float32).eval()
    policy = Policy(Scorer(model, True, takes_packed_rows(model)), None, torch.bfloat16)
    if recomputed:
        recompute_activations(model)
    optimizer = build_optimizer(config.optimizer, config.noise, model, 0)
    for step in range(2):
        take_step(policy, optimizer, Draw(0, step, 0) if preset == "c3po" else None)
    measured = (torch.cuda.max_memory_allocated() - before) / GIB
    figure("plan, GiB", said)
    figure("measured, GiB", round(measured, 2))
    figure("reserved by the allocator, GiB", round(torch.cuda.max_memory_reserved() / GIB, 2))
    assert 0.8 * said < measured < 1.1 * said


def test_weights_go_to_and_from_registered_memory(figure: Figure) -> None:
    there = torch.randn(1 << 26, device="cuda")
    shared = SharedTensors({"weight": (tuple(there.shape), there.dtype)})
    for registered in (False, True):
        if registered:
            shared.register()
        assert shared.tensors["weight"].is_pinned() == registered
        for _ in range(2):
            begin = time.perf_counter()
            shared.tensors["weight"].copy_(there)
            back = shared.tensors["weight"].to("cuda")
            torch.cuda.synchronize()
            speed = 2 * there.nbytes / 1e9 / (time.perf_counter() - begin)
        figure(f"GB/s there and back, registered: {registered}", round(speed, 1))
        assert torch.equal(back, there)
    shared.close()


def take_step(policy: Policy, optimizer: PolicyOptimizer, draw: Draw | None) -> None:
    """Two full micro-batches at a draw, and a step."""
    rows = GPU_TOKENS // ROW
    tokens = torch.zeros(rows * ROW, dtype=torch.long, device="cuda")
    micro = MicroBatch(tokens, (ROW,) * rows, torch.arange(rows * ROW, device="cuda"), tokens, tokens)
    with optimizer.at(draw):
        for _ in range(2):
            policy.logprobs(micro).logprobs.sum().backward()
    optimizer.observe(draw)
    optimizer.step(divisor=1.0)
