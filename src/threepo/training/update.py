"""One policy update from one training batch: rows to micro-batches; forward, backward, observe, step.

The code obeys the fields of the batch and does not know which method made it. Losses are summed over tokens and divided
once, in the optimizer, by the count that the batch names: the result does not depend on the micro-batches.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from threepo.config import Correction, ObjectiveConfig
from threepo.methods.corrections import Corrected, correct
from threepo.methods.method import split_batch
from threepo.models.packing import Row, flatten, pack
from threepo.models.policy import Policy
from threepo.objectives import policy_loss
from threepo.objectives.inputs import LossInputs, sum_by_row
from threepo.objectives.selection import TokenScores
from threepo.posterior.evolution import compare, evolve
from threepo.posterior.noise import address_key, uniforms
from threepo.posterior.policy_optimizer import PolicyOptimizer
from threepo.ranks.dealing import deal_rows
from threepo.ranks.group import ALONE, Ranks
from threepo.training.reference import Reference
from threepo.types import Draw, GradientPart, MicroBatch, TrainingBatch, TrainingRow


def dealt_bundles(rows: Sequence[Row], token_budget: int, policy: Policy, ranks: Ranks) -> list[list[Row]]:
    """This rank's bundles of these rows; as many as every other rank has, so the last ones may be empty."""
    hands = [
        list(pack(hand, token_budget, policy.device, padding=not policy.scorer.packed_rows))
        for hand in deal_rows(rows, ranks.size)
    ]
    mine = hands[ranks.rank]
    return mine + [[]] * (max(map(len, hands)) - len(mine))


def collate(rows: Sequence[TrainingRow], weights: Mapping[int, float], device: torch.device) -> MicroBatch:
    """Rows of reinforcement learning as one micro-batch; `weights` by row index."""
    packed = flatten(rows, device)
    by_row = torch.tensor([[row.advantage for row in rows], [weights[row.index] for row in rows]], device=device)
    behaviour = torch.tensor([x for row in rows for x in row.completion.logprobs], device=device)
    advantages, token_weights = by_row[:, packed.row_of]
    return MicroBatch(
        **vars(packed), rows=tuple(rows), behaviour_logprobs=behaviour, advantages=advantages, weights=token_weights
    )


@dataclass
class RowRecord:
    """Record of one row in the update, for metrics and the log of completions."""

    index: int
    tokens: int
    logprob_sum: float
    """At the weights where the gradient was taken; with several updates a batch, before the first of them."""
    self_certainty: float
    """Mean over its tokens (`models.logprobs.TokenLogprobs`), at the weights where the gradient was taken."""
    rho: float
    """Sequence ratio of the gradient's policy to the row's generator."""
    weight: float
    """Mean correction weight over the row's tokens; a masked token counts as 0."""
    kept_tokens: int
    untouched: bool


