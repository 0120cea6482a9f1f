"""Runs that go on without learning warn once, with what to do, whether they were interrupted or not."""

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from factories import completion
from runs import outcome, resume, train_config
from threepo import api
from threepo.config import Correction, TrainConfig
from threepo.errors import ThreepoWarning
from threepo.models.policy import load_policy
from threepo.run_folder import read_metrics
from threepo.training.alarms import CONSTANT_STEPS, FAILED_STEPS, watch
from threepo.training.update_record import RowRecord, UpdateRecord
from threepo.types import Completion

CONFIG = train_config(Path("unused"), "sampling.max_new_tokens=3")
NO_CORRECTION = UpdateRecord(None)
WRONG, RIGHT = completion(), completion(reward=1)
FAILED = completion(status="error")
CUT, CUT_RIGHT = (replace(one, finish_reason="length") for one in (WRONG, RIGHT))


def warned(
    steps: Iterable[Sequence[Completion]], record: UpdateRecord = NO_CORRECTION, config: TrainConfig = CONFIG
) -> list[tuple[int, str]]:
    """Step and text of each warning of a run whose steps have these completions."""
    found, streaks = [], dict[str, int]()
    for step, completions in enumerate(steps):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            streaks = watch(config, streaks, completions, record)
        found += [(step, str(warning.message)) for warning in caught]
    return found


def test_a_verifier_that_always_fails() -> None:
    assert not warned([[FAILED, FAILED]] * (FAILED_STEPS - 1) + [[FAILED, RIGHT]] * CONSTANT_STEPS)
    ((step, text),) = warned([[FAILED, RIGHT]] * 2 + [[FAILED, FAILED]] * 3 * CONSTANT_STEPS)
    assert step == 1 + FAILED_STEPS
    assert "for 5 steps in a row, the verifier has failed on every completion, so no reward means anything" in text
    assert FAILED.verdict
    slow = replace(FAILED, verdict=replace(FAILED.verdict, detail="time-out"))
    assert "failed on every completion (time-out), so" in warned([[slow]] * FAILED_STEPS)[0][1]


def test_completions_that_are_all_cut() -> None:
    assert not warned([[CUT, RIGHT]] * 3 * FAILED_STEPS)
    ((step, text),) = warned([[CUT, CUT_RIGHT]] * 3 * FAILED_STEPS)
    assert step == FAILED_STEPS - 1
    assert "every completion was cut at sampling.max_new_tokens = 3" in text
    assert "check that its tokenizer's eos_token" in text
    ((step, _),) = warned([[WRONG, RIGHT], *[[CUT, CUT_RIGHT]] * FAILED_STEPS, [WRONG, RIGHT]])
    assert step == FAILED_STEPS


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_rewards_that_are_all_equal(reward: float) -> None:
    same = completion(reward=reward)
    assert not warned([*[[same, same]] * (CONSTANT_STEPS - 1), [WRONG, RIGHT], [same, same]])
    # A step in which the verifier failed says nothing about the rewards.
    ((step, text),) = warned([[FAILED, FAILED], *[[same, same]] * 3 * CONSTANT_STEPS])
    assert step == CONSTANT_STEPS
    assert f"have earned the same reward (now {reward:g}), so every advantage is 0" in text
    unlike = train_config(Path("unused"), "method.preset=unlikeliness")
    assert len(warned([[same, same]] * CONSTANT_STEPS, config=unlike)) == (reward == 0), "right ones still compete"


def test_a_correction_that_does_nothing_is_warned_of_once_and_where_it_is_asked_for() -> None:
    untouched = RowRecord(0, 4, logprob_sum=-1.0, rho=1.0, weight=1.0, kept_tokens=4, untouched=True, advantage=0.5)
    masked = replace(untouched, weight=0.0, kept_tokens=0, untouched=False)
    steps, noisy = [[WRONG, RIGHT]] * 7, train_config(Path("unused"), "method.preset=c3po")
    for after, expected in ((3, [2]), (0, [])):
        record = UpdateRecord(Correction(kind="seq_mis", warn_after=after), rows=[untouched])
        assert [step for step, _ in warned(steps, record, noisy)] == expected
        assert not warned(steps, replace(record, rows=[]), noisy), "a step without rows says nothing"
        assert not warned(steps, replace(record, rows=[untouched, masked]), noisy)
        assert not warned(steps, replace(record, correction=Correction(warn_after=after)), noisy)
        assert not warned(steps, replace(record, correction=None), noisy), "rollouts that top-p cut have no correction"


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        (["method.preset=c3po"], "too close together to matter (lower optimizer.ess)"),
        (["method.preset=fixed_replay", "noise.size=0.1"], "too close together to matter (raise noise.size)"),
    ],
)
def test_the_advice_on_a_correction_that_does_nothing_can_be_followed(settings: list[str], advice: str) -> None:
    untouched = RowRecord(0, 4, logprob_sum=-1.0, rho=1.0, weight=1.0, kept_tokens=4, untouched=True, advantage=0.5)
    record = UpdateRecord(Correction(kind="seq_mis", warn_after=1), rows=[untouched])
    ((_, text),) = warned([[WRONG, RIGHT]], record, train_config(Path("unused"), *settings))
    assert advice in text
    assert not warned([[WRONG, RIGHT]], record, train_config(Path("unused"), "overlap.lag=1")), "which has no draws"


