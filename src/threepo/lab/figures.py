"""The figures of training runs: a list of panels, each drawn alone, or several in one picture.

A panel knows no theme: whoever draws it says which colour each run has.
"""

import io
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, NullFormatter, NullLocator

from threepo.errors import UserError
from threepo.files import atomic_file
from threepo.lab.report import RunReport

FORMATS = (".png", ".pdf", ".svg")
SMOOTHING = 5
"""Training curves show a running mean over this many steps, with the raw values faint behind it."""
SMOOTHED = f"Means over {SMOOTHING} steps."
LINE_AT_ZERO = 1
"""Depth of lines that mark a value, below all data."""
SHARES = ("eval/pass_at_1", "groups/zero_advantage_share", "correction/kept_share")
"""Metrics with an axis from 0 to 1."""
COLOURS = "1f6fb4 c8500a 1a8a3e b3246b 6a4bc4 8a6a00 00808a 8c3b2e 5b6470 4d7300"
DARK_COLOURS = "6cb4f5 ff9a5c 5fd38a f58abf b09bff e0c04c 4fd6df e08a78 b4bcc8 a8d44a"
"""Of up to ten runs, on a light and on a dark ground; those of more are spread over all hues."""
STYLE = {"text.parse_math": False, "axes.spines.top": False, "axes.spines.right": False, "svg.fonttype": "none"}
"""Names of runs are text, dollar signs and all."""
POINTS = 72
"""Units of an SVG's coordinates in an inch."""
Runs = Sequence[RunReport]
Colours = Mapping[str, str]
"""Of each run, by its name."""


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    name: str
    """Name of its file."""
    title: str
    note: str
    """What it shows, in a sentence for its reader."""
    draw: Callable[[Axes, Colours], None]
    """Draws the data; nothing above `LINE_AT_ZERO` if there is none."""


def colours(names: Sequence[str], *, dark: bool = False) -> dict[str, str]:
    """A colour for each run, as #rrggbb; no two are the same."""
    chosen = [f"#{colour}" for colour in (DARK_COLOURS if dark else COLOURS).split()]
    if len(names) > len(chosen):
        tone = (0.5, 0.95) if dark else (0.85, 0.55)  # saturation and value that stand out from the ground
        hues = (matplotlib.colors.hsv_to_rgb((i / len(names), *tone)) for i in range(len(names)))
        chosen = [matplotlib.colors.to_hex(hue) for hue in hues]
    return dict(zip(names, chosen[: len(names)], strict=True))


def _curve(metric: str, runs: Runs, axis: Axes, colours: Colours, *, against: str = "") -> None:
    """A metric of each run by training step, or by the total of another metric up to that step."""
    for run in runs:
        rows = [row for row in run.rows if row.get(metric) is not None and (not against or row.get(against))]
        y = [row[metric] for row in rows]
        x = list(accumulate(row[against] for row in rows)) if against else [row["step"] + 1 for row in rows]
        style: dict[str, Any] = {"color": colours[run.name]}
        if not rows:
            continue
        if metric == "eval/pass_at_1":
            bars = [row.get("eval/se_between") or 0.0 for row in rows]
            axis.errorbar(x, y, yerr=bars, marker="o", markersize=4, capsize=3, **style)
        elif metric == "sft/eval_loss":
            axis.plot(x, y, marker="o", markersize=4, **style)
        else:
            axis.plot(x, y, alpha=0.25, linewidth=1, **style)
            axis.plot(x, smooth(y), linewidth=1.8, **style)
    axis.set_xlabel({"": "training steps", "compute/flops": "operations so far (FLOPs)"}.get(against, against))
    if metric in SHARES:
        axis.set_ylim(-0.02, 1.02)


def smooth(values: Sequence[float]) -> list[float]:
    """Means over the last `SMOOTHING` values."""
    return [statistics.fmean(values[max(0, i - SMOOTHING + 1) : i + 1]) for i in range(len(values))]


