"""Figures of the laboratory: panels of curves with intervals, each drawn alone or several in one picture.

A panel is data. Whoever draws it says which colour each curve has.
"""

import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, NullFormatter, NullLocator

from threepo.files import atomic_file

SHARE = {"ylim": (-0.02, 1.02)}
"""Axes of a panel whose values lie between 0 and 1."""
COLOURS = "1f6fb4 c8500a 1a8a3e b3246b 6a4bc4 8a6a00 00808a 8c3b2e 5b6470 4d7300"
DARK_COLOURS = "6cb4f5 ff9a5c 5fd38a f58abf b09bff e0c04c 4fd6df e08a78 b4bcc8 a8d44a"
"""Colours of up to ten runs on a light and on a dark ground; more runs have colours spread over all hues."""
STYLE = {"text.parse_math": False, "axes.spines.top": False, "axes.spines.right": False, "svg.fonttype": "none"}
"""Names of runs are text, dollar signs and all."""
POINTS = 72
"""Units of an SVG's coordinates in an inch."""
Palette = Mapping[str, str]
"""Colour by the name of a curve."""


@dataclass(frozen=True)
class Curve:
    """Estimates of whatever has a name and a colour, such as a run; with intervals if `low` and `high` are given."""

    name: str
    """Key in the palette; several curves may have the same."""
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    bars: bool = False
    """Estimates are dots, and intervals bars instead of a band."""
    opacity: float = 0.15
    """Opacity of the band."""
    label: str = ""
    """Text at the end of the curve."""
    style: Mapping[str, Any] = field(default_factory=dict)
    """matplotlib's properties of a line."""


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    name: str
    """Name of its file."""
    title: str
    note: str
    """A sentence that tells the reader what it shows."""
    curves: Sequence[Curve]
    xlabel: str = "training steps"
    level: float | None = None
    """Value with a horizontal line, such as zero."""
    ticks: Mapping[float, str] = field(default_factory=dict)
    """Labels of the horizontal axis, if they are not its numbers."""
    axes: Mapping[str, Any] = field(default_factory=dict)
    """matplotlib's properties of axes, such as limits and scales."""
    legend: bool = False
    """Names of its curves stand beside it, the last one on top."""


def colours(names: Sequence[str], *, dark: bool = False) -> dict[str, str]:
    """A colour for each name, as #rrggbb; no two are the same."""
    chosen = [f"#{colour}" for colour in (DARK_COLOURS if dark else COLOURS).split()]
    if len(names) > len(chosen):
        tone = (0.5, 0.95) if dark else (0.85, 0.55)  # saturation and value that stand out from the ground
        hues = (matplotlib.colors.hsv_to_rgb((i / len(names), *tone)) for i in range(len(names)))
        chosen = [matplotlib.colors.to_hex(hue) for hue in hues]
    return dict(zip(names, chosen[: len(names)], strict=True))


def with_data(panels: Iterable[Panel]) -> list[Panel]:
    """Returns the panels that have data."""
    return [panel for panel in panels if panel.curves]


def draw_panel(panel: Panel, axis: Axes, palette: Palette) -> None:
    """Draw a panel that has data."""
    for curve in panel.curves:
        _draw_curve(curve, axis, palette[curve.name])
    if panel.level is not None:
        axis.axhline(panel.level, color="black", linewidth=0.8, zorder=1)
    if panel.legend:
        lines = [Line2D([], [], color=palette[curve.name], linewidth=5) for curve in reversed(panel.curves)]
        names = [curve.name for curve in reversed(panel.curves)]
        axis.legend(lines, names, loc="center left", bbox_to_anchor=(1, 0.5), fontsize=7, frameon=False)
    axis.grid(alpha=0.3)
    axis.set(xlabel=panel.xlabel, **panel.axes)
    for direction in (axis.xaxis, axis.yaxis):
        if direction.get_scale() == "log":
            _plain_numbers(direction)
    if axis.get_yscale() == "linear" and "ylim" not in panel.axes:
        _follow_lines(panel, axis)
    if panel.ticks:
        axis.set_xticks(list(panel.ticks), list(panel.ticks.values()))
        axis.xaxis.set_minor_locator(NullLocator())
    elif panel.xlabel.startswith("training step"):
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def _draw_curve(curve: Curve, axis: Axes, colour: str) -> None:
    style: dict[str, Any] = {"color": colour, "linewidth": 1.6, "markersize": 4, **curve.style}
    if curve.bars or len(curve.x) == 1:  # a line needs two points to be seen
        style = {"marker": "o", **style}
    if curve.bars and curve.low:
        errors = np.maximum([np.subtract(curve.y, curve.low), np.subtract(curve.high, curve.y)], 0)
        axis.errorbar(curve.x, curve.y, yerr=errors, capsize=3, elinewidth=1, **style)
    else:
        axis.plot(curve.x, curve.y, **style)
    if curve.low and not curve.bars:
        axis.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=curve.opacity, linewidth=0)
    if curve.label:
        axis.text(curve.x[-1], curve.y[-1], curve.label, color=colour, fontsize=8, ha="right", va="bottom")


