"""Compiled passes are the plain ones, are compiled once for all blocks and shapes, and also under checkpointing."""

from functools import partialmethod

import pytest
import torch
from torch._dynamo.utils import counters

from threepo.config import LoRAConfig, ModelConfig, TinyConfig
from threepo.errors import UserError
from threepo.models.policy import compile_blocks, load_policy
from threepo.types import MicroBatch

TINY = TinyConfig(hidden_size=16, intermediate_size=32, layers=3, heads=2, kv_heads=1, context=128)


def packed_rows(*lengths: int) -> MicroBatch:
    tokens = torch.randint(2, 200, (sum(lengths),), generator=torch.Generator().manual_seed(len(lengths)))
    return MicroBatch(tokens, lengths, torch.arange(len(tokens) - 1), tokens[1:], torch.zeros_like(tokens[1:]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A saved model."""
    folder = tmp_path_factory.mktemp("model")
    load_policy(ModelConfig(path="tiny-qwen2", tiny=TINY), seed=7).save(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("backend", "checkpointing", "rank"),
    [("eager", False, 0), ("aot_eager", True, 2)],
    ids=["plain", "checkpointing and adapters"],
)
def test_a_compiled_pass_is_the_plain_one(
    backend: str, checkpointing: bool, rank: int, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    counters.clear()
    # "eager" sees graphs and guards alone; tests/ranks have plain runs in which the backward passes are traced too.
    own = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", partialmethod(own, backend=backend))

    def passes(compiled: bool) -> list[torch.Tensor]:
        lora = LoRAConfig(rank=rank)
        settings = ModelConfig(path=folder, gradient_checkpointing=checkpointing, compile=compiled, lora=lora)
        policy = load_policy(settings, seed=7)
        trained = [p for p in policy.model.parameters() if p.requires_grad]
        found = []
        for lengths in ((9, 6, 4), (17, 3), (30,) * 5):
            logprobs = policy.logprobs(packed_rows(*lengths)).logprobs
            logprobs.sum().backward()
            found += [logprobs.detach(), *(p.grad.clone() for p in trained)]
        return found

    plain = passes(False)
    assert not counters["stats"]["unique_graphs"]
    torch.testing.assert_close(passes(True), plain, rtol=1e-4, atol=1e-5)
    # A norm, an MLP, and attention before and after the part that is left out.
    assert counters["stats"]["unique_graphs"] == 4, "compiled once for all blocks and shapes"


def test_a_model_that_names_no_blocks_is_refused(folder: str) -> None:
    model = load_policy(ModelConfig(path=folder)).model
    model._no_split_modules = None
    with pytest.raises(UserError, match="does not name its blocks"):
        compile_blocks(model)
