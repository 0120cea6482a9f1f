"""Inputs of the losses of tokens."""

from dataclasses import dataclass

import torch

from threepo.objectives.corrections import CorrectionEffect, bounded_exp, sum_by_row


@dataclass(frozen=True)
class LossInputs:
    """Values of the tokens that the loss counts in a micro-batch, which holds whole rows; all tensors are [K]."""

    logprobs: torch.Tensor
    """Log-probs under the policy, with gradient."""
    old_logprobs: torch.Tensor
    """Log-probs under the policy before this batch's first update, at the same draw; detached."""
    behaviour_logprobs: torch.Tensor
    """Log-probs that the rollout engine reported."""
    entropy: torch.Tensor
    """Entropies of the policy's distributions, in nats; with gradient if a term in use says `of_entropy`."""
    self_certainty: torch.Tensor
    """KL(uniform || the policy's distributions), in nats; without gradient."""
    advantages: torch.Tensor
    weights: torch.Tensor
    """Weight of each token's row (`policy_loss.row_weights`)."""
    correction: CorrectionEffect
    """Importance weights of the tokens, and which of them count."""
    row_of: torch.Tensor
    """Row of each token, 0 to `rows` - 1."""
    rows: int
    chosen: torch.Tensor
    """Bool: the tokens that the loss has chosen by its `select`; none if it does not choose."""
    in_mask: torch.Tensor
    """Bool: the tokens that the entropy mask leaves a policy gradient; all without a mask."""
    reference_logprobs: torch.Tensor | None = None
    """Log-probs under the reference model, where there is one."""

    def ratio(self) -> torch.Tensor:
        """Probability ratio of the policy to the old policy."""
        return bounded_exp(self.logprobs - self.old_logprobs)

    def sequence_ratio(self) -> torch.Tensor:
        """Geometric mean of a row's ratios, at each of its tokens, with the gradient of the token's own log-prob."""
        log_ratio = (self.logprobs - self.old_logprobs).detach()
        mean = sum_by_row(log_ratio, self.row_of, self.rows)
        mean /= sum_by_row(torch.ones_like(log_ratio), self.row_of, self.rows)
        return bounded_exp(mean.float()[self.row_of] + self.logprobs - self.logprobs.detach())
