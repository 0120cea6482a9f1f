"""A probe's findings as a short table and a picture."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from threepo.evaluation import tables
from threepo.lab.figures import SHARE, Curve, Panel, colours, picture, with_data
from threepo.lab.probe_config import POSTERIOR
from threepo.lab.probe_findings import label

Condition = Mapping[str, Any]
"""Findings for one noise, one temperature or the mean."""
KL = "KL to the mean, nats a token"


def table(summary: Mapping[str, Any]) -> Table:
    """The mean, temperatures, the best noise at each level of KL, and the chosen noise measured again."""
    group, counts = summary["group"], summary["problems"]
    title = (
        f"{len(counts['measured_on'])} problems that the mean (nearly) never solves, of {counts['hard']} among "
        f"{counts['candidates']}; alive: groups of {group} with a right rollout, shared by N draws"
    )
    conditions = [summary["mean"], *summary["temperatures"], *summary["best_at_kl"]]
    rows = [{"noise": label(condition), **_cells(condition, group)} for condition in conditions]
    if again := summary["confirmed"]:
        rows.append({"noise": f"again: {label(again)}", **_cells(again, group)})
    return tables.table(title, rows, columns=("noise", "KL/token", "mu", "mu / p, 95 %", "kept %", *_alive(group)))


def _alive(group: int) -> tuple[str, str]:
    return "alive, N=1", f"N={group}"


def _cells(condition: Condition, group: int) -> dict[str, str]:
    is_noise, dead = "kl" in condition, condition["dead_share"]
    cells = {"mu": _number(condition["mu"]["value"])}
    if is_noise:
        cells |= {"KL/token": _number(condition["kl"]), "kept %": tables.percent(condition["kept_share"], ".0f")}
    if condition["place"] != "mean":
        cells["mu / p, 95 %"] = _interval(condition["ratio"])
    for column, draws in zip(_alive(group), ("1", str(group)), strict=True):
        # Without draws, sharing changes nothing.
        found = dead.get(draws if is_noise else "1")
        cells[column] = _number(1 - found["value"]) if found else tables.MISSING
    return cells


def _interval(interval: Mapping[str, float]) -> str:
    if not math.isfinite(interval["value"]):
        return f"> {_number(interval['low'])}"
    return f"{_number(interval['value'])} [{_number(interval['low'])}, {_number(interval['high'])}]"


def _number(value: float) -> str:
    return f"{value:.2g}" if abs(value) < 100 else f"{value:.0f}"


def draw_picture(summary: Mapping[str, Any], path: Path) -> None:
    """Draw the panels of a probe that have data into a PNG file."""
    warm = max(summary["temperatures"], key=lambda condition: condition["mu"]["value"], default=None)
    panels = with_data(_panels(summary, warm))
    palette = colours(list(dict.fromkeys(_name(condition) for condition in summary["noise"])))
    palette |= {"the mean": "black"} | ({label(warm): "grey"} if warm else {})
    drawn = {curve.name for panel in panels for curve in panel.curves}
    picture(panels, {name: colour for name, colour in palette.items() if name in drawn}, path)


def _name(condition: Condition) -> str:
    """Name of a place, whose noise has a colour."""
    return f"{condition['place']} (ess)" if condition["place"] == POSTERIOR else str(condition["place"])


def _panels(summary: Mapping[str, Any], warm: Condition | None) -> list[Panel]:
    """mu / p, kept share and correlation over KL; and the groups rescued, over the number of draws."""
    ratios = _by_kl(summary, lambda condition: condition["ratio"])
    kept = _by_kl(summary, lambda condition: {"value": condition["kept_share"]})
    correlations = _by_kl(summary, lambda condition: condition["within_draw_correlation"])
    if warm and ratios and 0 < warm["ratio"]["value"] < math.inf:
        ends = [min(curve.x[0] for curve in ratios), max(curve.x[-1] for curve in ratios)]
        ratios.append(Curve(label(warm), ends, [warm["ratio"]["value"]] * 2, style={"linestyle": ":"}))
    alive, logarithmic = _alive_groups(summary, warm), {"xscale": "log"}
    draws = {n: f"{n:g}" for curve in alive for n in curve.x}
    both = {"xscale": "log", "yscale": "log"}
    title = f"Groups of {summary['group']} with a right answer, predicted"
    return [
        Panel("ratio", "mu / p: solved how often, relative to the mean", "", ratios, KL, level=1, axes=both),
        Panel("alive", title, "", alive, "draws that share a group, N", ticks=draws, axes=both),
        Panel("kept", "Share of rollouts that Seq-MIS would keep", "", kept, KL, axes=logarithmic | SHARE),
        Panel("correlation", "Correlation of outcomes within a draw", "", correlations, KL, axes=logarithmic),
    ]


def _by_kl(summary: Mapping[str, Any], estimate: Callable[[Condition], Mapping[str, float]]) -> list[Curve]:
    """A curve for each place of noise, over its KL to the mean."""
    places: dict[str, list[Condition]] = {}
    for condition in summary["noise"]:
        places.setdefault(_name(condition), []).append(condition)
    curves = []
    for name, conditions in places.items():
        curves += _curve(name, [condition["kl"] for condition in conditions], list(map(estimate, conditions)))
    return curves


def _curve(name: str, x: Sequence[float], estimates: Sequence[Mapping[str, float]], label: str = "") -> list[Curve]:
    """A curve through the estimates that exist and are not 0, which have no place on a logarithmic axis."""
    known = [(at, e) for at, e in zip(x, estimates, strict=True) if math.isfinite(e["value"]) and e["value"] != 0]
    if not known:
        return []
    xs, found = [at for at, _ in known], [estimate for _, estimate in known]
    low, high = ([e[end] for e in found if end in e] for end in ("low", "high"))
    return [Curve(name, xs, [e["value"] for e in found], low, high, bars=True, label=label)]


def _alive_groups(summary: Mapping[str, Any], warm: Condition | None) -> list[Curve]:
    """One minus the share of dead groups, for the chosen noise or the best of all, the mean, and a temperature."""
    shown = summary["confirmed"] or max(summary["noise"], key=lambda condition: condition["ratio"]["low"])
    draws = [int(n) for n in shown["dead_share"]]
    dead = shown["dead_share"].values()
    alive = [{"value": 1 - d["value"], "low": 1 - d["high"], "high": 1 - d["low"]} for d in dead]
    curves = _curve(_name(shown), draws, alive, label(shown))
    for condition in filter(None, (summary["mean"], warm)):
        if condition["dead_share"]:
            share = 1 - condition["dead_share"]["1"]["value"]
            style = {"linestyle": "-" if condition["place"] == "mean" else ":"}
            if share:
                curves.append(Curve(label(condition), [draws[0], draws[-1]], [share, share], style=style))
    return curves
