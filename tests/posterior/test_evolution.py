"""Evolution strategies: the gradient by hand and of a smooth fitness, in place, in pairs, and beside another one."""

import math
import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from posterior.test_noise_sizes import normals
from threepo.config import AdamWConfig, IVONConfig, NoiseConfig, SGDConfig
from threepo.models.policy import Policy
from threepo.posterior.evolution import evolution_metrics, evolve, gradients
from threepo.posterior.ivon import IVON
from threepo.posterior.perturbation import NoisyParameter
from threepo.posterior.point_optimizers import PointSGD
from threepo.training.optimizers import build_optimizer
from threepo.types import Draw

NOISE = NoiseConfig(unit="absolute", size=0.02, where={"mlp": 1.0, "norm": 5.0})
DRAWS = [Draw(0, 4, i) for i in range(3)]
FITNESS = {DRAWS[0]: 1.2, DRAWS[1]: -0.7, DRAWS[2]: -0.5}


def expected(entry: NoisyParameter, fitness: dict[Draw, float], sigma: float | torch.Tensor) -> torch.Tensor:
    """The gradient by definition, in float64."""
    total = torch.zeros(entry.p.shape, dtype=torch.float64)
    for draw, value in fitness.items():
        total -= value * draw.sign * normals(draw, entry.name, entry.p).double() / len(fitness)
    return total / sigma


def test_the_gradient_is_the_mean_of_fitness_times_noise_over_sigma(policy: Policy) -> None:
    optimizer = build_optimizer(SGDConfig(), NOISE, policy.model, 0)
    found = {entry.name: (entry, grad) for entry, grad in gradients(optimizer.noisy(), FITNESS)}
    assert {entry.name.split(".")[-2] for entry, _ in found.values()} >= {"gate_proj", "norm"}
    assert not any("embed" in name or "attn.q_proj" in name for name in found), "they have no noise"
    for name, (entry, grad) in found.items():
        sigma = 0.1 if "norm" in name else 0.02
        torch.testing.assert_close(grad.double(), expected(entry, FITNESS, sigma), rtol=1e-4, atol=1e-4)


def test_sigma_of_a_learned_posterior_divides_each_weight(policy: Policy) -> None:
    optimizer = IVON(policy.model.named_parameters(), ess=1e4)
    for p in policy.model.parameters():
        optimizer.state[p]["hessian"].mul_(torch.linspace(0.5, 2.0, p.numel()).view_as(p))
    for entry, grad in gradients(optimizer.noisy(), FITNESS):
        sigma = 1 / (1e4 * (entry.hessian.double() + 1e-8)).sqrt()
        torch.testing.assert_close(grad.double(), expected(entry, FITNESS, sigma), rtol=1e-4, atol=1e-4)


