"""One policy update from one training batch: forward, backward, observe, step.

The code obeys the fields of the batch and never asks which method made it. Losses are summed over tokens and divided
once, in the optimizer, by the count that the batch asks for: the result does not depend on the micro-batches.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from threepo.config import Correction, ObjectiveConfig
from threepo.methods.corrections import Corrected, correct, sum_by_row
from threepo.methods.method import split_batch
from threepo.models.policy import Policy
from threepo.objectives.aggregate import row_weights
from threepo.objectives.policy_loss import LossInputs, clip_statistics, split_by_gradient, terms_of, token_losses
from threepo.posterior.policy_optimizer import PolicyOptimizer
from threepo.training.batching import collate, flatten, pack
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
    kl: float = 0.0
    policy: dict[str, float] = field(default_factory=dict)
    """Metrics `policy/<name>`, as sums over tokens."""
    rows: list[RowRecord] = field(default_factory=list)

    def add(self, micro: MicroBatch, inputs: LossInputs, corrected: Corrected, statistics: dict[str, float]) -> None:
        """Add what the log says about a micro-batch."""
        logprobs = inputs.old_logprobs
        self.tokens += len(logprobs)
        for name, total in (statistics | {"entropy": float(inputs.entropy.detach().sum(dtype=torch.float64))}).items():
            self.policy[name] = self.policy.get(name, 0.0) + total
        d = (logprobs - micro.behaviour_logprobs).double()
        self.kl += float((d.exp() - 1 - d).sum())
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
        parts = [part for part in mini_batch.parts if part.rows]
        sums = []
        for part in parts:
            sharing = parts if batch.normalize == "step" else [part]
            weights = row_weights([row for p in sharing for row in p.rows], settings.objective.aggregation)
            with optimizer.at(part.draw):
                loss, count = _backward(policy, part, weights, old, settings, record)
            sums.append((loss, count))
            if batch.normalize == "step":
                optimizer.observe(part.draw, cumulative=batch.cumulative)
            elif count > 0:
                optimizer.observe(part.draw, count, cumulative=batch.cumulative)
        losses, counts = (math.fsum(column) for column in zip(*sums, strict=True)) if sums else (0.0, 0.0)
        record.loss += losses
        record.normalizer += counts
        if counts == 0:
            optimizer.discard()  # nothing to learn from: every row was masked
        elif batch.normalize == "step":
            record.minimised.append(losses / counts)
            optimizer.step(divisor=counts)
        else:
            means = [loss / count for loss, count in sums if count > 0]
            record.minimised.append(sum(means) / len(means))
            optimizer.step()
    return record


def _backward(
    policy: Policy,
    part: GradientPart,
    weights: Mapping[int, float],
    old: OldLogprobs | None,
    settings: UpdateSettings,
    record: UpdateRecord,
) -> tuple[float, float]:
    """Accumulate the gradient of the summed loss of a part's rows, at the weights that the model holds now.

    Returns that sum, and the count to divide it by.
    """
    total, count, objective = 0.0, 0.0, settings.objective
    with_gradient, without = split_by_gradient(part.rows, objective)
    of_entropy = any(term.of_entropy for term in terms_of(objective))
    correction = record.correction or Correction()
    for rows, enabled in ((with_gradient, True), (without, False)):
        for bundle in _bundles(policy, rows, settings):
            micro = collate(bundle, weights, policy.device)
            with torch.set_grad_enabled(enabled):
                logprobs, entropy = policy.logprobs(micro, settings.temperature, with_entropy_gradient=of_entropy)
                before = logprobs.detach()
                if old is not None:
                    before = torch.cat([old[part.draw, row.index] for row in bundle])
                corrected = correct(before, micro.behaviour_logprobs, micro.row_of, len(bundle), correction)
                counted = corrected.kept if correction.normalizer == "kept" else torch.ones_like(corrected.kept)
                inputs = LossInputs(logprobs, before, entropy, micro.advantages, corrected.weights, counted)
                loss = (token_losses(inputs, objective) * micro.weights).sum(dtype=torch.float64)
            if enabled:
                loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
            count += float((counted * micro.weights).sum(dtype=torch.float64))
            record.add(micro, inputs, corrected, clip_statistics(inputs, objective))
    return total, count


def _bundles(policy: Policy, rows: Sequence[TrainingRow], settings: UpdateSettings) -> Iterator[list[TrainingRow]]:
    return pack(rows, settings.token_budget, policy.device, padding=not policy.packed_rows)


@torch.no_grad()
def old_logprobs(
    policy: Policy, optimizer: PolicyOptimizer, batch: TrainingBatch, settings: UpdateSettings
) -> OldLogprobs:
    """Log-probs of every row where its gradient will be taken, before the first update (method.md 2.2)."""
    old: OldLogprobs = {}
    for part in batch.parts:
        with optimizer.at(part.draw):
            for bundle in _bundles(policy, part.rows, settings):
                logprobs, _ = policy.logprobs(flatten(bundle, policy.device), settings.temperature)
                lengths = [len(row.completion.tokens) for row in bundle]
                for row, own in zip(bundle, torch.split(logprobs, lengths), strict=True):
                    old[part.draw, row.index] = own
    return old
