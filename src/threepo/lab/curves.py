"""Curves of training runs: panels of a picture or a page, and `threepo report RUN... --output FILE.png`."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from rich.table import Table

from threepo.errors import UserError
from threepo.evaluation.statistics import Interval
from threepo.evaluation.tables import number, table
from threepo.lab.arms_view import OTHERS, SHOWN, Metrics, arm_shares, shown_arms
from threepo.lab.figures import SHARE, STYLE, Curve, Panel, colours, picture, together, with_data
from threepo.lab.report import Measure, RunReport, by_method, series
from threepo.lab.statistics import running_means

FORMATS = (".png", ".pdf", ".svg")
SMOOTHING = 5
"""Training curves show a running mean over this many steps, with the raw values faint behind it."""
SMOOTHED = f"Means over {SMOOTHING} steps."
ARMS_SMOOTHING = 3
"""Areas of arms are running means over this many steps, since a step has few draws."""
RAW = {"alpha": 0.25, "linewidth": 1}


def learning(runs: Sequence[RunReport]) -> list[Panel]:
    """Panels of learning curves: all of a picture, and the first of a page."""
    silent = "All completions of such a prompt earn the same, so it teaches nothing."
    scores_note = "Bars: one standard error over problems, or for several seeds their range."
    settled = "Falls when a policy settles, on what is right or on what is wrong: no measure of exploration."
    scores, heldout = _dotted(runs, "eval/pass_at_1", "eval/se_between"), _dotted(runs, "sft/eval_loss")
    reward, entropy, loss, shares = (
        _smoothed(runs, metric)
        for metric in ("reward/mean", "policy/entropy", "sft/loss", "groups/zero_advantage_share")
    )
    return [
        Panel("reward", "Reward (training rollouts)", SMOOTHED, reward),
        Panel("pass_at_1", "Held-out pass@1", scores_note, scores, axes=SHARE),
        Panel("zero_advantage", "Share of prompts without any advantage", silent, shares, axes=SHARE),
        Panel("entropy", "Token entropy (nats)", settled, entropy),
        Panel("sft_loss", "Cross-entropy of the targets (nats)", SMOOTHED, loss),
        Panel("sft_eval_loss", "Held-out cross-entropy (nats)", "", heldout),
    ]


def share_panel(name: str, title: str, rows: Sequence[Metrics]) -> Panel:
    """Areas, one upon the other, of the share of completions that each arm wrote; empty for a run without arms."""
    shares, curves = arm_shares(rows), []
    below, steps = np.zeros(len(rows)), [row["step"] + 1 for row in rows]
    for arm in shown_arms(rows):
        share = 1 - below if arm == OTHERS else np.array(running_means(shares[arm].tolist(), ARMS_SMOOTHING))
        above = below + share
        curves.append(Curve(arm, steps, above.tolist(), below.tolist(), above.tolist(), opacity=0.85))
        below = above
    note = f"The {SHOWN} arms that wrote most, upon the mean weights. Means over {ARMS_SMOOTHING} steps."
    return Panel(name, title, note, curves, axes=SHARE, legend=True)


def noise(runs: Sequence[RunReport]) -> list[Panel]:
    """Panels of noise on the weights and what it does to the rollouts."""
    kept_note = f"Share of which at least one token counts. {SMOOTHED}"
    rho_note = "Ratio of a completion's chance under the weights of the gradient and of the rollout: median, 5 to 95 %."
    hessian_note = "Of all weights: median, 5 to 95 %. At 1, nothing was learned of their precision."
    sigma_note = "Root mean square of sigma, divided by the root mean square of the weights."

    def only(telling: Callable[[RunReport], bool], curves: list[Curve]) -> list[Curve]:
        names = {name for name, seeds in by_method(runs).items() if any(map(telling, seeds))}
        return [curve for curve in curves if curve.name in names]

    kept = only(_corrected, _smoothed(runs, "correction/kept_share"))
    rho = only(lambda run: _corrected(run) or _off_policy(run), _quantiles(runs, "correction/rho"))
    hessian = _quantiles(runs, "posterior/hessian")
    # With arms, sigma is only the unit of their sizes.
    sigma = only(lambda run: not arm_shares(run.steps), _smoothed(runs, "posterior/sigma_to_rms"))
    return [
        Panel("kept", "Completions kept by the correction", kept_note, kept, axes=SHARE),
        Panel("rho", "Importance ratios (rho)", rho_note, rho, level=1, axes={"yscale": "log"}),
        Panel("hessian", "Hessian over its start", hessian_note, hessian, level=1, axes={"yscale": "log"}),
        Panel("sigma", "Noise over weights", sigma_note, sigma),
    ]


def _corrected(run: RunReport) -> bool:
    return run.settings.get("method.correction.kind", "'none'") != "'none'"


def _off_policy(run: RunReport) -> bool:
    """True if importance ratios differ from 1 by more than rounding ever made them."""
    return any(abs((row.get("correction/rho_p95") or 1) - 1) > 0.01 for row in run.steps)


def cost(runs: Sequence[RunReport]) -> list[Panel]:
    """Panels of what the runs have cost."""
    note = "As the paper counts: 2 operations per weight and token read or written, 6 per token trained on."
    operations = {curve.name: curve.y for curve in _totals(runs, _paid)}
    rewards = _smoothed(runs, lambda row: row["reward/mean"] if _paid(row) else None)
    by_flops = [replace(curve, x=operations[curve.name]) for curve in rewards]
    return [
        Panel("reward_by_flops", "Reward, by compute", note, by_flops, "operations so far (FLOPs)"),
        Panel("seconds", "Seconds so far", "Wall-clock time, evaluations included.", _totals(runs, seconds)),
        Panel("tokens", "Generated tokens so far", "In the rollouts for training.", _totals(runs, tokens)),
    ]


def costs(runs: Sequence[RunReport]) -> Table:
    """A table of the totals that the runs have cost, a row per run."""
    measures: dict[str, Measure] = {"FLOPs": "compute/flops", "generated tokens": tokens, "seconds": seconds}
    parts = {"rollout": "rollout", "reward": "reward", "update": "update", "evaluation": "eval"}
    measures |= {name: f"time/{part}" for name, part in parts.items()}
    forms = {"FLOPs": ".3g", "generated tokens": ",.0f"}
    rows = []
    for run in runs:
        known = {name: series(run.steps, measure)[1] for name, measure in measures.items()}
        totals = {name: sum(values) if values else None for name, values in known.items()}
        rows.append({"run": run.name} | {name: number(x, forms.get(name, ",.1f")) for name, x in totals.items()})
    return table("Totals of the training steps", rows)


def seed_range(values: Sequence[float]) -> Interval:
    """Mean and range over seeds."""
    return Interval(fmean(values), min(values), max(values))


def mean_curve(
    name: str,
    seeds: Iterable[tuple[Sequence[float], Sequence[float]]],
    interval: Callable[[Sequence[float]], Interval] = seed_range,
    **more: Any,
) -> list[Curve]:
    """The mean of (x, y) over seeds, with an interval if there are several; empty without data.

    It ends where the first seed ends, as the mean of the others would look like a jump; seeds that have come less than
    half as far as the longest are left out.
    """
    at: dict[float, list[float]] = defaultdict(list)
    known = [(x, y) for x, y in seeds if y]
    longest = max((x[-1] for x, _ in known), default=0.0)
    known = [(x, y) for x, y in known if 2 * x[-1] >= longest]
    end = min((x[-1] for x, _ in known), default=0.0)
    for x, y in known:
        for place, value in zip(x, y, strict=True):
            if place <= end:
                at[place].append(value)
    means = [interval(at[place]) for place in sorted(at)]
    low, high = ([m.low for m in means], [m.high for m in means]) if len(known) > 1 else ((), ())
    return [Curve(name, sorted(at), [m.value for m in means], low, high, **more)] if at else []


def _smoothed(runs: Sequence[RunReport], measure: Measure) -> list[Curve]:
    """The running mean of a measure; one seed has its raw values too."""
    curves = []
    for name, seeds in by_method(runs).items():
        raw = [series(run.rows, measure) for run in seeds]
        curves += mean_curve(name, raw, style=RAW) if len(seeds) == 1 else []
        curves += mean_curve(name, [(x, running_means(y, SMOOTHING)) for x, y in raw])
    return curves


def _dotted(runs: Sequence[RunReport], metric: str, error: str = "") -> list[Curve]:
    """A metric that is known at few steps; one seed has bars of one standard error where `error` names it."""
    curves = []
    for name, seeds in by_method(runs).items():
        for curve in mean_curve(name, [series(run.rows, metric) for run in seeds], bars=True):
            if error and len(seeds) == 1:
                errors = np.array([row.get(error) or 0.0 for row in seeds[0].rows if row.get(metric) is not None])
                curve = replace(curve, low=(curve.y - errors).tolist(), high=(curve.y + errors).tolist())
            curves.append(curve)
    return curves


def _quantiles(runs: Sequence[RunReport], stem: str) -> list[Curve]:
    """Median of a figure, and its 5 % and 95 % quantiles as a band; means over seeds."""
    curves = []
    for name, seeds in by_method(runs).items():
        found = [mean_curve(name, [series(run.rows, f"{stem}_p{q}") for run in seeds]) for q in ("05", "50", "95")]
        curves += [replace(middle, low=low.y, high=high.y) for low, middle, high in zip(*found, strict=True)]
    return curves


def _totals(runs: Sequence[RunReport], measure: Measure) -> list[Curve]:
    """The sum of a measure over the steps so far."""
    curves = []
    for name, seeds in by_method(runs).items():
        known = [series(run.steps, measure) for run in seeds]
        curves += mean_curve(name, [(x, list(accumulate(y))) for x, y in known])
    return curves


def _paid(row: Metrics) -> float | None:
    """Operations of a step whose reward is known."""
    if row.get("reward/mean") is None:
        return None
    return row.get("compute/flops") or None


def seconds(row: Metrics) -> float | None:
    """Wall-clock time of a step, its evaluation and its logging."""
    if "time/step" not in row:
        return None
    return sum(row.get(f"time/{part}") or 0.0 for part in ("step", "eval", "log"))


def tokens(row: Metrics) -> float | None:
    """Tokens that the rollouts of a step have."""
    speed: float | None = row.get("time/tokens_per_second")
    return speed * row["time/rollout"] if speed else None


def plot(runs: Sequence[RunReport], path: Path) -> None:
    """Draw the curves of the runs into a PNG, PDF or SVG file; `UserError` for another suffix, or nothing to draw."""
    if path.suffix not in FORMATS:
        raise UserError(f"--output {path}: name a folder for the page, or end the name in {', '.join(FORMATS)}")
    picture(_drawable(runs), colours(list(by_method(runs))), path)


def curves(runs: Sequence[RunReport]) -> Figure:
    """The curves of the runs in one figure; `UserError` where there is nothing to draw."""
    with matplotlib.rc_context(STYLE):
        return together(_drawable(runs), colours(list(by_method(runs))))


def _drawable(runs: Sequence[RunReport]) -> list[Panel]:
    panels = with_data(learning(runs))
    if not panels:
        raise UserError(f"{', '.join(run.name for run in runs)}: no finished step, so there is nothing to draw")
    return panels
