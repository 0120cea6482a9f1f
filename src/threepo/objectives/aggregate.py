"""How token losses become one number: sums first, one division at the end.

A row's weight makes the choice, so that every choice is a sum over tokens divided once by a global sum of the same
weights, and the result does not depend on how rows are batched or spread over ranks (method.md 2.3).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from threepo.types import TrainingRow

Aggregation = Literal["token", "group", "sequence"]


def weigh_rows(rows: Sequence[TrainingRow], aggregation: Aggregation) -> tuple[TrainingRow, ...]:
    """The rows of one update with the factor of their token losses.

    `token`: 1, a mean over all tokens. `group`: 1 / tokens of the row's prompt, a mean over prompts of token means, as
    the paper's equation 1 is written. `sequence`: 1 / tokens of the row, a mean over completions of token means.
    """
    if aggregation == "token":
        return tuple(replace(row, weight=1.0) for row in rows)
    if aggregation == "sequence":
        return tuple(replace(row, weight=1.0 / len(row.completion.tokens)) for row in rows)
    tokens: dict[str, int] = {}
    for row in rows:
        prompt = row.completion.problem.id
        tokens[prompt] = tokens.get(prompt, 0) + len(row.completion.tokens)
    return tuple(replace(row, weight=1.0 / tokens[row.completion.problem.id]) for row in rows)
