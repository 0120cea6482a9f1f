"""The effective sample size over a run: fixed schedules, two that follow entropy, and a controller (method.md 1.8).

Everything here is a function of numbers that the log has, and of a small state that the checkpoint keeps.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from threepo.config import EssScheduleConfig, TrainConfig
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


def next_ess(
    settings: EssScheduleConfig, base: float, state: EssState, done: int, steps: int, metrics: Mapping[str, float]
) -> EssState:
    """The state after `done` of `steps` training steps; `metrics` are of the last one, and `base` is optimizer.ess.

    A step that updated nothing, or whose entropy or correction is not finite, leaves everything as it was.
    """
    progress, low = min(done / steps, 1.0), settings.floor
    if settings.kind == "cosine":
        return replace(state, factor=(1 - low) / 2 * math.cos(math.pi * progress) + (1 + low) / 2)
    if settings.kind == "linear":
        return replace(state, factor=1 - (1 - low) * progress)
    measured = f"correction/{settings.metric}" if settings.kind == "controller" else "policy/entropy"
    value = metrics.get(measured, math.nan)
    if settings.kind == "constant" or not math.isfinite(value):
        return state
    if settings.kind == "controller":
        return replace(state, factor=_within(settings, base, state.factor * _correction(settings, value)))
    first, highest = state.first_entropy or value, max(value, state.highest_entropy)
    if settings.kind == "entropy_switch":
        factor = low if value <= settings.entropy_share * highest else 1.0
    else:
        # The product of all steps' ratios, so that a bound that was met once leaves no trace.
        factor = _within(settings, base, value / first if first else 1.0)
    return EssState(factor, first, highest)


def refuse_unmeasured(config: TrainConfig) -> None:
    """Raise `UserError` if the controller would steer by a metric that this run does not have."""
    method, sampling = config.method, config.sampling
    if config.ess_schedule.kind != "controller":
        return
    measured = f"ess_schedule.kind = 'controller': steers by correction/{config.ess_schedule.metric}, which"
    if rollouts_are_filtered(method, sampling):
        raise UserError(
            f"{measured} is not computed for rollouts that are cut by sampling.top_p = {sampling.top_p:g} or "
            f"sampling.top_k = {sampling.top_k}; set sampling.top_p = 1 and sampling.top_k = 0, or another "
            f"ess_schedule.kind"
        )
    if method.draws == method.gradient_draws == 1:
        raise UserError(
            f"{measured} is constant with method.draws = 1, where the gradient is taken at the draw that generated "
            f"the rollouts; set method.draws = 2 or more, or another ess_schedule.kind"
        )


def _correction(settings: EssScheduleConfig, value: float) -> float:
    """What to multiply ess by, from the measured KL or kept share.

    The KL between draws goes as 1 / ess, so ess times (KL / target) would meet the target; `gain` is the exponent that
    damps it. A kept share is first translated into the KL of a sequence that would give it (method.md 4).
    """
    if settings.metric == "kl":
        error = math.log(max(value, 1e-12) / settings.target)
    else:
        error = math.log(_divergence(value) / _divergence(settings.target))
    return min(max(math.exp(settings.gain * error), 1 / MOST_AT_ONCE), MOST_AT_ONCE)


def _divergence(kept: float) -> float:
    """The D at which a share `kept` of log rho ~ N(-D, 2 D) lies within +-ln 2, by bisection; between 1e-3 and 1e3."""
    low, high = 1e-3, 1e3
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if _kept(middle) > kept else (low, middle)
    return math.sqrt(low * high)


def _kept(divergence: float) -> float:
    scale = 2 * math.sqrt(divergence)  # sqrt(2) standard deviations
    return 0.5 * (math.erf((math.log(2) + divergence) / scale) - math.erf((divergence - math.log(2)) / scale))


def _within(settings: EssScheduleConfig, base: float, factor: float) -> float:
    return min(max(base * factor, settings.lowest), settings.highest) / base
