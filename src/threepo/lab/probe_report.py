"""A probe's findings as a table and a picture."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from threepo.evaluation import tables
from threepo.lab.figures import SHARE, Curve, Panel, colours, picture, with_data
from threepo.lab.probe_config import POSTERIOR
from threepo.lab.probe_findings import MEAN, estimate, label, short

Condition = Mapping[str, Any]
"""Findings for one noise, one temperature or the mean."""
KL = "KL to the mean, nats a token"


def table(summary: Mapping[str, Any]) -> Table:
    """The mean and the temperatures, the sizes of each place, and the chosen noise measured again."""
    group, counts = summary["group"], summary["problems"]
    title = (
        f"{len(counts['measured_on'])} problems that the mean (nearly) never solves, of {counts['hard']} among "
        f"{counts['candidates']}; alive: groups of {group} with a right rollout, shared by N draws"
    )
    sections = [[summary["mean"], *summary["temperatures"]], *_by_place(summary).values()]
    rows = [[{"noise": label(each), **_cells(each, group)} for each in section] for section in sections]
    if again := summary["confirmed"]:
        rows.append([{"noise": f"again: {label(again)}", **_cells(again, group)}])
    return tables.table(title, *rows, columns=("noise", "KL/token", "mu", "mu / p, 95 %", "kept %", *_alive(group)))


def _by_place(summary: Mapping[str, Any]) -> dict[str, list[Condition]]:
    """The noise by the name of its place, which has a colour."""
    places: dict[str, list[Condition]] = {}
    for condition in summary["noise"]:
        place = condition["place"]
        places.setdefault(f"{place} (ess)" if place == POSTERIOR else place, []).append(condition)
    return places


def _alive(group: int) -> tuple[str, str]:
    return "alive, N=1", f"N={group}"


def _cells(condition: Condition, group: int) -> dict[str, str]:
    is_noise = "kl" in condition
    cells = {"mu": short(condition["mu"]["value"])}
    if is_noise:
        cells |= {"KL/token": short(condition["kl"]), "kept %": tables.percent(condition["kept_share"], ".0f")}
    if condition["place"] != MEAN:
        cells["mu / p, 95 %"] = estimate(condition["ratio"])
    for column, draws in zip(_alive(group), ("1", str(group)), strict=True):
        # Without draws, sharing changes nothing.
        dead = condition["dead_share"].get(draws if is_noise else "1")
        cells[column] = tables.MISSING if dead is None else short(1 - dead)
    return cells


def draw_picture(summary: Mapping[str, Any], path: Path) -> None:
    """Draw mu / p and the share of rollouts that are kept, over KL, into a PNG file."""
    ratios, kept = [], []
    for place, conditions in _by_place(summary).items():
        # 0 and infinity have no place on a logarithmic axis.
        known = [c for c in conditions if 0 < c["ratio"]["value"] < math.inf]
        if known:
            value, low, high = ([c["ratio"][part] for c in known] for part in ("value", "low", "high"))
            ratios.append(Curve(place, [c["kl"] for c in known], value, low, high, bars=True))
        x, shares = [c["kl"] for c in conditions], [c["kept_share"] for c in conditions]
        kept.append(Curve(place, x, shares, bars=True))
    palette = colours([curve.name for curve in kept])
    warm = summary["best_temperature"]
    if warm and ratios and 0 < warm["ratio"]["value"] < math.inf:
        ends = [min(curve.x[0] for curve in ratios), max(curve.x[-1] for curve in ratios)]
        ratios.append(Curve(label(warm), ends, [warm["ratio"]["value"]] * 2, style={"linestyle": ":"}))
        palette[label(warm)] = "grey"
    title, both = "mu / p: solved how often, relative to the mean", {"xscale": "log", "yscale": "log"}
    panels = [
        Panel("ratio", title, "", ratios, KL, level=1, axes=both),
        Panel("kept", "Share of rollouts that Seq-MIS would keep", "", kept, KL, axes={"xscale": "log"} | SHARE),
    ]
    picture(with_data(panels), palette, path)
