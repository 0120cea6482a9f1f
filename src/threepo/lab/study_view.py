"""The tables and the picture of a study, from its summary and its runs."""

from collections.abc import Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from rich.table import Column, Table

from threepo.evaluation.statistics import running_means, t_interval
from threepo.files import write_json, write_text
from threepo.lab.figures import Colours, Panel, colours, picture, with_data
from threepo.lab.study import curve
from threepo.lab.study_config import Cell, Study
from threepo.lab.study_summary import finished_runs
from threepo.run_folder import SUMMARY

PANELS = {
    "reward/mean": "Reward of the rollouts",
    "eval/pass_at_1": "Held-out pass@1",
    "groups/zero_advantage_share": "Share of prompts without any advantage",
    "policy/entropy": "Token entropy (nats)",
}
"""What is drawn, besides the metric and the curve of the study, with titles."""
FINAL = ("method", "seeds", "final", "difference", "bootstrap", "p", "p of signs", "verdict", "finds")
LEARNING = ("method", "to target", "reached", "at half", "ahead at half", "area", "rollouts", "seconds")
SHOWN = ("method", "seeds", "final", "difference", "p", "verdict", "to target")
"""Columns of the two tables of the page, and of the terminal's; docs/studies.md explains them."""
Row = dict[str, str]
Summary = Mapping[str, Any]


def write_results(study: Study, summary: Summary) -> None:
    """Write summary.json, table.md and curves.png into the folder of the study."""
    write_json(study.folder / SUMMARY, summary)
    write_text(study.folder / "table.md", markdown(summary))
    draw_curves(study)


def markdown(summary: Summary) -> str:
    """All tables as one page."""
    settings = summary["tables"]["study"]
    parts = [
        f"# {summary['study']}",
        f"`{settings['metric']}` after the last step, seeds {', '.join(map(str, settings['seeds']))}: mean and 95 % t "
        f"interval. Differences are to {settings['baseline']} of the same seed; p is of the paired t-test, p of "
        f"signs of the randomisation test, each adjusted for all methods of a table (Holm).",
    ]
    if summary["average"]:
        parts += ["## All settings", "Mean and standard error over seeds.", _page(across(summary))]
    for name, variant in summary["variants"].items():
        found = rows(variant)
        target = "" if variant["target"] is None else f"The target is {settings['curve']} = {variant['target']:.3f}."
        same = f"Digest of all metrics but times: {variant['digest']}."
        parts += [f"## {name}" if name else "", _page(found, FINAL), target, _page(found, LEARNING), same]
    if summary["tuning"]:
        parts += ["## Tuning", _page([{"method": name} | _tuned(entry) for name, entry in summary["tuning"].items()])]
    parts += ["## Runs that are not in the tables", _page(summary["left_out"]) if summary["left_out"] else "None."]
    return "\n\n".join(filter(None, parts)) + "\n"


def rows(variant: Summary) -> list[Row]:
    """A row for each method in one setting, the baseline included."""
    found = []
    for method, figures in variant["methods"].items():
        row = {"method": method, "seeds": str(figures["n"])}
        if figures["n"]:
            reached = [steps for steps in figures["steps_to_target"].values() if steps is not None]
            to = figures["median_steps_to_target"]
            row["final"] = _interval(figures["final"], "mean")
            row["to target"] = f"> {figures['steps']}" if to is None else f"{to:g}"
            row["reached"] = f"{len(reached)} of {figures['n']}"
            row["area"] = _interval(figures["area"], "mean")
            row |= {"rollouts": f"{figures['rollouts']:,}", "seconds": f"{figures['seconds']:.0f}"}
        if compared := variant["metric"].get(method):
            row["difference"] = _interval(compared, "difference", "+")
            row["bootstrap"] = _interval(compared, "", "", "bootstrap_low", "bootstrap_high")
            row |= {"p": f"{compared['p_adjusted']:.2g}", "p of signs": f"{compared['p_sign_flip_adjusted']:.2g}"}
            row["verdict"] = compared["verdict"]
            if compared["detectable"] is not None:
                row["finds"] = f"{compared['detectable']:.3f}"
        if half := variant["half"].get(method):
            row["at half"] = _interval(half, "difference", "+")
            row["ahead at half"] = {"better": "yes", "worse": "no"}.get(half["verdict"], "undecided")
        found.append(row)
    return found


