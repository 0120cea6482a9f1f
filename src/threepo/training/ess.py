"""The effective sample size over a run: fixed schedules, two that follow entropy, and a controller (method.md 1.8).

Everything here is a function of numbers that the log has, and of a small state that the checkpoint keeps.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from threepo.config import Correction, TrainConfig
from threepo.errors import UserError
from threepo.methods.method import rollouts_are_filtered

MOST_AT_ONCE = 2.0
"""The controller changes ess by no more than this factor in one step."""


@dataclass(frozen=True)
class EssState:
    """What a schedule remembers of the steps done."""

    factor: float = 1.0
    """ess of the coming step, as a multiple of optimizer.ess."""
    first_entropy: float = 0.0
    """Nats per token, of the first step; 0 before it."""
    highest_entropy: float = 0.0
    """Over all steps."""


def next_ess(config: TrainConfig, state: EssState, done: int, metrics: Mapping[str, float]) -> EssState:
    """The state after `done` training steps; `metrics` are of the last one.

    A step that updated nothing, or whose entropy or correction is not finite, leaves everything as it was.
    """
    settings = config.ess_schedule
    progress, low = min(done / config.run.steps, 1.0), settings.floor
    if settings.kind == "cosine":
        return replace(state, factor=(1 - low) / 2 * math.cos(math.pi * progress) + (1 + low) / 2)
    if settings.kind == "linear":
        return replace(state, factor=1 - (1 - low) * progress)
    measured = f"correction/{settings.metric}" if settings.kind == "controller" else "policy/entropy"
    value = metrics.get(measured, math.nan)
    if settings.kind == "constant" or not math.isfinite(value):
        return state
    if settings.kind == "controller":
        # The KL between draws goes as 1 / ess, so ess times (KL / target) would meet the target; the exponent `gain`
        # damps it. A kept share is first translated into the KL of a sequence that would give it (method.md 4).
        target = settings.target
        if settings.metric == "kept_share":
            value, target = (_divergence(share, config.method.correction) for share in (value, target))
        change = math.exp(settings.gain * math.log(max(value, 1e-12) / target))
        return replace(state, factor=_within(config, state.factor * min(max(change, 1 / MOST_AT_ONCE), MOST_AT_ONCE)))
    first, highest = state.first_entropy or value, max(value, state.highest_entropy)
    if settings.kind == "entropy_switch":
        factor = low if value <= settings.entropy_share * highest else 1.0
    else:
        # The product of all steps' ratios, so that a bound that was met once leaves no trace.
        factor = _within(config, value / first if first else 1.0)
    return EssState(factor, first, highest)


def refuse_unmeasured(config: TrainConfig) -> None:
    """Raise `UserError` if the controller would steer by a metric that this run does not have."""
    method, sampling, why = config.method, config.sampling, ""
    if rollouts_are_filtered(method, sampling):
        why = (
            f"is not computed for rollouts that are cut by sampling.top_p = {sampling.top_p:g} or sampling.top_k = "
            f"{sampling.top_k}; set sampling.top_p = 1 and sampling.top_k = 0"
        )
    elif method.draws == method.gradient_draws == 1:
        why = (
            "is constant with method.draws = 1, where the gradient is taken at the draw that generated the rollouts; "
            "set method.draws = 2 or more"
        )
    if why and config.ess_schedule.kind == "controller":
        measured = f"steers by correction/{config.ess_schedule.metric}, which {why}"
        raise UserError(f"ess_schedule.kind = 'controller': {measured}, or another ess_schedule.kind")


def _divergence(kept: float, correction: Correction) -> float:
    """The D at which a share `kept` of rho, log rho ~ N(-D, 2 D), is within the bounds; by bisection in [1e-3, 1e3]."""
    first, last = (math.log(bound) if bound else -math.inf for bound in (correction.low, correction.high))
    low, high = 1e-3, 1e3
    for _ in range(60):
        middle = math.sqrt(low * high)
        scale = 2 * math.sqrt(middle)  # sqrt(2) standard deviations
        share = 0.5 * (math.erf((last + middle) / scale) - math.erf((first + middle) / scale))
        low, high = (middle, high) if share > kept else (low, middle)
    return math.sqrt(low * high)


def _within(config: TrainConfig, factor: float) -> float:
    settings, base = config.ess_schedule, getattr(config.optimizer, "ess", 1.0)
    return min(max(base * factor, settings.lowest), settings.highest) / base
