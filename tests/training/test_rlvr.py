"""The loop as a whole: it learns, it stops and resumes bitwise, it survives being killed."""

import ctypes
import errno
import hashlib
import json
import math
import os
import random
import shutil
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from runs import BRITTLE, RLVR, forked, outcome, resume, sft_config, train_config
from threepo import api
from threepo.cli import main
from threepo.config import IVONConfig, ModelConfig, NoiseConfig, TrainConfig
from threepo.config.method import C3PO
from threepo.config.presets import PRESETS
from threepo.config.recipes import load
from threepo.errors import Interrupted, ThreepoWarning, UserError
from threepo.evaluation.examination import Examination
from threepo.models.policy import Policy, load_policy
from threepo.posterior.gaussian import Posterior
from threepo.posterior.ivon import IVON
from threepo.posterior.shards import is_spread
from threepo.rollout.local import LocalEngine
from threepo.run_folder import COMPLETIONS, RunFolder, checkpoints, read_metrics
from threepo.training import completion_log, rlvr
from threepo.training.checkpoint import TrainState
from threepo.training.optimizers import begin_ivon, build_optimizer
from threepo.training.schedules import ScheduleState


def assert_it_learned_something(config: TrainConfig) -> None:
    """Gradients, moments and weights are not what they started as; else nothing that is lost could be missed."""
    rows = [row for row in read_metrics(Path(config.run.folder)) if row["step"] >= 0]
    assert sum(row["optimizer/grad_norm"] > 0 for row in rows) > len(rows) / 2
    last = checkpoints(Path(config.run.folder))[-1][1]
    first, now = load_policy(config.model, config.run.seed), load_file(last / "model.safetensors")
    assert all(not torch.equal(now[name], p) for name, p in first.model.named_parameters())
    moments = load_file(last / "optimizer.safetensors")
    assert all(moment.any() for name, moment in moments.items() if not name.startswith("missed_steps/"))


ADAMW = ("optimizer.lr=3e-2", "optimizer.weight_decay=0")
IVON_RATE = ("optimizer.step_size=1.5e-2", "optimizer.ess=1e8")
LEARNING = {
    **dict.fromkeys(("grpo", "psn", "auto"), ADAMW),
    **dict.fromkeys(("m3po", "c3po", "c3po_replay"), IVON_RATE),
    # Greedy rollouts differ by their weights alone.
    "thompson": ("optimizer.lr=2e4", "optimizer.ess=1e6", "method.draws=8"),
    "es": ("optimizer.lr=1.5e-2", "noise.size=0.05", "method.draws=64", "method.rollouts_per_prompt=64"),
}
"""One of each way to explore and to take the gradient; the other rows differ from these by their settings alone."""


@pytest.mark.filterwarnings("ignore:.*every completion was cut:threepo.errors.ThreepoWarning")
@pytest.mark.parametrize("preset", LEARNING)
def test_every_way_to_explore_learns(preset: str, tmp_path: Path, learnable: list[str]) -> None:
    common = [*learnable, "run.steps=10", "sampling.max_new_tokens=1"]
    api.train(train_config(tmp_path / "run", f"method.preset={preset}", *common, *LEARNING[preset]))
    rewards = [row["reward/mean"] for row in read_metrics(tmp_path / "run")]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:2]) / 2 + 0.25


def test_every_row_trains_otherwise_than_the_others(tmp_path: Path, learnable: list[str]) -> None:
    """Rows of the same optimizer, rate and number of updates of a batch end at weights of their own."""
    acts = {
        "polaris": ["sampling.raise_below=1"],  # the first entropy is a maximum, or the second step is below it
        "psn": ["ess_schedule.ratio=1.5", "ess_schedule.target=9"],  # sigma rises; above it falls
        "qerl": ["noise.size=0.1"],  # so much that a rollout has another token
        # To be told from pairs under GRPO by their data; pairs are often of one reward.
        "dapo": ["objective.clip_high=0.2", "method.rollouts_per_prompt=2"],
        "grpo of pairs": ["method.rollouts_per_prompt=2"],
    }
    ended: dict[str, str] = {}
    for name, preset in (PRESETS | {"grpo of pairs": PRESETS["grpo"]}).items():
        method = preset.method
        rate = ADAMW[:1] if method.optimizer == "adamw" else IVON_RATE if method.optimizer == "ivon" else ()
        updates = ["objective.mini_batches=4"] if method.optimizer == "adamw" else []
        sizes = ["method.rollouts_per_prompt=16", "method.draws=16"] if name in ("es", "thompson") else []
        settings = [
            *learnable,
            "run.steps=3",
            "sampling.max_new_tokens=2",
            *rate,
            *updates,
            *sizes,
            *acts.get(name, []),
        ]
        folder = tmp_path / name
        api.train(train_config(folder, f"method.preset={method.name}", *settings))
        last = checkpoints(folder)[-1][1]
        weights = load_file(last / "model.safetensors")
        digest = hashlib.sha256(b"".join(weights[key].numpy().tobytes() for key in sorted(weights))).hexdigest()
        assert digest not in ended, f"{name} is {ended[digest]}"
        ended[digest] = name


