"""Schedules of the effective sample size: by hand, within bounds, and the controller against a simulated policy."""

import math
from dataclasses import replace
from statistics import NormalDist

import pytest
from hypothesis import given
from hypothesis import strategies as st

from threepo.config import (
    Correction,
    DataConfig,
    IVONConfig,
    ModelConfig,
    RunConfig,
    SamplingConfig,
    TrainConfig,
)
from threepo.config.method import C3PO
from threepo.config.records import RECORDS
from threepo.config.schedules import (
    NO_NOISE,
    ConstantEss,
    ControllerEss,
    CosineEss,
    EntropyRatioEss,
    EntropySwitchEss,
    EssScheduleConfig,
    KLStepsEss,
    LinearEss,
    StagesEss,
    _divergence,
)
from threepo.errors import UserError
from threepo.training.schedules import ScheduleState, first_state, next_state, resumed_state, step_sampling


def config(schedule: EssScheduleConfig, ess: float = 1e9, steps: int = 10, **correction: float) -> TrainConfig:
    """A run with this schedule, whose correction has these bounds."""
    learn = schedule.kind != "stages"
    return TrainConfig(
        model=ModelConfig(path="tiny-qwen2"),
        data=DataConfig(train="sorting"),
        run=RunConfig(steps=steps),
        method=replace(C3PO, correction=Correction(kind="seq_mis", **correction)),
        optimizer=IVONConfig(ess=ess, learn_hessian=learn),
        ess_schedule=schedule,
    )


def factors(settings: EssScheduleConfig, entropies: list[float]) -> list[float]:
    """Factor after each step, for these entropies."""
    state, found = ScheduleState(), []
    for done, entropy in enumerate(entropies, start=1):
        state = next_state(config(settings), state, done, {"policy/entropy": entropy})
        found.append(state.ess_factor)
    return found


def test_schedules_by_hand() -> None:
    assert factors(ConstantEss(), [1.0] * 3) == [1.0] * 3
    linear = factors(LinearEss(), [1.0] * 10)
    assert linear[4] == pytest.approx(1 - 0.9 * 0.5)
    assert linear[9] == pytest.approx(0.1)
    cosine = factors(CosineEss(floor=0.2), [1.0] * 10)
    assert cosine[4] == pytest.approx(0.6)
    assert cosine[9] == pytest.approx(0.2)
    assert cosine[1] == pytest.approx(0.4 * math.cos(0.2 * math.pi) + 0.6)


def test_stages_are_those_of_qerls_code() -> None:
    """Its values for 10 stages from 1e-2 to 1e-4 over 20 steps: none for two steps, then 9 sigmas, each for two."""
    schedule = StagesEss(stages=10, last=0.01)
    assert first_state(config(schedule, steps=20)).ess_factor == NO_NOISE
    run = config(schedule, steps=20)
    sigmas = [1e-2 * next_state(run, ScheduleState(), done, {}).ess_factor ** -0.5 for done in range(20)]
    expected = [1e-2 * (1e-4 / 1e-2) ** (i / 8) for i in range(9)]
    assert sigmas[:2] == pytest.approx([0, 0], abs=1e-16)
    assert sigmas[2:] == pytest.approx([sigma for sigma in expected for _ in range(2)])


def test_sigma_takes_a_step_down_above_the_kl_and_up_below_it() -> None:
    """There is a dead zone of 1.1 around the target, as in PSN's code."""
    run, state = config(KLStepsEss(target=0.003)), ScheduleState()
    sigmas = []
    for kl in (0.001, 0.0029, 0.0032, 0.0034, math.nan, 0.0026):
        state = next_state(run, state, 1, {"correction/kl": kl})
        sigmas.append(state.ess_factor**-0.5)
    assert sigmas == pytest.approx([1.01, 1.01, 1.01, 1.0, 1.0, 1.01])


def test_low_entropy_switches_to_more_noise_and_back() -> None:
    switch = EntropySwitchEss()
    assert factors(switch, [0.8, 1.0, 0.76, 0.75, 0.5, 0.9]) == [1.0, 1.0, 1.0, 0.1, 0.1, 1.0]


def test_ess_goes_with_the_entropys_ratio() -> None:
    ratio = EntropyRatioEss(lowest=0.2)
    assert factors(ratio, [0.8, 0.4, 0.6, 0.1, 0.8]) == pytest.approx([1.0, 0.5, 0.75, 0.2, 1.0])


def test_the_temperature_rises_once_and_from_the_next_step() -> None:
    """0.85 times the first entropy, 0.8, is 0.68: the fourth step is the first below it, and the fifth is hotter."""
    sampling = SamplingConfig(temperature=0.9, raised_temperature=1.4, raise_below=0.85)
    run, state, used = replace(config(ConstantEss()), sampling=sampling), ScheduleState(), []
    for done, entropy in enumerate([0.8, 1.0, 0.68, 0.67, 2.0, 0.5], start=1):
        used.append(step_sampling(run, state).temperature)
        state = next_state(run, state, done, {"policy/entropy": entropy})
    assert used == [0.9, 0.9, 0.9, 0.9, 1.4, 1.4]
    assert (state.first_entropy, state.temperature_raised) == (0.8, True)
    unmeasured = next_state(run, ScheduleState(), 1, {})
    assert next_state(run, unmeasured, 2, {"policy/entropy": 0.1}).first_entropy == 0.1


