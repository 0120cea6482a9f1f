"""Arms of a run: which led, what each wrote and earned, and which answered what the mean weights could not."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain, pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from rich.table import Table

from threepo.config.arms import ARM_SHARE, MEAN
from threepo.evaluation.tables import number, percent, table
from threepo.lab.completions import saved_groups
from threepo.run_folder import COMPLETIONS

OTHERS, NO_ARM = "others", "no arm"
SHOWN = 7
"""Arms with an area of their own, those that wrote most; the others share one."""
RESCUES = 10
"""Prompts in the list of the first ones that only noise answered."""
Metrics = Mapping[str, Any]
"""A row of metrics.jsonl."""


def arm_shares(rows: Sequence[Metrics]) -> dict[str, np.ndarray]:
    """Share of each step's completions by arm, [steps] each; empty for a run without arms."""
    names = dict.fromkeys(name for row in rows for name in row if name.startswith(ARM_SHARE))
    return {name.removeprefix(ARM_SHARE): np.array([row.get(name) or 0.0 for row in rows]) for name in names}


def leading_arms(steps: Sequence[Metrics]) -> str:
    """The arms that led, each with its first step: `embedding 1 led from step 3; norm 0.2 led from step 24`.

    An arm leads a step if its draws wrote more than half of the completions; what led for one step only is left out.
    """
    shares = arm_shares(steps)
    leaders = []
    for i, row in enumerate(steps):
        leader = next((arm for arm, values in shares.items() if values[i] > 0.5), NO_ARM)
        leaders.append((row["step"], leader))
    if len(leaders) > 1:
        leaders = [now for now, after in pairwise(leaders) if now[1] == after[1]]
    changes = [(step, arm) for (_, before), (step, arm) in pairwise([(-1, NO_ARM), *leaders]) if arm != before]
    names = {MEAN: "the mean weights, without noise,"}
    return "; ".join(f"{names.get(arm, arm)} led from step {step}" for step, arm in changes) or f"{NO_ARM} led"


def shown_arms(rows: Sequence[Metrics]) -> list[str]:
    """Arms with an area of their own, in the order from below: the mean, and those that wrote most."""
    totals = {arm: float(values.sum()) for arm, values in arm_shares(rows).items()}
    most = sorted((arm for arm in totals if arm != MEAN), key=lambda arm: (-totals[arm], arm))[:SHOWN]
    shown = [*([MEAN] if MEAN in totals else []), *most]
    return [*shown, OTHERS] if len(totals) > len(shown) else shown


def arm_tables(run: Path, of: str = "") -> list[Table]:
    """Tables of what each arm of a run earned, and of the first prompts that only noise answered; none without arms.

    `of` ends the tables' titles. `UserError` for a damaged file.
    """
    columns = ["step", "problem_id", "draw_arm", "reward", "correct", "status"]
    groups = list(saved_groups(sorted((run / COMPLETIONS).glob("*.parquet")), columns))
    rewards: dict[str, list[float | None]] = defaultdict(list)
    for row in chain.from_iterable(groups):
        rewards[row["draw_arm"] or MEAN].append(None if row["status"] == "error" else row["reward"])
    if not rewards.keys() - {MEAN}:
        return []
    rescued = [(group[0], arms) for group in groups if (arms := rescuers(group))]
    counts = Counter(chain.from_iterable(arms for _, arms in rescued))
    total = sum(map(len, rewards.values()))
    earned = []
    for arm, values in sorted(rewards.items(), key=lambda item: -len(item[1])):
        judged = [value for value in values if value is not None]
        row = {"arm": arm, "completions": f"{len(values):,}", "share %": percent(len(values) / total)}
        row["mean reward"] = number(fmean(judged) if judged else None, ".3f")
        earned.append(row | {"groups rescued": f"{counts[arm]:,}"})
    first = [
        {"step": str(row["step"]), "problem": row["problem_id"], "answered by": ", ".join(arms)}
        for row, arms in rescued[:RESCUES]
    ]
    tables = [table(f"What each arm wrote and earned{of}", earned)]
    title = f"The first prompts that noise answered and the mean weights did not{of}"
    return [*tables, table(title, first)] if first else tables


def rescuers(group: Sequence[Mapping[str, Any]]) -> list[str]:
    """The arms that answered a prompt for which the mean weights wrote something, and nothing right."""
    by_mean = [row["correct"] for row in group if row["draw_arm"] is None]
    if not by_mean or any(by_mean):
        return []
    return list(dict.fromkeys(row["draw_arm"] for row in group if row["correct"]))