def _total(metric: Callable[[Mapping[str, Any]], float | None], runs: Runs, axis: Axes, colours: Colours) -> None:
    """The sum of a figure over the steps so far."""
    for run in runs:
        rows = [(row["step"] + 1, value) for row in run.rows if row["step"] >= 0 and (value := metric(row)) is not None]
        if rows:
            axis.plot([step for step, _ in rows], list(accumulate(v for _, v in rows)), color=colours[run.name])
    axis.set_xlabel("training steps")


def seconds(row: Mapping[str, Any]) -> float | None:
    """Wall-clock time of a step, its evaluation and its logging."""
    return sum(row.get(f"time/{part}") or 0.0 for part in ("step", "eval", "log")) if "time/step" in row else None


def tokens(row: Mapping[str, Any]) -> float | None:
    """Tokens that the rollouts of a step have."""
    return row["time/tokens_per_second"] * row["time/rollout"] if row.get("time/tokens_per_second") else None


def _band(stem: str, runs: Runs, axis: Axes, colours: Colours) -> None:
    """Median of a figure, and its 5 % and 95 % quantiles as a band."""
    for run in runs:
        rows = [row for row in run.rows if row.get(f"{stem}_p50") is not None]
        x = [row["step"] + 1 for row in rows]
        low, middle, high = ([row[f"{stem}_p{q}"] for row in rows] for q in ("05", "50", "95"))
        if rows:
            axis.plot(x, middle, color=colours[run.name], linewidth=1.8)
            axis.fill_between(x, low, high, color=colours[run.name], alpha=0.15, linewidth=0)
    axis.axhline(1, color="black", linewidth=0.8, zorder=LINE_AT_ZERO)
    axis.set(yscale="log", xlabel="training steps")
    axis.yaxis.set(major_formatter="{x:g}", minor_formatter=NullFormatter())
    bottom, top = axis.get_ylim()
    if top < 10 * bottom:  # too short for the ticks of a logarithmic axis
        axis.yaxis.set(major_locator=MaxNLocator(6), minor_locator=NullLocator(), major_formatter="{x:g}")


def ess(run: RunReport) -> float | None:
    """Effective sample size of the posterior, lambda, at the end; None without noise."""
    return next((row["posterior/ess"] for row in reversed(run.rows) if row.get("posterior/ess")), None)


def draws(run: RunReport) -> float | None:
    """Draws of the weights that generate a step's rollouts, N; 0: the mean weights do. None: no rollouts."""
    return run.config["method"].get("draws") if "method" in run.config else None


