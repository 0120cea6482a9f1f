"""Choices of tokens for a loss, made before the update among all tokens that share a divisor, on all ranks together.

So they do not depend on micro-batches or ranks. Legend: K tokens that share a divisor.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from threepo.config.objective import ClipCovConfig, KLCovConfig, ObjectiveConfig


@dataclass(frozen=True)
class ChoiceInputs:
    """Inputs of a choice of tokens; all tensors are [K] and on the CPU, rows in order."""

    logprobs: torch.Tensor
    """Log-probs under the policy before the batch's first update, at the weights where the gradient is taken."""
    entropy: torch.Tensor
    """Entropies of the policy's distributions, in nats."""
    advantages: torch.Tensor
    kept: torch.Tensor
    """Bool: not masked by a correction; others are never chosen, nor counted."""
    uniforms: torch.Tensor
    """A random number in [0, 1) for each token, a function of (run's seed, step, row, position)."""

    def covariance(self) -> torch.Tensor:
        """Summand of each kept token in the covariance of advantage and log-prob (arXiv 2505.22617)."""
        advantages, logprobs = self.advantages.double(), self.logprobs.double()
        return (advantages - advantages[self.kept].mean()) * (logprobs - logprobs[self.kept].mean())


Select = Callable[[ChoiceInputs, Any], torch.Tensor]
"""Makes a choice, bool [K], from the tokens and the settings."""


ENTROPY_STEP = 1e-3
"""Nats to which entropies are rounded before they are compared. Tokens with the same past, such as the first ones of a
prompt's completions, differ only by rounding, which depends on the micro-batch; the order of rows must decide."""


def highest_entropy(tokens: ChoiceInputs, settings: ObjectiveConfig) -> torch.Tensor:
    """Choose the share of tokens of the highest entropy (arXiv 2506.01939)."""
    rounded = (tokens.entropy.double() / ENTROPY_STEP).round()
    return _first(rounded, tokens.kept, _number(tokens, settings.entropy_mask_share))


def largest_covariance(tokens: ChoiceInputs, settings: KLCovConfig) -> torch.Tensor:
    """Choose the share of tokens of the largest covariance (KL-Cov); none where all advantages are equal, such as 0.

    There every covariance is 0, and the authors' code takes the first tokens of the first rows.
    """
    advantages = tokens.advantages[tokens.kept]
    among = tokens.kept & (advantages != advantages[:1]).any()
    return _first(tokens.covariance(), among, _number(tokens, settings.kl_cov_share))


def random_in_bounds(tokens: ChoiceInputs, settings: ClipCovConfig) -> torch.Tensor:
    """Choose a share of all tokens, at random among the tokens whose covariance is within bounds (Clip-Cov)."""
    low, high = settings.clip_cov_bounds
    covariance = tokens.covariance()
    candidates = tokens.kept & (covariance > low) & (covariance < high)
    return _first(-tokens.uniforms, candidates, _number(tokens, settings.clip_cov_share))


def _number(tokens: ChoiceInputs, share: float) -> int:
    """Number of tokens to choose: the share of the kept ones, rounded down, and at least one."""
    return max(1, int(share * int(tokens.kept.sum())))


def _first(values: torch.Tensor, among: torch.Tensor, number: int) -> torch.Tensor:
    """Choose the `number` tokens of the largest values [K] among some, bool [K]; of equal values, the first."""
    order = values.masked_fill(~among, -torch.inf).argsort(descending=True, stable=True)
    chosen = torch.zeros_like(among)
    chosen[order[: min(number, int(among.sum()))]] = True
    return chosen