def test_a_step_without_update_changes_nothing() -> None:
    for kind in ("constant", "entropy_switch", "entropy_ratio", "controller", "kl_steps"):
        state = ScheduleState(0.4, False, 1.0, 0.5)
        nothing = {"policy/entropy": math.nan, "correction/kept_share": math.nan, "correction/kl": math.nan}
        for metrics in ({}, nothing):
            assert next_state(config(RECORDS["ess_schedule"][kind]()), state, 3, metrics) == state


def test_a_kept_share_is_translated_by_the_corrections_own_bounds() -> None:
    """By hand: at D = 0.02, log rho has mean -0.02 and deviation 0.2; ln 0.8 and ln 1.25 are 1.0157 and 1.2157 away."""
    kept = NormalDist().cdf(1.2157) - NormalDist().cdf(-1.0157)
    assert _divergence(kept, Correction(low=0.8, high=1.25)) == pytest.approx(0.02, rel=1e-3)


def test_the_kept_share_is_translated_as_method_md_has_it() -> None:
    for kept, divergence in ((0.97, 0.05), (0.87, 0.1), (0.59, 0.3), (0.30, 1.0), (0.05, 5.0)):
        assert _divergence(kept, Correction()) == pytest.approx(divergence, rel=0.15)


@pytest.mark.parametrize(("metric", "target"), [("kl", 1e-3), ("kept_share", 0.7)])
@pytest.mark.parametrize("start", [1e7, 1e9, 1e11])
@pytest.mark.parametrize("bounds", [(0.5, 2.0), (0.9, 1.2), (0.5, math.inf)])
def test_the_controller_reaches_its_target_from_far_away(
    metric: str, target: float, start: float, bounds: tuple[float, float]
) -> None:
    """A policy whose KL per token is 1e6 / ess, and whose answers have 100 tokens."""
    settings = ControllerEss(metric=metric, target=target)
    run, state = config(settings, start, 100, low=bounds[0], high=bounds[1]), ScheduleState()
    for done in range(1, 101):
        kl = 1e6 / (start * state.ess_factor)
        spread = math.sqrt(2 * 100 * kl)
        low, high = ((math.log(bound) + 100 * kl) / spread / math.sqrt(2) for bound in bounds)
        metrics = {
            "policy/entropy": 1.0,
            "correction/kl": kl,
            "correction/kept_share": 0.5 * (math.erf(high) - math.erf(low)),
        }
        state = next_state(run, state, done, metrics)
    assert metrics[f"correction/{metric}"] == pytest.approx(target, rel=0.05)


def test_a_kl_does_not_take_the_kept_shares_target() -> None:
    with pytest.raises(UserError, match="is the default of a kept share; set the KL per token to hold"):
        ControllerEss(metric="kl")


@given(
    schedule=st.sampled_from(
        [
            ControllerEss(metric="kl", target=1e-3, lowest=0.1, highest=10),
            ControllerEss(metric="kept_share", lowest=0.1, highest=10),
            EntropyRatioEss(lowest=0.1, highest=10),
        ]
    ),
    base=st.sampled_from([1e7, 1e9]),
    seen=st.lists(st.tuples(st.floats(0, 5), st.floats(0, 1e6), st.floats(0, 1)), max_size=30),
)
def test_ess_stays_within_its_bounds_whatever_is_measured(
    schedule: EssScheduleConfig, base: float, seen: list[tuple[float, float, float]]
) -> None:
    run = config(schedule, base, 30)
    state = ScheduleState()
    for done, (entropy, kl, kept) in enumerate(seen, start=1):
        metrics = {"policy/entropy": entropy, "correction/kl": kl, "correction/kept_share": kept}
        state = next_state(run, state, done, metrics)
        assert 0.1 <= state.ess_factor <= 10


def test_an_extended_run_follows_its_new_length_at_once() -> None:
    """After 10 steps of 10 the factor is 0.1; of 100, 1 - 0.9 x 0.1 = 0.91. A controller keeps what it has found."""
    short, long = (config(LinearEss(floor=0.1), steps=steps) for steps in (10, 100))
    ended = next_state(short, ScheduleState(), 10, {})
    assert ended.ess_factor == pytest.approx(0.1)
    assert resumed_state(short, ended, 10) == ended
    assert resumed_state(long, ended, 10).ess_factor == pytest.approx(0.91)
    found = ScheduleState(ess_factor=0.37)
    assert resumed_state(config(ControllerEss(), steps=100), found, 10) == found