def test_a_resumed_run_warns_as_one_that_never_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reward function that always returns None; stopped in the middle of the streak, and after the warning."""
    monkeypatch.chdir(tmp_path)
    Path("no_reward.py").write_text("def reward(completions): return [None] * len(completions)\n")
    settings = ["reward.function=no_reward:reward", "schedule.warmup_share=0"]
    with pytest.warns(ThreepoWarning, match="'no_reward:reward' has returned None"):
        api.train(train_config(tmp_path / "whole", *settings, "run.steps=7"))
    config = train_config(tmp_path / "parts", *settings, "run.steps=3")
    api.train(config)
    for steps in (FAILED_STEPS, 7):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            resume(tmp_path / "parts", run={"steps": steps})
        assert sum(one.category is ThreepoWarning for one in caught) == (steps == FAILED_STEPS)
    assert outcome(tmp_path / "parts") == outcome(tmp_path / "whole")


def test_a_model_that_never_ends_warns_in_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("any_reward.py").write_text("def reward(completions): return [float(len(c)) for c in completions]\n")
    settings = ["reward.function=any_reward:reward", "sampling.max_new_tokens=1", f"run.steps={FAILED_STEPS}"]
    config = train_config(tmp_path / "run", *settings, "data.prompts_per_step=1", "method.rollouts_per_prompt=2")
    with pytest.warns(ThreepoWarning, match="for 5 steps in a row, every completion was cut"):
        api.train(config)


def test_noise_that_leaves_nothing_of_the_weights(tmp_path: Path) -> None:
    config = train_config(tmp_path / "run", "method.preset=b3po", "optimizer.ess=1", "run.steps=1")
    with pytest.warns(
        ThreepoWarning, match=r"optimizer.ess = 1: sigma is \d+ times the root .* optimizer.ess = "
    ) as told:
        api.train(config)
    assert len(told) == 1
    usual = float(str(told[0].message).split("optimizer.ess = ")[2].split()[0])
    run = api.train(train_config(tmp_path / "usual", "method.preset=b3po", f"optimizer.ess={usual}", "run.steps=1"))
    assert read_metrics(run)[0]["posterior/sigma_to_rms"] == pytest.approx(0.05, rel=0.05)


def test_noise_on_one_kind_of_layer_is_measured_against_its_weights(tmp_path: Path) -> None:
    """Against all weights, 30 times the RMS of the MLPs is below the limit of 10."""
    loud = ["method.preset=fixed_replay", "noise.size=30", "noise.where={mlp=1.0}", "run.steps=1"]
    with pytest.warns(ThreepoWarning, match=r"noise.size = 30: sigma is 30 times the root"):
        row = read_metrics(api.train(train_config(tmp_path / "run", *loud)))[0]
    assert row["posterior/sigma_to_rms"] == row["posterior/sigma_to_rms/mlp"] == pytest.approx(30)
    assert "posterior/sigma_to_rms/norm" not in row


def test_the_second_run_of_a_process_is_warned_too(tmp_path: Path) -> None:
    """As in a notebook. Python shows a warning of one place once."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for name in ("a", "b"):
            api.train(train_config(tmp_path / name, "method.preset=b3po", "optimizer.ess=1", "run.steps=1"))
    assert sum("times the root mean square of the weights" in str(warning.message) for warning in caught) == 2


def test_a_model_without_an_end_token(tmp_path: Path) -> None:
    policy = load_policy(CONFIG.model)
    policy.model.generation_config.eos_token_id = policy.model.config.eos_token_id = None
    policy.tokenizer.eos_token = None
    policy.save(tmp_path / "endless")
    settings = [f"model.path={tmp_path / 'endless'}", "run.steps=1", "sampling.max_new_tokens=3"]
    with pytest.warns(ThreepoWarning, match=r"endless': has no end token, .* at sampling.max_new_tokens = 3"):
        api.train(train_config(tmp_path / "run", *settings))
