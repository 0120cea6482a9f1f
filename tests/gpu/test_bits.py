"""Noise, draws and IVON on a GPU have the bits of the CPU.

posterior/triton_interpreted.py, which `make test-gpu` runs before, has the kernels alone.
"""

import copy
from typing import Any

import pytest
import torch

from threepo.config import LocalEngineConfig, ModelConfig, TinyConfig
from threepo.models.policy import load_policy
from threepo.posterior import kernels, native, torch_kernels
from threepo.posterior.ivon import IVON
from threepo.posterior.noise import BLOCK, noise_key, uniforms
from threepo.posterior.noise_structures import Noise
from threepo.posterior.operations import Perturb, Region, Scalars
from threepo.rollout.bit_sums import bit_sum
from threepo.rollout.local import LocalEngine
from threepo.types import Draw

DRAW = Draw(3, 5, 1)
SIGMA = Scalars(weight_decay=0.0, ess=1.0, fixed_root=0.0, noise_scale=0.7)
"""A noise_scale that is no power of two, and an ess of 1: nothing hides a rounding."""


def same_bits(ours: torch.Tensor, defined: torch.Tensor) -> bool:
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[defined.element_size()]
    return ours.dtype == defined.dtype and torch.equal(ours.cpu().view(integers), defined.view(integers))


def test_triton_is_what_runs_here() -> None:
    assert kernels.backend(torch.zeros(1, device="cuda")).__name__.endswith("triton_kernels")


@pytest.mark.parametrize("sign", [1, -1])
def test_torch_makes_the_same_noise_there(sign: int) -> None:
    """What structured noise and other devices use."""
    noise = Noise(noise_key(DRAW, "w"), sign)
    parts = ([z.cpu() for _, z in noise.numbers(700, 300_000, torch.device(name))] for name in ("cuda", "cpu"))
    there, here = map(torch.cat, parts)
    assert same_bits(there, here)


def test_hessians_of_any_size_give_the_same_sigma() -> None:
    """Below 1e-38 they are subnormal, smaller than IVON lets them become, and would show a flush to zero."""
    h = torch.logspace(-42, 18, 4096)
    results = []
    for device in ("cuda", "cpu"):
        out = torch.empty(4096, device=device)
        mean, own = torch.zeros(4096, device=device), h.to(device)
        kernels.run([Perturb(out, mean, own, Noise(noise_key(DRAW, "w")), SIGMA)])
        results.append(out.cpu())
    assert same_bits(*results)


def test_nothing_outside_a_view_is_written() -> None:
    whole = torch.full((5000,), 7.0, device="cuda")
    part, h = whole[1001:3333], torch.ones(2332, device="cuda")
    kernels.run([Perturb(part, part, h, Noise(noise_key(DRAW, "w")), SIGMA, Region(1001))])
    assert whole[:1001].eq(7).all()
    assert whole[3333:].eq(7).all()
    assert not part.eq(7).any()


def test_elements_beyond_32_bits() -> None:
    """A tensor with more elements than a 32-bit integer counts: its ends are those of the CPU."""
    count = (1 << 31) + 3 * BLOCK + 5
    mean = torch.ones(count, device="cuda", dtype=torch.bfloat16)
    h, out = torch.ones(count, device="cuda"), torch.zeros(count, device="cuda", dtype=torch.bfloat16)
    noise = Noise(noise_key(DRAW, "w"))
    kernels.run([Perturb(out, mean, h, noise, SIGMA)])
    for start in (0, (1 << 30) - 100, (1 << 31) - 4 * BLOCK - 7, count - 5000):
        size = min(5000, count - start)
        here = torch.empty(size, dtype=torch.bfloat16)
        ones = torch.ones(size)
        torch_kernels.run([Perturb(here, ones.bfloat16(), ones, noise, SIGMA, Region(start))])
        assert same_bits(out[start : start + size], here), start


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_over_bits(dtype: torch.dtype) -> None:
    """The weight check compares a trainer's on one device with an engine's on another."""
    tensor = torch.randn(3_000_001).to(dtype)
    tensor[::1000] = -0.0
    assert native.LIBRARY.loaded, "this compares with the compiled sums"
    assert bit_sum(tensor.cuda()) == bit_sum(tensor)


def test_random_numbers_of_sampling() -> None:
    keys = [(n, n * n) for n in range(50)]
    assert same_bits(uniforms(keys, 3, 999, "cuda"), uniforms(keys, 3, 999))


@pytest.mark.parametrize("structure", ["", "rank=3"])
@pytest.mark.parametrize("estimator", ["price", "gradsq"])
def test_ivon_from_the_same_gradients(structure: str, estimator: str) -> None:
    """Five steps of two draws; the states and the weights of a draw are the CPU's to the bit."""
    made = torch.nn.Sequential(torch.nn.Linear(300, 170), torch.nn.Linear(170, 33))
    models = {"cpu": made, "cuda": copy.deepcopy(made).cuda()}
    settings: dict[str, Any] = {"lr": 0.3, "ess": 1e6, "hess_init": 0.4, "estimator": estimator}
    optimizers = {
        device: IVON(model.named_parameters(), noise_structure=structure, **settings)
        for device, model in models.items()
    }
    torch.manual_seed(0)
    for step in range(5):
        for number in range(2):
            draw = Draw(0, step, number)
            grads = [torch.randn_like(p) for p in made.parameters()]
            for device, model in models.items():
                with optimizers[device].perturbed(draw):
                    for p, grad in zip(model.parameters(), grads, strict=True):
                        p.grad = grad.to(device)
                optimizers[device].observe(draw)
        for optimizer in optimizers.values():
            optimizer.step()
    for here, there in zip(models["cpu"].parameters(), models["cuda"].parameters(), strict=True):
        assert same_bits(there.detach(), here.detach())
        for name, value in optimizers["cpu"].state[here].items():
            if isinstance(value, torch.Tensor) and value.dim():
                assert same_bits(optimizers["cuda"].state[there][name], value), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_engine_holds_the_draws_of_the_trainer(dtype: str) -> None:
    """Every draw of the local engine on the GPU has the bits that a trainer on the CPU would perturb its weights to."""
    tiny = TinyConfig(hidden_size=32, intermediate_size=64, layers=2, heads=2, kv_heads=1, context=128)
    draws = [None, DRAW, Draw(3, 5, 2)]
    held = []
    for device in ("cpu", "cuda"):
        policy = load_policy(ModelConfig(path="tiny-qwen2", tiny=tiny, device=device), seed=7)
        optimizer = IVON(policy.model.named_parameters(), ess=1e4)
        if device == "cuda":
            engine = LocalEngine(policy, LocalEngineConfig(dtype=dtype))
            engine.load(optimizer, draws, 5)
            views = [engine._ensemble.views(index) for index in range(len(draws))]
            held.append([{name: value.cpu() for name, value in own.items()} for own in views])
        else:
            held.append(
                [{n: v.to(getattr(torch, dtype), copy=True) for n, v in optimizer.weights(draw)} for draw in draws]
            )
    for here, there in zip(*held, strict=True):
        assert here.keys() <= there.keys()
        for name, value in here.items():
            assert same_bits(there[name], value), name
