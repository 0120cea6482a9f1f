"""The objective of a policy update: the clipped surrogate of GRPO, and terms added to it (method.md 2.2).

Each term is an entry of `TERMS`, which also says which rows it has a gradient for. Token losses become one number by
the weights of their rows: a sum over tokens, divided once by a global sum of the same weights. So the result does not
depend on how rows are batched or dealt to ranks (method.md 2.3). Legend: K tokens of a micro-batch.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch

from threepo.config import ObjectiveConfig
from threepo.types import TrainingRow

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to plus and minus this before exponentiation."""


@dataclass(frozen=True)
class LossInputs:
    """What a term may read of the tokens; all tensors are [K]."""

    logprobs: torch.Tensor
    """Of the policy, with gradient."""
    old_logprobs: torch.Tensor
    """Of the policy before this batch's first update, at the same draw; detached."""
    entropy: torch.Tensor
    """Of the policy's distributions, in nats; with gradient if a term in use says `of_entropy`."""
    advantages: torch.Tensor
    correction_weights: torch.Tensor
    """Importance weights, detached; 0 masks a token."""
    counted: torch.Tensor
    """Bool: the tokens whose number divides the loss."""

    def ratio(self) -> torch.Tensor:
        """Of the policy to the old policy."""
        return (self.logprobs - self.old_logprobs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


@dataclass(frozen=True)
class Term:
    """A summand of the objective."""

    losses: Callable[[LossInputs, ObjectiveConfig], torch.Tensor]
    """[K], to be minimised."""
    in_use: Callable[[ObjectiveConfig], bool]
    has_gradient: Callable[[TrainingRow], bool]
    """Whether the gradient of a row can differ from 0; a row without any needs no backward pass."""
    of_entropy: bool = False
    """Whether gradients flow through the entropy."""


def clipped_surrogate(inputs: LossInputs, settings: ObjectiveConfig) -> torch.Tensor:
    """max(-A R, -A clip(R)) with the dual clip, times the correction (paper equation 1)."""
    a, ratio = inputs.advantages, inputs.ratio()
    loss = torch.maximum(-a * ratio, -a * ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high))
    if settings.dual_clip:
        loss = torch.where(a < 0, torch.minimum(loss, -a * settings.dual_clip), loss)
    return loss * inputs.correction_weights


def entropy_bonus(inputs: LossInputs, settings: ObjectiveConfig) -> torch.Tensor:
    """Minus the coefficient times the entropy."""
    return -settings.entropy_coefficient * inputs.entropy * inputs.counted


TERMS = {
    "clipped surrogate": Term(clipped_surrogate, lambda _: True, lambda row: row.advantage != 0),
    "entropy bonus": Term(entropy_bonus, lambda s: s.entropy_coefficient > 0, lambda _: True, of_entropy=True),
}


def terms_of(settings: ObjectiveConfig) -> list[Term]:
    """The terms that the settings use."""
    return [term for term in TERMS.values() if term.in_use(settings)]


def token_losses(inputs: LossInputs, settings: ObjectiveConfig) -> torch.Tensor:
    """[K]: the sum of all terms, before row weights."""
    return torch.stack([term.losses(inputs, settings) for term in terms_of(settings)]).sum(dim=0)


def row_weights(rows: Sequence[TrainingRow], aggregation: str) -> dict[int, float]:
    """The factor of the token losses of each row, by row index; `rows` are all that share a divisor.

    `token`: 1, a mean over all tokens. `group`: 1 / tokens of the row's prompt, a mean over prompts of token means, as
    the paper's equation 1 is written. `sequence`: 1 / tokens of the row, a mean over completions of token means.
    """

    def unit(row: TrainingRow) -> Hashable:
        return row.completion.problem.id if aggregation == "group" else row.index

    tokens: Counter[Hashable] = Counter()
    for row in rows:
        tokens[unit(row)] += len(row.completion.tokens)
    return {row.index: 1.0 if aggregation == "token" else 1.0 / tokens[unit(row)] for row in rows}


def clip_statistics(inputs: LossInputs, settings: ObjectiveConfig) -> dict[str, float]:
    """Sums over tokens: the ratio to the old policy, and how often the clip acted from below and from above."""
    a, ratio = inputs.advantages, inputs.ratio().detach()
    low, high = (a < 0) & (ratio < 1 - settings.clip_low), (a > 0) & (ratio > 1 + settings.clip_high)
    sums = {"ratio_mean": ratio, "clipped_low_share": low, "clipped_high_share": high}
    return {name: float(values.sum()) for name, values in sums.items()}


def split_by_gradient(
    rows: Sequence[TrainingRow], settings: ObjectiveConfig
) -> tuple[list[TrainingRow], list[TrainingRow]]:
    """Rows that need a backward pass, and rows whose gradient is 0, which are only scored and counted.

    At least one row is among the first, because the optimizer needs a gradient to observe, even one of zeros.
    """
    terms = terms_of(settings)
    needed = {row.index for row in rows if any(term.has_gradient(row) for term in terms)} or {rows[0].index}
    return [row for row in rows if row.index in needed], [row for row in rows if row.index not in needed]
