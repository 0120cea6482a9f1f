"""The tables and the picture of an exploration analysis, from what `explore` returns."""

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.table import Column, Table

from threepo.analysis.exploration import BAD
from threepo.analysis.report import SMOOTHING
from threepo.files import atomic_file

LINE_AT_ZERO = 1
"""Depth of the lines that mark zero and one half, below all data."""
OUTCOMES = ("wins", "losses", "ties")
Run = Mapping[str, Any]
Figures = Mapping[str, Any]
"""Value and interval by name."""


def exploration_tables(comparison: Mapping[str, Any]) -> list[Table]:
    """For each run: groups and win rates by phase, means beside the baseline's, two draws beside one, held-out ones."""
    tables = []
    for name, run in comparison["runs"].items():
        sizes, phases = {side: ", ".join(map(str, found)) for side, found in run["group_sizes"].items()}, run["phases"]
        title = f"{name} against {comparison['baseline']}: {run['pairs']:,} groups at {run['steps']} common steps"
        if len(set(sizes.values())) > 1:
            title += f"; groups of {sizes['baseline']} and {sizes['run']}, compared at {sizes['compared']}"
        tables += [_outcomes(title, phases), _means(f"{name}: means", phases["all"], ("baseline", "run"))]
        second = {key[7:]: found for key, found in phases["all"].items() if key.startswith("second/")}
        if any(found["value"] is not None for key, found in second.items() if key.endswith("other_draw")):
            title = f"{name}: pairs of completions of the same draw, and of two draws"
            tables.append(_means(title, second, ("same_draw", "other_draw")))
        if "heldout" in run:
            tables.append(_means(f"{name}: held-out problems", run["heldout"], ("baseline", "run")))
    return tables


def _outcomes(title: str, phases: Mapping[str, Figures]) -> Table:
    """Groups rescued and lost, and win rates in per cent with what they are made of."""
    table = Table(Column(no_wrap=True), *(Column(phase, justify="right") for phase in phases), title=title)
    for figure in ("rescued", "lost", "rescued_minus_lost"):
        table.add_row(figure.replace("_minus_", " - "), *(_counted(part[figure]) for part in phases.values()))
    for kind in BAD:
        parts = [{name: part[f"{kind}/{name}"] for name in (*OUTCOMES, "win_rate")} for part in phases.values()]
        if parts[0]["ties"]["value"] is not None:
            table.add_section()
            table.add_row(
                f"{kind.replace('_', ' ')}, won %", *(_estimate(part["win_rate"], ".1f", 100) for part in parts)
            )
            counts = ("/".join(f"{round(part[name]['value'], 1):g}" for name in OUTCOMES) for part in parts)
            table.add_row("  won/lost/tied", *counts)
    return table


def _means(title: str, figures: Figures, sides: tuple[str, str]) -> Table:
    """The means of both sides and their difference; of pass@k, only the first and the last."""
    heads = [side.replace("_", " ") for side in sides] + ["difference"]
    table = Table("", *(Column(head, justify="right") for head in heads), title=title)
    for figure in (name for name in ("gained", "lost") if "gained" in figures):
        table.add_row(figure, "", "", _counted(figures[figure]))
    ks = [k for k, _ in _pass_at_k(figures, sides[1])]
    for figure, found in figures.items():
        stem, _, last = figure.partition("/")
        hidden = stem.startswith("pass_at_") and int(stem.removeprefix("pass_at_")) not in (ks[0], ks[-1])
        if last == "difference" and found["value"] is not None and not hidden:
            ends = (f"{figures[f'{stem}/{side}']['value']:.3f}" for side in sides)
            table.add_row(stem.replace("_at_", "@").replace("_", " "), *ends, _estimate(found, "+.3f"))
    return table


def _counted(found: Figures) -> str:
    return _estimate(found, ".1f" if abs(found["value"]) < 100 else ".0f")


def _estimate(found: Figures, form: str, scale: float = 1) -> str:
    """A value with its interval."""
    if found["value"] is None:
        return "-"
    low, high = found["interval"]
    return f"{scale * found['value']:{form}} {scale * low:{form}}..{scale * high:{form}}"


def _pass_at_k(figures: Figures, side: str) -> list[tuple[int, Any]]:
    """The figures pass_at_K/SIDE with their K, in its order."""
    found = [(name.removeprefix("pass_at_").partition("/"), figure) for name, figure in figures.items()]
    return sorted((int(k), figure) for (k, _, end), figure in found if k.isdecimal() and end == side)


