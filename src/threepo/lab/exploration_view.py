"""The tables and the picture of an exploration analysis, from what `explore` returns."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from threepo.evaluation.scores import ks_up_to
from threepo.evaluation.tables import number, table, with_interval
from threepo.lab.curves import SMOOTHED, SMOOTHING
from threepo.lab.exploration import BAD, PHASES
from threepo.lab.figures import SHARE, Curve, Panel, colours, picture, with_data
from threepo.lab.statistics import running_means

STEP = "training step"
OUTCOMES = ("wins", "losses", "ties")
Comparison = Mapping[str, Any]
"""Result of `explore`."""
Figures = Mapping[str, Any]
"""Value and interval by the name of the figure."""


def exploration_tables(comparison: Comparison) -> list[Table]:
    """Tables of each run: groups and win rates by phase, and means."""
    tables = []
    for name, run in comparison["runs"].items():
        tables += [_outcomes(_title(name, comparison), run["phases"]), _means(f"{name}: means", run["phases"]["all"])]
    return tables


def _title(name: str, comparison: Comparison) -> str:
    run = comparison["runs"][name]
    sizes = {side: ", ".join(map(str, found)) for side, found in run["group_sizes"].items()}
    title = f"{name} against {comparison['baseline']}: {run['pairs']:,} groups at {run['steps']} common steps"
    if len(set(sizes.values())) > 1:
        title += f"; groups of {sizes['baseline']} and {sizes['run']}, compared at {sizes['compared']}"
    return f"{title}; numbers of groups, win rates in %"


def _outcomes(title: str, phases: Mapping[str, Figures]) -> Table:
    """Groups rescued and lost, and win rates with what they are made of."""
    rescued = []
    for figure in ("rescued", "lost", "rescued_minus_lost"):
        counts = {phase: _count(figures[figure]) for phase, figures in phases.items()}
        rescued.append({"": figure.replace("_minus_", " - "), **counts})
    sections = [rescued]
    for kind in BAD:
        if phases["all"][f"{kind}/win_rate"]["value"] is None:  # it was not recorded, or every group ties
            continue
        rates, counts = {"": kind.replace("_", " ")}, {"": "  won/lost/tied"}
        for phase, figures in phases.items():
            rates[phase] = _estimate(figures[f"{kind}/win_rate"], ".1f", 100)
            values = [figures[f"{kind}/{outcome}"]["value"] for outcome in OUTCOMES]
            counts[phase] = "/".join(f"{round(value, 1):g}" for value in values)
        sections.append([rates, counts])
    return table(title, *sections)


def _means(title: str, figures: Figures) -> Table:
    """The means of both sides and their difference."""
    rows = []
    for figure, found in figures.items():
        stem, _, last = figure.partition("/")
        if last == "difference" and found["value"] is not None:
            means = {side: number(figures[f"{stem}/{side}"]["value"], ".3f") for side in ("baseline", "run")}
            label = stem.replace("_at_", "@").replace("_", " ")
            rows.append({"": label, **means, "difference": _estimate(found, "+.3f")})
    return table(title, rows, columns=("", "baseline", "run", "difference"))


def _count(figure: Mapping[str, Any]) -> str:
    return _estimate(figure, ".1f" if abs(figure["value"]) < 100 else ".0f")


def _estimate(figure: Mapping[str, Any], form: str, scale: float = 1) -> str:
    return with_interval(figure["value"], figure["interval"], form, scale)


def exploration_panels(comparison: Comparison) -> list[Panel]:
    """The panels of an exploration analysis; each run and the baseline have a colour."""
    rescued = "Dashed: rescued; dotted: lost; solid: the difference."
    silent = f"Solid: all wrong; dashed: all right. {SMOOTHED} A group is all that a prompt got, also with M3PO."
    passes = _pass_curves(comparison)
    ks = {k: f"{k:g}" for curve in passes for k in curve.x}
    title, by_k = "pass@k, training rollouts, last third", {"xscale": "log", **SHARE}
    return [
        Panel("rescued", "Groups rescued so far", rescued, _rescued(comparison), STEP, level=0),
        _win_rates(comparison),
        Panel("no_signal", "Groups without a signal", silent, _without_signal(comparison), STEP, axes=SHARE),
        Panel("pass_at_k", title, "Bands: 95 % intervals.", passes, "k", ticks=ks, axes=by_k),
    ]


def plot_exploration(comparison: Comparison, path: Path) -> None:
    """Draw a comparison into a PNG file: a panel for each question, a colour for each run, black for the baseline."""
    palette = {comparison["baseline"]: "black", **colours(list(comparison["runs"]))}
    picture(with_data(exploration_panels(comparison)), palette, path)


def _rescued(comparison: Comparison) -> list[Curve]:
    found = []
    for name, run in comparison["runs"].items():
        steps, rescued, lost = (run["curves"][key] for key in ("step", "rescued", "lost"))
        net = [won - gone for won, gone in zip(rescued, lost, strict=True)]
        found += [
            Curve(name, steps, net),
            Curve(name, steps, rescued, style={"alpha": 0.6, "linestyle": "--"}),
            Curve(name, steps, [-gone for gone in lost], style={"alpha": 0.6, "linestyle": ":"}),
        ]
    return found


def _win_rates(comparison: Comparison) -> Panel:
    """The win rates of each kind and phase side by side; a dot with its interval for each run."""
    note = "Groups won, of those that are not ties: fewer such completions than the baseline. Bars: 95 % intervals."
    places = [(kind, phase) for kind in BAD for phase in PHASES[1:]]
    dots = []
    for i, (name, run) in enumerate(comparison["runs"].items()):
        shift = 0.6 * ((i + 0.5) / len(comparison["runs"]) - 0.5)
        for x, (kind, phase) in enumerate(places):
            rate = run["phases"][phase][f"{kind}/win_rate"]
            if rate["value"] is not None:
                low, high = rate["interval"]
                dots.append(Curve(name, [x + shift], [rate["value"]], [low], [high], bars=True))
    ticks: dict[float, str] = {x: f"{kind}_{phase}".replace("_", "\n") for x, (kind, phase) in enumerate(places)}
    axes = {"xlim": (-0.5, len(places) - 0.5), **SHARE}
    return Panel("win_rates", "Win rate: fewer bad rollouts", note, dots, "", ticks=ticks, axes=axes, level=0.5)


def _without_signal(comparison: Comparison) -> list[Curve]:
    found = []
    for side, run, name, label in _sides(comparison):
        wrong, right = (running_means(run["curves"][f"{end}/{side}"], SMOOTHING) for end in ("all_wrong", "all_right"))
        found.append(Curve(name, run["curves"]["step"], wrong, label=label))
        found.append(Curve(name, run["curves"]["step"], right, style={"linestyle": "--"}))
    return found


def _pass_curves(comparison: Comparison) -> list[Curve]:
    found = []
    for side, run, name, label in _sides(comparison):
        figures = run["phases"]["late"]
        ks = [k for k in ks_up_to(min(run["group_sizes"]["compared"])) if f"pass_at_{k}/{side}" in figures]
        estimates = [figures[f"pass_at_{k}/{side}"] for k in ks]
        low, high = zip(*(estimate["interval"] for estimate in estimates), strict=True)
        values = [estimate["value"] for estimate in estimates]
        found.append(Curve(name, ks, values, low, high, label=label, style={"marker": "o"}))
    return found


def _sides(comparison: Comparison) -> list[tuple[str, Mapping[str, Any], str, str]]:
    """Lines of a panel as (side, analysis, name, label); the baseline has one for each size and steps compared."""
    analyses: Mapping[str, Mapping[str, Any]] = comparison["runs"]
    pairings = {(*run["group_sizes"]["compared"], *run["curves"]["step"]): run for run in analyses.values()}
    lines = []
    for run in pairings.values():
        sizes = ", ".join(map(str, run["group_sizes"]["compared"]))
        label = f"groups of {sizes}, {run['steps']} steps" if len(pairings) > 1 else ""
        lines.append(("baseline", run, comparison["baseline"], label))
    return lines + [("run", run, name, "") for name, run in analyses.items()]
