"""Schedules that follow from earlier steps: effective sample size (method.md 1.8) and temperature (3.7).

Everything here is a function of numbers that the log has, and of a small state that the checkpoint keeps.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from threepo.config import Correction, SamplingConfig, TrainConfig
from threepo.errors import UserError
from threepo.methods.method import rollouts_are_filtered

NO_NOISE = 1e30
"""A factor of ess that leaves no noise in float32."""
DEAD_ZONE = 1.1
"""kl_steps leaves sigma as it is while the KL is within this factor of its target."""
MOST_AT_ONCE = 2.0
"""The controller changes ess by no more than this factor in one step."""


FOLLOW_ENTROPY = ("entropy_switch", "entropy_ratio")


@dataclass(frozen=True)
class ScheduleState:
    """Memory of all schedules of the steps done."""

    ess_factor: float = 1.0
    """ess of the coming step, as a multiple of optimizer.ess."""
    temperature_raised: bool = False
    """Whether the coming step samples at sampling.raised_temperature."""
    first_entropy: float = 0.0
    """Nats per token, of the first step that measured it; 0 before it, and where no schedule follows entropy."""
    highest_entropy: float = 0.0
    """Over all steps."""
    lowest_certainty: float = 0.0
    """Self-certainty of a completion, over all steps; 0 before the first, and where no schedule follows it."""
    highest_certainty: float = 0.0


def first_state(config: TrainConfig) -> ScheduleState:
    """The state before the first step."""
    return ScheduleState(ess_factor=_ess_factor(config, ScheduleState(), 0, {}))


def next_state(config: TrainConfig, state: ScheduleState, done: int, metrics: Mapping[str, float]) -> ScheduleState:
    """The state after `done` training steps; `metrics` are of the last one.

    A step that updated nothing, or whose entropy or correction is not finite, leaves everything as it was.
    """
    entropy, raised = metrics.get("policy/entropy", math.nan), config.sampling.raised_temperature
    if math.isfinite(entropy) and (raised or config.ess_schedule.kind in FOLLOW_ENTROPY):
        first, highest = state.first_entropy or entropy, max(entropy, state.highest_entropy)
        state = replace(state, first_entropy=first, highest_entropy=highest)
    least, most = (metrics.get(f"policy/self_certainty_{end}", math.nan) for end in ("min", "max"))
    if config.ess_schedule.kind == "similarity" and math.isfinite(least) and math.isfinite(most):
        least, most = min(least, state.lowest_certainty or least), max(most, state.highest_certainty)
        state = replace(state, lowest_certainty=least, highest_certainty=most)
    fallen = raised > 0 and entropy < config.sampling.raise_below * state.first_entropy
    return replace(
        state,
        ess_factor=_ess_factor(config, state, done, metrics),
        temperature_raised=state.temperature_raised or fallen,
    )


def certainty(state: ScheduleState, metrics: Mapping[str, float]) -> float:
    """Mean self-certainty of the last step, which `state` has seen: 0 is the lowest of a completion so far, 1 the
    highest. NaN if all have been alike."""
    span = state.highest_certainty - state.lowest_certainty
    return (metrics.get("policy/self_certainty", math.nan) - state.lowest_certainty) / span if span else math.nan


def step_sampling(config: TrainConfig, state: ScheduleState) -> SamplingConfig:
    """Sampling settings of the coming step; log-probs are scored at the same temperature."""
    if config.method.greedy:
        return replace(config.sampling, temperature=0.0)
    sampling = config.sampling
    return replace(sampling, temperature=sampling.raised_temperature) if state.temperature_raised else sampling


def _ess_factor(config: TrainConfig, state: ScheduleState, done: int, metrics: Mapping[str, float]) -> float:
    """ess of the coming step, as a multiple of optimizer.ess; `state` has seen what the last step measured."""
    settings = config.ess_schedule
    progress, low = min(done / config.run.steps, 1.0), settings.floor
    if settings.kind == "cosine":
        return (1 - low) / 2 * math.cos(math.pi * progress) + (1 + low) / 2
    if settings.kind == "linear":
        return 1 - (1 - low) * progress
    if settings.kind == "stages":  # as in QeRL's code: after one without noise, sigma falls from each to the next alike
        stage = min(int(progress * settings.stages), settings.stages - 1)
        share = settings.last ** ((stage - 1) / (settings.stages - 2))
        return share**-2 if stage else NO_NOISE
    by_kl = {"controller": f"correction/{settings.metric}", "kl_steps": "correction/kl"}
    measured = "groups/similarity" if settings.kind == "similarity" else by_kl.get(settings.kind, "policy/entropy")
    value = metrics.get(measured, math.nan)
    if settings.kind == "constant" or not math.isfinite(value):
        return state.ess_factor
    if settings.kind == "controller":
        # The KL between draws goes as 1 / ess, so ess times (KL / target) would meet the target; the exponent `gain`
        # damps it. A kept share is first translated into the KL of a sequence that would give it (method.md 4).
        target = settings.target
        if settings.metric == "kept_share":
            value, target = (_divergence(share, config.method.correction) for share in (value, target))
        change = math.exp(settings.gain * math.log(max(value, 1e-12) / target))
        return _within(config, state.ess_factor * min(max(change, 1 / MOST_AT_ONCE), MOST_AT_ONCE))
    if settings.kind == "kl_steps":  # PSN's code, variant I
        louder = (value < settings.target / DEAD_ZONE) - (value > settings.target * DEAD_ZONE)
        return _within(config, state.ess_factor * settings.ratio ** (-2 * louder))
    if settings.kind == "similarity":  # PSN's variant II
        indicator = settings.weight * value + (1 - settings.weight) * certainty(state, metrics)
        if not math.isfinite(indicator):
            return state.ess_factor
        louder = 1 if indicator > settings.target else -1
        return _within(config, state.ess_factor * settings.ratio ** (-2 * louder))
    if settings.kind == "entropy_switch":
        return low if value <= settings.entropy_share * state.highest_entropy else 1.0
    # The product of all steps' ratios, so that a bound that was met once leaves no trace.
    return _within(config, value / state.first_entropy if state.first_entropy else 1.0)


def refuse_unmeasured(config: TrainConfig) -> None:
    """Raise `UserError` if the controller would steer by a metric that this run does not have."""
    method, sampling, why = config.method, config.sampling, ""
    if rollouts_are_filtered(method, sampling):
        why = (
            f"is not computed for rollouts that are cut by sampling.top_p = {sampling.top_p:g} or sampling.top_k = "
            f"{sampling.top_k}; set sampling.top_p = 1 and sampling.top_k = 0"
        )
    elif method.draws == method.gradient_draws == 1 and method.gradient_at == "fresh":
        why = (
            "is constant with method.draws = 1, where the gradient is taken at the draw that generated the rollouts; "
            "set method.draws = 2 or more"
        )
    kind, metric = config.ess_schedule.kind, config.ess_schedule.metric
    if why and kind in ("controller", "kl_steps"):
        measured = f"steers by correction/{metric if kind == 'controller' else 'kl'}, which {why}"
        raise UserError(f"ess_schedule.kind = {kind!r}: {measured}, or another ess_schedule.kind")


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
    return min(max(factor, config.ess_schedule.lowest), config.ess_schedule.highest)
