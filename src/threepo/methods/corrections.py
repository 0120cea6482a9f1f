"""Importance corrections from the policies that wrote the rollouts to the policy whose gradient is taken (method.md 4).

The log-ratio of token t is D_t = logp_gradient(t) - logp_behaviour(t), both detached; the trainer computes the first
at the weights where the gradient is taken. The sequence ratio is rho = exp(sum_t D_t): the sum, not the mean.
Legend: R rows, K tokens of all rows.
"""

from dataclasses import dataclass

import torch

from threepo.config import Correction
from threepo.objectives.inputs import LOG_RATIO_BOUND, sum_by_row


@dataclass(frozen=True)
class Corrected:
    """Effect of a correction on the rows of a micro-batch; nothing here carries a gradient."""

    weights: torch.Tensor
    """[K] factor of each token's loss; 0 where masked."""
    kept: torch.Tensor
    """[K] bool: not masked."""
    rho: torch.Tensor
    """[R] sequence ratio exp(sum D), clamped; computed for every kind."""
    untouched: torch.Tensor
    """[R] bool: no token of the row was masked or truncated."""


@torch.no_grad()
def correct(
    logprobs: torch.Tensor, behaviour_logprobs: torch.Tensor, row_of: torch.Tensor, rows: int, settings: Correction
) -> Corrected:
    """Correct tokens by their log-probs [K] at the gradient's weights and as the engine drew them.

    `row_of` [K] has the row of each token, 0 to `rows` - 1; every row has at least one.
    """
    d = logprobs.float() - behaviour_logprobs.float()
    log_rho = sum_by_row(d, row_of, rows)
    match settings.kind:
        case "none":
            ratio = torch.ones_like(d)
        case "token_tis" | "token_mis":
            ratio = _exp(d)
        case "seq_tis" | "seq_mis":
            ratio = _exp(log_rho)[row_of]
        case "geometric_mis":
            ratio = _exp(log_rho / sum_by_row(torch.ones_like(d), row_of, rows))[row_of]
    if settings.kind.endswith("mis"):
        kept = (ratio >= settings.low) & (ratio <= settings.high)
        weights = torch.where(kept, ratio if settings.weight == "ratio" else 1.0, 0.0)
        touched = ~kept
    else:
        kept = torch.ones_like(ratio, dtype=torch.bool)
        touched = (ratio > settings.high) & (settings.kind != "none")
        weights = torch.where(touched, settings.high, ratio)
    return Corrected(weights, kept, _exp(log_rho), sum_by_row(touched, row_of, rows) == 0)


def _exp(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp().float()


def effective_sample_share(weights: torch.Tensor) -> float:
    """Kish's effective sample size over the number of rows, (sum w)^2 / (n sum w^2), of [R] weights; 0 if all are 0."""
    square = float(weights.double().square().sum())
    return float(weights.double().sum()) ** 2 / (len(weights) * square) if square > 0 else 0.0
