"""A probe's findings as a table."""

from collections.abc import Mapping
from itertools import groupby
from typing import Any

from rich.table import Table

from threepo.evaluation import tables
from threepo.lab.probe_findings import MEAN, estimate, label, short


def table(summary: Mapping[str, Any]) -> Table:
    """The mean and the temperatures, the sizes of each place, and the chosen noise measured again."""
    group, counts = summary["group"], summary["problems"]
    title = (
        f"{len(counts['measured_on'])} problems that the mean (nearly) never solves, of {counts['hard']} among "
        f"{counts['candidates']}; alive: groups of {group} with a right rollout, shared by N draws"
    )
    sections = [[summary["mean"], *summary["temperatures"]]]
    sections += [list(sizes) for _, sizes in groupby(summary["noise"], lambda condition: condition["place"])]
    rows = [[{"noise": label(each), **_cells(each, group)} for each in section] for section in sections]
    if again := summary["confirmed"]:
        rows.append([{"noise": f"again: {label(again)}", **_cells(again, group)}])
    columns = ("noise", "KL/token", "mu", "mu / p, 95 %", "kept %", *_alive(group))
    return tables.table(title, *rows, columns=columns)


def _alive(group: int) -> tuple[str, str]:
    return "alive, N=1", f"N={group}"


def _cells(condition: Mapping[str, Any], group: int) -> dict[str, str]:
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
