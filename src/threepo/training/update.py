"""One policy update from one training batch: forward, backward, observe, step.

The code obeys the fields of the batch and never asks which method made it. Losses are summed over tokens and divided
once, in the optimizer, by the count that the batch asks for: the result does not depend on the micro-batches.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from threepo.config import Correction, ObjectiveConfig
from threepo.methods.corrections import Corrected, correct, sum_by_row
from threepo.methods.method import split_batch
from threepo.models.policy import Policy
from threepo.objectives.aggregate import Aggregation, weigh_rows
from threepo.objectives.policy_loss import LossInputs, LossSums, policy_loss, split_by_gradient, terms_of
from threepo.posterior.policy_optimizer import PolicyOptimizer
from threepo.training.batching import collate, pack
from threepo.types import Draw, GradientPart, MicroBatch, TrainingBatch, TrainingRow

OldLogprobs = dict[tuple[Draw | None, int], torch.Tensor]
"""Log-probs of a row's tokens at a draw, before the first of several updates; by draw and row index."""


@dataclass
class RowRecord:
    """What the update saw of one row, for metrics and the log of completions."""

    index: int
    tokens: int
    logprob_sum: float
    """At the weights where the gradient was taken; with several updates a batch, before the first of them."""
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
    """That of the batch; None: the rollouts were cut, so `kl` and the rows' `rho` have no meaning."""
    minimised: list[float] = field(default_factory=list)
    """For each optimizer step, the loss as it was divided."""
    loss: float = 0.0
    normalizer: float = 0.0
    tokens: int = 0
    entropy: float = 0.0
    kl: float = 0.0
    clipped_low: float = 0.0
    clipped_high: float = 0.0
    ratio: float = 0.0
    rows: list[RowRecord] = field(default_factory=list)

    def add(self, micro: MicroBatch, inputs: LossInputs, sums: LossSums, corrected: Corrected) -> None:
        """Add one micro-batch."""
        logprobs = inputs.old_logprobs
        self.loss += float(sums.loss.detach())
        self.normalizer += sums.normalizer
        self.tokens += len(logprobs)
        self.entropy += float(inputs.entropy.detach().sum())
        d = (logprobs - micro.behaviour_logprobs).double()
        self.kl += float((d.exp() - 1 - d).sum())
        self.clipped_low += sums.clipped_low
        self.clipped_high += sums.clipped_high
        self.ratio += sums.ratio
        by_token = (torch.ones_like(logprobs), logprobs, corrected.weights, corrected.kept)
        tokens, logprob, weight, kept = (sum_by_row(x, micro.row_of, len(micro.rows)) for x in by_token)
        columns = (tokens.int(), logprob, corrected.rho, weight / tokens, kept.int(), corrected.untouched)
        for row, values in zip(micro.rows, zip(*(column.tolist() for column in columns), strict=True), strict=True):
            self.rows.append(RowRecord(row.index, *values))


@dataclass(frozen=True)
class UpdateSettings:
    """The settings that an update obeys."""

    objective: ObjectiveConfig
    temperature: float
    """Divides the trainer's logits, as it divided the engine's."""
    token_budget: int


def update_policy(
    policy: Policy, optimizer: PolicyOptimizer, batch: TrainingBatch, settings: UpdateSettings
) -> UpdateRecord:
    """Train on the batch: one optimizer step per mini-batch. Returns the sums over all of them."""
    record = UpdateRecord(batch.correction)
    old = old_logprobs(policy, optimizer, batch, settings) if settings.objective.mini_batches > 1 else None
    for mini_batch in split_batch(batch, settings.objective.mini_batches):
        losses, counts = [], []
        for part in _weighed(mini_batch, settings.objective.aggregation):
            loss_before, count_before = record.loss, record.normalizer
            with optimizer.at(part.draw):
                _backward(policy, part, old, settings, record)
            losses.append(record.loss - loss_before)
            counts.append(record.normalizer - count_before)
            if batch.normalize == "step":
                optimizer.observe(part.draw, cumulative=batch.cumulative)
            elif counts[-1] > 0:
                optimizer.observe(part.draw, counts[-1], cumulative=batch.cumulative)
        if sum(counts) == 0:
            optimizer.discard()  # nothing to learn from: every row was masked
            continue
        if batch.normalize == "step":
            record.minimised.append(sum(losses) / sum(counts))
            optimizer.step(divisor=sum(counts))
        else:
            means = [loss / count for loss, count in zip(losses, counts, strict=True) if count > 0]
            record.minimised.append(sum(means) / len(means))
            optimizer.step()
    return record


def _weighed(batch: TrainingBatch, aggregation: Aggregation) -> list[GradientPart]:
    """The parts that have rows, with row weights computed over all rows that share a divisor."""
    parts = [part for part in batch.parts if part.rows]
    if batch.normalize == "part":
        return [replace(part, rows=weigh_rows(part.rows, aggregation)) for part in parts]
    together = {row.index: row for part in parts for row in part.rows}
    weighed = {row.index: row for row in weigh_rows(list(together.values()), aggregation)}
    return [replace(part, rows=tuple(weighed[row.index] for row in part.rows)) for part in parts]


def _backward(
    policy: Policy, part: GradientPart, old: OldLogprobs | None, settings: UpdateSettings, record: UpdateRecord
) -> None:
    """Accumulate the gradient of the summed loss of a part's rows, at the weights that the model holds now."""
    with_gradient, without = split_by_gradient(part.rows, settings.objective)
    of_entropy = any(term.of_entropy for term in terms_of(settings.objective))
    correction = record.correction or Correction()
    for rows, enabled in ((with_gradient, True), (without, False)):
        for micro in _micro_batches(policy, rows, settings):
            with torch.set_grad_enabled(enabled):
                logprobs, entropy = policy.logprobs(micro, settings.temperature, with_entropy_gradient=of_entropy)
                before = logprobs.detach()
                if old is not None:
                    before = torch.cat([old[part.draw, row.index] for row in micro.rows])
                fix = correct(before, micro.behaviour_logprobs, micro.row_of, len(micro.rows), correction)
                counted = fix.kept if correction.normalizer == "kept" else torch.ones_like(fix.kept)
                inputs = LossInputs(logprobs, before, entropy, micro.advantages, fix.weights, counted, micro.weights)
                sums = policy_loss(inputs, settings.objective)
            if enabled:
                sums.loss.backward()  # type: ignore[no-untyped-call]
            record.add(micro, inputs, sums, fix)


def _micro_batches(policy: Policy, rows: Sequence[TrainingRow], settings: UpdateSettings) -> Iterator[MicroBatch]:
    for bundle in pack(rows, settings.token_budget, policy.device, padding=not policy.packed_rows):
        yield collate(bundle, policy.device)


@torch.no_grad()
def old_logprobs(
    policy: Policy, optimizer: PolicyOptimizer, batch: TrainingBatch, settings: UpdateSettings
) -> OldLogprobs:
    """Log-probs of every row where its gradient will be taken, before the first update (method.md 2.2)."""
    old: OldLogprobs = {}
    for part in batch.parts:
        with optimizer.at(part.draw):
            for micro in _micro_batches(policy, part.rows, settings):
                logprobs, _ = policy.logprobs(micro, settings.temperature)
                lengths = [len(row.completion.tokens) for row in micro.rows]
                for row, own in zip(micro.rows, torch.split(logprobs, lengths), strict=True):
                    old[part.draw, row.index] = own
    return old