def _plain_numbers(direction: Axis) -> None:
    """Labels of a logarithmic axis, also where it is too short for its own ticks."""
    direction.set(major_formatter="{x:g}", minor_formatter=NullFormatter())
    low, high = direction.get_view_interval()
    if high < 10 * low:
        direction.set(major_locator=MaxNLocator(6), minor_locator=NullLocator(), major_formatter="{x:g}")


def _follow_lines(panel: Panel, axis: Axes) -> None:
    """Show bands up to half the height of all lines beyond them: with few seeds, a band can be many times as high."""
    values = [value for curve in panel.curves if not curve.bars for value in curve.y]
    if values:
        pad = 0.5 * (max(values) - min(values)) or 0.05
        bottom, top = axis.get_ylim()
        axis.set_ylim(max(bottom, min(values) - pad), min(top, max(values) + pad))


def picture(panels: Sequence[Panel], palette: Palette, path: Path) -> None:
    """Draw panels that have data into one file, with a legend."""
    with matplotlib.rc_context(STYLE), atomic_file(path) as temporary:
        together(panels, palette).savefig(temporary, dpi=130, format=path.suffix.removeprefix("."))


class Picture(Figure):
    """A figure that a notebook shows without pyplot."""

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.savefig(file, format="png")
        return file.getvalue()


def together(panels: Sequence[Panel], palette: Palette) -> Figure:
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
    if not all(panel.legend for panel in panels):
        lines = [Line2D([], [], color=colour, linewidth=1.8) for colour in palette.values()]
        figure.legend(lines, list(palette), loc="outside lower center", ncols=min(len(lines), 4), frameon=False)
    return figure


def inline_svg(panel: Panel, palette: Palette, runs: Sequence[str] = ()) -> str:
    """A panel that has data as an element of a page, whose CSS sets the colours of text and runs.

    The colour of the i-th of `runs` becomes the variable --line-i. Identifiers of groups go: several figures share a
    page. The points of solid curves are in data-curves: i, and for each point its place from the left, x and y.
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
    numbers = {palette[name]: i for i, name in enumerate(runs)}
    for colour, i in numbers.items():
        text = text.replace(colour, f"var(--line-{i})")
    solid = [curve for curve in panel.curves if len(curve.x) > 1 and not curve.style.keys() & {"alpha", "linestyle"}]
    of_runs = [(numbers[palette[curve.name]], curve) for curve in solid if palette[curve.name] in numbers]
    curves = json.dumps([[i, _points_on_page(curve, axis)] for i, curve in of_runs])
    opening = f'<svg role="img" aria-label="{escape(panel.title)}" data-curves="{curves}"'
    return text.replace("#000000", "currentColor").replace("<svg", opening, 1)


def _points_on_page(curve: Curve, axis: Axes) -> list[list[float]]:
    """The finite points of a curve: place from the left of its figure, x and y, with four digits."""
    points = np.column_stack([curve.x, curve.y]).astype(float)
    places = axis.transData.transform(points)[:, :1] * POINTS / axis.figure.dpi
    finite = np.isfinite(points).all(axis=1)
    return [[float(f"{value:.4g}") for value in row] for row in np.hstack([places, points])[finite].tolist()]
