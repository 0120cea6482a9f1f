"""The tables and the picture of a study, from its summary and its folder."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.table import Column, Table

from threepo.analysis.paired import t_interval
from threepo.analysis.study import chosen_point, curve, outcome
from threepo.config.study import Cell, Study
from threepo.files import atomic_file, write_json, write_text

PANELS = {
    "reward/mean": "Reward of the rollouts",
    "eval/pass_at_1": "Held-out pass@1",
    "groups/zero_advantage_share": "Share of prompts without any advantage",
    "policy/entropy": "Token entropy (nats)",
}
"""What is drawn, besides the metric and the curve of the study."""
Summary = Mapping[str, Any]
Rows = list[list[str]]


def write_results(study: Study, summary: Summary) -> None:
    """Write summary.json, table.md and curves.png into the folder of the study."""
    study.folder.mkdir(parents=True, exist_ok=True)
    write_json(study.folder / "summary.json", summary)
    write_text(study.folder / "table.md", markdown(summary))
    draw_curves(study)


def markdown(summary: Summary) -> str:
    """All tables as one page."""
    parts = [f"# {summary['study']}", _caption(summary)]
    if summary["average"]:
        parts += ["## All settings", _page(*across(summary))]
    for name, variant in summary["variants"].items():
        title = [f"## {name}"] if name else []
        parts += [*title, _page(*against_baseline(summary, variant)), _page(*learning(summary, variant))]
    if tuning := summary["tuning"]:
        rows = [[name, *_tuned(entry)] for name, entry in tuning.items()]
        parts += ["## Tuning", _page(["method", "chosen", "mean of the metric at each point, in order"], rows)]
    left_out = [[entry["run"], entry["state"], entry["reason"].replace("|", "\\|")] for entry in summary["left_out"]]
    parts += ["## Runs that are not in the tables"]
    parts += [_page(["run", "state", "reason"], left_out) if left_out else "None."]
    return "\n\n".join(parts) + "\n"


def _caption(summary: Summary) -> str:
    seeds = ", ".join(map(str, summary["seeds"]))
    return (
        f"`{summary['metric']}` after the last step, seeds {seeds}: mean and 95 % t interval. Differences are "
        f"to {summary['baseline']} of the same seed; p is of the paired t-test, adjusted (Holm) for the methods of a "
        f"table. docs/studies.md explains every column."
    )


def across(summary: Summary) -> tuple[list[str], Rows]:
    """Methods x settings, as the paper's Table 1: mean and standard error over seeds, the best in bold."""
    columns = {**summary["variants"], "average": summary["average"]}
    rows = []
    for method in summary["average"]["methods"]:
        cells = []
        for part in columns.values():
            means = [figures["final"]["mean"] for figures in part["methods"].values() if figures["n"]]
            figures = part["methods"][method]
            text = _with_error(figures)
            cells.append(f"**{text}**" if figures["n"] and figures["final"]["mean"] == max(means) else text)
        comparison = summary["average"]["comparisons"]["metric"].get(method)
        rows.append([method, *cells, _number(comparison, "p_adjusted")])
    return ["method", *columns, "p of the average"], rows


def _with_error(figures: Mapping[str, Any]) -> str:
    if not figures["n"]:
        return "-"
    final, n = figures["final"], figures["n"]
    if final["low"] is None:
        return f"{final['mean']:.3f}"
    from scipy import stats

    error = (final["high"] - final["mean"]) / stats.t.ppf(0.975, n - 1)
    return f"{final['mean']:.3f} ± {error:.3f}"


COMPARED = ["method", "seeds", "final", "difference", "bootstrap", "p", "p (signs)", "verdict", "finds"]
LEARNED = [
    "method",
    "steps to target",
    "reached",
    "at half, minus the end",
    "ahead at half",
    "area",
    "rollouts",
    "seconds",
]


def against_baseline(summary: Summary, variant: Mapping[str, Any]) -> tuple[list[str], Rows]:
    """The final metric of each method, and its comparison with the baseline."""
    rows = []
    for method, figures in variant["methods"].items():
        c = variant["comparisons"]["metric"].get(method)
        cells = [_interval(c, "difference"), _interval(c, "", "bootstrap_low", "bootstrap_high")]
        cells += [
            _number(c, "p_adjusted"),
            _number(c, "p_sign_flip"),
            c["verdict"] if c else "-",
            _number(c, "detectable"),
        ]
        rows.append([method, str(figures["n"]), _interval(figures.get("final"), "mean"), *cells])
    return COMPARED, rows


