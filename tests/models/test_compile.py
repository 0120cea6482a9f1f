"""Compiled passes are the plain ones, are compiled once for all blocks and shapes, and also under checkpointing."""

import pytest
import torch
from torch._dynamo.utils import counters

from threepo.config import ModelConfig, TinyConfig
from threepo.models.policy import load_policy
from threepo.types import MicroBatch

TINY = TinyConfig(hidden_size=16, intermediate_size=32, layers=3, heads=2, kv_heads=1, context=128)


def packed_rows(*lengths: int) -> MicroBatch:
    tokens = torch.randint(2, 200, (sum(lengths),), generator=torch.Generator().manual_seed(len(lengths)))
    return MicroBatch(tokens, lengths, torch.arange(len(tokens) - 1), tokens[1:], torch.zeros_like(tokens[1:]))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_compiled_pass_is_the_plain_one(checkpointing: bool) -> None:
    torch._dynamo.reset()
    counters.clear()

    def passes(compiled: bool) -> list[torch.Tensor]:
        settings = ModelConfig(path="tiny-qwen2", tiny=TINY, gradient_checkpointing=checkpointing, compile=compiled)
        policy = load_policy(settings, seed=7)
        found = []
        for lengths in ((9, 6, 4), (17, 3), (30,) * 5):
            logprobs = policy.logprobs(packed_rows(*lengths)).logprobs
            logprobs.sum().backward()
            found += [logprobs.detach(), *(p.grad.clone() for p in policy.model.parameters())]
        return found

    plain = passes(False)
    assert not counters["stats"]["unique_graphs"]
    torch.testing.assert_close(passes(True), plain, rtol=1e-4, atol=1e-5)
    # A norm, an MLP, and attention before and after the part that is left out; with checkpointing, one part once more.
    assert counters["stats"]["unique_graphs"] in (4, 5)
