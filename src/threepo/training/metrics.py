"""The numbers of one training step, by the names that docs/metrics.md explains (a test holds the two together)."""

import re
import time
from dataclasses import dataclass, field

import torch

from threepo.config import Method
from threepo.methods.corrections import effective_sample_share
from threepo.methods.method import advantages
from threepo.training.update import RowRecord, UpdateRecord
from threepo.types import Group

Metrics = dict[str, float]


@dataclass
class Clock:
    """Wall-clock seconds of the parts of a step."""

    times: dict[str, float] = field(default_factory=dict)
    _last: float = field(default_factory=time.perf_counter)

    def lap(self, name: str) -> None:
        """Book the time since the last lap under `name`."""
        now = time.perf_counter()
        self.times[name], self._last = now - self._last, now


def rollout_metrics(method: Method, groups: list[Group]) -> Metrics:
    """Rewards, lengths, and how many prompts give no gradient."""
    completions = [completion for group in groups for completion in group.completions]
    verdicts = [completion.verdict for completion in completions if completion.verdict]
    _, flat = advantages(method, groups)
    # A prompt gives no gradient when all rewards are equal in each of its advantage groups.
    silent = flat.all(dim=1)
    solved = torch.tensor([all(c.verdict and c.verdict.correct for c in group.completions) for group in groups])
    lengths = torch.tensor([len(c.tokens) for c in completions], dtype=torch.float64)
    details = sorted({verdict.detail for verdict in verdicts if verdict.detail})
    layouts = [verdict.format_ok for verdict in verdicts if verdict.format_ok is not None]
    return {
        **{_share_of(detail): _mean([v.detail == detail for v in verdicts]) for detail in details},
        **({_share_of("format_ok"): _mean(layouts)} if layouts else {}),
        "reward/mean": _mean([v.reward for v in verdicts]),
        "reward/correct_share": _mean([v.correct for v in verdicts]),
        "reward/no_answer_share": _mean([v.status == "no_answer" for v in verdicts]),
        "reward/error_share": _mean([v.status == "error" for v in verdicts]),
        "groups/zero_advantage_share": float(silent.double().mean()),
        "groups/all_right_share": float((silent & solved).double().mean()),
        "groups/flat_share": float(flat.double().mean()),
        "completions/length_mean": float(lengths.mean()),
        "completions/length_max": float(lengths.max()),
        "completions/cut_share": _mean([c.finish_reason == "length" for c in completions]),
    }


def _share_of(detail: str) -> str:
    return f"reward/{re.sub(r'[^a-z0-9]+', '_', detail.lower())}_share"


def update_metrics(record: UpdateRecord) -> Metrics:
    """The loss, and the ratios of the gradient's policy to the old one and to the rollouts' generators."""
    if not record.rows:
        return {}
    metrics = {"policy/loss": _mean(record.minimised) if record.minimised else 0.0}
    metrics |= {f"policy/{name}": total / record.tokens for name, total in record.policy.items()}
    return metrics if record.correction is None else metrics | _correction_metrics(record)


def _correction_metrics(record: UpdateRecord) -> Metrics:
    rows = record.rows
    rho = torch.tensor([row.rho for row in rows], dtype=torch.float64)
    metrics = {
        "correction/kl": record.kl / record.tokens,
        "correction/kept_share": _mean([row.kept_tokens > 0 for row in rows]),
        "correction/kept_token_share": sum(row.kept_tokens for row in rows) / record.tokens,
        "correction/untouched_share": _mean([row.untouched for row in rows]),
        "correction/effective_sample_share": effective_sample_share(torch.tensor([row.weight for row in rows])),
    }
    for name, q in (("min", 0.0), ("p05", 0.05), ("p50", 0.5), ("p95", 0.95), ("max", 1.0)):
        metrics[f"correction/rho_{name}"] = float(rho.quantile(q))
    return metrics | _kept_by_length(rows)


def _kept_by_length(rows: list[RowRecord]) -> Metrics:
    """Kept share in each quarter of the rows by length, short to long: does the correction favour short answers?"""
    ordered = sorted(rows, key=lambda row: row.tokens)
    cuts = [len(ordered) * i // 4 for i in range(5)]
    return {
        f"correction/kept_share_length_q{i + 1}": _mean([row.kept_tokens > 0 for row in ordered[cuts[i] : cuts[i + 1]]])
        for i in range(4)
        if cuts[i] < cuts[i + 1]
    }


def corrects_nothing(record: UpdateRecord) -> bool:
    """Whether the update had a correction and rows, and the correction changed no row."""
    active = record.correction is not None and record.correction.kind != "none"
    return active and bool(record.rows) and all(row.untouched for row in record.rows)


def _mean(values: list[float] | list[bool]) -> float:
    return sum(values) / len(values)
