"""Importance corrections from the policies that wrote the rollouts to the policy whose gradient is taken (method.md 4).

The log-ratio of token t is D_t = logp_gradient(t) - logp_behaviour(t), both detached, where logp_gradient is computed
by the trainer at the weights where the gradient is taken. Sequence kinds use rho = exp(sum_t D_t): the sum, not the
mean. Legend: R rows, T token positions.
"""

from dataclasses import dataclass

import torch

from threepo.config import Correction

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to plus and minus this before exponentiation."""


@dataclass(frozen=True)
class Corrected:
    """What a correction makes of the rows of a micro-batch; nothing here carries a gradient."""

    weights: torch.Tensor
    """[R, T] factor of each token's loss; 0 where dropped."""
    kept: torch.Tensor
    """[R, T] bool: the tokens that contribute; a subset of the mask."""
    rho: torch.Tensor
    """[R] sequence ratio exp(sum D), clamped; recorded for every kind."""
    untouched: torch.Tensor
    """[R] bool: nothing of the row was dropped or truncated."""


@torch.no_grad()
def correct(
    logprobs: torch.Tensor, behaviour_logprobs: torch.Tensor, mask: torch.Tensor, settings: Correction
) -> Corrected:
    """Weights and kept tokens for [R, T] log-probs at the gradient's weights and as the engine drew them."""
    d = torch.where(mask, logprobs.float() - behaviour_logprobs.float(), 0.0)
    log_rho = d.sum(dim=1)
    rho = _exp(log_rho)
    everything = torch.ones_like(mask)
    match settings.kind:
        case "none":
            weights, kept = torch.ones_like(d), everything
        case "token_tis":
            weights, kept = _exp(d).clamp(max=settings.high), everything
        case "token_mis":
            weights, kept = _masked(_exp(d), settings)
        case "seq_tis":
            weights, kept = rho.clamp(max=settings.high).unsqueeze(1).expand_as(d), everything
        case "seq_mis":
            weights, kept = (x.unsqueeze(1).expand_as(d) for x in _masked(rho, settings))
        case "geometric_mis":
            mean_ratio = _exp(log_rho / mask.sum(dim=1).clamp(min=1))
            weights, kept = (x.unsqueeze(1).expand_as(d) for x in _masked(mean_ratio, settings))
    kept = kept & mask
    touched = (mask & ~kept).any(dim=1)
    if settings.kind == "token_tis":
        touched = ((_exp(d) > settings.high) & mask).any(dim=1)
    elif settings.kind == "seq_tis":
        touched = rho > settings.high
    return Corrected(torch.where(kept, weights, 0.0), kept, rho, ~touched)


def _exp(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def _masked(ratio: torch.Tensor, settings: Correction) -> tuple[torch.Tensor, torch.Tensor]:
    kept = (ratio >= settings.low) & (ratio <= settings.high)
    return (ratio if settings.weight == "ratio" else torch.ones_like(ratio)), kept


def effective_sample_share(weights: torch.Tensor) -> float:
    """Kish's effective sample size over the number of rows, (sum w)^2 / (n sum w^2), of [R] weights; 0 if all are 0."""
    square = float(weights.double().square().sum())
    return float(weights.double().sum()) ** 2 / (len(weights) * square) if square > 0 else 0.0
