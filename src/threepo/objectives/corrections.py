"""Importance corrections from the policies that wrote the rollouts to the policy whose gradient is taken (method.md 4).

The log-ratio of token t is D_t = logp_gradient(t) - logp_behaviour(t), both detached; the trainer computes the first
at the weights where the gradient is taken. The sequence ratio is rho = exp(sum_t D_t): the sum, not the mean.
Legend: R rows, K tokens of all rows.
"""

from dataclasses import dataclass

import torch

from threepo.config import Correction
from threepo.config.records import is_own
from threepo.errors import UserError
from threepo.user_code import find_object

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to plus and minus this before exponentiation."""


@dataclass(frozen=True)
class CorrectionEffect:
    """Effect of a correction on the rows of a micro-batch; nothing here carries a gradient."""

    weights: torch.Tensor
    """Factor [K] of each token's loss; 0 where masked."""
    kept: torch.Tensor
    """Bool [K]: not masked."""
    counted: torch.Tensor
    """Bool [K]: the tokens whose number divides the loss."""
    rho: torch.Tensor
    """Sequence ratio [R], exp(sum D), clamped; computed for every kind."""
    untouched: torch.Tensor
    """Bool [R]: no token of the row was masked or truncated; with a user's own correction, all its weights are 1."""


@torch.no_grad()
def correct(
    logprobs: torch.Tensor, behaviour_logprobs: torch.Tensor, row_of: torch.Tensor, rows: int, settings: Correction
) -> CorrectionEffect:
    """Correct tokens by their log-probs [K] at the gradient's weights and under the policies that wrote them.

    `row_of` [K] has the row of each token, 0 to `rows` - 1; every row has at least one.
    """
    d = logprobs.float() - behaviour_logprobs.float()
    log_rho = sum_by_row(d, row_of, rows)
    rho = bounded_exp(log_rho).float()
    match settings.kind:
        case "none":
            ratio = torch.ones_like(d)
        case "token_tis" | "token_mis":
            ratio = bounded_exp(d)
        case "seq_tis" | "seq_mis":
            ratio = rho[row_of]
        case "geometric_mis":
            ratio = bounded_exp(log_rho / sum_by_row(torch.ones_like(d), row_of, rows)).float()[row_of]
        case own:
            ratio = find_object(own, "method.correction.kind")(d, row_of, rows, settings)
            if ratio.shape != d.shape or not (ratio.isfinite() & (ratio >= 0)).all():
                fix = "returned other than a finite weight of 0 or more for each token"
                raise UserError(f"method.correction.kind = {own!r}: {fix}")
    if is_own(settings.kind):
        kept, weights, touched = ratio > 0, ratio, ratio != 1
    elif settings.kind.endswith("mis"):
        kept = (ratio >= settings.low) & (ratio <= settings.high)
        weights = torch.where(kept, ratio if settings.weight == "ratio" else 1.0, 0.0)
        touched = ~kept
    else:
        kept = torch.ones_like(ratio, dtype=torch.bool)
        touched = (ratio > settings.high) & (settings.kind != "none")
        weights = torch.where(touched, settings.high, ratio)
    return CorrectionEffect(
        weights=weights,
        kept=kept,
        counted=kept if settings.normalizer == "kept" else torch.ones_like(kept),
        rho=rho,
        untouched=sum_by_row(touched, row_of, rows) == 0,
    )


def sum_by_row(values: torch.Tensor, row_of: torch.Tensor, rows: int) -> torch.Tensor:
    """Sums [R] of values [K] over the tokens of each row, in float64."""
    return torch.zeros(rows, dtype=torch.float64, device=values.device).index_add_(0, row_of, values.double())


def bounded_exp(log_ratio: torch.Tensor) -> torch.Tensor:
    """The ratio of log-ratios, which are clamped to LOG_RATIO_BOUND first."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def effective_sample_share(weights: torch.Tensor) -> float:
    """Effective sample size of weights [R] over their number, (sum w)^2 / (R sum w^2) (Kish); 0 if all are 0."""
    square = float(weights.double().square().sum())
    return float(weights.double().sum()) ** 2 / (len(weights) * square) if square > 0 else 0.0
