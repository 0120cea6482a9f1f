"""Choices of tokens for a loss, made before the update over all tokens that share a divisor, on all ranks together.

So they do not depend on micro-batches or ranks. Legend: K of these tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from threepo.config import ClipCovConfig, KLCovConfig, ObjectiveConfig


@dataclass(frozen=True)
class TokenScores:
    """Inputs of a choice of tokens; all tensors are [K] and on the CPU, rows in order."""

    logprobs: torch.Tensor
    """Of the policy before the batch's first update, at the weights where the gradient is taken."""
    entropy: torch.Tensor
    """Of its distributions, in nats."""
    advantages: torch.Tensor
    kept: torch.Tensor
    """Bool: not masked by a correction; others are never chosen, nor counted."""
    uniforms: torch.Tensor
    """A random number in [0, 1) at the address of each token: (run's seed, step, row, position)."""

    def covariance(self) -> torch.Tensor:
        """Each kept token's summand of the covariance of advantage and log-prob (arXiv 2505.22617)."""
        advantages, logprobs = self.advantages.double(), self.logprobs.double()
        return (advantages - advantages[self.kept].mean()) * (logprobs - logprobs[self.kept].mean())


Select = Callable[[TokenScores, Any], torch.Tensor]
"""A choice: bool [K]."""


ENTROPY_STEP = 1e-3
"""Nats to which entropies are rounded before they are compared. Tokens with the same past, such as the first ones of a
prompt's completions, are equal but for how a micro-batch is added up; the order of rows must decide between them."""


def highest_entropy(scores: TokenScores, settings: ObjectiveConfig) -> torch.Tensor:
    """The share of tokens of the highest entropy (arXiv 2506.01939)."""
    rounded = (scores.entropy.double() / ENTROPY_STEP).round()
    return _first(rounded, scores.kept, _number(scores, settings.entropy_mask_share))


def largest_covariance(scores: TokenScores, settings: KLCovConfig) -> torch.Tensor:
    """The share of tokens of the largest covariance (KL-Cov); none where all advantages are the same, such as 0.

    There every covariance is 0, and the authors' code takes the first tokens of the first rows.
    """
    advantages = scores.advantages[scores.kept]
    among = scores.kept & (advantages != advantages[:1]).any()
    return _first(scores.covariance(), among, _number(scores, settings.kl_cov_share))


def random_in_bounds(scores: TokenScores, settings: ClipCovConfig) -> torch.Tensor:
    """A share of all tokens, at random among those whose covariance is within bounds (Clip-Cov)."""
    low, high = settings.clip_cov_bounds
    covariance = scores.covariance()
    candidates = scores.kept & (covariance > low) & (covariance < high)
    return _first(-scores.uniforms, candidates, _number(scores, settings.clip_cov_share))


def _number(scores: TokenScores, share: float) -> int:
    """That share of the kept tokens, rounded down, and at least one."""
    return max(1, int(share * int(scores.kept.sum())))


def _first(values: torch.Tensor, among: torch.Tensor, number: int) -> torch.Tensor:
    """Bool [K]: the `number` tokens of the largest values among some; of equal values, the first."""
    order = values.masked_fill(~among, -torch.inf).argsort(descending=True, stable=True)
    chosen = torch.zeros_like(among)
    chosen[order[: min(number, int(among.sum()))]] = True
    return chosen
