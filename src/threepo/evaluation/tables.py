"""Evaluations as tables on the terminal, in per cent."""

from collections.abc import Mapping
from typing import Any

from rich.console import Group
from rich.table import Column, Table

from threepo.evaluation.scores import ks_up_to

_SHARES = {"no answer": "no_answer_share", "verifier failed": "error_share", "cut": "cut_share"}


def evaluation_table(summary: Mapping[str, Any]) -> Group:
    """A table of summary.json: a column for each set of problems, and their average."""
    sets: dict[str, Mapping[str, Any]] = dict(summary["benchmarks"])
    columns = {**sets, **({"average": summary["average"]} if len(sets) > 1 else {})}
    samples = int(summary["config"]["eval"]["samples"])
    ks = [str(k) for k in ks_up_to(samples)]
    errors = summary["average"]["standard_errors_of_pass_at_1"]
    sections = [
        ("pass_at", {f"pass@{k}": k for k in ks}),
        ("standard_errors_of_pass_at_1", {f"se {name}": name for name in errors}),
        ("majority_at", {f"maj@{k}": k for k in ks[1:]}),
    ]
    table = _table("", *columns)
    table.add_row("problems", *(str(column.get("problems", "")) for column in columns.values()), end_section=True)
    for section, rows in sections:
        if any(column[section] for column in columns.values()):
            for label, key in rows.items():
                table.add_row(label, *(_percent(column[section].get(key)) for column in columns.values()))
            table.add_section()
    for label, name in _SHARES.items():
        if name != "error_share" or any(column.get(name) for column in sets.values()):
            table.add_row(label, *(_percent(column.get(name)) for column in columns.values()))
    return Group(f"{summary['model']}: pass@k and maj@k in per cent, {samples} completions a problem", table)


def comparison_table(comparison: Mapping[str, Any]) -> Group:
    """A table of what `compare` returns: pass@1 and pass@K of every set of problems."""
    samples = comparison["samples"]
    table = _table("set", "k", "A", "B", "B - A", "se", "95 %", "p", "won/lost/tied")
    rows: dict[str, Mapping[str, Any]] = dict(comparison["benchmarks"])
    if len(rows) > 1:
        rows["average"] = comparison["average"]
    for k in dict.fromkeys(("1", str(samples))):
        for name, row in rows.items():
            values = row["pass_at"][k]
            low, high = values["interval"]
            table.add_row(
                *(name, k, _percent(values["first"]), _percent(values["second"])),
                *(f"{100 * values['difference']:+.1f}", _percent(values["error"])),
                *(f"{100 * low:+.1f}..{100 * high:+.1f}", f"{values['p']:.2g}"),
                f"{values['wins']}/{values['losses']}/{values['ties']}",
            )
        table.add_section()
    names = (f"{letter} = {comparison[key]}" for letter, key in (("A", "first"), ("B", "second")))
    return Group(*names, f"pass@k in per cent, {samples} completions a problem, paired by problem", table)


def _table(first: str, *others: str) -> Table:
    return Table(first, *(Column(name, justify="right") for name in others))


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f}"