@dataclass
class UpdateRecord:
    """Sums over all tokens of an update."""

    correction: Correction | None
    """That of the batch; None: rollouts under top-p or top-k, so `kl` and the rows' `rho` have no meaning."""
    minimised: list[float] = field(default_factory=list)
    """For each optimizer step, the loss as it was divided."""
    loss: float = 0.0
    normalizer: float = 0.0
    tokens: int = 0
    finite: bool = True
    """Whether all gradients were."""
    kl: float = 0.0
    policy: dict[str, float] = field(default_factory=dict)
    """Metrics `policy/<name>`, as sums over tokens."""
    rows: list[RowRecord] = field(default_factory=list)
    chose: list[bool] = field(default_factory=list)
    """For each choice of tokens by the loss, whether it chose any."""
    compared: dict[str, float] = field(default_factory=dict)
    """Metrics of the comparison with an evolution strategy."""

    def unite(self, ranks: Ranks) -> None:
        """Add up what the ranks have recorded, each of its own rows."""
        records = ranks.gather(self)
        self.tokens = sum(record.tokens for record in records)
        self.kl = math.fsum(record.kl for record in records)
        names = {name: None for record in records for name in record.policy}
        self.policy = {name: math.fsum(record.policy.get(name, 0.0) for record in records) for name in names}
        self.rows = sorted((row for record in records for row in record.rows), key=lambda row: row.index)

    def add(
        self,
        micro: MicroBatch,
        inputs: LossInputs,
        corrected: Corrected,
        statistics: dict[str, float],
        certainty: torch.Tensor,
    ) -> None:
        """Add the sums and rows of a micro-batch; `certainty`: self-certainties [K]."""
        logprobs = inputs.old_logprobs
        self.tokens += len(logprobs)
        for name, total in (statistics | {"entropy": float(inputs.entropy.detach().sum(dtype=torch.float64))}).items():
            self.policy[name] = self.policy.get(name, 0.0) + total
        d = (logprobs - micro.behaviour_logprobs).double()
        self.kl += float((d.exp() - 1 - d).sum())
        by_token = (torch.ones_like(logprobs), logprobs, certainty, corrected.weights, corrected.kept)
        tokens, logprob, certain, weight, kept = (sum_by_row(x, micro.row_of, len(micro.rows)) for x in by_token)
        means = (certain / tokens, corrected.rho, weight / tokens)
        columns = (tokens.int(), logprob, *means, kept.int(), corrected.untouched)
        for row, values in zip(micro.rows, zip(*(column.tolist() for column in columns), strict=True), strict=True):
            self.rows.append(RowRecord(row.index, *values))


def update_policy(
    policy: Policy,
    optimizer: PolicyOptimizer,
    batch: TrainingBatch,
    objective: ObjectiveConfig,
    token_budget: int = 0,
    ranks: Ranks = ALONE,
    reference: Reference | None = None,
) -> UpdateRecord:
    """Train on the batch: one optimizer step per mini-batch. Returns the sums over all of them, and over all ranks."""
    if not batch.parts:
        evolve(optimizer, batch.fitness)
        return UpdateRecord(None)
    update = _Update(policy, batch, objective, token_budget, ranks, UpdateRecord(batch.correction))
    record = update.record
    if policy_loss.scored_first(objective):
        update.score_first(optimizer)
    if reference:
        update.score_reference(reference)
    for mini_batch in split_batch(batch, objective.mini_batches):
        parts, sums = mini_batch.parts, []
        for sharing in [parts] if batch.normalize == "step" else [[part] for part in parts]:
            update.choose(sharing)
            rows = [row for part in sharing for row in part.rows]
            weights = policy_loss.row_weights(rows, objective.aggregation)
            update.factor = policy_loss.signal_factor(rows, weights, objective.aggregation)
            for part in sharing:
                with optimizer.at(part.draw):
                    loss, count = update.backward(part, weights)
                sums.append((loss, count))
                if batch.normalize == "step":
                    record.finite &= optimizer.observe(part.draw, cumulative=batch.cumulative)
                elif count > 0:
                    record.finite &= optimizer.observe(part.draw, count, cumulative=batch.cumulative)
        losses, counts = (math.fsum(column) for column in zip(*sums, strict=True))
        if batch.fitness and counts:
            record.compared = compare(optimizer, batch.fitness)
        record.loss += losses
        record.normalizer += counts
        if counts == 0 or not policy_loss.teaches(parts, objective):
            optimizer.discard()  # nothing to learn from: every row was masked or dropped
        elif batch.normalize == "step":
            record.minimised.append(losses / counts)
            optimizer.step(divisor=counts)
        else:
            means = [loss / count for loss, count in sums if count > 0]
            record.minimised.append(sum(means) / len(means))
            optimizer.step()
        update.moved = True
    record.unite(ranks)
    return record


class Scores(NamedTuple):
    """Scores of the tokens of a row, on the CPU."""

    logprobs: torch.Tensor
    entropy: torch.Tensor


