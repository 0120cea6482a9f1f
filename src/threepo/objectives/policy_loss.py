"""The objective of a policy update: the loss of `objective.loss`, and terms added to it (method.md 2.3 to 2.6).

Each term is an entry of a table, which also says which rows it has a gradient for and whether it chooses tokens before
the update. Token losses become one number by the weights of their rows: a sum over tokens, divided once by a global
number. So the result does not depend on how rows are batched or dealt to ranks. Legend: K tokens of a micro-batch.
"""

import math
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence

import torch

from threepo.config import ObjectiveConfig
from threepo.objectives.corrections import LOG_RATIO_BOUND
from threepo.objectives.inputs import LossInputs, Term
from threepo.objectives.selection import Select, highest_entropy
from threepo.objectives.token_losses import token_loss
from threepo.types import CreditedRow


def entropy_bonus(inputs: LossInputs, settings: ObjectiveConfig) -> torch.Tensor:
    """Minus the coefficient times the entropy."""
    return -settings.entropy_coefficient * inputs.entropy * inputs.correction.counted


def kl_to_reference(inputs: LossInputs) -> torch.Tensor:
    """[K]: of each token, exp(d) - d - 1 with d = log reference - log policy, whose mean is the KL (Schulman's k3)."""
    assert inputs.reference_logprobs is not None, "scored before the update"
    d = inputs.reference_logprobs - inputs.logprobs
    return d.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).expm1() - d


def reference_penalty(inputs: LossInputs, settings: ObjectiveConfig) -> torch.Tensor:
    """The coefficient times the KL; corrected, because tokens are those of their generators."""
    return settings.reference_kl * kl_to_reference(inputs) * inputs.correction.weights


ADDED = {
    "entropy bonus": Term(
        entropy_bonus, lambda row, chosen: True, in_use=lambda s: s.entropy_coefficient > 0, of_entropy=True
    ),
    "KL to the reference": Term(reference_penalty, lambda row, chosen: True, in_use=lambda s: s.reference_kl > 0),
}
"""What can be added to the policy loss."""


def terms_of(settings: ObjectiveConfig) -> list[Term]:
    """The terms that the settings use."""
    return [token_loss(settings), *(term for term in ADDED.values() if term.in_use(settings))]


def selections(settings: ObjectiveConfig) -> dict[str, Select]:
    """The choices of tokens to make before an update: `chosen` and `in_mask` of `LossInputs`."""
    masked = settings.entropy_mask_share < 1
    found = {"chosen": token_loss(settings).select, "in_mask": highest_entropy if masked else None}
    return {name: select for name, select in found.items() if select}


def scored_first(settings: ObjectiveConfig) -> bool:
    """Whether all rows go through the model once more, before the update: for old log-probs, or for a choice."""
    return settings.mini_batches > 1 or bool(selections(settings))


def token_losses(inputs: LossInputs, settings: ObjectiveConfig) -> torch.Tensor:
    """[K]: the sum of all terms, before row weights."""
    policy, *added = (term.losses(inputs, settings) for term in terms_of(settings))
    return torch.stack([policy * inputs.correction.weights * inputs.in_mask, *added]).sum(dim=0)


def row_weights(rows: Sequence[CreditedRow], aggregation: str) -> dict[int, float]:
    """The factor of the token losses of each row, by row index; `rows` are all that share a divisor.

    `token`, `constant`: 1. `group`: 1 / tokens of the row's prompt, a mean over prompts of token means, as the paper's
    equation 1 is written. `sequence`: 1 / tokens of the row, a mean over completions of token means.
    """

    def unit(row: CreditedRow) -> Hashable:
        return row.completion.problem.id if aggregation == "group" else row.index

    tokens: Counter[Hashable] = Counter()
    for row in rows:
        tokens[unit(row)] += row.loss_tokens
    weighted = aggregation in ("group", "sequence")
    return {row.index: 1.0 / tokens[unit(row)] if weighted else 1.0 for row in rows}


def signal_factor(rows: Sequence[CreditedRow], weights: Mapping[int, float], aggregation: str) -> float:
    """The factor of all advantages with which the policy loss is a mean over the rows that count, not over all `rows`.

    It is the sum of the row weights of all tokens over that of the rows that count: 1 if all rows do. Other terms of
    the loss do not see it. With `constant` it is 1. Tokens count as they are before a correction masks any, so with
    masks it is an approximation (method.md 2.6).
    """

    def total(some: Iterable[CreditedRow]) -> float:
        return math.fsum(weights[row.index] * row.loss_tokens for row in some)

    counted = total(row for row in rows if row.counts)
    return total(rows) / counted if counted and aggregation != "constant" else 1.0


def teaches(rows: Iterable[CreditedRow], settings: ObjectiveConfig) -> bool:
    """Whether an update has anything to learn from: a row that counts, or a term that reads all rows."""
    return len(terms_of(settings)) > 1 or any(row.counts for row in rows)


def divisor(counted: float, rows: int, aggregation: str, max_new_tokens: int) -> float:
    """Divisor of the summed loss of so many rows; 0 if nothing counts.

    `counted`: the sum of the row weights of the tokens that count. With `constant` their number does not matter.
    """
    return float(rows * max_new_tokens) if aggregation == "constant" and counted else counted


def statistics(inputs: LossInputs, settings: ObjectiveConfig) -> dict[str, float]:
    """Sums over tokens: the ratio to the old policy, how often the clip acted, what was chosen, the KL."""
    a, loss = inputs.advantages, token_loss(settings)
    ratio = loss.ratio(inputs).detach()
    lowest, highest = settings.bounds
    low, high = ratio < lowest, ratio > highest
    low, high = (low & (a != 0), high & (a != 0)) if loss.both_signs else (low & (a < 0), high & (a > 0))
    sums = {"ratio_mean": ratio, "clipped_low_share": low, "clipped_high_share": high}
    if loss.select:
        sums["chosen_share"] = inputs.chosen
    if inputs.reference_logprobs is not None:
        sums["reference_kl"] = kl_to_reference(inputs).detach()
    return {name: float(values.sum()) for name, values in sums.items()}


def split_by_gradient(
    rows: Sequence[CreditedRow], settings: ObjectiveConfig, chosen: Collection[int] = ()
) -> list[tuple[list[CreditedRow], bool]]:
    """Rows that need a backward pass (with True), and rows whose gradient is 0 (with False).

    `chosen`: indices of the rows with a token that the loss has chosen. At least one row is among the first, because
    the optimizer needs a gradient to observe, even one of zeros.
    """
    terms = terms_of(settings)
    needed = {row.index for row in rows if any(term.has_gradient(row, row.index in chosen) for term in terms)}
    needed = needed or {rows[0].index}
    return [([row for row in rows if (row.index in needed) == wanted], wanted) for wanted in (True, False)]
