"""The losses of a token (method.md 2.3): their inputs, policy losses, and terms that are added to them.

config/objective.py has a record for each policy loss, which names it here. Policy losses are multiplied by the
correction's weights and by the entropy mask afterwards. Legend: K tokens of a micro-batch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

import torch

from threepo.config.objective import CISPOConfig, ClipCovConfig, GSPOConfig, KLCovConfig, ObjectiveConfig, PPOConfig
from threepo.objectives.corrections import LOG_RATIO_BOUND, CorrectionEffect, bounded_exp, sum_by_row
from threepo.objectives.selection import Select, largest_covariance, random_in_bounds
from threepo.types import CreditedRow


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


def _clipped(ratio: torch.Tensor, advantages: torch.Tensor, settings: ObjectiveConfig) -> torch.Tensor:
    """The clipped surrogate [K], max(-A R, -A clip(R))."""
    clipped = ratio.clamp(*settings.bounds)
    return torch.maximum(-advantages * ratio, -advantages * clipped)


def ppo(inputs: LossInputs, settings: PPOConfig) -> torch.Tensor:
    """The clipped surrogate, with the dual clip (arXiv 1707.06347, 1912.09729; paper equation 1)."""
    a, loss = inputs.advantages, _clipped(inputs.ratio(), inputs.advantages, settings)
    if settings.dual_clip:
        loss = torch.where(a < 0, torch.minimum(loss, -a * settings.dual_clip), loss)
    return loss


def gspo(inputs: LossInputs, settings: GSPOConfig) -> torch.Tensor:
    """The clipped surrogate of the sequence's ratio (arXiv 2507.18071)."""
    return _clipped(inputs.sequence_ratio(), inputs.advantages, settings)


def cispo(inputs: LossInputs, settings: CISPOConfig) -> torch.Tensor:
    """The log-prob times the clipped ratio, which has no gradient: no token loses its own (arXiv 2506.13585)."""
    weights = inputs.ratio().detach().clamp(*settings.bounds)
    return -weights * inputs.advantages * inputs.logprobs


def kl_cov(inputs: LossInputs, settings: KLCovConfig) -> torch.Tensor:
    """-A R, and a penalty |log R| on the tokens of the largest covariance (arXiv 2505.22617)."""
    penalty = (inputs.logprobs - inputs.old_logprobs).abs() * inputs.chosen
    return -inputs.advantages * inputs.ratio() + settings.kl_cov_coefficient * penalty


def clip_cov(inputs: LossInputs, settings: ClipCovConfig) -> torch.Tensor:
    """The clipped surrogate, without the chosen tokens of a large covariance (arXiv 2505.22617)."""
    return _clipped(inputs.ratio(), inputs.advantages, settings) * ~inputs.chosen


@dataclass(frozen=True)
class Term:
    """A summand of the loss."""

    losses: Callable[[LossInputs, Any], torch.Tensor]
    """Computes losses [K], to be minimised, from the inputs and the settings."""
    has_gradient: Callable[[CreditedRow, bool], bool] = lambda row, chosen: row.advantage != 0
    """Tells whether the gradient of a row can differ from 0, given whether any of its tokens was chosen; a row whose
    gradient is 0 needs no backward pass."""
    of_entropy: bool = False
    """True if gradients flow through the entropy."""
    select: Select | None = None
    """Chooses tokens before the update, among all that share a divisor."""


@dataclass(frozen=True)
class TokenLoss(Term):
    """A policy loss."""

    ratio: Callable[[LossInputs], torch.Tensor] = LossInputs.ratio
    """Computes the ratio [K] that it clips."""
    both_signs: bool = False
    """True if the clip acts whatever the sign of the advantage."""


PPO = TokenLoss(ppo)
GSPO = TokenLoss(gspo, ratio=LossInputs.sequence_ratio)
CISPO = TokenLoss(cispo, both_signs=True)
KL_COV = TokenLoss(kl_cov, has_gradient=lambda row, chosen: row.advantage != 0 or chosen, select=largest_covariance)
CLIP_COV = TokenLoss(clip_cov, select=random_in_bounds)


def token_loss(settings: ObjectiveConfig) -> TokenLoss:
    """The loss that `objective.loss` names."""
    found = resolve_name(settings.code)
    return found if isinstance(found, TokenLoss) else TokenLoss(found)


def entropy_bonus(inputs: LossInputs, settings: ObjectiveConfig) -> torch.Tensor:
    """Minus the coefficient times the entropy."""
    return -settings.entropy_coefficient * inputs.entropy * inputs.correction.counted


def kl_to_reference(inputs: LossInputs) -> torch.Tensor:
    """Estimate exp(d) - d - 1 of each token, d = log reference - log policy; its mean is the KL (Schulman's k3)."""
    assert inputs.reference_logprobs is not None, "scored before the update"
    d = inputs.reference_logprobs - inputs.logprobs
    return d.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).expm1() - d


def reference_penalty(inputs: LossInputs, settings: ObjectiveConfig) -> torch.Tensor:
    """The coefficient times the KL; corrected, because other policies wrote the tokens."""
    return settings.reference_kl * kl_to_reference(inputs) * inputs.correction.weights


ENTROPY_BONUS = Term(entropy_bonus, has_gradient=lambda row, chosen: True, of_entropy=True)
REFERENCE_PENALTY = Term(reference_penalty, has_gradient=lambda row, chosen: True)


def terms_of(settings: ObjectiveConfig) -> list[Term]:
    """The policy loss, and the terms that the settings add to it."""
    terms: list[Term] = [token_loss(settings)]
    if settings.entropy_coefficient > 0:
        terms.append(ENTROPY_BONUS)
    if settings.reference_kl > 0:
        terms.append(REFERENCE_PENALTY)
    return terms