def across(summary: Summary) -> list[Row]:
    """Methods x settings, as the paper's Table 1: the best in bold."""
    columns = {**summary["variants"], "average": summary["average"]}
    found = []
    for method in summary["average"]["methods"]:
        row = {"method": method}
        for name, part in columns.items():
            means = {m: figures["final"]["mean"] for m, figures in part["methods"].items() if figures["n"]}
            if method in means:
                error = part["methods"][method]["final"]["se"]
                text = f"{means[method]:.3f}" + ("" if error is None else f" ± {error:.3f}")
                row[name] = f"**{text}**" if means[method] == max(means.values()) else text
        if compared := summary["average"]["metric"].get(method):
            row["p of the average"] = f"{compared['p_adjusted']:.2g}"
        found.append(row)
    return found


def _tuned(entry: Summary) -> Row:
    means = ["-" if None in point["metric"] else f"{fmean(point['metric']):.3f}" for point in entry["points"]]
    chosen = ", ".join(entry["chosen"]) or "the recipe as it is"
    return {"chosen": chosen, "mean of the metric, point by point": ", ".join(means)}


def tables(summary: Summary) -> list[Table]:
    """Tables that the terminal shows."""
    shown = {"all settings": (across(summary), ())} if summary["average"] else {}
    shown |= {name: (rows(variant), SHOWN) for name, variant in summary["variants"].items()}
    found = []
    for title, (lines, columns) in shown.items():
        names = columns or _columns(lines)
        table = Table(*(Column(name, justify="left" if name == "method" else "right") for name in names))
        table.title = " ".join(filter(None, [summary["study"], title, summary["tables"]["study"]["metric"]]))
        for line in lines:
            table.add_row(*(line.get(name, "-").replace("**", "") for name in names))
        found.append(table)
    return found


def _interval(figure: Summary, value: str, sign: str = "", low: str = "low", high: str = "high") -> str:
    ends = "" if figure[low] is None else f"[{figure[low]:.3f}, {figure[high]:.3f}]"
    return f"{figure[value]:{sign}.3f} {ends}".strip() if value else ends or "-"


def _columns(lines: Sequence[Row]) -> Sequence[str]:
    return list(dict.fromkeys(name for line in lines for name in line))


def _page(lines: Sequence[Row], columns: Sequence[str] = ()) -> str:
    names = columns or _columns(lines)
    cells = [[line.get(name, "-").replace("|", "\\|") for name in names] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in [names, ["---"] * len(names), *cells])


def draw_curves(study: Study) -> None:
    """curves.png: means over the finished seeds, with bands of their 95 % t intervals; nothing if none is finished.

    What is known at every step is smoothed as the study says.
    """
    settings, palette = study.tables.study, colours(list(study.tables.methods))
    panels = [
        Panel(metric, f"{variant} {PANELS.get(metric, metric)}".strip(), "", partial(_bands, study, variant, metric))
        for variant in study.tables.variants or ("",)
        for metric in dict.fromkeys([settings.metric, settings.curve, *PANELS])
    ]
    if known := with_data(panels, palette):
        picture(known, palette, study.folder / "curves.png")


def _bands(study: Study, variant: str, metric: str, axis: Axes, palette: Colours) -> None:
    """Draw a metric of all methods."""
    for method, colour in palette.items():
        _band(study, Cell(variant, method), metric, axis, colour)
    _follow_lines(axis)
    axis.set_xlabel("training steps")


def _follow_lines(axis: Axes) -> None:
    """Scale an axis by its lines, since the bands of two or three seeds can be many times as high."""
    if values := [float(value) for line in axis.get_lines() for value in np.asarray(line.get_ydata())]:
        pad = 0.5 * (max(values) - min(values)) or 0.05
        axis.set_ylim(min(values) - pad, max(values) + pad)


def _band(study: Study, cell: Cell, metric: str, axis: Axes, colour: str) -> None:
    """Draw a metric of one method, if there is anything to draw."""
    at: dict[int, list[float]] = {}
    width = 1 if metric.startswith("eval/") else study.tables.study.smoothing
    for run in finished_runs(study, cell):
        steps, values = curve(run, metric)
        if len(values) >= width:
            for step, value in list(zip(steps, running_means(values, width), strict=True))[width - 1 :]:
                at.setdefault(step + 1, []).append(value)
    if not at:
        return
    known = sorted(at)
    bands = [t_interval(at[step]) for step in known]
    marker = "o" if len(known) < 20 else ""
    axis.plot(known, [b.value for b in bands], color=colour, linewidth=1.5, marker=marker, markersize=4)
    low, high = zip(*((b.low, b.high) for b in bands), strict=True)
    axis.fill_between(known, low, high, color=colour, alpha=0.15, linewidth=0)