def test_completions_are_written_while_the_next_step_runs(
    tmp_path: Path, learnable: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write, update = completion_log.write_completions, rlvr.update_policy
    updated = [threading.Event() for _ in range(3)]
    events, written = iter(updated), []

    def late(folder: RunFolder, step: int, *args: Any) -> None:
        if step == 2:
            time.sleep(0.5)  # the end of the run waits
        else:
            assert updated[step + 1].wait(60), "the next step waits for the log"
        write(folder, step, *args)
        written.append(step)

    def begin(*args: Any) -> Any:
        next(events).set()
        return update(*args)

    monkeypatch.setattr(completion_log, "write_completions", late)
    monkeypatch.setattr(rlvr, "update_policy", begin)
    config = train_config(tmp_path / "run", *learnable, "run.steps=3")
    api.train(config)
    assert written == [0, 1, 2]
    assert len(outcome(tmp_path / "run")["completions"]) == 3


@pytest.mark.parametrize("steps", [1, 4])
def test_a_log_that_cannot_be_written_ends_the_run(
    steps: int, tmp_path: Path, learnable: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(completion_log, "write_completions", fail)
    with pytest.raises(OSError, match="No space left"):
        api.train(train_config(tmp_path / "run", *learnable, f"run.steps={steps}", "run.checkpoint_every=0"))
    assert len(read_metrics(tmp_path / "run")) == 1, "the next step hears of it"
    assert not checkpoints(tmp_path / "run"), "a checkpoint would leave the completions out for good"


def test_the_log_is_written_though_the_next_step_fails(
    tmp_path: Path, learnable: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write, update = completion_log.write_completions, rlvr.update_policy
    failed = threading.Event()

    def late(*args: Any) -> None:
        assert failed.wait(60)
        time.sleep(0.5)
        write(*args)

    def fail_second(*args: Any) -> Any:
        if read_metrics(tmp_path / "run"):
            failed.set()
            raise RuntimeError("out of memory")
        return update(*args)

    monkeypatch.setattr(completion_log, "write_completions", late)
    monkeypatch.setattr(rlvr, "update_policy", fail_second)
    with pytest.raises(RuntimeError, match="out of memory"):
        api.train(train_config(tmp_path / "run", *learnable, "run.steps=3"))
    assert [file.name for file in (tmp_path / "run" / COMPLETIONS).iterdir()] == ["step-000000.parquet"]


def test_a_policy_that_diverges_does_not_replace_the_last_checkpoint(tmp_path: Path, learnable: list[str]) -> None:
    """The first update makes weights whose logits overflow, which the rollouts of the second step notice."""
    folder = tmp_path / "run"
    saved = [*learnable, "optimizer.weight_decay=0", "run.checkpoint_every=0", "run.keep_checkpoints=1"]
    api.train(train_config(folder, *saved, "run.steps=1", "optimizer.lr=1e-2"))
    config = json.loads((folder / "config.json").read_text())
    config["optimizer"]["lr"] = 1e30
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="the policy has diverged"):
        resume(folder, run={"steps": 6})
    assert [step for step, _ in checkpoints(folder)] == [1, 2]


def test_trackers_find_the_rollouts_of_the_step(
    tmp_path: Path, learnable: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write, folder = completion_log.write_completions, tmp_path / "run"

    def late(*args: Any) -> None:
        time.sleep(0.5)
        write(*args)

    monkeypatch.setattr(completion_log, "write_completions", late)
    tracked = ["run.steps=2", "run.show_every=1", 'run.trackers=["tensorboard"]']
    api.train(train_config(folder, *learnable, *tracked))
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Tensors("rollouts/text_summary")] == [0, 1]


def test_c3po_with_one_draw_is_b3po_bitwise(tmp_path: Path, learnable: list[str]) -> None:
    """Weights, posterior, metrics and completions of a whole run."""
    common = [*learnable, "run.steps=3", "optimizer.lr=1e3", "optimizer.ess=1e6"]
    api.train(train_config(tmp_path / "b3po", "method.preset=b3po", *common))
    api.train(train_config(tmp_path / "c3po", "method.preset=c3po", "method.draws=1", *common))
    assert outcome(tmp_path / "c3po") == outcome(tmp_path / "b3po")


@pytest.mark.parametrize("cut", ["sampling.top_p=0.9", "sampling.top_k=5"])
def test_rollouts_cut_by_top_p_or_top_k_have_no_ratios(cut: str, tmp_path: Path) -> None:
    """Engine and trainer have the same weights here, so every true ratio is 1; the ratios of the log-probs are not."""
    api.train(train_config(tmp_path / "run", "run.steps=1", cut))
    row = read_metrics(tmp_path / "run")[-1]
    assert not [name for name in row if name.startswith("correction/")]
    assert row["policy/ratio_mean"] == 1
    for completion in outcome(tmp_path / "run")["completions"]["step-000000.parquet"]:
        assert completion["rho"] is None
        assert completion["correction_weight"] == 1


PAIRS = ("method.rollouts_per_prompt=2", "method.draws=2")
"""Groups of two, of which many have no spread."""


def stop_after(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send this process a SIGTERM in the middle of training step `step`."""
    inner = rlvr.begin_rollouts

    def begin(run: rlvr.RLRun, at: int) -> object:
        if run.state.step == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return inner(run, at)

    monkeypatch.setattr(rlvr, "begin_rollouts", begin)


@pytest.mark.filterwarnings("ignore:.*every completion was cut:threepo.errors.ThreepoWarning")
@pytest.mark.parametrize(
    ("preset", "settings"),
    [
        (
            "grpo",
            [
                *("optimizer.lr=1e-2", "objective.mini_batches=2"),
                *("sampling.raised_temperature=1.4", "sampling.raise_below=0.999"),
            ],
        ),
        ("c3po_replay", ["optimizer.lr=1e3", "optimizer.ess=1e6", "sampling.dynamic_rounds=3", *PAIRS]),
        ("m3po", ["optimizer.lr=1e3", "optimizer.ess=1e6", "objective.reference_kl=0.1", "noise.rank=2"]),
        ("auto", ["optimizer.lr=1e-2", "method.draws=4", "method.antithetic=true", "arms.more=['*.0.mlp.* 0.3']"]),
        ("c3po_auto", ["method.draws=4", "optimizer.betas=[0.9, 0.99]", "arms.prior={'norm 4' = 0.9}"]),
        (
            "c3po",
            [
                *("optimizer.lr=1e3", "optimizer.ess=1e6", "ess_schedule.kind=controller"),
                *("overlap.lag=1", "run.checkpoint_every=1", "run.steps=5"),
            ],
        ),
        (
            "auto",
            [
                *("optimizer.lr=1e-2", "overlap.lag=2", "method.correction.kind=seq_mis", "run.steps=6"),
                *("sampling.dynamic_rounds=3", *PAIRS),
            ],
        ),
        # The RMS is that of the first weights.
        ("psn", ["optimizer.lr=1e-2", "noise.unit=rms", "noise.size=0.1", "noise.rank=1"]),
        (
            "es",
            ["optimizer.lr=1e-2", "noise.size=0.05", "method.draws=4", "method.greedy=false", "method.antithetic=true"],
        ),
        (
            "grpo",  # stopped between two resets of the reference
            [
                *("optimizer.lr=1e-2", "objective.reference_kl=0.1", "objective.reference_reset_every=2"),
                *("objective.loss=clip_cov", "objective.clip_cov_share=0.2", "objective.clip_cov_bounds=[0, 9]"),
            ],
        ),
    ],
)
def test_stopping_and_resuming_equals_never_stopping_bitwise(
    preset: str, settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, learnable: list[str]
) -> None:
    common = [f"method.preset={preset}", "run.steps=4", "eval.every=2", *learnable, *settings]
    uninterrupted = train_config(tmp_path / "whole", *common)
    api.train(uninterrupted)
    assert_it_learned_something(uninterrupted)
    with monkeypatch.context() as patch:
        stop_after(2, patch)
        with pytest.raises(Interrupted, match="SIGTERM after step 3 of"):
            api.train(train_config(tmp_path / "parts", *common))
    assert checkpoints(tmp_path / "parts")[-1][0] == 3
    resume(tmp_path / "parts")
    whole, parts = outcome(tmp_path / "whole"), outcome(tmp_path / "parts")
    for key in whole:
        assert parts[key] == whole[key], key
    # A program that reads every file of a checkpoint must find no other tensors by the names of the weights.
    files = checkpoints(tmp_path / "whole")[-1][1].glob("*.safetensors")
    names = [name for file in files for name in load_file(file)]
    assert len(set(names)) == len(names)
    # The temperature rises in the first step after the interruption.
    rows = [row for row in whole["metrics"] if row["step"] >= 0]
    raised = "sampling.raised_temperature=1.4" in settings
    assert [row["sampling/temperature"] for row in rows] == [1.0] * 3 + [1.4 if raised else 1.0] * (len(rows) - 3)
    refilled = any(row.get("sampling/rounds", 0) > 1 for row in rows)
    assert refilled is ("sampling.dynamic_rounds=3" in settings)


def test_the_reference_stays_when_the_run_that_it_came_from_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, learnable: list[str]
) -> None:
    """model.path names a run folder, whose newest checkpoint is another one then."""
    once = ("run.steps=1", "run.checkpoint_every=1", "run.keep_checkpoints=2", "optimizer.kind=adamw")
    api.train(train_config(tmp_path / "start", *learnable, *once, "optimizer.lr=1e-2"))
    common = [*learnable, f"model.path={tmp_path / 'start'}", "run.steps=3", "eval.every=0", "method.preset=grpo"]
    common += ["optimizer.lr=1e-2", "objective.reference_kl=0.1"]
    api.train(train_config(tmp_path / "whole", *common))
    with monkeypatch.context() as patch:
        stop_after(0, patch)
        with pytest.raises(Interrupted):
            api.train(train_config(tmp_path / "parts", *common))
    resume(tmp_path / "start", run={"steps": 4})
    assert not (tmp_path / "start" / "checkpoints" / "step-000001").exists()
    resume(tmp_path / "parts")
    whole, parts = outcome(tmp_path / "whole"), outcome(tmp_path / "parts")
    assert whole["metrics"][-1]["policy/reference_kl"] > 0
    assert parts == whole


def test_a_raised_temperature_is_that_of_rollouts_log_probs_and_update(tmp_path: Path, learnable: list[str]) -> None:
    """A step after the latch is, bitwise, a step of a run that has always had that temperature."""
    raised = TrainState(schedules=ScheduleState(temperature_raised=True, first_entropy=3.0, highest_entropy=3.0))
    found = {}
    for name, state, settings in (
        ("raised", raised, ["sampling.raised_temperature=1.4"]),
        ("hot", TrainState(), ["sampling.temperature=1.4"]),
        ("cold", TrainState(), ["sampling.raised_temperature=1.4"]),
    ):
        settings += [*learnable, "run.steps=1", "optimizer.lr=1e-2", "eval.every=1"]
        run = rlvr.assemble(train_config(tmp_path / name, *settings))
        run.state = state
        with run.folder:
            rlvr.train(run)
        found[name] = outcome(tmp_path / name)
    for key in ("tensors", "completions", "metrics"):
        assert found["raised"][key] == found["hot"][key]
        assert found["cold"][key] != found["hot"][key]
    first = [found[name]["metrics"][0] for name in ("raised", "cold")]
    assert first[0] == first[1], "an evaluation, here that before the first step, has a temperature of its own"
    for row in found["raised"]["completions"]["step-000000.parquet"]:
        assert row["gradient_logprob_sum"] == pytest.approx(row["behaviour_logprob_sum"], abs=1e-4)


def test_a_run_killed_at_three_random_moments_ends_like_one_never_killed(tmp_path: Path, learnable: list[str]) -> None:
    """SIGKILL, which no program can prepare for, at moments that fall anywhere: in a step, in a write."""
    settings = ["method.preset=c3po", "optimizer.lr=1e3", "optimizer.ess=1e6", "run.steps=30", "run.checkpoint_every=3"]
    settings += ["overlap.lag=1"]  # so that checkpoints have rollouts, too
    whole = train_config(tmp_path / "whole", *learnable, *settings)
    api.train(whole)
    assert_it_learned_something(whole)
    killed = tmp_path / "killed"
    RunFolder.create(killed, replace(whole, run=replace(whole.run, folder=str(killed)))).close()
    generator = random.Random(20260810)
    reached = []
    for _ in range(3):
        process = forked("train", "--resume", str(killed))
        before = len(read_metrics(killed))
        deadline = time.monotonic() + 120
        while len(read_metrics(killed)) <= before and process.is_alive() and time.monotonic() < deadline:
            time.sleep(0.01)  # wait for this process to make a step of its own, then let it run a random while
        time.sleep(generator.uniform(0, 0.5))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        reached.append(len(read_metrics(killed)))
    assert reached[-1] < 30, "the last kill came after the end: make the run longer"
    assert main(["train", "--resume", str(killed)]) == 0
    assert (killed / "summary.json").is_file()
    one, other = outcome(tmp_path / "whole"), outcome(killed)
    for key in one:
        assert other[key] == one[key], key


WIRED = (
    "sampling.temperature=0.7",
    "optimizer.lr=1e3",
    "optimizer.ess=1e6",  # loud enough that draws disagree, quiet enough that some sequences stay within the bounds
    "run.steps=4",
    "schedule.kind=cosine",
    "schedule.warmup_share=0.5",
    "schedule.floor=0.2",
)
"""Settings that the loop must hand on: none of them is what a part would take if nobody told it."""


def test_trainer_and_engine_agree_at_the_sampling_temperature_while_the_rate_follows_its_schedule(
    tmp_path: Path, learnable: list[str]
) -> None:
    """The gradient of B3PO is taken where its rollouts were drawn, so every ratio is one up to rounding."""
    config = train_config(tmp_path / "run", "method.preset=b3po", *learnable, *WIRED)
    api.train(config)
    assert_it_learned_something(config)
    for row in read_metrics(tmp_path / "run"):
        for quantile in ("min", "p05", "p50", "p95", "max"):
            assert row[f"correction/rho_{quantile}"] == pytest.approx(1, abs=1e-3)
        assert abs(row["correction/kl"]) < 1e-6
    rates = [row["optimizer/lr"] for row in read_metrics(tmp_path / "run")]
    assert rates == pytest.approx([500, 1000, 600, 200])  # warm-up over two steps, then half a cosine down to 0.2


def test_the_loop_takes_as_many_optimizer_steps_as_mini_batches(tmp_path: Path, learnable: list[str]) -> None:
    settings = ["method.preset=b3po", "run.steps=2", "objective.mini_batches=2"]
    api.train(train_config(tmp_path / "run", *learnable, *settings))
    assert json.loads(outcome(tmp_path / "run")["state"])["optimizer_steps"] == 4


def test_the_correction_of_the_method_acts_in_the_loop(tmp_path: Path, learnable: list[str]) -> None:
    """C3PO drops the sequences whose ratio lies outside the bounds, and no others."""
    api.train(train_config(tmp_path / "run", "method.preset=c3po", *learnable, *WIRED))
    completions = outcome(tmp_path / "run")["completions"]
    for row in read_metrics(tmp_path / "run"):
        written = completions[f"step-{row['step']:06d}.parquet"]
        for one in written:
            difference = one["gradient_logprob_sum"] - one["behaviour_logprob_sum"]
            assert one["rho"] == pytest.approx(math.exp(difference), rel=1e-3)
            within = 0.5 <= one["rho"] <= 2
            assert one["correction_weight"] == pytest.approx(one["rho"] if within else 0.0, rel=1e-5)
        share = sum(one["correction_weight"] > 0 for one in written) / len(written)
        assert 0 < row["correction/kept_share"] < 1
        assert row["correction/kept_share"] == pytest.approx(share)
        assert row["correction/rho_min"] < 0.5


def test_evaluation_while_training_is_logged_before_at_intervals_and_at_the_end(tmp_path: Path) -> None:
    api.train(train_config(tmp_path / "run", "run.steps=5", "eval.every=2"))
    rows = read_metrics(tmp_path / "run")
    assert [row["step"] for row in rows if "eval/pass_at_1" in row] == [-1, 1, 3, 4]
    assert [row["step"] for row in rows] == [-1, 0, 1, 2, 3, 4]


LEARNED = ("method.preset=c3po", "optimizer.lr=1e3", "optimizer.ess=1e4")
FIXED = ("method.preset=psn", "optimizer.lr=1e-2", "noise.size=0.1")
UNDER_DRAWS = (
    *("eval.draws=2", "eval.problems=32", "eval.max_new_tokens=1"),
    *("ess_schedule.kind=linear", "ess_schedule.floor=0.01"),
)
"""Draws as loud as the steps before have left them, and as many answers as show it."""


@pytest.mark.parametrize(("fault", "more"), [("kill", (*LEARNED, *UNDER_DRAWS)), ("raise", (*FIXED, *UNDER_DRAWS))])
def test_an_evaluation_that_failed_is_made_up_bitwise(
    fault: str, more: tuple[str, ...], tmp_path: Path, learnable: list[str]
) -> None:
    """The evaluation fails in the middle of a run, or at its end, where nothing is left to train."""
    settings = [*learnable, *more, "run.steps=5", "eval.every=2"]
    api.train(train_config(tmp_path / "whole", *settings))
    (tmp_path / "brittle.py").write_text(BRITTLE)
    parts, left = tmp_path / "parts", tmp_path / "evaluations-left"
    # A kill leaves what was saved before it, so a checkpoint must be due.
    own = ["reward.function=brittle:when_evaluated", f"run.checkpoint_every={2 if fault == 'kill' else 0}"]
    command = ["train", *RLVR, *settings, *own, f"run.folder={parts}"]
    for evaluations, steps in ((2, 4), (0, 4), (1, 5)):
        left.write_text(f"{fault} {evaluations}")
        if fault == "raise":
            assert main(command) == 2
        else:
            process = forked(*command)
            process.join()
            assert process.exitcode == -signal.SIGKILL
        rows = read_metrics(parts)
        assert [row["step"] for row in rows] == [-1, *range(steps)]
        assert "eval/pass_at_1" not in rows[-1]
        assert checkpoints(parts)[-1][0] == len(outcome(parts)["completions"]) == steps
        command = ["train", "--resume", str(parts)]
    left.unlink()
    assert main(command) == 0
    assert outcome(parts) == outcome(tmp_path / "whole")
    assert json.loads((parts / "summary.json").read_text())["pass_at_1_after"] is not None


@pytest.mark.parametrize("fault", ["memory", "signal"])
def test_what_comes_before_an_evaluation_is_saved(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, learnable: list[str]
) -> None:
    """An error of ours in it keeps its traceback; a signal of the step before does not wait for it."""
    settings = [*learnable, *LEARNED, "run.steps=3", "eval.every=2"]
    api.train(train_config(tmp_path / "whole", *settings))
    inner, parts = Examination.measure, tmp_path / "parts"

    def no_memory(self: Examination, *where: Any) -> Any:
        if fault == "memory" and where[-1] == 2:
            raise torch.OutOfMemoryError
        return inner(self, *where)

    with monkeypatch.context() as patch:
        patch.setattr(Examination, "measure", no_memory)
        stop_after(1 if fault == "signal" else -1, patch)
        with pytest.raises(Interrupted if fault == "signal" else torch.OutOfMemoryError):
            api.train(train_config(parts, *settings))
    rows = [(row["step"], "eval/pass_at_1" in row) for row in read_metrics(parts)]
    assert rows == [(-1, True), (0, False), (1, False)]
    assert checkpoints(parts)[-1][0] == 2
    resume(parts)
    assert outcome(parts) == outcome(tmp_path / "whole")


def test_a_signal_in_the_first_evaluation_lets_it_finish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, learnable: list[str]
) -> None:
    inner = Examination.measure

    def stopped(self: Examination, *where: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return inner(self, *where)

    monkeypatch.setattr(Examination, "measure", stopped)
    with pytest.raises(Interrupted, match="SIGTERM after step 0 of 3"):
        api.train(train_config(tmp_path / "run", *learnable, "run.steps=3", "eval.every=2"))
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [-1]


def test_evaluating_does_not_disturb_training(tmp_path: Path, learnable: list[str]) -> None:
    settings = ["method.preset=c3po", "optimizer.lr=1e3", "optimizer.ess=1e6", "run.steps=3", *learnable]
    api.train(train_config(tmp_path / "with", *settings, "eval.every=1", "eval.draws=2"))
    without = train_config(tmp_path / "without", *settings)
    api.train(without)
    assert_it_learned_something(without)
    one, other = outcome(tmp_path / "with"), outcome(tmp_path / "without")
    assert one["tensors"] == other["tensors"]
    assert one["completions"] == other["completions"]


def test_methods_see_the_same_prompts_at_the_same_step(tmp_path: Path) -> None:
    seen = {}
    for preset in ("grpo", "m3po"):
        api.train(train_config(tmp_path / preset, f"method.preset={preset}", "run.steps=2"))
        completions = outcome(tmp_path / preset)["completions"]
        seen[preset] = {name: [row["problem_id"] for row in rows] for name, rows in completions.items()}
    assert seen["grpo"] == seen["m3po"]


def test_every_rollout_is_written_with_its_draw(tmp_path: Path) -> None:
    api.train(train_config(tmp_path / "run", "method.preset=m3po", "run.steps=1"))
    rows = outcome(tmp_path / "run")["completions"]["step-000000.parquet"]
    assert len(rows) == 4 * 8
    assert [row["draw_index"] for row in rows] == [n for _ in range(4) for n in range(4) for _ in range(2)]
    for row in rows:
        assert row["gradient_logprob_sum"] == pytest.approx(row["behaviour_logprob_sum"], abs=1e-3)
        assert row["rho"] == pytest.approx(1, abs=1e-3)


def test_a_correction_that_never_acts_warns_once(tmp_path: Path) -> None:
    settings = ["method.preset=c3po", "noise.size=0", "run.steps=6", "method.correction.warn_after=3"]
    with pytest.warns(ThreepoWarning, match="for 3 steps in a row, the seq_mis correction has masked") as caught:
        api.train(train_config(tmp_path / "run", *settings))
    assert len([w for w in caught if issubclass(w.category, ThreepoWarning)]) == 1


@pytest.mark.filterwarnings("ignore:IVON lr:threepo.errors.ThreepoWarning")
@pytest.mark.filterwarnings("ignore:.*every completion was cut:threepo.errors.ThreepoWarning")
def test_the_controller_turns_the_noise_down_until_the_correction_keeps_enough(
    tmp_path: Path, learnable: list[str]
) -> None:
    """A recipe far too loud; the weights stay, so that only the controller changes what is kept."""
    settings = ["method.preset=c3po", "run.steps=12", "optimizer.lr=1e-9", "optimizer.ess=5e4", *learnable]
    steered = [*settings, "ess_schedule.kind=controller", "ess_schedule.target=0.8", "ess_schedule.lowest=0.1"]
    api.train(train_config(tmp_path / "fixed", *settings, "run.steps=3"))
    api.train(train_config(tmp_path / "steered", *steered))
    fixed, rows = read_metrics(tmp_path / "fixed"), read_metrics(tmp_path / "steered")
    assert [row["posterior/ess"] for row in fixed] == [5e4] * 3
    assert rows[0]["posterior/ess"] == 5e4
    assert rows[-1]["posterior/ess"] > 1e6
    kept = [sum(row["correction/kept_share"] for row in run[-3:]) / 3 for run in (fixed, rows)]
    assert kept[0] < 0.3
    assert kept[1] > 0.6


def test_a_prior_that_has_grown_loud_warns_with_the_ess_that_would_undo_it(tmp_path: Path, policy: Policy) -> None:
    optimizer = IVON(policy.model.named_parameters())
    for name, p, _ in optimizer.trainable():
        if "mlp" in name:
            optimizer.state[p]["hessian"].fill_(1e-3 / 9)
    Posterior.of(optimizer).save(tmp_path)
    settings = IVONConfig(ess=1e9, load_hessian=str(tmp_path))
    with pytest.warns(ThreepoWarning, match=r"factors of: mlp 3\.0; .* optimizer\.ess = 9e\+09 would undo"):
        begin_ivon(
            settings, build_optimizer(settings, NoiseConfig(), policy.model, seed=0), ModelConfig(path=str(tmp_path))
        )


def test_a_refused_run_leaves_no_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[LocalEngine] = []
    monkeypatch.setattr(LocalEngine, "close", lambda engine: closed.append(engine))
    with pytest.raises(UserError, match="engine: . policies of .* need"):
        rlvr.assemble(train_config(tmp_path / "run", "engine.memory_gib=1e-6"))
    assert closed


def test_rlvr_can_start_from_a_learned_hessian(tmp_path: Path, learnable: list[str]) -> None:
    settings = ["method.preset=b3po", "run.steps=2", "optimizer.ess=1e6", *learnable]
    api.train(train_config(tmp_path / "first", *settings))
    for momentum in ("false", "true"):
        config = train_config(
            tmp_path / momentum,
            f"model.path={tmp_path / 'first'}",
            "method.preset=c3po",
            f"optimizer.load_hessian={tmp_path / 'first'}",
            f"optimizer.load_momentum={momentum}",
        )
        run = rlvr.assemble(config)
        assert isinstance(run.optimizer, IVON)
        learned = Posterior.from_pretrained(checkpoints(tmp_path / "first")[-1][1])
        for name, p in run.policy.model.named_parameters():
            assert torch.equal(run.optimizer.state[p]["hessian"], learned.hessian[name])
        loaded = any(bool(run.optimizer.state[p]["momentum"].any()) for p in run.policy.model.parameters())
        assert loaded is (momentum == "true")
        run.folder.close()


@pytest.mark.parametrize("kind", ["ivon", "adamw"])
def test_a_posterior_that_is_not_used_is_named_at_the_start(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is named only if there is one and IVON could use it; resuming says nothing."""
    warm, name = tmp_path / "warm", "optimizer.load_hessian"
    api.train(sft_config(warm, "run.steps=1", f"optimizer.kind={kind}"))
    assert (f"model.path={warm} {name}={warm}" in api.closing_words(warm)) is (kind == "ivon")

    def said(*settings: str) -> str:
        capsys.readouterr()
        config = train_config(tmp_path / "rl", f"model.path={warm}", "run.steps=1", *settings)
        rlvr.assemble(config).folder.close()
        shutil.rmtree(tmp_path / "rl")
        return capsys.readouterr().err

    unused = said("method.preset=b3po")
    assert (f"has a learned posterior, which is not used; {name}={warm}" in unused) is (kind == "ivon")
    assert name not in said("method.preset=grpo", "optimizer.kind=adamw", "optimizer.lr=1e-6")
    if kind == "ivon":
        assert name not in said("method.preset=b3po", f"{name}={warm}")


def test_a_controller_without_anything_to_measure_is_refused_before_a_model_is_loaded(tmp_path: Path) -> None:
    """It would leave ess as it is under top-p and top-k, and lower it to its bound with a single draw."""
    settings = ["method.preset=c3po", "ess_schedule.kind=controller", f"model.path={tmp_path / 'nothing'}"]
    by_kl = ["method.correction.kind=none", "ess_schedule.metric=kl", "ess_schedule.target=1e-3"]
    for more in (["sampling.top_p=0.9"], ["sampling.top_k=5"], ["method.gradient_at=generator"]):
        with pytest.raises(UserError, match="ess_schedule.kind = 'controller': follows the ratios between"):
            train_config(tmp_path / "run", *settings, *by_kl, *more)
    with pytest.raises(UserError, match="method.correction.kind = 'none' masks nothing"):
        train_config(tmp_path / "run", *settings, "method.correction.kind=none")
    with pytest.raises(UserError, match="no config.json"):
        api.train(train_config(tmp_path / "run", *settings))
    assert not (tmp_path / "run").exists()


def test_what_cannot_work_is_refused_before_a_folder_is_made(tmp_path: Path) -> None:
    for settings, message in (
        (["sampling.max_new_tokens=600"], "exceed the model's context"),
        (["data.levels=[1]"], "starts at level 2"),
        (["reward.function=exact_:f"], "no module 'exact_'"),
        ([f"model.path={tmp_path / 'nothing'}"], "no config.json"),
        (["method.preset=b3po", f"optimizer.load_hessian={tmp_path}"], "holds no posterior"),
    ):
        with pytest.raises(UserError, match=message):
            api.train(train_config(tmp_path / "run", *settings))
        assert not (tmp_path / "run").exists()


def test_bfloat16_engine_and_compute_run(tmp_path: Path) -> None:
    settings = ["method.preset=c3po", "run.steps=2", "engine.dtype=bfloat16", "model.compute_dtype=bfloat16"]
    api.train(train_config(tmp_path / "run", *settings, "model.gradient_checkpointing=true"))
    row = read_metrics(tmp_path / "run")[-1]
    assert 0 < row["correction/kl"] < 0.05


def test_a_run_can_be_started_from_a_shipped_recipe(tmp_path: Path) -> None:
    config = load(TrainConfig, "demo/c3po", [f"run.folder={tmp_path / 'run'}", "model.path=tiny-qwen2", "run.steps=1"])
    assert config.method == C3PO


def test_one_process_may_keep_its_weights_in_cpu_memory(
    learnable: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same run to the bit, also if it begins without; FSDP2 moves the weights."""
    settings = [*RLVR, *learnable, "method.preset=c3po", "optimizer.ess=1e7", "eval.every=2", "run.steps=3"]
    assert main(["train", *settings, f"run.folder={tmp_path / 'plain'}"]) == 0
    held: list[Any] = []
    assemble = rlvr.assemble
    monkeypatch.setattr(rlvr, "assemble", lambda *arguments: held.append(assemble(*arguments)) or held[-1])
    offload = "parallel.offload=true"
    signal_of_death = ctypes.c_int(-1)
    assert main(["train", *settings, f"run.folder={tmp_path / 'offloaded'}", offload]) == 0
    assert main(["train", *settings, f"run.folder={tmp_path / 'begun'}", "run.steps=2"]) == 0
    assert main(["train", "--resume", str(tmp_path / "begun"), "run.steps=3", offload]) == 0
    if sys.platform == "linux":  # a shell that ends must not end the run, as the end of torchrun does
        ctypes.CDLL(None).prctl(2, ctypes.byref(signal_of_death))  # PR_GET_PDEATHSIG
        assert signal_of_death.value == 0
    spread = [is_spread(next(run.policy.model.parameters())) for run in held]
    assert spread == [True, False, True]
    plain, offloaded, begun = (outcome(tmp_path / name) for name in ("plain", "offloaded", "begun"))
    assert offloaded == plain
    assert begun == plain
