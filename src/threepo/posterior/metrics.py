"""Metrics of a posterior: how far training moves the mean, whether the Hessian has changed, how large sigma is.

All are measured on an even subsample of every parameter (method.md 1.6).
"""

import math
from typing import Any

import torch

from threepo.posterior.ivon import IVON
from threepo.posterior.noise_sizes import layer_kind, scaled_by
from threepo.posterior.perturbation import sigma_scalars
from threepo.posterior.policy_optimizer import PolicyOptimizer, named_in_groups
from threepo.posterior.shards import sampled


class Movement:
    """Compares the trained weights with those that it saw last, on an even subsample of every parameter.

    Between two looks it keeps the subsample, not the weights. With sharded parameters every rank must make one and
    call it, and all get the same numbers, which do not depend on the sharding.
    """

    def __init__(self, optimizer: PolicyOptimizer) -> None:
        parameters = {name: p for name, p, _ in named_in_groups(optimizer.param_groups)}
        self._optimizer = optimizer
        self._trained = {name: p for name, p in parameters.items() if p.requires_grad and p.numel()}
        bases = {name: parameters.get(scaled_by(name), p) for name, p in self._trained.items()}
        adapted = {name: base for name, base in bases.items() if base is not self._trained[name]}
        self._bases = dict(zip(adapted, sampled((base, base) for base in adapted.values()), strict=True))
        """Samples of the frozen weights that an adapter's B adapts, by the name of B."""
        self._seen = self._look()

    def _look(self) -> list[torch.Tensor]:
        states = getattr(self._optimizer, "state", {})
        return sampled((p, states.get(p, {}).get("mean", p)) for p in self._trained.values())

    def metrics(self) -> dict[str, float]:
        """RMS of the movement since the last call, also relative to the weights: of all, and by kind of layer."""
        before, self._seen = self._seen, self._look()
        squares: dict[str, list[float]] = {}  # kind -> [sum of movement^2, sum of weight^2, number of weights]
        for (name, p), then, now in zip(self._trained.items(), before, self._seen, strict=True):
            total = squares.setdefault(layer_kind(name), [0.0, 0.0, 0])
            total[0] += float((now.double() - then).square().mean()) * p.numel()
            total[1] += float(self._bases.get(name, now).square().mean()) * p.numel()
            total[2] += p.numel()
        sums = {"": [sum(column) for column in zip(*squares.values(), strict=True)]}
        sums |= {f"/{kind}": own for kind, own in squares.items()}
        metrics: dict[str, float] = {}
        for kind, (moved, weights, count) in sums.items():
            metrics[f"update/rms{kind}"] = math.sqrt(moved / count)
            metrics[f"update/rms_to_weights{kind}"] = _root_ratio(moved, weights)
        return metrics


@torch.no_grad()
def posterior_metrics(optimizer: Any) -> dict[str, float]:
    """ess, and sigma over RMS weight for all weights with noise and for each kind of layer; IVON adds quantiles of
    h / h0 and the share of h / h0 outside [0.9, 1.1].

    All come from an even subsample of every parameter, weighted by the parameter's size. With sharded parameters every
    rank must call it, and all get the same numbers, which do not depend on the sharding.
    """
    groups = {name: group for group in optimizer.noise_groups() for name in group.parameters}
    parameters: dict[str, torch.Tensor] = dict(optimizer.named())
    entries = [(name, p) for name, p in parameters.items() if name in groups and p.numel()]
    hessians = [torch.ones(1)] * len(entries)
    metrics: dict[str, float] = {}
    if isinstance(optimizer, IVON):
        hessians = sampled((p, optimizer.state[p]["hessian"]) for _, p in entries)
        ratios = [h / groups[name].hess_init for (name, _), h in zip(entries, hessians, strict=True)]
        weights = [torch.full_like(h, p.numel() / len(h)) for (_, p), h in zip(entries, hessians, strict=True)]
        metrics = hessian_metrics(torch.cat(ratios), torch.cat(weights).double())
    scaled = [parameters.get(scaled_by(name), p) for name, p in entries]
    means = sampled((p, p) for p in scaled)
    squares: dict[str, list[float]] = {}  # kind -> [sum of sigma^2, sum of weight^2]
    has_noise = any(group.noise_scale for group in groups.values())
    for (name, p), h, m in zip(entries, hessians, means, strict=True):
        if groups[name].noise_scale or not has_noise:
            sigma = sigma_scalars(vars(groups[name])).sigma(h)
            total = squares.setdefault(layer_kind(name), [0.0, 0.0])
            total[0] += float(sigma.square().mean()) * p.numel()
            total[1] += float(m.square().mean()) * p.numel()
    metrics["posterior/ess"] = float(optimizer.param_groups[0]["ess"])
    everything = [sum(column) for column in zip(*squares.values(), strict=True)]
    metrics["posterior/sigma_to_rms"] = _root_ratio(*everything)
    return metrics | {f"posterior/sigma_to_rms/{kind}": _root_ratio(*totals) for kind, totals in squares.items()}


def hessian_metrics(ratio: torch.Tensor, weight: torch.Tensor) -> dict[str, float]:
    """Quantiles of h / h0, of a sample with weights in float64, and its share outside [0.9, 1.1]."""
    outside = ((ratio < 0.9) | (ratio > 1.1)).double()
    ordered, index = ratio.sort()
    cumulative, levels = weight[index].cumsum(0), (5, 50, 95)
    sums = torch.tensor(levels, dtype=torch.float64) / 100 * cumulative[-1]
    quantiles = ordered[torch.searchsorted(cumulative, sums).clamp(max=len(ordered) - 1)].tolist()
    metrics = {f"posterior/hessian_p{level:02d}": q for level, q in zip(levels, quantiles, strict=True)}
    metrics["posterior/hessian_outside_share"] = float((outside * weight).sum() / weight.sum())
    return metrics


def _root_ratio(square: float, weight_square: float) -> float:
    return math.sqrt(square / weight_square) if weight_square > 0 else math.inf