def test_a_mirrored_draw_counts_against_the_noise_that_it_shares(policy: Policy) -> None:
    optimizer = build_optimizer(SGDConfig(), NOISE, policy.model, 0)
    values = (1.0, -0.5, 0.25, 0.25)
    pairs = {Draw(0, 4, i // 2, sign=-1 if i % 2 else 1): value for i, value in enumerate(values)}
    for entry, grad in gradients(optimizer.noisy(), pairs):
        z = normals(Draw(0, 4, 0), entry.name, entry.p)
        sigma = 0.1 if "norm" in entry.name else 0.02
        torch.testing.assert_close(grad, -1.5 / 4 * z / sigma, rtol=1e-4, atol=1e-4)  # of the second, nothing is left


def test_pairs_recover_the_gradient_of_a_linear_fitness() -> None:
    """F(theta) = a theta: every pair measures its own projection of a, so their mean tends to a."""
    p = torch.nn.Parameter(torch.zeros(8))
    a = torch.linspace(-1, 1, 8)
    optimizer = PointSGD([{"params": [("w", p)], "noise_scale": 0.3}], lr=1.0, max_grad_norm=0.0)
    draws = [Draw(7, 0, i // 2, sign=-1 if i % 2 else 1) for i in range(2000)]
    fitness = {}
    for draw in draws:
        with optimizer.at(draw), torch.no_grad():
            fitness[draw] = float(a @ p)
    evolve(optimizer, fitness)
    torch.testing.assert_close(p.detach(), a, rtol=0, atol=0.15)  # 1000 pairs: 1 / sqrt(1000) = 0.03 times |a| sqrt(2)
    assert torch.nn.functional.cosine_similarity(p.detach(), a, dim=0) > 0.99


def test_es_at_scale_adds_half_of_sigma_times_fitness_times_noise(policy: Policy) -> None:
    """alpha = sigma / 2 = 5e-4 in front of mean(fitness z) is the default learning rate of sigma = 1e-3."""
    noise = NoiseConfig(unit="absolute", size=1e-3)
    optimizer = build_optimizer(SGDConfig(), noise, policy.model, 0)
    before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    evolve(optimizer, FITNESS)
    for name, p in policy.model.named_parameters():
        step = 5e-4 * sum(value * normals(draw, name, p) for draw, value in FITNESS.items()) / 3
        torch.testing.assert_close(p.detach(), before[name] + step, rtol=0, atol=1e-6)
    assert all(p.grad is None for p in policy.model.parameters()), "the step holds no gradient"
    metrics = optimizer.step_metrics()
    total = math.sqrt(sum(((p - before[n]) / 5e-7).square().sum().item() for n, p in policy.model.named_parameters()))
    assert metrics["optimizer/grad_norm"] == pytest.approx(total, rel=1e-3)


class Largest(TorchDispatchMode):
    """Counts how many of the tensors that `zeros_like` makes are alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[weakref.ref[torch.Tensor]] = []
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.zeros_like.default:
            self.made = [*(ref for ref in self.made if ref() is not None), weakref.ref(out)]
            self.most = max(self.most, len(self.made))
        return out


def test_a_step_holds_the_gradient_of_one_parameter_at_a_time(policy: Policy) -> None:
    optimizer = build_optimizer(SGDConfig(), NoiseConfig(unit="absolute", size=1e-3), policy.model, 0)
    with Largest() as seen:
        evolve(optimizer, FITNESS)
    assert len(optimizer.noisy()) > 1
    assert seen.most == 1


@pytest.mark.parametrize("settings", [AdamWConfig(lr=1e-3), IVONConfig(lr=1e3)], ids=lambda s: s.kind)
def test_other_optimizers_take_the_same_gradient(settings: AdamWConfig | IVONConfig, policy: Policy) -> None:
    ours, theirs = (build_optimizer(settings, NOISE, policy.model, 0) for _ in range(2))
    before = [p.detach().clone() for p in policy.model.parameters()]
    evolve(ours, FITNESS)
    moved = [p.detach().clone() for p in policy.model.parameters()]
    with torch.no_grad():
        for p, value in zip(policy.model.parameters(), before, strict=True):
            p.copy_(value)
    for entry, grad in gradients(theirs.noisy(), FITNESS):
        entry.p.grad = grad
    theirs.observe(None)
    theirs.step()
    assert all(torch.equal(p, value) for p, value in zip(policy.model.parameters(), moved, strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(before, moved, strict=True))


def test_draws_that_are_worth_the_same_move_nothing(policy: Policy) -> None:
    optimizer = build_optimizer(SGDConfig(lr=1.0), NOISE, policy.model, 0)
    before = [p.detach().clone() for p in policy.model.parameters()]
    evolve(optimizer, dict.fromkeys(DRAWS, 0.0))
    assert all(torch.equal(p, value) for p, value in zip(policy.model.parameters(), before, strict=True))
    assert optimizer.skipped_steps == 1


@pytest.mark.parametrize("kind", ["sgd", "ivon"])
def test_the_comparison_is_of_whole_vectors(kind: str, policy: Policy) -> None:
    """Cosine and correlation again, from all parameters as one vector in float64."""
    optimizer = build_optimizer(SGDConfig() if kind == "sgd" else IVONConfig(), NOISE, policy.model, 0)
    draws = {**FITNESS, Draw(0, 4, 1, sign=-1): 2.0}
    torch.manual_seed(0)
    for p in policy.model.parameters():
        p.grad = torch.randn_like(p)
    grads = {name: p.grad.double() for name, p in policy.model.named_parameters() if p.grad is not None}
    optimizer.observe(None)
    entries = optimizer.noisy()
    g = torch.cat([grads[entry.name].flatten() for entry in entries])
    sigma = {entry.name: 0.1 if "norm" in entry.name else 0.02 for entry in entries}
    e = torch.cat([expected(entry, draws, sigma[entry.name]).flatten() for entry in entries])
    predicted = []
    for draw in draws:
        moves = [sigma[n.name] * draw.sign * normals(draw, n.name, n.p).double().flatten() for n in entries]
        predicted.append(-float(torch.cat(moves) @ g))
    values = torch.tensor([list(draws.values()), predicted], dtype=torch.float64)
    found = evolution_metrics(optimizer, draws)
    assert found["evolution/cosine"] == pytest.approx(float(e @ g / e.norm() / g.norm()), abs=1e-6)
    assert found["evolution/correlation"] == pytest.approx(float(torch.corrcoef(values)[0, 1]), abs=1e-5)


def test_a_gradient_that_is_not_finite_is_compared_with_nothing(policy: Policy) -> None:
    """IVON has thrown it away; the step that follows is skipped, not the run ended."""
    optimizer = build_optimizer(IVONConfig(), NOISE, policy.model, 0)
    for p in policy.model.parameters():
        p.grad = torch.full_like(p, math.inf)
    assert not optimizer.observe(DRAWS[0])
    assert evolution_metrics(optimizer, FITNESS) == {}
    optimizer.step()
    assert optimizer.step_metrics()["optimizer/skipped_steps"] == 1
