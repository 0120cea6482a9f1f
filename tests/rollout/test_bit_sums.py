"""Sums over bits: what changes them, what does not, and that every payload's are those of the trainer's own model."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from threepo.config import LoRAConfig, ModelConfig, TinyConfig
from threepo.config.engine import VLLMConfig, VLLMEngineConfig
from threepo.errors import ThreepoWarning
from threepo.models.policy import load_policy
from threepo.posterior import native
from threepo.posterior.ivon import IVON
from threepo.rollout.bit_sums import MODULUS, SumCheck, added_up, bit_sum, bit_sums, sums_in_engine
from threepo.rollout.memory import SharedTensors
from threepo.rollout.payloads import choose_payload
from threepo.types import Arm, Draw

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@given(seed=st.integers(0, 1 << 30), rows=st.integers(1, 9), split=st.integers(0, 9))
def test_order_padding_and_fusing_change_nothing_and_a_bit_does(
    dtype: torch.dtype, seed: int, rows: int, split: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    matrix = torch.randn(rows, 7, generator=random).to(dtype)
    whole = bit_sum(matrix)
    assert bit_sum(matrix.T.contiguous()) == whole
    assert bit_sum(torch.cat([matrix, -torch.zeros(3, 7, dtype=dtype)])) == whole
    assert (bit_sum(matrix[:split]) + bit_sum(matrix[split:])) % MODULUS == whole
    changed = matrix.clone()
    place = tuple(int(torch.randint(n, (), generator=random)) for n in matrix.shape)
    changed[place] = torch.nextafter(changed[place].float(), torch.tensor(9.0)) if dtype == torch.float32 else 1.5
    assert bit_sum(changed) != whole or torch.equal(changed, matrix)


def test_a_large_tensor_is_summed_in_parts() -> None:
    values = torch.randn(3, 1 << 20)
    with patch.object(native, "takes", lambda *_: False):  # as on a GPU; compiled sums have no parts
        assert bit_sum(values) == sum(map(bit_sum, values)) % MODULUS


@pytest.mark.parametrize("dtype", DTYPES[:2])
@given(seed=st.integers(0, 1 << 30), size=st.sampled_from([0, 1, 1000, 70_000]))
def test_compiled_sums_are_those_of_torch(dtype: torch.dtype, seed: int, size: int) -> None:
    """Of any bits, subnormal numbers and both zeros among them; and neither changes them."""
    random, whole = torch.Generator().manual_seed(seed), {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    limits = torch.iinfo(whole)
    bits = torch.randint(limits.min, limits.max + 1, (size,), dtype=whole, generator=random)
    bits[::7] = limits.min
    numbers, before = bits.view(dtype), bits.clone()
    assert native.takes(numbers)
    with patch.object(native, "takes", lambda *_: False):
        plain = bit_sum(numbers)
    assert bit_sum(numbers) == plain
    assert torch.equal(bits, before)


class Packed(torch.nn.Module):
    """A linear layer as the CPU build of vLLM leaves it: computes with a copy that is no parameter."""

    def __init__(self, weight: torch.Tensor, kept: torch.Tensor) -> None:
        super().__init__()
        self.input_size = weight.shape[1]
        self.weight = torch.nn.Parameter(kept)
        self.quant_method = self
        self.cpu_linear = lambda x: x @ weight.T

    def apply(self, layer: Any, x: torch.Tensor) -> Any:  # type: ignore[override]
        return layer.cpu_linear(x)


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("width", [5, 256, 300])
def test_packed_weights_are_read_to_the_bit_through_their_product(dtype: torch.dtype, width: int) -> None:
    q, k = torch.randn(6, width).to(dtype), torch.randn(2, width).to(dtype)
    model = torch.nn.Module()
    model.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj"]}  # type: ignore[assignment]
    model.block = torch.nn.Module()
    model.block.qkv_proj = Packed(torch.cat([q, k]), torch.empty(0, dtype=dtype))
    model.head = Packed(q, k)  # keeps a parameter that it does not compute with
    model.norm = torch.nn.RMSNorm(4, dtype=dtype)
    found = sums_in_engine(model, dtype)
    assert found.keys() == {"block.q_proj.weight + block.k_proj.weight", "head.weight", "norm.weight"}
    trainer = {"block.q_proj.weight": q, "block.k_proj.weight": k, "head.weight": q, "norm.weight": torch.ones(4)}
    assert SumCheck().differing(bit_sums(trainer.items(), dtype), found) == []


def test_what_never_agreed_is_named_once_and_what_did_is_an_error() -> None:
    check, trainer = SumCheck(), {"a": 1, "b": 2, "c": MODULUS - 1}
    assert check.differing(trainer, {}) == []  # nothing was asked for
    with pytest.warns(ThreepoWarning, match=r"2 of 4 tensors are not compared to the bit, .*: b, unknown$"):
        assert check.differing(trainer, {"a + c": 0, "b": 7, "unknown": 5, "empty": 0}) == []
    assert check.differing(trainer, {"a + c": 3, "b": 7, "unknown": 6}) == ["a + c"]


def test_what_several_workers_hold_whole_counts_as_often() -> None:
    """Four workers, two heads of keys: each worker has a quarter of `q`, half of `k`, and all of `norm`."""
    check, trainer = SumCheck(workers=4), {"q": 10, "k": 100, "norm": MODULUS - 1}
    workers = [{"q + k": part + 50, "norm": MODULUS - 1} for part in (1, 2, 3, 4)]
    assert check.differing(trainer, added_up(workers)) == []
    assert check.differing(trainer, {"q + k": 310, "norm": MODULUS - 3}) == ["q + k", "norm"]


def test_what_an_engine_holds_in_a_finer_dtype_is_the_same() -> None:
    """vLLM keeps some biases in float32."""
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(5))
    with torch.no_grad():
        model[0].bias.copy_(torch.randn(5).bfloat16())
    expected = bit_sums(model.named_parameters(), torch.bfloat16)
    assert sums_in_engine(model, torch.bfloat16) == expected


@pytest.mark.parametrize(("dtype", "tied"), [("float32", False), ("bfloat16", True)])
@pytest.mark.parametrize("slots", [None, 0, 2], ids=["weights", "merged", "adapters"])
def test_what_is_written_is_the_trainers_model_to_the_bit(
    dtype: str, slots: int | None, tied: bool, tmp_path: Path
) -> None:
    shape = TinyConfig(hidden_size=32, intermediate_size=64, layers=2, heads=2, kv_heads=1, context=64, tied=tied)
    policy = load_policy(ModelConfig(path="tiny-qwen2", tiny=shape), seed=1)
    if slots is not None:
        policy.save(tmp_path)
        policy = load_policy(ModelConfig(path=str(tmp_path), lora=LoRAConfig(rank=4)), seed=1)
    settings = VLLMEngineConfig(dtype=dtype, vllm=VLLMConfig(adapters=slots or 0))  # type: ignore[arg-type]
    payload = choose_payload(policy, settings)
    shared = SharedTensors(payload.layout)
    optimizer = IVON(policy.model.named_parameters(), ess=1e5)
    before = {name: p.clone() for name, p in policy.model.named_parameters()}
    draws = [None, Draw(0, 0, 1), Draw(0, 0, 1, arm=Arm("attention", 2.0))]
    for draw in draws:
        payload.write(optimizer, draw, shared.tensors)
        written = payload.sums(shared.tensors)
        for other in draws:
            source = payload.source_sums(optimizer, other)
            assert source.keys() <= written.keys()
            assert all(written[name] == value for name, value in source.items()) == (draw == other)
    assert all(torch.equal(p, before[name]) for name, p in policy.model.named_parameters())
    shared.close()
