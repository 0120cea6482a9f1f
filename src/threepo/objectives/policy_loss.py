"""The loss of an update, made of the losses of its tokens (method.md 2.3 to 2.6).

Token losses become one number by the weights of their rows: a sum over tokens, divided once by a global number. So the
result does not depend on how rows are batched or dealt to ranks. Legend: K tokens of a micro-batch.
"""

from collections import Counter
from collections.abc import Collection, Sequence

import torch

from threepo.config import ObjectiveConfig
from threepo.objectives.selection import Select, highest_entropy
from threepo.objectives.token_losses import LossInputs, kl_to_reference, terms_of, token_loss
from threepo.types import CreditedRow


def selections(settings: ObjectiveConfig) -> dict[str, Select]:
    """The choices of tokens to make before an update, by the field of `LossInputs` that they fill."""
    selects: dict[str, Select] = {}
    if select := token_loss(settings).select:
        selects["chosen"] = select
    if settings.entropy_mask_share < 1:
        selects["in_mask"] = highest_entropy
    return selects


def scored_first(settings: ObjectiveConfig) -> bool:
    """True if all rows go through the model once more, before the update: for old log-probs or for a choice."""
    return settings.mini_batches > 1 or bool(selections(settings))


def token_losses(inputs: LossInputs, settings: ObjectiveConfig) -> torch.Tensor:
    """Sum [K] of all terms, before row weights."""
    policy, *added = (term.losses(inputs, settings) for term in terms_of(settings))
    return torch.stack([policy * inputs.correction.weights * inputs.in_mask, *added]).sum(dim=0)


def row_weights(rows: Sequence[CreditedRow], aggregation: str) -> dict[int, float]:
    """Factor of the token losses of each row, by row index; `rows` are all that share a divisor.

    `token`, `constant`: 1. `group`: 1 / tokens of the row's prompt, a mean over prompts of token means, as the paper's
    equation 1 is written. `sequence`: 1 / tokens of the row, a mean over completions of token means.
    """
    if aggregation == "sequence":
        return {row.index: 1.0 / row.loss_tokens for row in rows}
    if aggregation == "group":
        tokens: Counter[str] = Counter()
        for row in rows:
            tokens[row.completion.problem.id] += row.loss_tokens
        return {row.index: 1.0 / tokens[row.completion.problem.id] for row in rows}
    return dict.fromkeys((row.index for row in rows), 1.0)


def divisor(counted: float, rows: int, aggregation: str, max_new_tokens: int) -> float:
    """Divisor of the summed loss of `rows` rows; 0 if nothing counts.

    `counted`: sum of the row weights of the tokens that count.
    """
    return float(rows * max_new_tokens) if aggregation == "constant" and counted else counted


def statistics(inputs: LossInputs, settings: ObjectiveConfig) -> dict[str, float]:
    """Sums over tokens: the ratio to the old policy, clipped and chosen tokens, the KL to the reference."""
    a, loss = inputs.advantages, token_loss(settings)
    ratio = loss.ratio(inputs).detach()
    lowest, highest = settings.bounds
    low, high = (ratio < lowest) & (a < 0), (ratio > highest) & (a > 0)
    if loss.both_signs:
        low, high = (ratio < lowest) & (a != 0), (ratio > highest) & (a != 0)
    sums = {"ratio_mean": ratio, "clipped_low_share": low, "clipped_high_share": high}
    if loss.select:
        sums["chosen_share"] = inputs.chosen
    if inputs.reference_logprobs is not None:
        sums["reference_kl"] = kl_to_reference(inputs).detach()
    return {name: float(values.sum()) for name, values in sums.items()}


def split_by_gradient(
    rows: Sequence[CreditedRow], settings: ObjectiveConfig, chosen: Collection[int] = ()
) -> list[tuple[list[CreditedRow], bool]]:
    """Split rows into those that need a backward pass, with True, and those whose gradient is 0, with False.

    `chosen`: indices of the rows with a token that the loss has chosen. At least one row needs a backward pass, because
    the optimizer needs a gradient to observe, even one of zeros.
    """
    terms = terms_of(settings)
    needed = {row.index for row in rows if any(term.has_gradient(row, row.index in chosen) for term in terms)}
    needed = needed or {rows[0].index}
    return [([row for row in rows if (row.index in needed) == wanted], wanted) for wanted in (True, False)]
