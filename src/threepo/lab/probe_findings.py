"""Findings of a probe: intervals, the best noise at each distance from the mean, and a proposal.

The proposal is a plain sentence and, where noise helps, the training recipe that follows.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from threepo.config import TrainConfig
from threepo.config.recipes import Table, merge
from threepo.config.records import shown
from threepo.evaluation.statistics import (
    Outcomes,
    dead_interval,
    intraclass,
    mean_rate,
    predictable_draws,
    rate_ratio,
    silent_share,
)
from threepo.files import write_text
from threepo.lab.probe_config import POSTERIOR, ProbeConfig

MEAN, TEMPERATURE = "mean", "temperature"
LEVELS = (0.01, 0.03, 0.1, 0.3, 1.0, math.inf)
"""Upper ends of the levels of KL to the mean, in nats a token, at which the best noise is named."""
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
    noise = [row for row in rows if row["place"] not in (MEAN, TEMPERATURE)]
    levels = zip((0.0, *LEVELS), LEVELS, strict=False)
    at_levels = [[row for row in noise if low < row["kl"] <= high] for low, high in levels]
    helpful = [row for row in noise if row["kl"] <= settings.most_kl and row["ratio"]["low"] > 1]
    chosen = max(helpful, key=lambda row: row["ratio"]["low"], default=None)
    confirmed = describe(again, mean, group) if again else None
    summary: dict[str, Any] = {
        "group": group,
        "rollouts_per_step": group * config.data.prompts_per_step,
        "mean": rows[0],
        "temperatures": [row for row in rows if row["place"] == TEMPERATURE],
        "noise": noise,
        "best_at_kl": [max(level, key=lambda row: row["ratio"]["low"]) for level in at_levels if level],
        "chosen": chosen,
        "confirmed": confirmed,
    }
    warmest = max((row["mu"]["value"] for row in summary["temperatures"]), default=0.0)
    helped = confirmed and confirmed["ratio"]["low"] > 1 and confirmed["mu"]["low"] > warmest
    return summary | {"draws": fewest_draws(confirmed) if confirmed and helped else 0, "verdict": verdict(summary)}


def describe(measured: Measured, mean: Outcomes, group: int) -> dict[str, Any]:
    """A measurement with the statistics of its outcomes."""
    outcomes = _outcomes(measured)
    by_draw = outcomes.rates.mean(axis=0)
    plain = measured["place"] in (MEAN, TEMPERATURE)
    counts = predictable_draws(outcomes, group)
    facts = {key: value for key, value in measured.items() if key != "rates"}
    return facts | {
        "mu": asdict(mean_rate(outcomes)),
        "ratio": asdict(rate_ratio(outcomes, mean)),
        "dead_share": {str(n): asdict(dead_interval(outcomes, group, n)) for n in counts},
        "silent_step_share": {str(n): silent_share(outcomes, group, n) for n in counts},
        **({} if plain else {"within_draw_correlation": asdict(intraclass(outcomes))}),
        "best_draw": float(by_draw.max()),
        "share_of_best_draw": float(by_draw.max() / by_draw.sum()) if by_draw.sum() else 0.0,
    }


def _outcomes(measured: Measured) -> Outcomes:
    return Outcomes(np.array(measured["rates"]), measured["rollouts"])


def fewest_draws(row: Measured) -> int:
    """The fewest draws with which nearly as many steps have a success as with the most draws."""
    successes = {int(n): 1 - silent for n, silent in row["silent_step_share"].items()}
    return min(n for n, share in successes.items() if share >= NEARLY_ALL * successes[max(successes)])


def label(row: Measured) -> str:
    """A condition in words."""
    if row["place"] == MEAN:
        return "the mean"
    unit = {TEMPERATURE: "", POSTERIOR: " ess"}.get(row["place"], " x RMS")
    return f"{row['place']} {row['size']:g}{unit}"


def verdict(summary: Measured) -> str:
    """A plain sentence on what to do."""
    mean, confirmed, noise = summary["mean"], summary["confirmed"], summary["noise"]
    if not mean["mu"]["value"] and not any(row["mu"]["value"] for row in noise):
        return (
            f"Cannot be told: nothing solved these problems, neither the mean (below {mean['mu']['high']:.2g}) nor any "
            f"draw. Use more draws and rollouts, easier problems, or --exact where the right text is unique."
        )
    warm = max(summary["temperatures"], key=lambda row: row["mu"]["value"], default=None)
    heat = "no temperature was tried"
    if warm:
        heat = f"temperature {warm['size']:g} alone, the best of those tried, {_times(warm['ratio'])}"
    if confirmed is None or confirmed["ratio"]["low"] <= 1:
        row = confirmed or max(noise, key=lambda row: row["ratio"]["low"])
        fresh = " on other draws" if confirmed else ""
        return (
            f"Weight noise will not help here: no noise within the limit on KL is shown to solve these problems more "
            f"often than the mean does. The best, {label(row)}, has mu / p = {_times(row['ratio'])}{fresh}, at a KL of "
            f"{row['kl']:.2g} nats a token; {heat}."
        )
    gain = f"{label(confirmed)} (KL {confirmed['kl']:.2g} nats a token) solves these problems"
    gain += f" {_times(confirmed['ratio'])} times as often as the mean does"
    if warm and warm["mu"]["value"] >= confirmed["mu"]["low"]:
        return f"Weight noise is not shown to do more here than a temperature. {gain}; {heat}."
    wait, without = (1 / row["mu"]["value"] if row["mu"]["value"] else math.inf for row in (confirmed, mean))
    steps = f"{_round(wait / summary['rollouts_per_step'])} steps of this recipe"
    return (
        f"Weight noise should help here: {gain}; {heat}. Expect a first success on such problems after {_round(wait)} "
        f"rollouts ({steps}), instead of {_round(without)}."
    )


def _round(value: float) -> str:
    return f"{float(f'{value:.2g}'):,.0f}" if 10 <= value < math.inf else f"{value:.2g}"


def _times(interval: Mapping[str, float]) -> str:
    low, high = _round(interval["low"]), _round(interval["high"])
    if not math.isfinite(interval["value"]):
        return f"more than {low}"
    return f"{_round(interval['value'])} ({low} to {high})"


def recipe(summary: Measured, config: TrainConfig, training: Table, prior: str) -> Table:
    """The training recipe that follows from a probe whose noise helps.

    `training`: the tables that `config` was built from; `prior`: the folder of the probed posterior, if it has one.
    """
    row, draws, group = summary["confirmed"], summary["draws"], summary["group"]
    replay = row["kept_share"] < MOSTLY_KEPT
    method: Table = {"name": "c3po_replay" if replay else "c3po", "rollouts_per_prompt": group, "draws": draws}
    method |= {"gradient_at": "generator"} if replay else {"gradient_at": "fresh", "correction": {"kind": "seq_mis"}}
    table = {key: value for key, value in training.items() if key not in ("method", "noise")}
    table["optimizer"] = {"kind": config.optimizer.kind, **table.get("optimizer", {})}  # a preset may have named it
    noise: Table = {"rank": config.noise.rank} if config.noise.rank else {}
    if row["place"] == POSTERIOR:
        optimizer: Table = {"kind": "ivon", "ess": row["size"]}
        if prior:
            optimizer["load_hessian"] = prior
        table = merge(table, {"optimizer": optimizer})
    else:
        noise = {"unit": "rms", "size": row["size"], "where": {row["place"]: 1.0}, **noise}
    return {**table, "method": method, **({"noise": noise} if noise else {})}


def write_recipe(path: Path, table: Table, verdict: str) -> None:
    """Write a recipe as TOML, headed by its reason."""
    lines = [f"# {verdict}"]
    for name, keys in table.items():
        lines += ["", f"[{name}]", *(f"{_key(key)} = {_toml(value)}" for key, value in keys.items())]
    write_text(path, "\n".join(lines) + "\n")


def _key(key: str) -> str:
    return key if key.replace("_", "").isalnum() else f'"{key}"'


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(key)} = {_toml(item)}" for key, item in value.items()) + " }"
    return shown(value)
