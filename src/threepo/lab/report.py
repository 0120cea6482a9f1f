"""Training runs as their folders have them, and tables that compare them; curves.py and page.py show more.

threepo report RUN... [--output FOLDER | --output FILE.png]
"""

import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from threepo.errors import UserError
from threepo.evaluation.tables import number, percent, table
from threepo.files import read_json
from threepo.lab.arms_view import arm_shares, leading_arms
from threepo.run_folder import CONFIG, read_metrics

Metrics = Mapping[str, Any]
"""A row of metrics.jsonl."""


@dataclass(frozen=True)
class RunReport:
    """One training run, read from its folder."""

    path: Path
    name: str
    config: dict[str, Any]
    rows: list[dict[str, Any]]
    """metrics.jsonl; the row of step -1 holds only the evaluation before training."""

    @property
    def trains(self) -> bool:
        """True if it learned from rewards; otherwise it was fine-tuned."""
        return "method" in self.config

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The rows of training steps."""
        return [row for row in self.rows if row["step"] >= 0]

    def summary(self) -> dict[str, Any]:
        """The numbers of the table; None for what the run did not measure."""
        steps = self.steps
        first, last = (steps[0], steps[-1]) if steps else ({}, {})
        seconds = statistics.median(row["time/step"] for row in steps) if steps else None
        if not self.trains:
            return {
                "loss_first": first.get("sft/loss"),
                "loss_last": last.get("sft/loss"),
                "eval_loss": next((row["sft/eval_loss"] for row in reversed(steps) if "sft/eval_loss" in row), None),
                "seconds_per_step": seconds,
                "steps": len(steps),
            }
        before: Metrics = next((row for row in self.rows if row["step"] == -1), {})
        after: Metrics = next((row for row in reversed(steps) if "eval/pass_at_1" in row), {})
        silent = [row["groups/zero_advantage_share"] for row in steps]
        rollouts_per_step = self.config["data"]["prompts_per_step"] * self.config["method"]["rollouts_per_prompt"]
        return {
            "pass_at_1_before": before.get("eval/pass_at_1"),
            "se_before": before.get("eval/se_between"),
            "pass_at_1_after": after.get("eval/pass_at_1"),
            "se_after": after.get("eval/se_between"),
            "reward_first": first.get("reward/mean"),
            "reward_last": last.get("reward/mean"),
            "zero_advantage_share": statistics.fmean(silent) if silent else None,
            "seconds_per_step": seconds,
            "rollouts": rollouts_per_step * len(steps),
            "steps": len(steps),
            **({"arms": leading_arms(steps)} if arm_shares([last]) else {}),
        }


def read_run(path: Path) -> RunReport:
    """Read the folder of a training run; `UserError` if it holds none."""
    if not (path / CONFIG).is_file():
        raise UserError(f"run folder {path}: holds no run (no {CONFIG})")
    return RunReport(path, os.path.basename(os.path.abspath(path)), read_json(path / CONFIG), read_metrics(path))


def read_runs(paths: Sequence[Path]) -> list[RunReport]:
    """Read several runs, each once; runs whose folders have the same name go by their paths, from where these part."""
    runs = [read_run(path) for path in {os.path.abspath(path): path for path in paths}.values()]
    if len({run.name for run in runs}) == len(runs):
        return runs
    shared = os.path.commonpath([os.path.abspath(run.path) for run in runs])
    return [replace(run, name=os.path.relpath(run.path, shared)) for run in runs]


def series(rows: Sequence[Metrics], metric: str) -> tuple[list[int], list[float]]:
    """Training steps done and values of a metric, where it is known; step 0 is before training."""
    known = [row for row in rows if row.get(metric) is not None]
    return [row["step"] + 1 for row in known], [row[metric] for row in known]


def tables(runs: Sequence[RunReport]) -> list[Table]:
    """The summaries, a row per run: a table for reinforcement learning, one for fine-tuning."""
    learned = [(run.name, run.summary()) for run in runs if run.trains]
    tuned = [(run.name, run.summary()) for run in runs if not run.trains]
    title = "Reward of the rollouts in the first and the last step; nothing was evaluated"
    evaluated = any(s[f"pass_at_1_{at}"] is not None for _, s in learned for at in ("before", "after"))
    if evaluated:
        title = "Held-out pass@1, mean and standard error over problems"
    found = [
        table(title, [_learned(name, summary, evaluated) for name, summary in learned]),
        table("Cross-entropy of the targets, nats a token", [_tuned(name, summary) for name, summary in tuned]),
    ]
    return [each for each in found if each.row_count]


def _learned(name: str, summary: Mapping[str, Any], evaluated: bool) -> dict[str, str]:
    if evaluated:
        scores = {f"pass@1 {at}": score(summary, at) for at in ("before", "after")}
    else:
        scores = {f"reward {at}": number(summary[f"reward_{at}"]) for at in ("first", "last")}
    return {
        "run": name,
        **scores,
        "zero-adv. %": percent(summary["zero_advantage_share"], ".0f"),
        "s/step": number(summary["seconds_per_step"], ".2f"),
        "rollouts": f"{summary['rollouts']:,}",
    }


def score(summary: Mapping[str, Any], at: str) -> str:
    """Held-out pass@1 `before` or `after` training, with its standard error."""
    mean, error = summary[f"pass_at_1_{at}"], summary[f"se_{at}"]
    return percent(mean) if mean is None or error is None else f"{percent(mean)} % ± {percent(error)}"


def _tuned(name: str, summary: Mapping[str, Any]) -> dict[str, str]:
    return {
        "run": name,
        "loss first": number(summary["loss_first"]),
        "loss last": number(summary["loss_last"]),
        "held-out loss": number(summary["eval_loss"]),
        "s/step": number(summary["seconds_per_step"], ".2f"),
        "steps": str(summary["steps"]),
    }
