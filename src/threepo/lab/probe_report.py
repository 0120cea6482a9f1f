"""A probe's findings as a short table and a picture."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.table import Column, Table

from threepo.files import atomic_file
from threepo.lab.probe_config import POSTERIOR
from threepo.lab.probe_findings import TEMPERATURE, label

Row = Mapping[str, Any]


def table(summary: Row) -> Table:
    """The mean, temperatures, the best noise at each level of KL, and the chosen noise measured again."""
    group, counts = summary["group"], summary["problems"]
    title = (
        f"{len(counts['measured_on'])} problems that the mean (nearly) never solves, of {counts['hard']} among "
        f"{counts['candidates']}; alive: groups of {group} with a right rollout, shared by N draws"
    )
    names = ("KL/token", "mu", "mu / p, 95 %", "kept", "alive, N=1", f"N={group}")
    found = Table("noise", *(Column(name, justify="right") for name in names), title=title, box=SIMPLE)
    plain = [("", row) for row in (summary["mean"], *summary["temperatures"])]
    again = [("again: ", summary["confirmed"])] if summary["confirmed"] else []
    for mark, row in (*plain, *(("", row) for row in summary["best_at_kl"]), *again):
        found.add_row(mark + label(row).removesuffix(" x RMS"), *_cells(row, group))
    return found


def _cells(row: Row, group: int) -> list[str]:
    dead = row["dead_share"]
    either = {} if "kl" in row else dead.get("1", {})  # without draws, sharing changes nothing
    return [
        _number(row.get("kl")),
        _number(row["mu"]["value"]),
        "" if row["place"] == "mean" else _interval(row["ratio"]),
        f"{100 * row['kept_share']:.0f} %" if "kl" in row else "",
        *(_number(1 - found["value"] if (found := dead.get(n, either)) else None) for n in ("1", str(group))),
    ]


def _interval(interval: Mapping[str, float]) -> str:
    if not math.isfinite(interval["value"]):
        return f"> {_number(interval['low'])}"
    return f"{_number(interval['value'])} ({_number(interval['low'])} to {_number(interval['high'])})"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}" if abs(value) < 100 else f"{value:,.0f}"


def draw_picture(summary: Row, path: Path) -> None:
    """Four panels: mu / p, kept share and correlation over KL; and the groups rescued, over the number of draws."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(11, 7.5), layout="constrained")
    places: dict[str, list[Row]] = {}
    for row in summary["noise"]:
        places.setdefault(row["place"], []).append(row)
    colours = plt.get_cmap("tab10" if len(places) <= 10 else "turbo", max(len(places), 10))
    for index, (place, rows) in enumerate(places.items()):
        name = f"{place} (ess)" if place == POSTERIOR else place
        style = {"color": colours(index), "marker": "o", "markersize": 4, "label": name}
        kl = [row["kl"] for row in rows]
        _with_bars(axes[0, 0], kl, [row["ratio"] for row in rows], style)
        axes[1, 0].plot(kl, [row["kept_share"] for row in rows], **style)
        _with_bars(axes[1, 1], kl, [row["within_draw_correlation"] for row in rows], style)
    axes[0, 0].axhline(1, color="black", linewidth=1)
    warm = max(summary["temperatures"], key=lambda row: row["mu"]["value"], default=None)
    if warm and math.isfinite(warm["ratio"]["value"]) and warm["ratio"]["value"] > 0:
        text = f"temperature {warm['size']:g}"
        axes[0, 0].axhline(warm["ratio"]["value"], color="grey", linestyle=":", linewidth=1.5, label=text)
    if _drawn(axes[0, 0]):
        axes[0, 0].set_yscale("log")
    _rescued(axes[0, 1], summary, warm)
    titles = (
        ("mu / p: solved how often, relative to the mean", "KL to the mean, nats a token"),
        (f"Groups of {summary['group']} with a right answer, predicted", "draws that share a group, N"),
        ("Share of rollouts that Seq-MIS would keep", "KL to the mean, nats a token"),
        ("Correlation of outcomes within a draw", "KL to the mean, nats a token"),
    )
    for axis, (title, name) in zip(axes.flat, titles, strict=True):
        axis.set_title(title, fontsize=11)
        axis.set_xlabel(name)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
        if axis is not axes[0, 1] and _drawn(axis):
            axis.set_xscale("log")
    axes[1, 0].set_ylim(-0.03, 1.03)
    handles, names = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=5, frameon=False)
    with atomic_file(path) as temporary:
        figure.savefig(temporary, dpi=130, format="png")
    plt.close(figure)


def _with_bars(
    axis: Any, x: Sequence[float], intervals: Sequence[Mapping[str, float]], style: Mapping[str, Any]
) -> None:
    """A line through the estimates with their intervals; on a log axis nothing can lie at 0."""
    found = [(at, i) for at, i in zip(x, intervals, strict=True) if math.isfinite(i["value"]) and i["value"] != 0]
    values = [i["value"] for _, i in found]
    bars = [[max(v - i["low"], 0) for v, (_, i) in zip(values, found, strict=True)]]
    bars += [[max(min(i["high"], 1e12) - v, 0) for v, (_, i) in zip(values, found, strict=True)]]
    axis.errorbar([at for at, _ in found], values, yerr=bars, capsize=2, linewidth=1.3, elinewidth=0.7, **style)


def _drawn(axis: Any) -> bool:
    """Whether a curve has a point; without one, for which nothing needs to be solved, an axis cannot be logarithmic."""
    return any(len(line.get_xdata()) and line.get_marker() == "o" for line in axis.get_lines())


def _rescued(axis: Any, summary: Row, warm: Row | None) -> None:
    """One minus the share of dead groups, for the chosen noise or the best of all, the mean, and a temperature."""
    shown = summary["confirmed"] or max(summary["noise"], key=lambda row: row["ratio"]["low"])
    counts = [int(n) for n in shown["dead_share"]]
    dead = list(shown["dead_share"].values())
    flipped = [{"value": 1 - d["value"], "low": 1 - d["high"], "high": 1 - d["low"]} for d in dead]
    style = {"color": "tab:red", "marker": "o", "markersize": 4, "label": label(shown)}
    _with_bars(axis, counts, flipped, style)
    for row, colour in ((summary["mean"], "black"), (warm, "grey")):
        if row and row["dead_share"]:
            name = "the mean" if row["place"] != TEMPERATURE else f"temperature {row['size']:g}"
            line = {"color": colour, "linestyle": ":" if colour == "grey" else "-", "linewidth": 1.5, "label": name}
            axis.axhline(1 - row["dead_share"]["1"]["value"], **line)
    if _drawn(axis):
        axis.set_xscale("log", base=2)
    axis.set_xticks(counts, [str(n) for n in counts])
    values = [f["value"] for f in flipped]
    if min(values, default=0) > 0:
        axis.set_yscale("log")
    axis.legend(loc="center left", fontsize=9)
