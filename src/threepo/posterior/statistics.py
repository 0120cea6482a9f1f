"""Metrics of a posterior: whether the Hessian has changed, and how large sigma is (method.md 1.6)."""

import math

import torch

from threepo.posterior.groups import sigma_scalars
from threepo.posterior.ivon import IVON
from threepo.posterior.layout import sampled

SAMPLE = 4096
"""Elements read per parameter, about: evenly spaced, the same ones every time."""

_KINDS = (("embed", "embedding"), ("lm_head", "head"), ("norm", "norm"), ("attn", "attention"), ("mlp", "mlp"))


def layer_kind(name: str) -> str:
    """Which kind of layer a parameter belongs to, by the names that Hugging Face decoders share."""
    return next((kind for part, kind in _KINDS if part in name), "other")


@torch.no_grad()
def posterior_metrics(optimizer: IVON) -> dict[str, float]:
    """Quantiles of h / h0, its share outside [0.9, 1.1], ess, and sigma over RMS weight, whole and per layer kind.

    All come from an even subsample of every parameter, weighted by the parameter's size. With sharded parameters every
    rank must call it, and all get the same numbers, which do not depend on the sharding.
    """
    ratios, weights = [], []
    squares: dict[str, list[float]] = {}  # kind -> [sum of sigma^2, sum of weight^2]
    entries = [entry for entry in optimizer.trainable() if entry[1].numel()]
    hessians = sampled(((p, optimizer.state[p]["hessian"]) for _, p, _ in entries), _stride)
    means = sampled(((p, p) for _, p, _ in entries), _stride)
    for (name, p, group), h, m in zip(entries, hessians, means, strict=True):
        ratios.append(h / group["hess_init"])
        weights.append(torch.full_like(h, p.numel() / len(h)))
        sigma = sigma_scalars(group).sigma(h)
        total = squares.setdefault(layer_kind(name), [0.0, 0.0])
        total[0] += float(sigma.square().mean()) * p.numel()
        total[1] += float(m.square().mean()) * p.numel()
    ratio, weight = torch.cat(ratios), torch.cat(weights).double()
    outside = ((ratio < 0.9) | (ratio > 1.1)).double()
    metrics = {f"posterior/hessian_p{level:02d}": q for level, q in _quantiles(ratio, weight, (5, 50, 95)).items()}
    metrics["posterior/hessian_outside_share"] = float((outside * weight).sum() / weight.sum())
    metrics["posterior/ess"] = float(optimizer.param_groups[0]["ess"])
    everything = [sum(column) for column in zip(*squares.values(), strict=True)]
    metrics["posterior/sigma_to_rms"] = _root_ratio(*everything)
    for kind, totals in squares.items():
        metrics[f"posterior/sigma_to_rms/{kind}"] = _root_ratio(*totals)
    return metrics


@torch.no_grad()
def sigma_growth(optimizer: IVON) -> dict[str, float]:
    """Median over the weights of each layer kind of sigma, divided by what it is while the Hessian is hess_init.

    A collective like posterior_metrics.
    """
    ratios: dict[str, list[torch.Tensor]] = {}
    entries = [entry for entry in optimizer.trainable() if entry[1].numel()]
    hessians = sampled(((p, optimizer.state[p]["hessian"]) for _, p, _ in entries), _stride)
    for (name, _, group), h in zip(entries, hessians, strict=True):
        ratio = ((group["hess_init"] + group["weight_decay"]) / (h + group["weight_decay"])).sqrt()
        ratios.setdefault(layer_kind(name), []).append(ratio)
    return {kind: float(torch.cat(found).median()) for kind, found in ratios.items()}


def _stride(p: torch.Tensor) -> int:
    """About SAMPLE elements of all columns: a stride that shares a factor with the row's length would miss some."""
    stride = max(1, p.numel() // SAMPLE)
    while p.ndim > 1 and math.gcd(stride, p.shape[-1]) > 1:
        stride -= 1
    return stride


def _root_ratio(sigma_square: float, weight_square: float) -> float:
    return math.sqrt(sigma_square / weight_square) if weight_square > 0 else math.inf


def _quantiles(values: torch.Tensor, weights: torch.Tensor, levels: tuple[int, ...]) -> dict[int, float]:
    """Of weighted values, at levels in per cent; sorting is what costs, so it is done once."""
    ordered, index = values.sort()
    cumulative = weights[index].cumsum(0)
    sums = torch.tensor(levels, dtype=torch.float64) / 100 * cumulative[-1]
    at = torch.searchsorted(cumulative, sums).clamp(max=len(ordered) - 1)
    return dict(zip(levels, ordered[at].tolist(), strict=True))
