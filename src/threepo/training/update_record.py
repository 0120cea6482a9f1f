"""Record of a policy update: sums over its tokens, values of its rows, and the metrics that follow from them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from threepo.config import Correction
from threepo.objectives.corrections import effective_sample_share, sum_by_row
from threepo.objectives.token_losses import LossInputs
from threepo.ranks.world import World
from threepo.run_folder import completion_row
from threepo.training.metrics import mean
from threepo.types import Completion, CreditedRow


@dataclass
class RowRecord:
    """Record of one row in the update, for metrics and the log of completions."""

    index: int
    tokens: int
    logprob_sum: float
    """Log-prob at the weights where the gradient was taken; with several updates a batch, before the first of them."""
    rho: float
    """Sequence ratio of the gradient's policy to the row's generator."""
    weight: float
    """Mean correction weight over the row's tokens; a masked token counts as 0."""
    kept_tokens: int
    untouched: bool
    advantage: float


@dataclass
class UpdateRecord:
    """Sums over all tokens of an update."""

    correction: Correction | None
    """Correction of the batch; None: rollouts under top-p or top-k, so `kl` and the rows' `rho` have no meaning."""
    minimised: list[float] = field(default_factory=list)
    """The loss of each optimizer step, after its division."""
    loss: float = 0.0
    normalizer: float = 0.0
    tokens: int = 0
    finite: bool = True
    """True if all gradients were finite."""
    kl: float = 0.0
    policy: dict[str, float] = field(default_factory=dict)
    """Metrics `policy/<name>`, as sums over tokens."""
    rows: list[RowRecord] = field(default_factory=list)
    chose: list[bool] = field(default_factory=list)
    """True for each choice of tokens by the loss that chose any."""
    evolution: dict[str, float] = field(default_factory=dict)
    """Metrics of the comparison with an evolution strategy."""

    def add(self, rows: Sequence[CreditedRow], inputs: LossInputs, statistics: dict[str, float]) -> None:
        """Add the sums and rows of a micro-batch; `statistics` come from `policy_loss.statistics`."""
        logprobs, correction = inputs.old_logprobs, inputs.correction
        self.tokens += len(logprobs)
        for name, total in (statistics | {"entropy": float(inputs.entropy.detach().sum(dtype=torch.float64))}).items():
            self.policy[name] = self.policy.get(name, 0.0) + total
        d = (logprobs - inputs.behaviour_logprobs).double()
        self.kl += float((d.exp() - 1 - d).sum())

        def by_row(values: torch.Tensor) -> torch.Tensor:
            return sum_by_row(values, inputs.row_of, len(rows))

        tokens = by_row(torch.ones_like(logprobs))
        columns = {
            "tokens": tokens.int(),
            "logprob_sum": by_row(logprobs),
            "rho": correction.rho,
            "weight": by_row(correction.weights) / tokens,
            "kept_tokens": by_row(correction.kept).int(),
            "untouched": correction.untouched,
        }
        for row, *values in zip(rows, *(column.tolist() for column in columns.values()), strict=True):
            self.rows.append(RowRecord(row.index, **dict(zip(columns, values, strict=True)), advantage=row.advantage))

    def unite(self, world: World) -> None:
        """Sum the records of all ranks, each of its own rows."""
        records = world.gather(self)
        self.tokens = sum(record.tokens for record in records)
        self.kl = math.fsum(record.kl for record in records)
        names = {name: None for record in records for name in record.policy}
        self.policy = {name: math.fsum(record.policy.get(name, 0.0) for record in records) for name in names}
        self.rows = sorted((row for record in records for row in record.rows), key=lambda row: row.index)

    def metrics(self) -> dict[str, float]:
        """The loss, and the ratios of the gradient's policy to the old one and to the rollouts' generators."""
        if not self.rows:
            return {}
        metrics = {"policy/loss": mean(self.minimised) if self.minimised else 0.0, **self.evolution}
        metrics |= {f"policy/{name}": total / self.tokens for name, total in self.policy.items()}
        if self.chose:
            metrics["policy/no_choice_share"] = 1 - mean(self.chose)
        return metrics if self.correction is None else metrics | self._correction_metrics()

    def completion_rows(self, step: int, completions: Sequence[Completion]) -> list[dict[str, Any]]:
        """Rows of the log of completions; the first ones, which the update learned from, have its numbers."""
        update = {row.index: row for row in self.rows}
        rows = []
        for index, completion in enumerate(completions):
            row = update.get(index)
            numbers = {
                "gradient_logprob_sum": row and row.logprob_sum,
                "rho": row.rho if row and self.correction else None,
                "correction_weight": row and row.weight,
                "advantage": row and row.advantage,
            }
            rows.append(completion_row(step, completion) | numbers)
        return rows

    def _correction_metrics(self) -> dict[str, float]:
        rows = self.rows
        metrics = {
            "correction/kl": self.kl / self.tokens,
            "correction/kept_share": mean([row.kept_tokens > 0 for row in rows]),
            "correction/kept_token_share": sum(row.kept_tokens for row in rows) / self.tokens,
            "correction/untouched_share": mean([row.untouched for row in rows]),
            "correction/effective_sample_share": effective_sample_share(torch.tensor([row.weight for row in rows])),
        }
        rho = torch.tensor([row.rho for row in rows], dtype=torch.float64)
        for name, q in (("min", 0.0), ("p05", 0.05), ("p50", 0.5), ("p95", 0.95), ("max", 1.0)):
            metrics[f"correction/rho_{name}"] = float(rho.quantile(q))
        # By quarters of the rows by length, short to long: does the correction favour short answers?
        ordered = sorted(rows, key=lambda row: row.tokens)
        cuts = [len(ordered) * i // 4 for i in range(5)]
        for i, (first, end) in enumerate(pairwise(cuts), start=1):
            if first < end:
                kept = [row.kept_tokens > 0 for row in ordered[first:end]]
                metrics[f"correction/kept_share_length_q{i}"] = mean(kept)
        return metrics
