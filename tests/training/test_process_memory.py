"""The memory of --dry-run for one process, against torch's allocator in a real micro-batch."""

from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM

from published_shapes import QWEN25_MATH_7B
from threepo.config import LoRAConfig
from threepo.lab import activations
from threepo.lab.activations import activation_bytes, bytes_of_all_blocks
from threepo.models.adapters import add_adapters, round_base
from threepo.models.logprobs import CPU_CHUNK, Scorer
from threepo.models.policy import Policy, blocks, recompute_activations, takes_packed_rows
from threepo.types import MicroBatch

SIZES = {"num_hidden_layers": 2, "vocab_size": 5000, "hidden_size": 224, "intermediate_size": 1184}
"""Otherwise it is like Qwen2.5-Math-7B."""
ROWS, LENGTH = 4, 350


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


def deep_model(rank: int) -> Any:
    """Ten blocks, without weights."""
    shape = AutoConfig.for_model(**QWEN25_MATH_7B | SIZES | {"num_hidden_layers": 10})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape, dtype=torch.float32).eval()
    if rank:
        pytest.importorskip("peft")
        add_adapters(model, LoRAConfig(rank=rank), "base", 0)
    return model


@pytest.mark.parametrize(
    ("rank", "settings"),
    [
        (0, {"recomputed": True, "sharded": True}),
        (0, {"recomputed": False}),
        (8, {"recomputed": True, "base_dtype": "bfloat16"}),
    ],
    ids=["sharded", "plain", "adapters"],
)
def test_few_blocks_tell_the_memory_of_many(rank: int, settings: dict[str, Any]) -> None:
    model = deep_model(rank)
    said = activation_bytes(model, ROWS, LENGTH, torch.bfloat16, **settings)
    assert said == bytes_of_all_blocks(model, ROWS, LENGTH, torch.bfloat16, **settings)


@pytest.mark.parametrize(
    ("known", "tried", "said"),
    [
        ({2: 10, 3: 12, 4: 14}, [2, 3, 4], 26),
        ({2: 10, 3: 10, 4: 10, 10: 11}, [2, 3, 4, 10], 11),  # the peak is elsewhere until there are ten
        ({2: 10, 3: 11, 4: 13, 10: 25}, [2, 3, 4, 10], 25),
    ],
)
def test_all_blocks_are_tried_unless_each_adds_the_same(
    known: dict[int, int], tried: list[int], said: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def count(model: Any, *_: Any, **__: Any) -> int:
        asked.append(len(blocks(model)))
        return known[asked[-1]]

    monkeypatch.setattr(activations, "bytes_of_all_blocks", count)
    assert activation_bytes(deep_model(0), ROWS, LENGTH, torch.bfloat16, recomputed=False) == said
    assert asked == tried


def test_blocks_that_differ_are_all_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked = deep_model(0), []
    with torch.device("meta"):
        model.model.layers[3].mlp.up_proj = torch.nn.Linear(224, 1000)
    monkeypatch.setattr(activations, "bytes_of_all_blocks", lambda model, *_, **__: asked.append(len(blocks(model))))
    activation_bytes(model, ROWS, LENGTH, torch.bfloat16, recomputed=False)
    assert asked == [10]