def _final(runs: Runs) -> tuple[str, dict[str, float], dict[str, float]]:
    """Final score of each run with its standard error: pass@1 if all have it, else the last tenth's reward."""
    summaries = {run.name: run.summary() for run in runs if "method" in run.config}
    if summaries and all(found["pass_at_1_after"] is not None for found in summaries.values()):
        after = {name: found["pass_at_1_after"] for name, found in summaries.items()}
        return "held-out pass@1", after, {name: found["se_after"] or 0.0 for name, found in summaries.items()}
    rewards = {run.name: [row["reward/mean"] for row in run.rows if row.get("reward/mean") is not None] for run in runs}
    means = {name: statistics.fmean(r[-max(1, len(r) // 10) :]) for name, r in rewards.items() if r}
    return "reward, last tenth of steps", means, dict.fromkeys(means, 0.0)


def _reached(
    x_of: Callable[[RunReport], float | None], scale: str, label: str, runs: Runs, axis: Axes, colours: Colours
) -> None:
    """Plots the final score of runs against one of their settings; runs without it are dashed lines."""
    what, reached, errors = _final(runs)
    settings = {run.name: x_of(run) for run in runs if run.name in reached}
    if len({x for x in settings.values() if x is not None}) < 2:
        return
    axis.set_xscale(scale)
    for name, x in settings.items():
        if x is None:
            axis.axhline(reached[name], color=colours[name], linestyle="--", linewidth=1.3)
        else:
            axis.errorbar([x], [reached[name]], yerr=errors[name], color=colours[name], marker="o", capsize=3)
    axis.set(xlabel=label, ylabel=what)
    axis.set_ylim(bottom=min(0.0, axis.get_ylim()[0]))  # a cropped axis makes small differences look large
    ticks = sorted({x for x in settings.values() if x is not None})
    axis.set_xticks(ticks, [f"{x:g}" for x in ticks])
    axis.xaxis.set_minor_locator(NullLocator())


def learning(runs: Runs) -> list[Panel]:
    """Panels of learning curves: all of a picture, and the first of a page."""
    silent = "All completions of such a prompt earn the same, so it teaches nothing."
    settled = "Falls when a policy settles, on what is right or on what is wrong: no measure of exploration."
    listed = (
        ("reward", "Reward (training rollouts)", "reward/mean", SMOOTHED),
        ("pass_at_1", "Held-out pass@1 ± one standard error", "eval/pass_at_1", ""),
        ("zero_advantage", "Share of prompts without any advantage", "groups/zero_advantage_share", silent),
        ("entropy", "Token entropy (nats)", "policy/entropy", settled),
        ("sft_loss", "Cross-entropy of the targets (nats)", "sft/loss", SMOOTHED),
        ("sft_eval_loss", "Held-out cross-entropy (nats)", "sft/eval_loss", ""),
    )
    return [Panel(name, title, note, partial(_curve, metric, runs)) for name, title, metric, note in listed]


def diagnostics(runs: Runs) -> dict[str, list[Panel]]:
    """Panels beyond the curves, under their headings."""
    dots = "A dot is a run; bars: one standard error; dashed: runs without noise. Runs may differ in more than this."
    rho = "Ratio of a completion's chance under the weights of the gradient and of the rollout: median, 5 to 95 %."
    listed: dict[str, list[tuple[str, str, str, Any]]] = {
        "Settings": [
            ("by_ess", "Reached, by size of the posterior", dots, partial(_reached, ess, "log", "lambda (ess)")),
            ("by_draws", "Reached, by number of draws", dots, partial(_reached, draws, "linear", "draws, N")),
        ],
        "Noise": [
            (
                "kept",
                "Completions kept by the correction",
                f"Share of which at least one token counts. {SMOOTHED}",
                partial(_curve, "correction/kept_share"),
            ),
            ("rho", "Importance ratios (rho)", rho, partial(_band, "correction/rho")),
            (
                "hessian",
                "Hessian over its start",
                "Of all weights: median, 5 to 95 %. At 1, nothing was learnt of their precision.",
                partial(_band, "posterior/hessian"),
            ),
            (
                "sigma",
                "Noise over weights",
                "Root mean square of sigma over that of the weights.",
                partial(_curve, "posterior/sigma_to_rms"),
            ),
        ],
        "Cost": [
            (
                "reward_by_flops",
                "Reward, by compute",
                "As the paper counts: 2 operations per weight and token read or written, 6 per token trained on.",
                partial(_curve, "reward/mean", against="compute/flops"),
            ),
            ("seconds", "Seconds so far", "Wall-clock time, evaluations included.", partial(_total, seconds)),
            ("tokens", "Generated tokens so far", "In the rollouts for training.", partial(_total, tokens)),
        ],
    }
    return {
        heading: [Panel(name, title, note, partial(draw, runs)) for name, title, note, draw in panels]
        for heading, panels in listed.items()
    }


def draw_panel(panel: Panel, axis: Axes, palette: Colours) -> bool:
    """Draw a panel; whether it has data."""
    panel.draw(axis, palette)
    axis.grid(alpha=0.3)
    for line in axis.lines:
        if np.size(line.get_xdata()) == 1 and line.get_marker() == "None":  # a line needs two points to be seen
            line.set(marker="o", markersize=4)
    if axis.get_xlabel().startswith("training step"):
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    return any(line.get_zorder() > LINE_AT_ZERO for line in axis.lines)


def with_data(panels: Sequence[Panel], palette: Colours) -> list[Panel]:
    """Returns the panels that have data."""
    return [panel for panel in panels if draw_panel(panel, Figure().subplots(), palette)]


def picture(panels: Sequence[Panel], palette: Colours, path: Path) -> None:
    """Draw panels that have data into one file, with a legend."""
    with matplotlib.rc_context(STYLE), atomic_file(path) as temporary:
        together(panels, palette).savefig(temporary, dpi=130, format=path.suffix.removeprefix("."))


class Picture(Figure):
    """A figure that a notebook shows without pyplot."""

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.savefig(file, format="png")
        return file.getvalue()


def together(panels: Sequence[Panel], palette: Colours) -> Figure:
    """Panels that have data in one figure, with a legend."""
    columns = min(len(panels), 1 + (len(panels) > 1) + (len(panels) > 4))
    rows, width = -(-len(panels) // columns), 5.5 if columns > 1 else 7
    figure = Picture(figsize=(width * columns, 0.68 * width * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for unused in axes.flat[len(panels) :]:
        unused.set_visible(False)
    for axis, panel in zip(axes.flat, panels, strict=False):
        draw_panel(panel, axis, palette)
        axis.set_title(panel.title, fontsize=11)
    lines = [Line2D([], [], color=colour, linewidth=1.8) for colour in palette.values()]
    figure.legend(lines, list(palette), loc="outside lower center", ncols=min(len(lines), 4), frameon=False)
    return figure


def plot(runs: Runs, path: Path) -> None:
    """Draw the curves of the runs into a PNG, PDF or SVG file; `UserError` for another suffix, or nothing to draw."""
    if path.suffix not in FORMATS:
        raise UserError(f"--output {path}: name a folder for the page, or end the name in {', '.join(FORMATS)}")
    picture(*_curves(runs), path)


def curves(runs: Runs) -> Figure:
    """The curves of the runs in one figure; `UserError` where there is nothing to draw."""
    with matplotlib.rc_context(STYLE):
        return together(*_curves(runs))


def _curves(runs: Runs) -> tuple[list[Panel], dict[str, str]]:
    palette = colours([run.name for run in runs])
    panels = with_data(learning(runs), palette)
    if not panels:
        raise UserError(f"{', '.join(run.name for run in runs)}: no finished step, so there is nothing to draw")
    return panels, palette


def inline_svg(panel: Panel, palette: Colours, variables: Mapping[str, str]) -> str:
    """A panel that has data as an element of a page, whose CSS sets the colours of text and runs.

    `variables` names a CSS variable for each run. Identifiers of groups go: several figures share a page. What the
    page needs to read values off is in data-frame (left, bottom, right, top of the axes, in units of the figure),
    data-limits (their values) and data-scales.
    """
    with matplotlib.rc_context(STYLE | {"svg.hashsalt": panel.name}):
        figure = Figure(figsize=(4.6, 2.9), layout="constrained")
        axis = figure.subplots()
        draw_panel(panel, axis, palette)
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    text = file.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*"', "<g", re.sub(r' (width|height)="[\d.]+pt"', "", text))
    for name, variable in variables.items():
        text = text.replace(palette[name], f"var({variable})")
    (left, bottom), (right, top) = axis.get_position().get_points() * figure.get_size_inches() * POINTS
    height = figure.get_figheight() * POINTS
    values = {
        "frame": f"{left:g} {height - bottom:g} {right:g} {height - top:g}",
        "limits": " ".join(f"{limit!r}" for limit in map(float, (*axis.get_xlim(), *axis.get_ylim()))),
        "scales": f"{axis.get_xscale()} {axis.get_yscale()}",
    }
    about = " ".join(f'data-{name}="{value}"' for name, value in values.items())
    opening = f'<svg role="img" aria-label="{panel.title}" {about}'
    return text.replace("#000000", "currentColor").replace("<svg", opening, 1)
