"""Tables of training runs, from their run folders alone.

threepo report RUN... [--output FOLDER]
"""

import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Column, Table

from threepo.errors import UserError
from threepo.files import read_json
from threepo.run_folder import CONFIG, read_metrics


@dataclass(frozen=True)
class RunReport:
    """One run, read from its folder."""

    path: Path
    name: str
    config: dict[str, Any]
    rows: list[dict[str, Any]]
    """metrics.jsonl; the row of step -1 holds only the evaluation before training."""

    def summary(self) -> dict[str, Any]:
        """The numbers of the table; those that the run did not measure are None."""
        steps = [row for row in self.rows if row["step"] >= 0]
        first, last = (steps[0], steps[-1]) if steps else ({}, {})
        seconds = statistics.median(row["time/step"] for row in steps) if steps else None
        if "method" not in self.config:  # a run of `threepo sft`, which has neither rollouts nor rewards
            return {
                "loss_first": first.get("sft/loss"),
                "loss_last": last.get("sft/loss"),
                "eval_loss": next((row["sft/eval_loss"] for row in reversed(steps) if "sft/eval_loss" in row), None),
                "seconds_per_step": seconds,
                "steps": len(steps),
            }
        before: dict[str, Any] = next((row for row in self.rows if row["step"] == -1), {})
        after: dict[str, Any] = next((row for row in reversed(steps) if "eval/pass_at_1" in row), {})
        silent = [row["groups/zero_advantage_share"] for row in steps]
        data, method = self.config["data"], self.config["method"]
        return {
            "pass_at_1_before": before.get("eval/pass_at_1"),
            "se_before": before.get("eval/se_between"),
            "pass_at_1_after": after.get("eval/pass_at_1"),
            "se_after": after.get("eval/se_between"),
            "reward_first": first.get("reward/mean"),
            "reward_last": last.get("reward/mean"),
            "zero_advantage_share": statistics.fmean(silent) if silent else None,
            "seconds_per_step": seconds,
            "rollouts": data["prompts_per_step"] * method["rollouts_per_prompt"] * len(steps),
            "steps": len(steps),
        }


def read_run(path: Path) -> RunReport:
    """Read the folder of a training run; `UserError` if it holds none."""
    if not (path / CONFIG).is_file():
        raise UserError(f"run folder {path}: holds no run (no {CONFIG})")
    return RunReport(path, os.path.basename(os.path.abspath(path)), read_json(path / CONFIG), read_metrics(path))


def read_runs(paths: Sequence[Path]) -> list[RunReport]:
    """Read several runs, each once; those whose folders have the same name go by their paths, from where these part."""
    runs = [read_run(path) for path in {os.path.abspath(path): path for path in paths}.values()]
    if len({run.name for run in runs}) == len(runs):
        return runs
    shared = os.path.commonpath([os.path.abspath(run.path) for run in runs])
    return [replace(run, name=os.path.relpath(run.path, shared)) for run in runs]


def tables(runs: Mapping[str, RunReport]) -> list[Table]:
    """The summaries as rich tables, a row per run: one for reinforcement learning, one for fine-tuning."""
    summaries = {name: run.summary() for name, run in runs.items()}
    evaluated = any(s.get(f"pass_at_1_{at}") is not None for s in summaries.values() for at in ("before", "after"))
    learning = "Reward of the rollouts in the first and the last step; nothing was evaluated"
    if evaluated:
        learning = "Held-out pass@1, mean and standard error over problems"
    tuning = "Cross-entropy of the targets, nats a token"
    found: dict[str, dict[str, dict[str, str]]] = {learning: {}, tuning: {}}
    for name, s in summaries.items():
        seconds = _number(s["seconds_per_step"], ".2f")
        if "loss_first" in s:
            losses = {"loss first": "loss_first", "loss last": "loss_last", "held-out loss": "eval_loss"}
            cells = {column: _number(s[key]) for column, key in losses.items()}
            found[tuning][name] = cells | {"s/step": seconds, "steps": str(s["steps"])}
            continue
        cells = {f"reward {at}": _number(s[f"reward_{at}"]) for at in ("first", "last")}
        if evaluated:
            cells = {f"pass@1 {at}": _score(s[f"pass_at_1_{at}"], s[f"se_{at}"]) for at in ("before", "after")}
        cells["zero-adv."] = _number(s["zero_advantage_share"], ".0%").replace("%", " %")
        found[learning][name] = cells | {"s/step": seconds, "rollouts": f"{s['rollouts']:,}"}
    return [_table(title, rows) for title, rows in found.items() if rows]


def _table(title: str, rows: Mapping[str, Mapping[str, str]]) -> Table:
    """Named cells for each run."""
    columns = next(iter(rows.values()))
    table = Table("run", *(Column(name, justify="right") for name in columns), title=title)
    for name, cells in rows.items():
        table.add_row(name, *cells.values())
    return table


def _score(value: float | None, error: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %" + ("" if error is None else f" ± {100 * error:.1f}")


def _number(value: float | None, form: str = ".3g") -> str:
    return "-" if value is None else format(value, form)
