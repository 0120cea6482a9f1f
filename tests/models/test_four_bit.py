"""A base in four bits: QLoRA's numbers, and one policy in trainer, engines, checkpoints and merges."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.nn import Linear, Parameter

from rollout.asked import requests_for, trainer_logprobs
from threepo import api
from threepo.config import LocalEngineConfig, LoRAConfig, ModelConfig, SamplingConfig, TinyConfig
from threepo.errors import UserError
from threepo.models.adapters import frozen_layers
from threepo.models.four_bit import BYTES, FourBit, four_bit
from threepo.models.loading import model_shape
from threepo.models.policy import Policy, load_policy
from threepo.posterior.ivon import IVON
from threepo.rollout.local import LocalEngine
from threepo.types import Draw, MicroBatch

pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")

# Appendix E of arXiv 2305.14314.
NF4 = [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334]
NF4 += [-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224]
NF4 += [0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0]


def saved(folder: Path, shape: TinyConfig) -> ModelConfig:
    load_policy(ModelConfig(path="tiny-qwen2", tiny=shape), seed=2).save(folder)
    return ModelConfig(path=str(folder), lora=LoRAConfig(rank=4, alpha=8.0, base_dtype="nf4"))


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    shape = TinyConfig(hidden_size=32, intermediate_size=64, layers=2, heads=2, kv_heads=1)
    return saved(tmp_path_factory.mktemp("base"), shape)


def moved(settings: ModelConfig) -> Policy:
    """The policy, with a B that is not 0."""
    policy = load_policy(settings)
    with torch.no_grad():
        for name, p in policy.model.named_parameters():
            if "lora_B" in name:
                p.normal_(0, 0.02, generator=torch.Generator().manual_seed(len(name)))
    return policy


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(3, 30)[None]).logits  # type: ignore[no-any-return]


@pytest.mark.parametrize("shape", [(24, 40), (32, 32), (64, 96), (5, 6)])
def test_the_numbers_are_those_of_the_paper(shape: tuple[int, int]) -> None:
    """A scale for every 64 numbers in the order of memory, also where a row ends inside of them."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    blocks = F.pad(weight.flatten(), (0, -weight.numel() % 64)).view(-1, 64)
    scales = blocks.abs().amax(1, keepdim=True)
    table = torch.tensor(NF4)
    nearest = table[(blocks / scales)[..., None].sub(table).abs().argmin(-1)] * scales
    expected = nearest.flatten()[: weight.numel()].view(shape)
    torch.testing.assert_close(four_bit(weight).dense(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_has_the_bits_of_a_model_of_the_same_numbers(settings: ModelConfig, dtype: str) -> None:
    """An ordinary model with peft, whose weights are the numbers that the four bits stand for."""
    found = {}
    for kind in ("nf4", "dense"):
        policy = moved(replace(settings, compute_dtype=dtype))
        layers = [layer for layer in frozen_layers(policy.model, "nf4").values() if isinstance(layer.weight, FourBit)]
        assert len(layers) == 14
        if kind == "dense":
            for layer in layers:
                layer.weight = Parameter(layer.weight.dense(), requires_grad=False)
        ids, positions = torch.arange(3, 33), torch.arange(4, 29)
        packed = MicroBatch(ids, (30,), positions, ids[positions + 1], torch.zeros(25, dtype=torch.long))
        logprobs = policy.logprobs(packed).logprobs
        logprobs.sum().backward()
        found[kind] = [logprobs.detach(), *(p.grad for p in policy.model.parameters() if p.grad is not None)]
    assert len(found["nf4"]) == 1 + 14
    assert all(torch.equal(a, b) for a, b in zip(found["nf4"], found["dense"], strict=True))


def test_memory_is_four_bits_and_a_scale_for_every_64(settings: ModelConfig) -> None:
    packed = [p for p in load_policy(settings).model.parameters() if isinstance(p, FourBit)]
    held = sum(p.codes.nbytes + p.state.absmax.nbytes for p in packed)
    assert held == BYTES * sum(p.numel() for p in packed)


@pytest.mark.parametrize("shape", [(32, 64), (24, 40)], ids=["copied by the engine", "the trainer's own"])
def test_local_engine_and_trainer_agree_for_every_draw(shape: tuple[int, int], tmp_path: Path) -> None:
    """Sizes that are too odd to be packed, as on GPUs, are read from the trainer's four bits."""
    hidden, inner = shape
    tiny = TinyConfig(hidden_size=hidden, intermediate_size=inner, layers=2, heads=2, kv_heads=1)
    policy = moved(saved(tmp_path, tiny))
    optimizer = IVON(policy.model.named_parameters(), ess=1e5, hess_init=1e-2)
    engine = LocalEngine(policy, LocalEngineConfig())
    own = [stack for stack in set(engine._ensemble.stacks.values()) if stack.four_bit is not None]
    assert len(own) == (14 if shape == (24, 40) else 0)
    draws = [Draw(0, 0, 0), Draw(0, 0, 1), None]
    engine.load(optimizer, draws, 0)
    for completion in engine.generate(requests_for(policy, draws), SamplingConfig(max_new_tokens=16), seed=1):
        with optimizer.at(completion.draw):
            gap = trainer_logprobs(policy, completion, 1.0) - torch.tensor(completion.logprobs)
        assert float(gap.abs().max()) < 1e-5
    engine.close()


def test_a_checkpoint_says_that_its_base_is_in_four_bits(settings: ModelConfig, tmp_path: Path) -> None:
    policy = moved(settings)
    policy.save(tmp_path / "adapters")
    expected = logits(policy.model)
    again = load_policy(ModelConfig(path=str(tmp_path / "adapters")))
    assert torch.equal(logits(again.model), expected)
    api.merge(tmp_path / "adapters", tmp_path / "merged")
    merged = load_policy(ModelConfig(path=str(tmp_path / "merged")))
    torch.testing.assert_close(logits(merged.model), expected, atol=1e-5, rtol=0)
    assert all(type(m.weight) is Parameter for m in merged.model.modules() if type(m) is Linear)
    lora = replace(settings.lora, base_dtype="float32")
    with pytest.raises(UserError, match="base_dtype = 'float32': the adapters of .* belong to a base in nf4"):
        load_policy(ModelConfig(path=str(tmp_path / "adapters"), lora=lora))


def test_layers_without_adapters_are_merged_too_and_an_adapted_head_stays_in_float32(tmp_path: Path) -> None:
    tiny = TinyConfig(hidden_size=32, intermediate_size=64, layers=1, heads=2, kv_heads=1, tied=False)
    settings = saved(tmp_path / "base", tiny)
    settings = replace(settings, lora=replace(settings.lora, targets=("q_proj", "lm_head")))
    policy = moved(settings)
    rounded = {name: p for name, p in policy.model.named_parameters() if isinstance(p, FourBit)}
    assert len(rounded) == 7
    assert not any("lm_head" in name for name in rounded)
    assert model_shape(settings).rounded == sum(p.numel() for p in rounded.values())
    policy.save(tmp_path / "adapters")
    api.merge(tmp_path / "adapters", tmp_path / "merged")
    merged = load_policy(ModelConfig(path=str(tmp_path / "merged")))
    torch.testing.assert_close(logits(merged.model), logits(policy.model), atol=1e-5, rtol=0)


def test_without_bitsandbytes(settings: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", None)
    with pytest.raises(UserError, match="model.lora.base_dtype = 'nf4': needs bitsandbytes; in a clone, pip install"):
        load_policy(settings)
