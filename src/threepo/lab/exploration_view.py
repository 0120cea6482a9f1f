"""The tables and the picture of an exploration analysis, from what `explore` returns."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from rich.table import Column, Table

from threepo.lab.exploration import BAD
from threepo.lab.figures import LINE_AT_ZERO, SMOOTHED, Colours, Panel, colours, picture, smooth, with_data

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


def exploration_panels(comparison: Mapping[str, Any]) -> list[Panel]:
    """The panels of an exploration analysis; each run and the baseline have a colour."""
    heldout = all("heldout" in run for run in comparison["runs"].values())
    of = "held-out problems" if heldout else "training rollouts, last third"
    fewer = "Groups won, of those that are not ties: fewer such completions than the baseline. Bars: 95 % intervals."
    second = "What a completion of another draw adds to one of the same draw; above zero: the draws differ."
    silent = f"Solid: all wrong; dashed: all right. {SMOOTHED}"
    if not comparison.get("by_draw"):
        silent += " A group is all that a prompt got; M3PO credits each draw alone, which explore --by-draw shows."
    listed = (
        ("rescued", "Groups rescued so far", "Dashed: rescued; dotted: lost; solid: the difference.", _rescued),
        ("win_rates", "Win rate: fewer bad rollouts", fewer, _win_rates),
        ("no_signal", "Groups without a signal", silent, _without_signal),
        ("second_draw", "Pairs of two draws minus pairs of one draw", second, _second_draw),
        ("pass_at_k", f"pass@k, {of}", "Bands: 95 % intervals.", _pass_curves),
        ("entropy", "Token entropy (nats): no measure of exploration", "", _entropy),
    )
    return [Panel(name, title, note, partial(draw, comparison)) for name, title, note, draw in listed]


def plot_exploration(comparison: Mapping[str, Any], path: Path) -> None:
    """Draw a comparison into a PNG file: a panel for each question, a colour for each run, black for the baseline."""
    palette = {comparison["baseline"]: "black", **colours(list(comparison["runs"]))}
    picture(with_data(exploration_panels(comparison), palette), palette, path)


def _rescued(comparison: Mapping[str, Any], axis: Axes, colours: Colours) -> None:
    for name, run in comparison["runs"].items():
        curves = run["curves"]
        net = [won - lost for won, lost in zip(curves["rescued"], curves["lost"], strict=True)]
        axis.plot(curves["step"], net, color=colours[name])
        axis.plot(curves["step"], curves["rescued"], color=colours[name], alpha=0.6, linestyle="--")
        axis.plot(curves["step"], [-lost for lost in curves["lost"]], color=colours[name], alpha=0.6, linestyle=":")
    axis.axhline(0, color="black", linewidth=1, zorder=LINE_AT_ZERO)
    axis.set(xlabel="training step")


def _win_rates(comparison: Mapping[str, Any], axis: Axes, colours: Colours) -> None:
    labels = [(kind, phase) for kind in BAD for phase in ("early", "late")]
    for i, (name, run) in enumerate(comparison["runs"].items()):
        for x, (kind, phase) in enumerate(labels):
            found = run["phases"][phase].get(f"{kind}/win_rate")
            _point(axis, x + _shift(i, len(comparison["runs"])), found, colours[name])
    axis.axhline(0.5, color="black", linewidth=1, zorder=LINE_AT_ZERO)
    axis.set_xticks(range(len(labels)), [f"{kind}_{phase}".replace("_", "\n") for kind, phase in labels], fontsize=9)
    axis.set(ylim=(-0.02, 1.02), xlim=(-0.5, len(labels) - 0.5))


def _without_signal(comparison: Mapping[str, Any], axis: Axes, colours: Colours) -> None:
    for side, run, colour, label in _lines(comparison, colours):
        steps = run["curves"]["step"]
        for kind, style in (("all_wrong", "-"), ("all_right", "--")):
            shares = smooth(run["curves"][f"{kind}/{side}"])
            axis.plot(steps, shares, color=colour, linestyle=style, linewidth=1.3)
            if kind == "all_wrong":
                axis.text(steps[-1], shares[-1], label, color=colour, fontsize=8, ha="right", va="bottom")
    axis.set(xlabel="training step", ylim=(-0.02, 1.02))


def _second_draw(comparison: Mapping[str, Any], axis: Axes, colours: Colours) -> None:
    labels = ("text_distance", "two_answers", "one_right")
    for i, (name, run) in enumerate(comparison["runs"].items()):
        for x, label in enumerate(labels):
            found = run["phases"]["all"].get(f"second/{label}/difference")
            _point(axis, x + _shift(i, len(comparison["runs"])), found, colours[name])
    axis.axhline(0, color="black", linewidth=1, zorder=LINE_AT_ZERO)
    axis.set_xticks(range(len(labels)), [label.replace("_", " ") for label in labels])
    axis.set(xlim=(-0.5, len(labels) - 0.5))


def _pass_curves(comparison: Mapping[str, Any], axis: Axes, colours: Colours) -> None:
    for side, run, colour, label in _lines(comparison, colours):
        curve = _pass_at_k(run.get("heldout", run["phases"]["late"]), side)
        ks = [k for k, _ in curve]
        axis.plot(ks, [found["value"] for _, found in curve], color=colour, marker="o", markersize=3)
        axis.text(ks[-1], curve[-1][1]["value"], label, color=colour, fontsize=8, ha="right", va="bottom")
        low, high = zip(*(found["interval"] for _, found in curve), strict=True)
        axis.fill_between(ks, low, high, color=colour, alpha=0.12)
        axis.set_xscale("log", base=2)
        axis.set_xticks(ks, map(str, ks))
    axis.set(xlabel="k", ylim=(-0.02, 1.02))


def _entropy(comparison: Mapping[str, Any], axis: Axes, colours: Colours) -> None:
    for side, run, colour, _ in _lines(comparison, colours):
        if (entropy := run["entropy"][side])["step"]:
            axis.plot(entropy["step"], entropy["nats"], color=colour, linewidth=1.3)
    axis.set(xlabel="training step")


def _lines(comparison: Mapping[str, Any], colours: Colours) -> list[tuple[str, Run, str, str]]:
    """Lines of the figure as (side, pairing, colour, label); the baseline has one for each size and steps compared."""
    runs: Mapping[str, Run] = comparison["runs"]
    pairings = {(*run["group_sizes"]["compared"], *run["curves"]["step"]): run for run in runs.values()}
    lines = []
    for run in pairings.values():
        sizes = ", ".join(map(str, run["group_sizes"]["compared"]))
        label = f"groups of {sizes}, {run['steps']} steps" if len(pairings) > 1 else ""
        lines.append(("baseline", run, colours[comparison["baseline"]], label))
    return lines + [("run", run, colours[name], "") for name, run in runs.items()]


def _point(axis: Any, x: float, found: Any, colour: Any) -> None:
    """A value with its interval, if it is known."""
    if found and found["value"] is not None:
        axis.vlines(x, *found["interval"], color=colour)
        axis.plot(x, found["value"], color=colour, marker="o", markersize=5)


def _shift(i: int, n: int) -> float:
    return 0.6 * ((i + 0.5) / n - 0.5)
