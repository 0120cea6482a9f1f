"""How far a step moves the mean weights: known steps of every optimizer."""

import pytest
import torch

from threepo.models.policy import Policy
from threepo.posterior.evolution import evolve
from threepo.posterior.ivon import IVON
from threepo.posterior.metrics import Movement
from threepo.posterior.point_optimizers import PointAdamW, PointSGD
from threepo.types import Draw

SHAPES = {"embed": (300, 40), "mlp": (40, 60), "norm": (40,)}


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    made = {name: 0.02 * torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    return {name: torch.nn.Parameter(value.to(dtype)) for name, value in made.items()}


def give_gradients(named: dict[str, torch.nn.Parameter], **sizes: float) -> None:
    for name, p in named.items():
        p.grad = torch.full_like(p, sizes.get(name, 1.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_where_ivon_clips_everything_all_weights_move_alike(dtype: torch.dtype) -> None:
    """By lr * hess_init * clip_radius = 60 * 1e-3 * 1e-3; in bfloat16 that is the movement of the float32 masters."""
    named = parameters(dtype)
    optimizer = IVON(named.items(), lr=60.0, hess_init=1e-3, weight_decay=0.0, clip_radius=1e-3)
    movement = Movement(optimizer)
    give_gradients(named)
    optimizer.observe(None)
    optimizer.step()
    found = movement.metrics()
    kinds = ["", "/embedding", "/mlp", "/norm"]
    assert set(found) == {f"update/{name}{kind}" for name in ("rms", "rms_to_weights") for kind in kinds}
    assert [found[f"update/rms{kind}"] for kind in kinds] == pytest.approx([6e-5] * 4, rel=1e-4)
    for kind, weights in {"": list(named.values()), "/embedding": [named["embed"]]}.items():
        rms = torch.cat([p.detach().float().flatten() for p in weights]).square().mean().sqrt()
        assert found[f"update/rms_to_weights{kind}"] == pytest.approx(6e-5 / float(rms), rel=0.02)


def test_the_first_step_of_adamw_moves_each_weight_by_its_rate() -> None:
    named = parameters()
    optimizer = PointAdamW(named.items(), lr=1e-4, weight_decay=0.0)
    movement = Movement(optimizer)
    give_gradients(named)
    optimizer.observe(None)
    optimizer.step()
    assert movement.metrics()["update/rms"] == pytest.approx(1e-4, rel=1e-4)
    give_gradients(named, embed=float("nan"))
    optimizer.observe(None)
    optimizer.step()
    assert movement.metrics()["update/rms"] == 0, "the step is skipped"


def test_kinds_count_by_their_weights() -> None:
    """Plain steps of 0.1 times the gradient: 12,000 weights move by 0.2, 2,440 by 0.1; frozen ones do not count."""
    named = parameters()
    frozen = torch.nn.Parameter(torch.ones(10**4), requires_grad=False)
    optimizer = PointSGD([*named.items(), ("lm_head", frozen)], max_grad_norm=0.0, lr=0.1)
    movement = Movement(optimizer)
    give_gradients(named, embed=2.0)
    optimizer.observe(None)
    optimizer.step()
    found = movement.metrics()
    assert found["update/rms/embedding"] == pytest.approx(0.2, rel=1e-4)
    assert found["update/rms/mlp"] == pytest.approx(0.1, rel=1e-4)
    assert found["update/rms"] == pytest.approx(((12_000 * 0.04 + 2_440 * 0.01) / 14_440) ** 0.5, rel=1e-4)


def test_an_evolution_strategy_is_measured_on_all_of_a_models_weights(policy: Policy) -> None:
    """The subsample agrees with all weights, compared with a copy of them."""
    named = list(policy.model.named_parameters())
    optimizer = PointSGD(named, max_grad_norm=0.0, lr=1e-3, noise_scale=0.01)
    movement, before = Movement(optimizer), {name: p.detach().clone() for name, p in named}
    evolve(optimizer, {Draw(0, 0, index): value for index, value in enumerate((1.0, -0.5, -0.5))})
    moved = torch.cat([(p.detach() - before[name]).flatten() for name, p in named])
    weights = torch.cat([p.detach().flatten() for _, p in named])
    found = movement.metrics()
    assert found["update/rms"] == pytest.approx(float(moved.square().mean().sqrt()), rel=0.02)
    expected = float((moved.square().mean() / weights.square().mean()).sqrt())
    assert found["update/rms_to_weights"] == pytest.approx(expected, rel=0.02)
