"""Findings of a probe: intervals, the choice among the noise that was tried, a table of all, and a proposal.

The proposal is a plain sentence and, where noise helps, the training recipe that follows.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import rich.table

from threepo.config import NoiseConfig, TrainConfig
from threepo.config.recipes import Table, merge
from threepo.config.records import shown
from threepo.evaluation import tables
from threepo.files import write_text
from threepo.lab.probe_config import POSTERIOR, ProbeConfig
from threepo.lab.statistics import Outcomes, dead_share, mean_rate, predictable_draws, rate_ratio, silent_share

MEAN, TEMPERATURE = "mean", "temperature"
NEARLY_ALL = 0.95
"""Propose the fewest draws that keep this share of the best success rate of a step."""
MOSTLY_KEPT = 0.5
"""Propose replay, which needs no correction, where Seq-MIS keeps less than this."""
Measured = Mapping[str, Any]


def findings(
    config: TrainConfig, settings: ProbeConfig, measured: Sequence[Measured], again: Measured | None = None
) -> dict[str, Any]:
    """The contents of summary.json: intervals for every measurement, the choice among them, and a verdict.

    `again` is the chosen noise measured with other draws. It decides the verdict, because the best of many measurements
    is best partly by luck.
    """
    group = config.method.rollouts_per_prompt
    mean = _outcomes(next(m for m in measured if m["place"] == MEAN))
    rows = [describe(m, mean, group) for m in measured]
    temperatures = [row for row in rows if row["place"] == TEMPERATURE]
    noise = [row for row in rows if row["place"] not in (MEAN, TEMPERATURE)]
    helpful = [row for row in noise if row["kl"] <= settings.most_kl and row["ratio"]["low"] > 1]
    confirmed = describe(again, mean, group) if again else None
    summary: dict[str, Any] = {
        "group": group,
        "mean": rows[0],
        "temperatures": temperatures,
        "best_temperature": max(temperatures, key=lambda row: row["mu"]["value"], default=None),
        "noise": noise,
        "chosen": max(helpful, key=lambda row: row["ratio"]["low"], default=None),
        "confirmed": confirmed,
    }
    helped, words = verdict(summary, settings.most_kl)
    return summary | {"draws": fewest_draws(_outcomes(again), group) if again and helped else 0, "verdict": words}


def describe(measured: Measured, mean: Outcomes, group: int) -> dict[str, Any]:
    """A measurement with the statistics of its outcomes."""
    outcomes = _outcomes(measured)
    facts = {key: value for key, value in measured.items() if key != "rates"}
    return facts | {
        "mu": asdict(mean_rate(outcomes)),
        "ratio": asdict(rate_ratio(outcomes, mean)),
        "dead_share": {str(n): dead_share(outcomes, group, n) for n in predictable_draws(outcomes, group)},
    }


def _outcomes(measured: Measured) -> Outcomes:
    return Outcomes(np.array(measured["rates"]), measured["rollouts"])


def fewest_draws(outcomes: Outcomes, group: int) -> int:
    """The fewest draws with which nearly as many steps have a success as with the most draws."""
    successes = {n: 1 - silent_share(outcomes, group, n) for n in predictable_draws(outcomes, group)}
    return min(n for n, share in successes.items() if share >= NEARLY_ALL * successes[max(successes)])


def label(row: Measured) -> str:
    """A condition in words."""
    if row["place"] == MEAN:
        return "the mean"
    unit = {TEMPERATURE: "", POSTERIOR: " ess"}.get(row["place"], " x RMS")
    return f"{row['place']} {row['size']:g}{unit}"


def verdict(summary: Measured, most_kl: float) -> tuple[bool, str]:
    """The verdict, true if noise helps, and a plain sentence on what to do. `most_kl`: as `probe.most_kl`."""
    mean, warm, confirmed = summary["mean"], summary["best_temperature"], summary["confirmed"]
    heat = "no temperature was tried"
    if warm:
        heat = f"{label(warm)} alone, the best of those tried, {estimate(warm['ratio'])}"
    if not any(row["mu"]["value"] for row in (mean, *summary["noise"])):
        tried = f", but a temperature did: {heat}. Try it first" if warm and warm["mu"]["value"] else ""
        return False, (
            f"Cannot be told: neither the mean (below {mean['mu']['high']:.2g}) nor any draw solved these problems"
            f"{tried}. Use more draws and rollouts, easier problems, or --exact where the right text is unique."
        )
    if confirmed is None or confirmed["ratio"]["low"] <= 1:
        return False, _without_help(summary, most_kl, heat)
    gain = (
        f"{label(confirmed)} (KL {confirmed['kl']:.2g} nats a token) solves these problems "
        f"{estimate(confirmed['ratio'])} times as often as the mean does; {heat}."
    )
    if warm and warm["mu"]["value"] >= confirmed["mu"]["low"]:
        return False, f"Weight noise is not shown to do more here than a temperature. {gain}"
    return True, f"Weight noise should help here: {gain}"


def _without_help(summary: Measured, most_kl: float, heat: str) -> str:
    """The verdict where no noise within `most_kl` helps; it names larger noise that does, and the best within."""

    def least(row: Measured) -> float:
        return float(row["ratio"]["low"])

    noise, confirmed = summary["noise"], summary["confirmed"]
    within = [row for row in noise if row["kl"] <= most_kl]
    row = confirmed or max(within or noise, key=least)
    fresh = " on other draws" if confirmed else ""
    best = f"The best, {label(row)}, has mu / p = {estimate(row['ratio'])}{fresh}, at a KL of {row['kl']:.2g}; {heat}."
    limit = f"probe.most_kl = {most_kl:g} nats a token"
    strong = max((row for row in noise if row["kl"] > most_kl and least(row) > 1), key=least, default=None)
    if strong:
        return (
            f"Weight noise within {limit} is not shown to help here, but larger noise is: {label(strong)} (KL "
            f"{strong['kl']:.2g}) solves these problems {estimate(strong['ratio'])} times as often as the mean "
            f"does. Raise the limit to try it; little of such rollouts passes a correction. Within it: {best}"
        )
    return (
        f"Weight noise will not help here: no noise within {limit} is shown to solve these problems more often "
        f"than the mean does. {best}"
    )


def estimate(interval: Mapping[str, float]) -> str:
    """An estimate with its interval: 0.64 [0, 2]; without an upper bound: > 3."""
    value, low, high = (short(interval[part]) for part in ("value", "low", "high"))
    return f"{value} [{low}, {high}]" if math.isfinite(interval["value"]) else f"> {low}"


def short(value: float) -> str:
    """A number of two digits, or a whole one."""
    return f"{value:.2g}" if abs(value) < 100 else f"{value:,.0f}"


def findings_table(summary: Measured) -> rich.table.Table:
    """The mean and the temperatures, the sizes of each place, and the chosen noise measured again."""
    group, counts, again = summary["group"], summary["problems"], summary["confirmed"]
    alive = {"alive, N=1": "1", f"N={group}": str(group)}

    def cells(row: Measured, before: str = "") -> tables.TableRow:
        is_noise = "kl" in row
        found = {"noise": before + label(row), "mu": short(row["mu"]["value"])}
        if is_noise:
            found |= {"KL/token": short(row["kl"]), "kept %": tables.percent(row["kept_share"], ".0f")}
        if row["place"] != MEAN:
            found["mu / p, 95 %"] = estimate(row["ratio"])
        # Without draws, sharing changes nothing.
        dead = {column: row["dead_share"].get(draws if is_noise else "1") for column, draws in alive.items()}
        return found | {column: short(1 - share) for column, share in dead.items() if share is not None}

    title = (
        f"{len(counts['measured_on'])} problems that the mean (nearly) never solves, of {counts['hard']} among "
        f"{counts['candidates']}; alive: groups of {group} with a right rollout, shared by N draws"
    )
    by_place = [list(sizes) for _, sizes in groupby(summary["noise"], lambda row: row["place"])]
    sections = [list(map(cells, rows)) for rows in ([summary["mean"], *summary["temperatures"]], *by_place)]
    sections += [[cells(again, "again: ")]] if again else []
    columns = ("noise", "KL/token", "mu", "mu / p, 95 %", "kept %", *alive)
    return tables.table(title, *sections, columns=columns)


def recipe(summary: Measured, config: TrainConfig, training: Table, prior: str) -> Table:
    """The training recipe that follows from a probe whose noise helps.

    A run that chooses arms anywhere gets the measured noise as its arms; any other gets the noise that helps most.
    `training`: the tables that `config` was built from; `prior`: the folder of the probed posterior, if it has one.
    """
    row, everywhere = summary["confirmed"], config.noise.where == NoiseConfig().where
    if config.arms.active and config.noise.unit == "rms" and everywhere and row["place"] != POSTERIOR:
        measured = [each for each in summary["noise"] if each["place"] != POSTERIOR]
        chances = {f"{each['place']} {each['size'] / config.noise.size:g}": each["mu"]["value"] for each in measured}
        arms = {"sizes": [], "more": list(chances), "prior": {MEAN: summary["mean"]["mu"]["value"], **chances}}
        known = {name: value for name, value in training.get("arms", {}).items() if name != "places"}
        return {**training, "arms": {**known, **arms}}
    method: Table = {"name": "c3po", "gradient_at": "fresh", "correction": {"kind": "seq_mis"}}
    alone = config.overlap.stream and summary["draws"] == 1  # a stream does not take a fresh draw for one draw
    if row["kept_share"] < MOSTLY_KEPT or alone:
        method = {"name": "c3po_replay", "gradient_at": "generator"}
    structure = {name: getattr(config.noise, name) for name in ("rank", "tied", "structure")}
    noise: Table = {name: value for name, value in structure.items() if value}
    table = {key: value for key, value in training.items() if key not in ("method", "noise", "arms", "ess_schedule")}
    table["optimizer"] = {"kind": config.optimizer.kind, **table.get("optimizer", {})}  # a preset may have named it
    if row["place"] == POSTERIOR:
        loaded = {"load_hessian": prior} if prior else {}
        table = merge(table, {"optimizer": {"kind": "ivon", "ess": row["size"], **loaded}})
    else:
        noise |= {"unit": "rms", "size": row["size"], "where": {row["place"]: 1.0}}
    table["method"] = {**method, "rollouts_per_prompt": summary["group"], "draws": summary["draws"]}
    return {**table, "noise": noise} if noise else table


def write_recipe(path: Path, table: Table, verdict: str) -> None:
    """Write a recipe as TOML, headed by its reason."""
    lines = [f"# {verdict}"]
    for name, keys in table.items():
        lines += ["", f"[{name}]", *(f"{key} = {_toml(value)}" for key, value in keys.items())]
    write_text(path, "\n".join(lines) + "\n")


def _toml(value: Any) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_toml, value))}]"
    if not isinstance(value, Mapping):
        return shown(value)
    keys = {key: key if key.isidentifier() else json.dumps(key) for key in value}  # a pattern needs quotes
    return "{ " + ", ".join(f"{keys[key]} = {_toml(item)}" for key, item in value.items()) + " }"
