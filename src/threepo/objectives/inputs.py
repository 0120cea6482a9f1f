"""Inputs of the objective's terms, and the interface of a term."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from threepo.config import ObjectiveConfig
from threepo.objectives.corrections import CorrectionEffect, bounded_exp, sum_by_row
from threepo.objectives.selection import Select
from threepo.types import CreditedRow


@dataclass(frozen=True)
class LossInputs:
    """Inputs of a term for the tokens of a micro-batch, which holds whole rows; all tensors are [K]."""

    logprobs: torch.Tensor
    """Of the policy, with gradient."""
    old_logprobs: torch.Tensor
    """Of the policy before this batch's first update, at the same draw; detached."""
    behaviour_logprobs: torch.Tensor
    """As the rollout engine reported them."""
    entropy: torch.Tensor
    """Of the policy's distributions, in nats; with gradient if a term in use says `of_entropy`."""
    advantages: torch.Tensor
    weights: torch.Tensor
    """The weight of each token's row (`policy_loss.row_weights`)."""
    correction: CorrectionEffect
    """Importance weights of the tokens, and which of them count."""
    row_of: torch.Tensor
    """The row of each token, 0 to `rows` - 1."""
    rows: int
    chosen: torch.Tensor
    """Bool: the tokens that the loss has chosen by its `select`; none if it has no such."""
    in_mask: torch.Tensor
    """Bool: the tokens that the entropy mask leaves a policy gradient; all without a mask."""
    reference_logprobs: torch.Tensor | None = None
    """Of the reference model, where there is one."""

    def ratio(self) -> torch.Tensor:
        """Probability ratio of the policy to the old policy."""
        return bounded_exp(self.logprobs - self.old_logprobs)

    def sequence_ratio(self) -> torch.Tensor:
        """The geometric mean of a row's ratios, at each of its tokens; the gradient is that of the token's own."""
        log_ratio = (self.logprobs - self.old_logprobs).detach()
        mean = sum_by_row(log_ratio, self.row_of, self.rows)
        mean /= sum_by_row(torch.ones_like(log_ratio), self.row_of, self.rows)
        return bounded_exp(mean.float()[self.row_of] + self.logprobs - self.logprobs.detach())


@dataclass(frozen=True)
class Term:
    """A summand of the objective."""

    losses: Callable[[LossInputs, Any], torch.Tensor]
    """[K], to be minimised."""
    has_gradient: Callable[[CreditedRow, bool], bool] = lambda row, chosen: row.advantage != 0
    """Whether the gradient of a row can differ from 0, given whether any of its tokens was chosen; a row without any
    needs no backward pass."""
    in_use: Callable[[ObjectiveConfig], bool] = lambda settings: True
    of_entropy: bool = False
    """Whether gradients flow through the entropy."""
    select: Select | None = None
    """Chooses tokens before the update, from the scores of all that share a divisor."""
