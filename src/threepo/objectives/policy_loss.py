"""The clipped surrogate of GRPO, as a sum over tokens (paper equation 1; method.md 2.2).

Legend: R rows, T token positions.
"""

from dataclasses import dataclass

import torch

from threepo.config import ObjectiveConfig

LOG_RATIO_BOUND = 20.0


@dataclass(frozen=True)
class LossSums:
    """Sums over the tokens of a micro-batch; the loop adds them up and divides once."""

    loss: torch.Tensor
    """0-dim, carries the gradient."""
    normalizer: float
    """Weighted count of tokens that the loss is to be divided by."""
    clipped_low: float
    """Tokens whose ratio was clipped from below (and the clip was active)."""
    clipped_high: float
    """And from above."""
    ratio: float
    """Sum of the ratios to the old policy."""


def policy_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    entropy: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    correction_weights: torch.Tensor,
    counted: torch.Tensor,
    row_weights: torch.Tensor,
    settings: ObjectiveConfig,
) -> LossSums:
    """Sum of token losses to minimise.

    Args:
        logprobs: [R, T] of the policy, with gradient.
        old_logprobs: [R, T] of the policy before this batch's first update, at the same draw; detached.
        entropy: [R, T] of the policy's distributions, in nats, with gradient if the bonus is on.
        advantages: [R].
        mask: [R, T] bool, the completion tokens.
        correction_weights: [R, T] importance weights, detached; 0 drops a token.
        counted: [R, T] bool, the tokens that the normalizer counts.
        row_weights: [R], from `aggregate.weigh_rows`.
        settings: clip bounds, dual clip, entropy bonus.
    """
    ratio = (logprobs - old_logprobs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    a = advantages.to(ratio.dtype).unsqueeze(1)
    bounded = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    loss = torch.maximum(-a * ratio, -a * bounded)
    if settings.dual_clip:
        loss = torch.where(a < 0, torch.minimum(loss, -a * settings.dual_clip), loss)
    loss = loss * correction_weights
    if settings.entropy_coefficient:
        loss = loss - settings.entropy_coefficient * entropy * counted
    loss = torch.where(mask, loss, 0.0) * row_weights.unsqueeze(1)
    return LossSums(
        loss=loss.sum(),
        normalizer=float((counted * row_weights.unsqueeze(1)).sum(dtype=torch.float64)),
        clipped_low=float((mask & (a < 0) & (ratio < 1 - settings.clip_low)).sum()),
        clipped_high=float((mask & (a > 0) & (ratio > 1 + settings.clip_high)).sum()),
        ratio=float(torch.where(mask, ratio.detach(), 0.0).sum()),
    )