def plot_exploration(comparison: Mapping[str, Any], path: Path) -> None:
    """Draw a comparison into a PNG file: six panels, a colour for each run."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 3, figsize=(15, 8), layout="constrained")
    runs: Mapping[str, Run] = comparison["runs"]
    chosen = plt.get_cmap("tab10" if len(runs) <= 10 else "turbo", max(len(runs), 10))
    colours = {name: chosen(i) for i, name in enumerate(runs)}
    _rescued(axes[0, 0], runs, colours)
    _win_rates(axes[0, 1], runs, colours)
    _without_signal(axes[0, 2], runs, colours)
    _second_draw(axes[1, 0], runs, colours)
    _pass_curves(axes[1, 1], runs, colours)
    _entropy(axes[1, 2], runs, colours)
    for axis in axes.flat:
        if not any(line.get_zorder() > LINE_AT_ZERO for line in axis.lines):
            axis.set(xticks=[], yticks=[])
            axis.text(0.5, 0.6, "no data", transform=axis.transAxes, ha="center", color="grey")
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    handles = [plt.Line2D([], [], color="black", label="baseline")]
    handles += [plt.Line2D([], [], color=colour, label=name) for name, colour in colours.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 5), frameon=False)
    with atomic_file(path) as temporary:
        figure.savefig(temporary, dpi=130, format="png")
    plt.close(figure)


def _rescued(axis: Any, runs: Mapping[str, Run], colours: Mapping[str, Any]) -> None:
    for name, run in runs.items():
        curves = run["curves"]
        net = [won - lost for won, lost in zip(curves["rescued"], curves["lost"], strict=True)]
        axis.plot(curves["step"], net, color=colours[name])
        axis.plot(curves["step"], curves["rescued"], color=colours[name], alpha=0.4, linestyle="--")
        axis.plot(curves["step"], [-lost for lost in curves["lost"]], color=colours[name], alpha=0.4, linestyle=":")
    axis.axhline(0, color="black", linewidth=1, zorder=LINE_AT_ZERO)
    axis.set(title="Groups rescued so far (dashed), lost (dotted), difference", xlabel="training step")


def _win_rates(axis: Any, runs: Mapping[str, Run], colours: Mapping[str, Any]) -> None:
    labels = [(kind, phase) for kind in BAD for phase in ("early", "late")]
    for i, (name, run) in enumerate(runs.items()):
        for x, (kind, phase) in enumerate(labels):
            found = run["phases"][phase].get(f"{kind}/win_rate")
            _point(axis, x + _shift(i, len(runs)), found, colours[name])
    axis.axhline(0.5, color="black", linewidth=1, zorder=LINE_AT_ZERO)
    axis.set_xticks(range(len(labels)), [f"{kind}_{phase}".replace("_", "\n") for kind, phase in labels], fontsize=9)
    axis.set(
        title="Win rate against the baseline: fewer bad rollouts", ylim=(-0.02, 1.02), xlim=(-0.5, len(labels) - 0.5)
    )


def _without_signal(axis: Any, runs: Mapping[str, Run], colours: Mapping[str, Any]) -> None:
    for side, run, colour in _lines(runs, colours):
        for kind, style in (("all_wrong", "-"), ("all_right", "--")):
            shares = run["curves"][f"{kind}/{side}"]
            smooth = [fmean(shares[max(0, i - SMOOTHING + 1) : i + 1]) for i in range(len(shares))]
            axis.plot(run["curves"]["step"], smooth, color=colour, linestyle=style, linewidth=1.3)
    title = f"Groups all wrong (solid), right (dashed), {SMOOTHING}-step mean"
    axis.set(title=title, xlabel="training step", ylim=(-0.02, 1.02))


def _second_draw(axis: Any, runs: Mapping[str, Run], colours: Mapping[str, Any]) -> None:
    labels = ("text_distance", "two_answers", "one_right")
    for i, (name, run) in enumerate(runs.items()):
        for x, label in enumerate(labels):
            found = run["phases"]["all"].get(f"second/{label}/difference")
            _point(axis, x + _shift(i, len(runs)), found, colours[name])
    axis.axhline(0, color="black", linewidth=1, zorder=LINE_AT_ZERO)
    axis.set_xticks(range(len(labels)), [label.replace("_", " ") for label in labels])
    axis.set(title="Pairs of two draws minus pairs of one draw", xlim=(-0.5, len(labels) - 0.5))


def _pass_curves(axis: Any, runs: Mapping[str, Run], colours: Mapping[str, Any]) -> None:
    heldout = all("heldout" in run for run in runs.values())
    for side, run, colour in _lines(runs, colours):
        curve = _pass_at_k(run["heldout"] if heldout else run["phases"]["late"], side)
        ks = [k for k, _ in curve]
        axis.plot(ks, [found["value"] for _, found in curve], color=colour, marker="o", markersize=3)
        low, high = zip(*(found["interval"] for _, found in curve), strict=True)
        axis.fill_between(ks, low, high, color=colour, alpha=0.12)
        axis.set_xscale("log", base=2)
        axis.set_xticks(ks, map(str, ks))
    of = "held-out problems" if heldout else "training rollouts, last third"
    axis.set(title=f"pass@k, {of}", xlabel="k", ylim=(-0.02, 1.02))


def _entropy(axis: Any, runs: Mapping[str, Run], colours: Mapping[str, Any]) -> None:
    for side, run, colour in _lines(runs, colours):
        if (entropy := run["entropy"][side])["step"]:
            axis.plot(entropy["step"], entropy["nats"], color=colour, linewidth=1.3)
    axis.set(title="Token entropy (nats): no measure of exploration", xlabel="training step")


def _lines(runs: Mapping[str, Run], colours: Mapping[str, Any]) -> list[tuple[str, Run, Any]]:
    """What has a line: the baseline, as paired with the first run, and every run; with the side it is on."""
    return [("baseline", next(iter(runs.values())), "black"), *(("run", run, colours[n]) for n, run in runs.items())]


def _point(axis: Any, x: float, found: Any, colour: Any) -> None:
    """A value with its interval, if it is known."""
    if found and found["value"] is not None:
        axis.vlines(x, *found["interval"], color=colour)
        axis.plot(x, found["value"], color=colour, marker="o", markersize=5)


def _shift(i: int, n: int) -> float:
    return 0.6 * ((i + 0.5) / n - 0.5)
