"""Tables and curves of training runs, from their run folders alone.

threepo report RUN... [--output report.png]
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Column, Table

from threepo.errors import UserError
from threepo.files import atomic_file, read_json
from threepo.run_folder import CONFIG, read_metrics

PANELS = (
    ("Reward (training rollouts)", "reward/mean"),
    ("Held-out pass@1 (bars: one standard error)", "eval/pass_at_1"),
    ("Share of prompts without any advantage", "groups/zero_advantage_share"),
    ("Token entropy (nats)", "policy/entropy"),
    ("Cross-entropy of the targets (nats)", "sft/loss"),
    ("Held-out cross-entropy (nats)", "sft/eval_loss"),
)
"""Titles and metrics; a panel is drawn if one of the runs has its metric."""
SHARES = ("eval/pass_at_1", "groups/zero_advantage_share")
"""Metrics with an axis from 0 to 1."""
FORMATS = (".png", ".pdf", ".svg")
SMOOTHING = 5
"""Training curves show a running mean over this many steps, with the raw values faint behind it."""


@dataclass(frozen=True)
class RunReport:
    """One run, read from its folder."""

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
    return RunReport(path.name, read_json(path / CONFIG), read_metrics(path))


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


def plot(runs: Sequence[RunReport], path: Path) -> None:
    """Draw the curves of the runs into a PNG, PDF or SVG file; `UserError` for another suffix, or nothing to draw."""
    if path.suffix not in FORMATS:
        raise UserError(f"--output {path}: the suffix says how to draw; end it in {', '.join(FORMATS)}")
    measured = {metric for run in runs for row in run.rows for metric, value in row.items() if value is not None}
    panels = [(title, metric) for title, metric in PANELS if metric in measured]
    if not panels:
        raise UserError(f"--output {path}: the runs have no finished step, so there is nothing to draw")
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows, columns = -(-len(panels) // 2), min(len(panels), 2)
    figure, axes = plt.subplots(rows, columns, figsize=(11, 3.75 * rows), squeeze=False, layout="constrained")
    for unused in axes.flat[len(panels) :]:
        unused.set_visible(False)
    colours = plt.get_cmap("tab10" if len(runs) <= 10 else "turbo", max(len(runs), 10))
    lines = {}
    for axis, (title, metric) in zip(axes.flat, panels, strict=False):
        for index, run in enumerate(runs):
            if line := _curve(axis, run, metric, colours(index)):
                lines[index] = line
        axis.set_title(title, fontsize=11)
        axis.set_xlabel("training steps")
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
        if metric in SHARES:
            axis.set_ylim(-0.02, 1.02)
    names = [runs[index].name for index in lines]
    figure.legend(list(lines.values()), names, loc="outside lower center", ncols=min(len(names), 4), frameon=False)
    with atomic_file(path) as temporary:
        figure.savefig(temporary, dpi=130, format=path.suffix.removeprefix("."))
    plt.close(figure)


def _curve(axis: Any, run: RunReport, metric: str, colour: Any) -> Any:
    """Draw one run's metric; returns its line for the legend, or None if the run does not have it."""
    rows = [row for row in run.rows if row.get(metric) is not None]
    if not rows:
        return None
    x, y = [row["step"] + 1 for row in rows], [row[metric] for row in rows]
    if metric == "eval/pass_at_1":
        bars = [row.get("eval/se_between") or 0.0 for row in rows]
        return axis.errorbar(x, y, yerr=bars, color=colour, marker="o", markersize=4, capsize=3)
    if metric == "sft/eval_loss":
        return axis.plot(x, y, color=colour, marker="o", markersize=4)[0]
    axis.plot(x, y, color=colour, alpha=0.2, linewidth=1)
    smooth = [statistics.fmean(y[max(0, i - SMOOTHING + 1) : i + 1]) for i in range(len(y))]
    return axis.plot(x, smooth, color=colour, linewidth=1.8)[0]


def _score(value: float | None, error: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %" + ("" if error is None else f" ± {100 * error:.1f}")


def _number(value: float | None, form: str = ".3g") -> str:
    return "-" if value is None else format(value, form)