Address = tuple[Draw | None, int]
"""Of a row in an update: the draw of its gradient, and its index."""


@dataclass
class _Update:
    """State that the passes of one policy update share."""

    policy: Policy
    batch: TrainingBatch
    objective: ObjectiveConfig
    token_budget: int
    ranks: Ranks
    record: UpdateRecord
    first_scores: dict[Address, Scores] = field(default_factory=dict)
    """Before the first of several updates, or for `choose`; else empty."""
    reference_scores: dict[int, Scores] = field(default_factory=dict)
    """By row index; empty without a reference."""
    choices: dict[str, dict[Address, torch.Tensor]] = field(default_factory=dict)
    """By the field of `LossInputs`: which tokens were chosen."""
    factor: float = 1.0
    """Multiplies the advantages of the rows that share a divisor (`policy_loss.signal_factor`)."""
    moved: bool = False
    """Whether the policy may not be the old policy any more."""

    def score_first(self, optimizer: PolicyOptimizer) -> None:
        """Fill `first_scores` at the weights where each row's gradient will be taken (method.md 2.3)."""
        for part in self.batch.parts:
            with optimizer.at(part.draw):
                found = self.score(part.rows)
            self.first_scores |= {(part.draw, index): scores for index, scores in found.items()}

    def score_reference(self, reference: Reference) -> None:
        """Fill `reference_scores`."""
        rows = {row.index: row for part in self.batch.parts for row in part.rows}
        with reference.in_place():
            self.reference_scores = self.score(list(rows.values()))

    @torch.no_grad()
    def score(self, rows: Sequence[TrainingRow]) -> dict[int, Scores]:
        """Scores by row index at the weights that the model holds now, of all ranks' rows on every rank."""
        found: dict[int, Scores] = {}
        for bundle in self.bundles(rows):
            if not bundle:
                self.policy.idle()
                continue
            scores = self.policy.logprobs(flatten(bundle, self.policy.device), self.batch.temperature)
            lengths = [len(row.completion.tokens) for row in bundle]
            # Copies, because to send a part of a tensor is to send all of it.
            wanted = (scores.logprobs, scores.entropy)
            logprobs, entropy = ([own.clone() for own in torch.split(x.cpu(), lengths)] for x in wanted)
            found |= {row.index: Scores(*own) for row, *own in zip(bundle, logprobs, entropy, strict=True)}
        return {index: scores for here in self.ranks.gather(found) for index, scores in here.items()}

    def choose(self, parts: Sequence[GradientPart]) -> None:
        """Fill `choices` for these parts, from the scores of all their tokens."""
        selects = policy_loss.selections(self.objective)
        entries = sorted(((part.draw, row) for part in parts for row in part.rows), key=lambda entry: entry[1].index)
        if not selects:
            return
        rows = [row for _, row in entries]
        lengths = [len(row.completion.tokens) for row in rows]
        row_of = torch.arange(len(rows)).repeat_interleave(torch.tensor(lengths))
        logprobs, entropy = map(torch.cat, zip(*(self.first_scores[d, row.index] for d, row in entries), strict=True))
        behaviour = torch.tensor([x for row in rows for x in row.completion.logprobs])
        corrected = correct(logprobs, behaviour, row_of, len(rows), self.batch.correction or Correction())
        address = (self.batch.seed, self.batch.step)
        random = [
            uniforms([address_key("threepo-choice", *address, row.index)], 0, length)[0]
            for row, length in zip(rows, lengths, strict=True)
        ]
        advantages = torch.tensor([row.advantage for row in rows])[row_of]
        scores = TokenScores(logprobs, entropy, advantages, corrected.kept, torch.cat(random))
        for name, select in selects.items():
            chosen = select(scores, self.objective)
            if name == "chosen":
                self.record.chose.append(bool(chosen.any()))
            by_row, found = torch.split(chosen, lengths), self.choices.setdefault(name, {})
            found |= {(draw, row.index): own for (draw, row), own in zip(entries, by_row, strict=True)}

    def backward(self, part: GradientPart, weights: Mapping[int, float]) -> tuple[float, float]:
        """Accumulate the gradient of the part's summed loss at the weights that the model holds now.

        `weights`: of rows, by index. Returns the summed loss, and the number to divide it by.
        """
        total = count = 0.0
        of_entropy = any(term.of_entropy for term in policy_loss.terms_of(self.objective))
        for rows, enabled in zip(self.split(part), (True, False), strict=True):
            for bundle in self.bundles(rows):
                if not bundle:
                    with torch.set_grad_enabled(enabled):
                        self.policy.idle()
                    continue
                micro = collate(bundle, weights, self.policy.device)
                with torch.set_grad_enabled(enabled):
                    scores = self.policy.logprobs(micro, self.batch.temperature, with_entropy_gradient=of_entropy)
                    inputs, corrected = self.inputs(part.draw, micro, scores.logprobs, scores.entropy)
                    loss = (policy_loss.token_losses(inputs, self.objective) * micro.weights).sum(dtype=torch.float64)
                if enabled:
                    loss.backward()  # type: ignore[no-untyped-call]
                total += float(loss.detach())
                count += float((inputs.counted * micro.weights).sum(dtype=torch.float64))
                statistics = policy_loss.statistics(inputs, self.objective)
                self.record.add(micro, inputs, corrected, statistics, scores.self_certainty)
        totals, counts = (math.fsum(column) for column in zip(*self.ranks.gather((total, count)), strict=True))
        longest = self.batch.max_new_tokens
        return totals, policy_loss.divisor(counts, len(part.rows), self.objective.aggregation, longest)

    def inputs(
        self, draw: Draw | None, micro: MicroBatch, logprobs: torch.Tensor, entropy: torch.Tensor
    ) -> tuple[LossInputs, Corrected]:
        """Inputs of the loss for a micro-batch, and its correction."""

        def joined(by_row: Iterable[torch.Tensor]) -> torch.Tensor:
            return torch.cat(list(by_row)).to(logprobs.device)

        # Before anything has moved, a pass in other micro-batches would give the same but for rounding.
        first, reference = logprobs.detach(), None
        if self.moved:
            first = joined(self.first_scores[draw, row.index].logprobs for row in micro.rows)
        if self.reference_scores:
            reference = joined(self.reference_scores[row.index].logprobs for row in micro.rows)
        correction = self.batch.correction or Correction()
        corrected = correct(first, micro.behaviour_logprobs, micro.row_of, len(micro.rows), correction)
        everywhere = torch.ones_like(corrected.kept)
        choices = {"chosen": ~everywhere, "in_mask": everywhere}
        for name, found in self.choices.items():
            choices[name] = joined(found[draw, row.index] for row in micro.rows)
        inputs = LossInputs(
            logprobs=logprobs,
            old_logprobs=first,
            entropy=entropy,
            advantages=micro.advantages * self.factor,
            correction_weights=corrected.weights,
            counted=corrected.kept if correction.normalizer == "kept" else everywhere,
            row_of=micro.row_of,
            rows=len(micro.rows),
            reference_logprobs=reference,
            **choices,
        )
        return inputs, corrected

    def split(self, part: GradientPart) -> tuple[list[TrainingRow], list[TrainingRow]]:
        """The part's rows with a gradient, and those without (`policy_loss.split_by_gradient`)."""
        found = self.choices.get("chosen", {})
        chosen = {row.index for row in part.rows if found and found[part.draw, row.index].any()}
        return policy_loss.split_by_gradient(part.rows, self.objective, chosen)

    def bundles(self, rows: Sequence[TrainingRow]) -> list[list[TrainingRow]]:
        """This rank's rows that go through the model together; empty where only other ranks have any left."""
        return dealt_bundles(rows, self.token_budget, self.policy, self.ranks)
