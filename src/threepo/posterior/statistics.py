"""What the log says about a posterior: is the Hessian alive, and how loud is the noise (method.md 1.6)?"""

import math

import torch

from threepo.posterior.groups import scale_of
from threepo.posterior.ivon import IVON
from threepo.posterior.kernels import read
from threepo.posterior.layout import local
from threepo.posterior.policy_optimizer import named_in_groups

SAMPLE = 4096
"""Elements read per parameter, about: evenly spaced, the same ones every time."""

_KINDS = (("embed", "embedding"), ("lm_head", "head"), ("norm", "norm"), ("attn", "attention"), ("mlp", "mlp"))


def layer_kind(name: str) -> str:
    """Which kind of layer a parameter belongs to, by the names that Hugging Face decoders share."""
    return next((kind for part, kind in _KINDS if part in name), "other")


@torch.no_grad()
def posterior_metrics(optimizer: IVON) -> dict[str, float]:
    """Quantiles of h / h0, its share outside [0.9, 1.1], ess, and sigma over RMS weight, whole and per layer kind.

    Quantiles and shares come from an even subsample of every parameter, weighted by the parameter's size; of sharded
    parameters they speak of this rank's shards.
    """
    ratios, weights = [], []
    squares: dict[str, list[float]] = {}  # kind -> [sum of sigma^2, sum of weight^2]
    for name, p, group in named_in_groups(optimizer.param_groups):
        if not p.requires_grad or not local(p).numel():
            continue
        stride = _stride(p)
        h = read(optimizer.state[p]["hessian"])[::stride].float().cpu()
        m = read(p)[::stride].float().cpu()
        ratios.append(h / group["hess_init"])
        weights.append(torch.full_like(h, p.numel() / len(h)))
        sigma = scale_of(group).sigma(h)
        total = squares.setdefault(layer_kind(name), [0.0, 0.0])
        total[0] += float(sigma.square().mean()) * p.numel()
        total[1] += float(m.square().mean()) * p.numel()
    ratio, weight = torch.cat(ratios), torch.cat(weights).double()
    outside = ((ratio < 0.9) | (ratio > 1.1)).double()
    metrics = {f"posterior/hessian_p{q:02d}": _quantile(ratio, weight, q / 100) for q in (5, 50, 95)}
    metrics["posterior/hessian_outside_share"] = float((outside * weight).sum() / weight.sum())
    metrics["posterior/ess"] = float(optimizer.param_groups[0]["ess"])
    everything = [sum(column) for column in zip(*squares.values(), strict=True)]
    metrics["posterior/sigma_to_rms"] = _root_ratio(*everything)
    for kind, totals in squares.items():
        metrics[f"posterior/sigma_to_rms/{kind}"] = _root_ratio(*totals)
    return metrics


@torch.no_grad()
def sigma_growth(optimizer: IVON) -> dict[str, float]:
    """Median over the weights of each layer kind of sigma, divided by what it is while the Hessian is hess_init."""
    ratios: dict[str, list[torch.Tensor]] = {}
    for name, p, group in optimizer.trainable():
        precision = read(optimizer.state[p]["hessian"])[:: _stride(p)].float() + group["weight_decay"]
        ratio = ((group["hess_init"] + group["weight_decay"]) / precision).sqrt()
        ratios.setdefault(layer_kind(name), []).append(ratio.cpu())
    return {kind: float(torch.cat(found).median()) for kind, found in ratios.items() if sum(map(len, found))}


def _stride(p: torch.Tensor) -> int:
    """About SAMPLE elements of all columns: a stride that shares a factor with the row's length would miss some."""
    stride = max(1, p.numel() // SAMPLE)
    while p.ndim > 1 and math.gcd(stride, p.shape[-1]) > 1:
        stride -= 1
    return stride


def _root_ratio(sigma_square: float, weight_square: float) -> float:
    return math.sqrt(sigma_square / weight_square) if weight_square > 0 else math.inf


def _quantile(values: torch.Tensor, weights: torch.Tensor, q: float) -> float:
    ordered, index = values.sort()
    cumulative = weights[index].cumsum(0)
    at = int(torch.searchsorted(cumulative, q * cumulative[-1]).clamp(max=len(ordered) - 1))
    return float(ordered[at])
