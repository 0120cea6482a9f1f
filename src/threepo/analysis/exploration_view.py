"""The tables and the picture of an exploration analysis, from what `explore` returns."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Column, Table

from threepo.files import atomic_file

COUNTS = ("rescued", "lost", "rescued_minus_lost", "gained", "gained_minus_lost")
Run = Mapping[str, Any]


def exploration_tables(comparison: Mapping[str, Any]) -> list[Table]:
    """For each run: against the baseline, a second draw against a second completion, and on held-out problems."""
    tables = []
    for name, run in comparison["runs"].items():
        sizes, parts = run["group_sizes"], run["phases"]
        title = f"{name} against {comparison['baseline']}: {run['pairs']:,} groups at {run['steps']} common steps"
        if sizes["baseline"] != sizes["run"] or sizes["run"] != sizes["compared"]:
            title += f"; groups of {_list(sizes['baseline'])} and {_list(sizes['run'])}, at {_list(sizes['compared'])}"
        tables.append(_table(title, parts, ("baseline", "run")))
        second = {p: {k[7:]: v for k, v in figures.items() if k.startswith("second/")} for p, figures in parts.items()}
        if any(figure["value"] is not None for key, figure in second["all"].items() if key.endswith("other_draw")):
            title = f"{name}: a second completion, of the same draw or of another one"
            tables.append(_table(title, second, ("same_draw", "other_draw")))
        if "heldout" in run:
            tables.append(_table(f"{name}: held-out problems", {"all": run["heldout"]}, ("baseline", "run")))
    return tables


def _table(title: str, parts: Mapping[str, Mapping[str, Any]], sides: tuple[str, str]) -> Table:
    """Both sides over all steps, and their difference, win rate or count in every phase."""
    heads = [side.replace("_", " ") for side in sides] + [f"difference, {part}" for part in parts]
    table = Table(Column(no_wrap=True), *(Column(head, justify="right") for head in heads), title=title)
    largest = max((k for k, _ in _pass_at_k(parts["all"], sides[0])), default=0)
    for figure, found in parts["all"].items():
        stem, _, last = figure.partition("/")
        hidden = stem.startswith("pass_at_") and stem not in ("pass_at_1", f"pass_at_{largest}")
        known = parts["all"][f"{stem}/ties"]["value"] if last == "win_rate" else found["value"]
        if known is None or hidden or not (figure in COUNTS or last in ("difference", "win_rate")):
            continue
        label = stem.replace("_at_", "@").replace("_", " ")
        ends = [parts["all"][f"{stem}/{side}"]["value"] for side in sides] if last == "difference" else []
        cells = [f"{value:.3f}" for value in ends] or ["", ""]
        label += ": win rate\n  (won/lost/tied)" if last == "win_rate" else ""
        table.add_row(label, *cells, *(_cell(part, figure) for part in parts.values()))
    return table


def _cell(part: Mapping[str, Any], figure: str) -> str:
    """A figure with its interval, and what a win rate is made of."""
    form = ".1f" if figure in COUNTS else "+.3f" if figure.endswith("difference") else ".3f"
    value, interval = part[figure]["value"], part[figure]["interval"]
    text = "-" if value is None else f"{value:{form}} {'..'.join(format(bound, form) for bound in interval)}"
    if figure.endswith("/win_rate"):
        counts = (part[figure.replace("win_rate", name)]["value"] for name in ("wins", "losses", "ties"))
        text += "\n" + "/".join(f"{round(count, 1):g}" for count in counts)
    return text


def _pass_at_k(figures: Mapping[str, Any], side: str) -> list[tuple[int, Any]]:
    """The figures pass_at_K/SIDE with their K, in its order."""
    found = [(name.removeprefix("pass_at_").partition("/"), figure) for name, figure in figures.items()]
    return sorted((int(k), figure) for (k, _, end), figure in found if k.isdecimal() and end == side)


def _list(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes))


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
    axis.axhline(0, color="black", linewidth=1)
    axis.set(title="Groups rescued so far (dashed), lost (dotted), difference", xlabel="training step")


def _win_rates(axis: Any, runs: Mapping[str, Run], colours: Mapping[str, Any]) -> None:
    labels = [(kind, phase) for kind in ("no_answer", "incorrect", "wrong_answer") for phase in ("early", "late")]
    for i, (name, run) in enumerate(runs.items()):
        for x, (kind, phase) in enumerate(labels):
            found = run["phases"][phase].get(f"{kind}/win_rate")
            _point(axis, x + _shift(i, len(runs)), found, colours[name])
    axis.axhline(0.5, color="black", linewidth=1)
    axis.set_xticks(range(len(labels)), [f"{kind}_{phase}".replace("_", "\n") for kind, phase in labels], fontsize=9)
    axis.set(
        title="Win rate against the baseline: fewer bad rollouts", ylim=(-0.02, 1.02), xlim=(-0.5, len(labels) - 0.5)
    )


def _without_signal(axis: Any, runs: Mapping[str, Run], colours: Mapping[str, Any]) -> None:
    for name, run in runs.items():
        curves = run["curves"]
        for side, colour in (("baseline", "black"), ("run", colours[name])):
            for kind, style in (("all_wrong", "-"), ("all_right", "--")):
                axis.plot(curves["step"], curves[f"{kind}/{side}"], color=colour, linestyle=style, linewidth=1.3)
    axis.set(title="Groups all wrong (solid), all right (dashed)", xlabel="training step", ylim=(-0.02, 1.02))


def _second_draw(axis: Any, runs: Mapping[str, Run], colours: Mapping[str, Any]) -> None:
    labels = ("text_distance", "two_answers", "one_right")
    for i, (name, run) in enumerate(runs.items()):
        for x, label in enumerate(labels):
            found = run["phases"]["all"].get(f"second/{label}/difference")
            _point(axis, x + _shift(i, len(runs)), found, colours[name])
    axis.axhline(0, color="black", linewidth=1)
    axis.set_xticks(range(len(labels)), [label.replace("_", " ") for label in labels])
    axis.set(title="Pairs of two draws minus pairs of one draw", xlim=(-0.5, len(labels) - 0.5))


def _pass_curves(axis: Any, runs: Mapping[str, Run], colours: Mapping[str, Any]) -> None:
    heldout = all("heldout" in run for run in runs.values())
    for name, run in runs.items():
        figures = run["heldout"] if heldout else run["phases"]["late"]
        for side, colour in (("baseline", "black"), ("run", colours[name])):
            curve = _pass_at_k(figures, side)
            ks = [k for k, _ in curve]
            axis.plot(ks, [found["value"] for _, found in curve], color=colour, marker="o", markersize=3)
            axis.fill_between(
                ks, *zip(*(found["interval"] for _, found in curve), strict=True), color=colour, alpha=0.12
            )
            axis.set_xscale("log", base=2)
            axis.set_xticks(ks, map(str, ks))
    of = "held-out problems" if heldout else "training rollouts, last third"
    axis.set(title=f"pass@k, {of}", xlabel="k", ylim=(-0.02, 1.02))


def _entropy(axis: Any, runs: Mapping[str, Run], colours: Mapping[str, Any]) -> None:
    for name, run in runs.items():
        for side, colour in (("baseline", "black"), ("run", colours[name])):
            axis.plot(run["entropy"][side]["step"], run["entropy"][side]["nats"], color=colour, linewidth=1.3)
    axis.set(title="Token entropy (nats): no measure of exploration", xlabel="training step")


def _point(axis: Any, x: float, found: Any, colour: Any) -> None:
    """A value with its interval, if it is known."""
    if found and found["value"] is not None:
        axis.vlines(x, *found["interval"], color=colour)
        axis.plot(x, found["value"], color=colour, marker="o", markersize=5)


def _shift(i: int, n: int) -> float:
    return 0.6 * ((i + 0.5) / n - 0.5)
