"""Evolution strategies: a gradient made of draws and their fitness, without a backward pass (Salimans et al., 2017).

The gradient of the expected fitness E[F(m + sigma z)] with respect to m is E[F z / sigma]. With N draws it is estimated
by the mean of F_n z_n / sigma. The noise is made again from its addresses, one parameter at a time.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from threepo.posterior import kernels
from threepo.posterior.noise import chunk_of
from threepo.posterior.operations import Perturb, Scalars
from threepo.posterior.perturbation import NoisyParameter
from threepo.posterior.point_optimizers import PointSGD
from threepo.posterior.shards import local, sum_over_shards
from threepo.types import Draw

Fitness = Mapping[Draw, float]
"""The centred score of each draw of a step; the larger, the better."""


def evolve(optimizer: Any, fitness: Fitness) -> None:
    """Take a step of the optimizer along the gradient of minus the fitness; skip it if all draws scored the same.

    IVON keeps its Hessian. With SGD, a parameter is moved before the next one's gradient is made: the step needs no
    more memory than the largest parameter.
    """
    if not any(fitness.values()):
        optimizer.discard()
        return
    found = gradients(optimizer.noisy(), fitness)
    if isinstance(optimizer, PointSGD):
        optimizer.move(found)
        return
    for entry, grad in found:
        entry.p.grad = grad.to(entry.p.dtype)
    optimizer.observe(None)
    optimizer.step()


def gradients(noisy: Sequence[NoisyParameter], fitness: Fitness) -> Iterator[tuple[NoisyParameter, torch.Tensor]]:
    """Minus the mean over draws of fitness times z / sigma: float32, in each parameter's shape and on its shards."""
    weights = {draw: -weight / len(fitness) for draw, weight in _by_noise(fitness).items()}
    return ((entry, _divide(_sum_of_noise(entry, weights), entry)) for entry in noisy)


def evolution_metrics(optimizer: Any, fitness: Fitness) -> dict[str, float]:
    """Metrics that compare the observed gradient with an evolution strategy's gradient from the same rollouts.

    `evolution/cosine`: between the two, over all parameters with noise. `evolution/correlation`: over the draws,
    between the fitness of a draw and what the observed gradient predicts of it, minus <sigma z, gradient>. Nothing if
    the gradient was rejected. A collective where parameters are sharded.
    """
    weights, observed = _by_noise(fitness), optimizer.gradients()
    entries = [entry for entry in optimizer.noisy() if entry.p in observed]
    if not entries:
        return {}
    products = [_products(entry, observed[entry.p].float(), weights) for entry in entries]
    sums = {
        key: sum_over_shards([(e.p, own[key]) for e, own in zip(entries, products, strict=True)]) for key in products[0]
    }
    norms = math.sqrt(sums["evolved"] * sums["observed"])
    cosine = sums["both"] / norms if norms else math.nan
    predicted = [-sums[replace(draw, sign=1)] * draw.sign for draw in fitness]
    correlation = torch.corrcoef(torch.tensor([list(fitness.values()), predicted], dtype=torch.float64))[0, 1]
    return {"evolution/cosine": cosine, "evolution/correlation": float(correlation)}


def _products(entry: NoisyParameter, grad: torch.Tensor, weights: Mapping[Draw, float]) -> dict[Any, torch.Tensor]:
    """A parameter's part of <sigma z, gradient>, by draw, and of the products of the two gradients."""
    total, products = _sum_of_noise(entry, {}), {}
    for draw, weight in weights.items():
        z = _sum_of_noise(entry, {draw: 1.0})
        products[draw] = _product(z, local(grad) * _sigma(entry))
        total.add_(z, alpha=-weight)
    evolved = _divide(total, entry)
    pairs = {"both": (evolved, grad), "evolved": (evolved, evolved), "observed": (grad, grad)}
    return products | {name: _product(a, b) for name, (a, b) in pairs.items()}


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Sum of products over this rank's shards, in float64, without a copy of the whole in it."""
    parts = zip(*(torch.split(local(x).reshape(-1), chunk_of(x.device)) for x in (a, b)), strict=True)
    return sum(((x.double() * y).sum() for x, y in parts), torch.zeros((), dtype=torch.float64, device=a.device))


def _by_noise(fitness: Fitness) -> dict[Draw, float]:
    """The fitness of each noise: the fitness of a mirrored draw counts against it."""
    found: dict[Draw, float] = {}
    for draw, value in fitness.items():
        base = replace(draw, sign=1)
        found[base] = found.get(base, 0.0) + draw.sign * value
    return found


@torch.no_grad()
def _sum_of_noise(entry: NoisyParameter, weights: Mapping[Draw, float]) -> torch.Tensor:
    """The sum over draws of weight times z: float32, in the parameter's shape and on its shards."""
    total = torch.zeros_like(entry.p, dtype=torch.float32, requires_grad=False)
    for draw, weight in weights.items():
        unit = Scalars(weight_decay=0.0, ess=1.0, fixed_root=1.0, noise_scale=weight)
        kernels.run([Perturb(total, total, total, entry.noise(draw), unit)])
    return total


def _divide(total: torch.Tensor, entry: NoisyParameter) -> torch.Tensor:
    """Divides by sigma, in place."""
    local(total).div_(_sigma(entry))
    return total


def _sigma(entry: NoisyParameter) -> torch.Tensor | float:
    scalars = entry.scalars
    return scalars.noise_scale / scalars.fixed_root if scalars.fixed_root else scalars.sigma(local(entry.hessian))
