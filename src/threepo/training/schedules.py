"""Schedules that follow from earlier steps: effective sample size (method.md 1.8), temperature (3.7) and overlap.

Everything here is a function of numbers that the log has, and of a small state that the checkpoint keeps.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from threepo.config import SamplingConfig, TrainConfig
from threepo.config.schedules import Moment


@dataclass(frozen=True)
class ScheduleState:
    """The memory of the schedules about the steps done."""

    ess_factor: float = 1.0
    """ess of the coming step, as a multiple of optimizer.ess."""
    temperature_raised: bool = False
    """True if the coming step samples at sampling.raised_temperature."""
    first_entropy: float = 0.0
    """Entropy (nats per token) of the first step that measured it; 0 before, and where no schedule follows entropy."""
    highest_entropy: float = 0.0
    """Highest entropy of all steps."""
    ahead: int = 0
    """Steps by which rollouts may be ahead in the coming step: `overlap.lag`, or fewer because of `most_kl`."""


def first_state(config: TrainConfig) -> ScheduleState:
    """The state before the first step."""
    return ScheduleState(ess_factor=_ess_factor(config, ScheduleState(), 0, {}), ahead=_ahead(config, 0, 0.0))


def resumed_state(config: TrainConfig, state: ScheduleState, done: int) -> ScheduleState:
    """The state of a resumed run, whose ess may follow another number of steps than before."""
    return state if config.ess_schedule.metric_read else replace(state, ess_factor=_ess_factor(config, state, done, {}))


def next_state(config: TrainConfig, state: ScheduleState, done: int, metrics: Mapping[str, float]) -> ScheduleState:
    """The state after `done` training steps; `metrics` are the last step's.

    A step without an update, or with an entropy or correction that is not finite, changes nothing.
    """
    entropy, raised = metrics.get("policy/entropy", math.nan), config.sampling.raised_temperature
    followed = config.ess_schedule.metric_read
    if math.isfinite(entropy) and (raised or followed == "policy/entropy"):
        first, highest = state.first_entropy or entropy, max(entropy, state.highest_entropy)
        state = replace(state, first_entropy=first, highest_entropy=highest)
    fallen = raised > 0 and entropy < config.sampling.raise_below * state.first_entropy
    return replace(
        state,
        ess_factor=_ess_factor(config, state, done, metrics),
        temperature_raised=state.temperature_raised or fallen,
        ahead=_ahead(config, state.ahead, metrics.get("correction/kl", math.nan)),
    )


def step_sampling(config: TrainConfig, state: ScheduleState) -> SamplingConfig:
    """Sampling settings of the coming step; log-probs are scored at the same temperature."""
    if config.method.greedy:
        return replace(config.sampling, temperature=0.0)
    sampling = config.sampling
    return replace(sampling, temperature=sampling.raised_temperature) if state.temperature_raised else sampling


def _ahead(config: TrainConfig, ahead: int, kl: float) -> int:
    """Steps by which rollouts may be ahead: one more after a step with a small divergence, none after a large one.

    All at once would be too far: the divergence of the next steps grows with their age before it is measured.
    """
    settings = config.overlap
    if not settings.most_kl:
        return settings.lag
    if math.isnan(kl):
        return ahead
    return 0 if kl > settings.most_kl else min(ahead + 1, settings.lag)


def _ess_factor(config: TrainConfig, state: ScheduleState, done: int, metrics: Mapping[str, float]) -> float:
    """ess of the coming step, as a multiple of optimizer.ess; `state` includes the last step."""
    schedule = config.ess_schedule
    value = metrics.get(schedule.metric_read, math.nan)
    if schedule.metric_read and not math.isfinite(value):
        return state.ess_factor
    now = Moment(
        progress=min(done / config.run.steps, 1.0),
        factor=state.ess_factor,
        value=value,
        first_entropy=state.first_entropy,
        highest_entropy=state.highest_entropy,
        correction=config.method.correction,
    )
    return schedule.factor(now)