def learning(summary: Summary, variant: Mapping[str, Any]) -> tuple[list[str], Rows]:
    """How soon each method learned, and what it cost."""
    rows = []
    for method, figures in variant["methods"].items():
        if not figures["n"]:
            rows.append([method, *["-"] * (len(LEARNED) - 1)])
            continue
        to, half = figures["steps_to_target"], variant["comparisons"]["half"].get(method)
        median = f"> {figures['steps']}" if to["median"] is None else f"{to['median']:g}"
        ahead = {"better": "yes", "worse": "no"}.get(half["verdict"], "undecided") if half else "-"
        cells = [median, f"{to['reached']} of {figures['n']}", _interval(half, "difference"), ahead]
        cells += [_interval(figures["area"], "mean"), f"{figures['rollouts']:,}", f"{figures['seconds']:.0f}"]
        rows.append([method, *cells])
    return LEARNED, rows


def _tuned(entry: Mapping[str, Any]) -> list[str]:
    means = [None if None in p["metric"] else float(np.mean(p["metric"])) for p in entry["points"]]
    chosen = ", ".join(entry["grid"][entry["chosen"]]) or "the recipe as it is"
    return [f"`{chosen}`", ", ".join("-" if mean is None else f"{mean:.3f}" for mean in means)]


def tables(summary: Summary) -> list[Table]:
    """What the terminal shows."""
    shown = [("All settings", across(summary))] if summary["average"] else []
    for name, variant in summary["variants"].items():
        title = f"{summary['study']} {name}".strip()
        target = "" if variant["target"] is None else f", target {variant['target']:.3f}"
        shown += [(f"{title}: {summary['metric']}", against_baseline(summary, variant))]
        shown += [(f"{title}: {summary['curve']}{target}", learning(summary, variant))]
    tables = []
    for title, (columns, rows) in shown:
        table = Table(columns[0], *(Column(name, justify="right") for name in columns[1:]), title=title)
        for row in rows:
            table.add_row(*(cell.replace("**", "") for cell in row))
        tables.append(table)
    return tables


def _interval(figure: Mapping[str, Any] | None, value: str, low: str = "low", high: str = "high") -> str:
    if not figure:
        return "-"
    shown = [f"{figure[value]:.3f}"] if value else []
    if figure[low] is not None:
        shown.append(f"[{figure[low]:.3f}, {figure[high]:.3f}]")
    return " ".join(shown) or "-"


def _number(figure: Mapping[str, Any] | None, key: str) -> str:
    return "-" if not figure or figure[key] is None else f"{figure[key]:.2g}"


def _page(columns: Sequence[str], rows: Rows) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def draw_curves(study: Study) -> None:
    """curves.png: means over the seeds that are finished, with bands of their 95 % t intervals; a row per variant."""
    settings = study.tables.study
    panels = list(dict.fromkeys([settings.metric, settings.curve, *PANELS]))
    variants = list(study.tables.variants or ("",))
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    size = (4.2 * len(panels), 3.4 * len(variants))
    figure, axes = plt.subplots(len(variants), len(panels), figsize=size, squeeze=False, layout="constrained")
    lines: dict[str, Any] = {}
    for row, variant in zip(axes, variants, strict=True):
        for axis, metric in zip(row, panels, strict=True):
            for index, method in enumerate(study.tables.methods):
                if line := _band(study, Cell(variant, method), metric, axis, f"C{index % 10}"):
                    lines[method] = line
            axis.set_title(f"{variant} {PANELS.get(metric, metric)}".strip(), fontsize=10)
            axis.set_xlabel("training steps")
            axis.grid(alpha=0.3)
            axis.spines[["top", "right"]].set_visible(False)
    if lines:
        figure.legend(
            list(lines.values()), list(lines), loc="outside lower center", ncols=min(len(lines), 6), frameon=False
        )
    with atomic_file(study.folder / "curves.png") as temporary:
        figure.savefig(temporary, dpi=110, format="png")
    plt.close(figure)


def _band(study: Study, cell: Cell, metric: str, axis: Any, colour: str) -> Any:
    """Draw a metric of one method; returns its line, or None if there is nothing to draw."""
    point = chosen_point(study, cell)
    runs = study.reported(cell, point) if point is not None else []
    at: dict[int, list[float]] = {}
    for run in runs:
        if outcome(study, run).state == "finished":
            for step, value in zip(*curve(run, metric), strict=True):
                at.setdefault(step + 1, []).append(value)
    if not at:
        return None
    steps = sorted(at)
    means = [t_interval(at[step]) for step in steps]
    line = axis.plot(steps, [m.mean for m in means], color=colour, linewidth=1.5, marker="o" if len(steps) < 20 else "")
    low, high = ([m.mean if (end := getattr(m, side)) is None else end for m in means] for side in ("low", "high"))
    axis.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
    return line[0]
