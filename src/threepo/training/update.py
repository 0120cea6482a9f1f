"""One policy update from one batch: rows to micro-batches; forward, backward, observe, step.

The code obeys the fields of the batch and does not know which method made it. Losses are summed over tokens and divided
once, in the optimizer, by the count that the batch names: the result does not depend on the micro-batches. Legend: R
rows of a micro-batch, K of its tokens that the loss counts.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from threepo.config import Correction, ObjectiveConfig
from threepo.methods.method import split_batch
from threepo.models.logprobs import TokenLogprobs
from threepo.models.packing import flatten
from threepo.models.policy import Policy
from threepo.objectives import policy_loss
from threepo.objectives.corrections import correct
from threepo.objectives.token_losses import LossInputs, terms_of
from threepo.posterior.evolution import evolution_metrics, evolve
from threepo.posterior.policy_optimizer import PolicyOptimizer
from threepo.ranks.dealing import deal_bundles
from threepo.ranks.world import ALONE, World
from threepo.training.reference import Reference
from threepo.training.scoring import Key, Parts, behaviour_logprobs, choose_tokens, score_rows
from threepo.training.update_record import UpdateRecord
from threepo.types import Batch, CreditedRow, Draw


def update_policy(
    policy: Policy,
    optimizer: PolicyOptimizer,
    batch: Batch,
    objective: ObjectiveConfig,
    token_budget: int = 0,
    world: World = ALONE,
    reference: Reference | None = None,
) -> UpdateRecord:
    """Train on the batch: one optimizer step per mini-batch. Returns the sums over all of them, and over all ranks."""
    if not batch.parts:
        evolve(optimizer, batch.fitness)
        return UpdateRecord(None)
    update = _Update(policy, optimizer, batch, objective, token_budget, world, UpdateRecord(batch.correction))
    if policy_loss.scored_first(objective):
        update.score_first()
    if reference:
        update.score_reference(reference)
    for mini_batch in split_batch(batch, objective.mini_batches):
        update.take_step(mini_batch.parts)
        update.moved = True
    update.record.unite(world)
    return update.record


@dataclass
class _Update:
    """State that the passes of one policy update share."""

    policy: Policy
    optimizer: PolicyOptimizer
    batch: Batch
    objective: ObjectiveConfig
    token_budget: int
    world: World
    record: UpdateRecord
    moved: bool = False
    """True if an optimizer step was taken, so that the policy may differ from the old policy."""
    first_scores: dict[Key, TokenLogprobs] = field(default_factory=dict)
    """Scores of the old policy; empty unless several updates or a choice of tokens need them."""
    reference_scores: dict[int, TokenLogprobs] = field(default_factory=dict)
    """Scores of the reference model by row index; empty without one."""
    choices: dict[str, dict[Key, torch.Tensor]] = field(default_factory=dict)
    """Choices among the tokens that share a divisor, by the field of `LossInputs` that they fill."""
    row_weights: dict[int, float] = field(default_factory=dict)
    """Factor of the losses of a row's tokens, by row index (`policy_loss.row_weights`)."""

    def score_first(self) -> None:
        """Score all rows at the weights where each row's gradient will be taken (method.md 2.3)."""
        for draw, rows in self.batch.parts.items():
            with self.optimizer.at(draw):
                scores = self.score(rows)
            self.first_scores |= {(draw, index): own for index, own in scores.items()}

    def score_reference(self, reference: Reference) -> None:
        """Score all rows by the reference model."""
        rows = {row.index: row for part in self.batch.parts.values() for row in part}
        with reference.in_place():
            self.reference_scores = self.score(list(rows.values()))

    def score(self, rows: Sequence[CreditedRow]) -> dict[int, TokenLogprobs]:
        """Scores by row index at the weights that the model holds now."""
        return score_rows(rows, self.policy, self.batch.temperature, self.token_budget, self.world)

    def take_step(self, parts: Parts) -> None:
        """One optimizer step from the rows of a mini-batch."""
        batch, record = self.batch, self.record
        shares = [parts] if batch.normalize == "step" else [{draw: rows} for draw, rows in parts.items()]
        sums = [pair for share in shares for pair in self.take_gradients(share)]
        loss = math.fsum(loss for loss, _ in sums)
        count = math.fsum(count for _, count in sums)
        record.loss += loss
        record.normalizer += count
        if batch.fitness and count:
            record.evolution = evolution_metrics(self.optimizer, batch.fitness)
        if not count:
            self.optimizer.discard()  # nothing to learn from: every row was masked
        elif batch.normalize == "step":
            record.minimised.append(loss / count)
            self.optimizer.step(divisor=count)
        else:
            means = [loss / count for loss, count in sums if count > 0]
            record.minimised.append(sum(means) / len(means))
            self.optimizer.step()

    def take_gradients(self, parts: Parts) -> list[tuple[float, float]]:
        """Take the gradients of parts that share a divisor, for the optimizer to observe.

        Returns the summed loss of each part, and the number to divide it by.
        """
        rows = [row for part in parts.values() for row in part]
        self.choices = choose_tokens(parts, self.first_scores, self.batch, self.objective)
        if "chosen" in self.choices:
            self.record.chose.append(any(bool(tokens.any()) for tokens in self.choices["chosen"].values()))
        self.row_weights = policy_loss.row_weights(rows, self.objective.aggregation)
        sums = []
        for draw, part in parts.items():
            with self.optimizer.at(draw):
                loss, count = self.backward(draw, part)
            sums.append((loss, count))
            if self.batch.normalize == "step":
                self.record.finite &= self.optimizer.observe(draw, cumulative=self.batch.cumulative, weight=count)
            elif count > 0:
                self.record.finite &= self.optimizer.observe(draw, count, cumulative=self.batch.cumulative)
        return sums

    def backward(self, draw: Draw | None, part: Sequence[CreditedRow]) -> tuple[float, float]:
        """Accumulate the gradient of the part's summed loss at the weights that the model holds now.

        Rows whose gradient is 0 are only scored and counted. Returns the summed loss, and the number to divide it by.
        """
        total = count = 0.0
        for rows, with_gradient in self.split(draw, part):
            for bundle in deal_bundles(rows, self.token_budget, self.policy, self.world):
                with torch.set_grad_enabled(with_gradient):
                    if not bundle:  # other ranks have rows left
                        self.policy.idle()
                        continue
                    inputs = self.forward(draw, bundle)
                    losses = policy_loss.token_losses(inputs, self.objective) * inputs.weights
                    loss = losses.sum(dtype=torch.float64)
                if with_gradient:
                    loss.backward()  # type: ignore[no-untyped-call]
                # Everything below waits for the device, so it comes after the backward pass has been queued.
                total += float(loss.detach())
                count += float((inputs.correction.counted * inputs.weights).sum(dtype=torch.float64))
                self.record.add(bundle, inputs, policy_loss.statistics(inputs, self.objective))
        totals, counts = (math.fsum(column) for column in zip(*self.world.gather((total, count)), strict=True))
        longest = self.batch.max_new_tokens
        return totals, policy_loss.divisor(counts, len(part), self.objective.aggregation, longest)

    def split(self, draw: Draw | None, part: Sequence[CreditedRow]) -> list[tuple[list[CreditedRow], bool]]:
        """Rows that need a backward pass, with True, and the others (`policy_loss.split_by_gradient`)."""
        chosen_tokens = self.choices.get("chosen", {})
        chosen = {row.index for row in part if chosen_tokens and chosen_tokens[draw, row.index].any()}
        return policy_loss.split_by_gradient(part, self.objective, chosen)

    def forward(self, draw: Draw | None, rows: Sequence[CreditedRow]) -> LossInputs:
        """Send rows through the model together; returns the inputs of their loss."""
        micro = flatten(rows, self.policy.device)
        of_entropy = any(term.of_entropy for term in terms_of(self.objective))
        scores = self.policy.logprobs(micro, self.batch.temperature, with_entropy_gradient=of_entropy)
        device, row_of = micro.row_of.device, micro.row_of

        def by_token(values_of_rows: Iterable[torch.Tensor]) -> torch.Tensor:
            return torch.cat(list(values_of_rows)).to(device)

        # Before anything has moved, a pass in other micro-batches would give the same, except for rounding.
        old, reference = scores.logprobs.detach(), None
        if self.moved:
            old = by_token(self.first_scores[draw, row.index].logprobs for row in rows)
        if self.reference_scores:
            reference = by_token(self.reference_scores[row.index].logprobs for row in rows)
        by_row = [[row.advantage for row in rows], [self.row_weights[row.index] for row in rows]]
        advantages, weights = torch.tensor(by_row, device=device)[:, row_of]
        behaviour = behaviour_logprobs(rows).to(device)
        everywhere = torch.ones_like(row_of, dtype=torch.bool)
        choices = {"chosen": ~everywhere, "in_mask": everywhere}
        for name, chosen in self.choices.items():
            choices[name] = by_token(chosen[draw, row.index] for row in rows)
        return LossInputs(
            logprobs=scores.logprobs,
            old_logprobs=old,
            behaviour_logprobs=behaviour,
            reference_logprobs=reference,
            entropy=scores.entropy,
            advantages=advantages,
            weights=weights,
            correction=correct(old, behaviour, row_of, len(rows), self.batch.correction or Correction()),
            row_of=row_of,
            rows=len(rows),
            **choices,
        )
