"""Scores of an update's rows before the first gradient (log-probs, entropies), and the choices of tokens made of them.

All ranks know the scores of all rows, so the choices are made over all tokens that share a divisor, and depend neither
on micro-batches nor on ranks.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from threepo.config import Correction, ObjectiveConfig
from threepo.models.logprobs import TokenLogprobs
from threepo.models.packing import flatten
from threepo.models.policy import Policy
from threepo.objectives.corrections import correct
from threepo.objectives.policy_loss import selections
from threepo.objectives.selection import ChoiceInputs
from threepo.posterior.noise import address_key, uniforms
from threepo.ranks.dealing import deal_bundles
from threepo.ranks.world import World
from threepo.types import Batch, CreditedRow, Draw

Key = tuple[Draw | None, int]
"""Key of a row in an update: (gradient draw, row index)."""
Parts = Mapping[Draw | None, Sequence[CreditedRow]]
"""Rows by gradient draw, as in `Batch.parts`."""


@torch.no_grad()
def score_rows(
    rows: Sequence[CreditedRow], policy: Policy, temperature: float, token_budget: int, world: World
) -> dict[int, TokenLogprobs]:
    """Scores by row index, on the CPU, at the weights that the model holds now, of all ranks' rows on every rank."""
    mine: dict[int, TokenLogprobs] = {}
    for bundle in deal_bundles(rows, token_budget, policy, world):
        if not bundle:
            policy.idle()
            continue
        scores = policy.logprobs(flatten(bundle, policy.device), temperature)
        lengths = [row.loss_tokens for row in bundle]
        by_row = zip(*(torch.split(x.cpu(), lengths) for x in (scores.logprobs, scores.entropy)), strict=True)
        for row, (logprobs, entropy) in zip(bundle, by_row, strict=True):
            # Copies, because to send a part of a tensor is to send all of it.
            mine[row.index] = TokenLogprobs(logprobs.clone(), entropy.clone())
    return {index: scores for own in world.gather(mine) for index, scores in own.items()}


def behaviour_logprobs(rows: Sequence[CreditedRow]) -> torch.Tensor:
    """[K] log-probs of the rows' own tokens under the policies that wrote them, on the CPU."""
    return torch.from_numpy(np.concatenate([row.completion.logprobs for row in rows], dtype=np.float32))


def choose_tokens(
    parts: Parts, scores: Mapping[Key, TokenLogprobs], batch: Batch, objective: ObjectiveConfig
) -> dict[str, dict[Key, torch.Tensor]]:
    """The choices of tokens that the objective makes among all tokens of `parts`, by field of `LossInputs`: bool."""
    selects = selections(objective)
    if not selects:
        return {}
    entries = [(draw, row) for draw, rows in parts.items() for row in rows]
    entries.sort(key=lambda entry: entry[1].index)
    keys = [(draw, row.index) for draw, row in entries]
    rows = [row for _, row in entries]
    lengths = [row.loss_tokens for row in rows]
    row_of = torch.arange(len(rows)).repeat_interleave(torch.tensor(lengths))
    logprobs = torch.cat([scores[key].logprobs for key in keys])
    behaviour = behaviour_logprobs(rows)
    random = [
        uniforms([address_key("threepo-choice", batch.seed, batch.step, row.index)], 0, length)[0]
        for row, length in zip(rows, lengths, strict=True)
    ]
    tokens = ChoiceInputs(
        logprobs=logprobs,
        entropy=torch.cat([scores[key].entropy for key in keys]),
        advantages=torch.tensor([row.advantage for row in rows])[row_of],
        kept=correct(logprobs, behaviour, row_of, len(rows), batch.correction or Correction()).kept,
        uniforms=torch.cat(random),
    )
    chosen = {name: torch.split(select(tokens, objective), lengths) for name, select in selects.items()}
    return {name: dict(zip(keys, by_row, strict=True)) for name, by_row in chosen.items()}
