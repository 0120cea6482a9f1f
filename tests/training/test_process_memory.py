"""The memory of --dry-run for one process, against torch's allocator in a real micro-batch."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM

from published_shapes import QWEN25_MATH_7B
from threepo.config import LoRAConfig
from threepo.lab.activations import activation_bytes
from threepo.models.adapters import add_adapters, round_base
from threepo.models.logprobs import CPU_CHUNK, Scorer
from threepo.models.policy import Policy, recompute_activations, takes_packed_rows
from threepo.types import MicroBatch

SIZES = {"num_hidden_layers": 2, "vocab_size": 2500, "hidden_size": 112, "intermediate_size": 592}
"""Otherwise it is like Qwen2.5-Math-7B."""
ROWS, LENGTH = 2, 350


@pytest.mark.parametrize(
    ("dtype", "rank", "base_dtype", "recomputed"),
    [
        (torch.float32, 0, "float32", False),
        (torch.bfloat16, 0, "float32", True),
        (torch.bfloat16, 0, "float32", False),
        (torch.bfloat16, 8, "float32", True),
        (torch.bfloat16, 8, "bfloat16", True),
        (torch.bfloat16, 8, "nf4", False),
    ],
)
def test_a_pretended_micro_batch_takes_what_a_real_one_does(
    dtype: torch.dtype, rank: int, base_dtype: str, recomputed: bool
) -> None:
    if base_dtype == "nf4":
        pytest.importorskip("bitsandbytes")
    shape = AutoConfig.for_model(**QWEN25_MATH_7B | SIZES)
    models = {}
    for device in ("meta", "cpu"):
        with torch.device(device):
            models[device] = model = AutoModelForCausalLM.from_config(shape, dtype=torch.float32).eval()
        if rank:
            pytest.importorskip("peft")
            add_adapters(model, LoRAConfig(rank=rank), "base", 0)
        assert device == "meta" or takes_packed_rows(model)
    round_base(model, base_dtype, torch.device("cpu"))
    own = {"recomputed": recomputed, "base_dtype": base_dtype, "chunk": CPU_CHUNK, "fused": False}
    said = activation_bytes(models["meta"], ROWS, LENGTH, dtype, **own)
    if recomputed:
        recompute_activations(model)
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if p.requires_grad else None
    policy, tokens = Policy(Scorer(model, linear_head=True, packed_rows=True), None, dtype), torch.zeros(ROWS * LENGTH)
    packed = MicroBatch(tokens.long(), (LENGTH,) * ROWS, torch.arange(ROWS * LENGTH), tokens.long(), tokens.long())
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        policy.logprobs(packed).logprobs.sum().backward()
    held = most = 0
    for event in sorted(profiled.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    assert said == pytest.approx(most, rel=1e-3)
