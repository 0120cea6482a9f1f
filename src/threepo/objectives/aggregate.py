"""How token losses become one number: sums first, one division at the end.

The choice is made by the weights of rows, so that each choice is a sum over tokens divided once by a global sum of the
same weights, and the result does not depend on how rows are batched or dealt to ranks (method.md 2.3).
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Literal

from threepo.types import TrainingRow

Aggregation = Literal["token", "group", "sequence"]


def row_weights(rows: Sequence[TrainingRow], aggregation: Aggregation) -> dict[int, float]:
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
