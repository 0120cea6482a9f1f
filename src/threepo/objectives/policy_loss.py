"""The objective of a policy update, as sums over tokens: the clipped surrogate of GRPO, and terms added to it.

Each term is an entry of `TERMS`, which also says for which rows it has a gradient. Legend: K tokens of a micro-batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from threepo.config import ObjectiveConfig
from threepo.types import TrainingRow

LOG_RATIO_BOUND = 20.0


@dataclass(frozen=True)
class LossInputs:
    """What a term may read of each token; all [K]."""

    logprobs: torch.Tensor
    """Of the policy, with gradient."""
    old_logprobs: torch.Tensor
    """Of the policy before this batch's first update, at the same draw; detached."""
    entropy: torch.Tensor
    """Of the policy's distribution, in nats; with gradient if a term in use needs it."""
    advantages: torch.Tensor
    correction_weights: torch.Tensor
    """Importance weights, detached; 0 masks a token."""
    counted: torch.Tensor
    """Bool: the tokens that the normalizer counts."""
    row_weights: torch.Tensor
    """Factor of the token's losses, from `aggregate.weigh_rows`."""

    @property
    def ratio(self) -> torch.Tensor:
        """Of the policy to the old policy."""
        return (self.logprobs - self.old_logprobs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


@dataclass(frozen=True)
class Term:
    """A summand of the objective."""

    losses: Callable[[LossInputs, ObjectiveConfig], torch.Tensor]
    """Losses [K] of the tokens, before row weights."""
    in_use: Callable[[ObjectiveConfig], bool]
    has_gradient: Callable[[TrainingRow], bool]
    """Whether the gradient of a row can differ from 0; a row for which no term says so needs no backward pass."""
    of_entropy: bool = False
    """Whether gradients flow through the entropy."""


def clipped_surrogate(inputs: LossInputs, settings: ObjectiveConfig) -> torch.Tensor:
    """max(-A R, -A clip(R)), with the dual clip, times the correction (paper equation 1; method.md 2.2)."""
    a, ratio = inputs.advantages, inputs.ratio
    loss = torch.maximum(-a * ratio, -a * ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high))
    if settings.dual_clip:
        loss = torch.where(a < 0, torch.minimum(loss, -a * settings.dual_clip), loss)
    return loss * inputs.correction_weights


def entropy_bonus(inputs: LossInputs, settings: ObjectiveConfig) -> torch.Tensor:
    """Minus the coefficient times the entropy of the counted tokens."""
    return -settings.entropy_coefficient * inputs.entropy * inputs.counted


TERMS = {
    "clipped_surrogate": Term(clipped_surrogate, lambda settings: True, lambda row: row.advantage != 0),
    "entropy_bonus": Term(
        entropy_bonus, lambda settings: settings.entropy_coefficient > 0, lambda row: True, of_entropy=True
    ),
}


def terms_of(settings: ObjectiveConfig) -> list[Term]:
    """The terms that a recipe uses."""
    return [term for term in TERMS.values() if term.in_use(settings)]


def split_by_gradient(
    rows: Sequence[TrainingRow], settings: ObjectiveConfig
) -> tuple[list[TrainingRow], list[TrainingRow]]:
    """Rows that need a backward pass, and rows whose gradient is 0, which are only scored and counted.

    At least one row is among the first, because the optimizer needs a gradient to observe, even one of zeros.
    """
    terms = terms_of(settings)
    with_gradient = [row for row in rows if any(term.has_gradient(row) for term in terms)] or list(rows[:1])
    chosen = {row.index for row in with_gradient}
    return with_gradient, [row for row in rows if row.index not in chosen]


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


def policy_loss(inputs: LossInputs, settings: ObjectiveConfig) -> LossSums:
    """The loss to minimise, summed over tokens, with what the log says about it."""
    losses = torch.stack([term.losses(inputs, settings) for term in terms_of(settings)]).sum(dim=0)
    a, ratio = inputs.advantages, inputs.ratio.detach()
    return LossSums(
        loss=(losses * inputs.row_weights).sum(),
        normalizer=float((inputs.counted * inputs.row_weights).sum(dtype=torch.float64)),
        clipped_low=float(((a < 0) & (ratio < 1 - settings.clip_low)).sum()),
        clipped_high=float(((a > 0) & (ratio > 1 + settings.clip_high)).sum()),
        ratio=float(ratio.sum()),
    )
