"""A table and a picture of training runs, from their run folders alone.

threepo report RUN... [--output report.png]
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from threepo.errors import UserError
from threepo.runs import CONFIG, read_json, read_metrics


@dataclass(frozen=True)
class RunReport:
    """One run as its folder tells it."""

    name: str
    config: dict[str, Any]
    rows: list[dict[str, Any]]
    """metrics.jsonl; the row of step -1 holds only the evaluation before training."""

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The rows of training steps."""
        return [row for row in self.rows if row["step"] >= 0]

    def evaluations(self) -> list[dict[str, Any]]:
        """The rows with an evaluation, oldest first."""
        return [row for row in self.rows if "eval/pass_at_1" in row]

    def summary(self) -> dict[str, Any]:
        """The figures of the table; those that the run did not measure are None."""
        evaluated, steps = self.evaluations(), self.steps
        first = evaluated[0] if evaluated and evaluated[0]["step"] == -1 else {}
        last = evaluated[-1] if evaluated and evaluated[-1]["step"] >= 0 else {}
        rollouts = self.config["data"]["prompts_per_step"] * self.config["method"]["rollouts_per_prompt"]
        return {
            "pass_at_1_before": first.get("eval/pass_at_1"),
            "se_before": first.get("eval/se_between"),
            "pass_at_1_after": last.get("eval/pass_at_1"),
            "se_after": last.get("eval/se_between"),
            "reward_first": steps[0]["reward/mean"] if steps else None,
            "reward_last": steps[-1]["reward/mean"] if steps else None,
            "zero_advantage_share": _mean([row["groups/zero_advantage_share"] for row in steps]),
            "seconds_per_step": statistics.median(row["time/step"] for row in steps) if steps else None,
            "rollouts": rollouts * len(steps),
            "steps": len(steps),
        }


def read_run(path: Path) -> RunReport:
    """Read a training run's folder; `UserError` if it is none."""
    if not (path / CONFIG).is_file():
        raise UserError(f"run folder {path}: holds no run (no {CONFIG})")
    config = read_json(path / CONFIG)
    if "method" not in config:
        raise UserError(f"run folder {path}: is no run of `threepo train`")
    return RunReport(path.name, config, read_metrics(path))


def table(summaries: dict[str, dict[str, Any]]) -> Any:
    """The summaries as a rich table, a row per run."""
    from rich.table import Table

    evaluated = any(s[f"pass_at_1_{at}"] is not None for s in summaries.values() for at in ("before", "after"))
    scores = ("pass@1 before", "pass@1 after") if evaluated else ("reward first", "reward last")
    title = "Held-out pass@1, mean and standard error over problems"
    result = Table(
        *("run", *scores, "zero-adv.", "s/step", "rollouts"),
        title=title if evaluated else "Reward of the rollouts in the first and the last step; nothing was evaluated",
    )
    for column in result.columns[1:]:
        column.justify = "right"
    for name, summary in summaries.items():
        if evaluated:
            cells = [_score(summary[f"pass_at_1_{at}"], summary[f"se_{at}"]) for at in ("before", "after")]
        else:
            cells = [_number(summary[f"reward_{at}"]) for at in ("first", "last")]
        result.add_row(
            name,
            *cells,
            _percent(summary["zero_advantage_share"]),
            "-" if summary["seconds_per_step"] is None else f"{summary['seconds_per_step']:.2f}",
            f"{summary['rollouts']:,}",
        )
    return result


PANELS = (
    ("Reward (training rollouts)", "reward/mean"),
    ("Held-out pass@1 (bars: one standard error)", "eval/pass_at_1"),
    ("Prompts without any advantage", "groups/zero_advantage_share"),
    ("Token entropy (nats)", "policy/entropy"),
)
SMOOTHING = 5
"""Training curves show a running mean over this many steps, with the raw values faint behind it."""


def plot(runs: Sequence[RunReport], path: Path) -> None:
    """Draw the curves of the runs into a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from threepo.files import atomic_file

    figure, axes = plt.subplots(2, 2, figsize=(11, 7.5), constrained_layout=True)
    for axis, (title, metric) in zip(axes.flat, PANELS, strict=True):
        for index, run in enumerate(runs):
            _curve(axis, run, metric, f"C{index}")
        axis.set_title(title, fontsize=11)
        axis.set_xlabel("training steps")
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
        if metric != "policy/entropy":
            axis.set_ylim(-0.02, 1.02)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=max(len(runs), 1), frameon=False)
    with atomic_file(path) as temporary:
        figure.savefig(temporary, dpi=130, format="png")
    plt.close(figure)


def _curve(axis: Any, run: RunReport, metric: str, colour: str) -> None:
    rows = [row for row in run.rows if row.get(metric) is not None]
    x, y = [row["step"] + 1 for row in rows], [row[metric] for row in rows]
    if metric.startswith("eval/"):
        bars = [row["eval/se_between"] or 0.0 for row in rows]
        axis.errorbar(x, y, yerr=bars, color=colour, marker="o", markersize=4, capsize=3, label=run.name)
        return
    axis.plot(x, y, color=colour, alpha=0.2, linewidth=1)
    smooth = [_mean(y[max(0, i - SMOOTHING + 1) : i + 1]) for i in range(len(y))]
    axis.plot(x, smooth, color=colour, linewidth=1.8, label=run.name)


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _score(value: float | None, error: float | None) -> str:
    if value is None:
        return "-"
    return f"{100 * value:.1f} %" + ("" if error is None else f" ± {100 * error:.1f}")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"
