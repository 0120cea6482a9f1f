"""Warm start: it learns, it resumes bitwise, it leaves a posterior, and the shipped recipe is what it says."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from runs import outcome, resume, sft_config
from threepo import api
from threepo.config import SFTConfig
from threepo.config.recipes import load
from threepo.errors import ThreepoWarning, UserError
from threepo.models.packing import flatten
from threepo.models.policy import Policy, load_policy
from threepo.posterior.gaussian import Posterior
from threepo.posterior.ivon import IVON
from threepo.run_folder import checkpoints, read_metrics
from threepo.training import sft
from threepo.types import Draw, Purpose, Row


@pytest.mark.parametrize("optimizer", [["optimizer.kind=adamw", "optimizer.lr=2e-2"], ["optimizer.lr=1e4"]])
def test_the_loss_falls(optimizer: list[str], tmp_path: Path) -> None:
    api.train(sft_config(tmp_path / "run", "run.steps=20", *optimizer))
    losses = [row["sft/loss"] for row in read_metrics(tmp_path / "run")]
    assert losses[0] == pytest.approx(math.log(260), rel=0.1), "a random model knows nothing of 260 tokens"
    assert sum(losses[-3:]) / 3 < 0.6 * losses[0]


def test_the_loss_is_the_mean_over_completion_tokens(policy: Policy) -> None:
    source = sft.Demonstrations(sft_config(Path("unused")).demonstrations)
    shown = source.batch(0)
    rows = sft.encode(policy, shown)
    total = sft.cross_entropy(policy, rows, token_budget=100)
    grads = [p.grad.clone() for p in policy.model.parameters()]
    policy.model.zero_grad()
    expected = torch.zeros(())
    for row, (problem, completion) in zip(rows, shown, strict=True):
        ((first, end),) = row.loss_ranges
        assert end == len(row.tokens)
        assert row.tokens[-1] == policy.tokenizer.eos_token_id
        assert policy.tokenizer.decode(row.tokens[:first]) == problem.prompt
        assert policy.tokenizer.decode(row.tokens[first:-1]) == completion
        ids = torch.tensor([row.tokens])
        labels = ids.clone()
        labels[0, :first] = -100
        expected = expected + policy.model(ids, labels=labels).loss * (end - first)
    expected.backward()
    assert total == pytest.approx(expected.item(), rel=1e-4)
    for p, grad in zip(policy.model.parameters(), grads, strict=True):
        torch.testing.assert_close(grad, p.grad, rtol=1e-3, atol=1e-4)


def test_a_step_takes_the_mean_over_all_its_target_tokens(tmp_path: Path) -> None:
    """The logged norm is that of the gradient of transformers' own loss, though there are several micro-batches."""
    config = sft_config(tmp_path / "run", "run.steps=1", "optimizer.kind=adamw", "batching.tokens=64")
    policy = load_policy(config.model, config.run.seed)
    nats, tokens = torch.zeros(()), 0
    for row in sft.encode(policy, sft.Demonstrations(config.demonstrations).batch(0)):
        ((first, end),) = row.loss_ranges
        ids = torch.tensor([row.tokens])
        labels = ids.clone()
        labels[0, :first] = -100
        nats = nats + policy.model(ids, labels=labels).loss * (end - first)
        tokens += end - first
    (nats / tokens).backward()
    norm = torch.stack([p.grad.norm() for p in policy.model.parameters()]).norm()
    api.train(config)
    (logged,) = read_metrics(tmp_path / "run")
    assert logged["sft/tokens"] == tokens
    assert logged["sft/loss"] == pytest.approx(float(nats.detach()) / tokens, rel=1e-4)
    assert logged["optimizer/grad_norm"] == pytest.approx(float(norm), rel=1e-3)


def test_the_loss_counts_the_chosen_tokens_of_every_turn(policy: Policy) -> None:
    rows = [
        Row(0, (10, 11, 12, 13, 14, 15, 16), ((2, 4), (5, 7))),
        Row(1, (20, 21, 22, 23), ((1, 2),)),
    ]
    packed = flatten(rows, policy.device)
    assert (packed.input_ids.tolist(), packed.row_lengths) == ([10, 11, 12, 13, 14, 15, 20], (6, 1))
    assert packed.loss_positions.tolist() == [1, 2, 4, 5, 6]
    assert packed.targets.tolist() == [12, 13, 15, 16, 21]
    assert packed.row_of.tolist() == [0, 0, 0, 0, 1]
    assert sft.loss_tokens(rows) == 5
    expected = 0.0
    for row, labels in zip(rows, ([-100, -100, 12, 13, -100, 15, 16], [-100, 21, -100, -100]), strict=True):
        with torch.no_grad():
            loss = policy.model(torch.tensor([row.tokens]), labels=torch.tensor([labels])).loss
        expected += float(loss) * sum(label != -100 for label in labels)
    with torch.no_grad():
        assert sft.cross_entropy(policy, rows, token_budget=100) == pytest.approx(expected, rel=1e-5)
    assert all(p.grad is None for p in policy.model.parameters())


@pytest.mark.parametrize("kind", ["ivon", "adamw"])
def test_stopping_and_resuming_equals_never_stopping_bitwise(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ["run.steps=6", f"optimizer.kind={kind}", "run.checkpoint_every=2"]
    api.train(sft_config(tmp_path / "whole", *settings))
    inner, calls = sft.cross_entropy, []

    def fail(*arguments: object) -> float:
        calls.append(1)
        if len(calls) == 4:
            raise ZeroDivisionError
        return inner(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(sft, "cross_entropy", fail)
        with pytest.raises(ZeroDivisionError):
            api.train(sft_config(tmp_path / "parts", *settings))
    assert checkpoints(tmp_path / "parts")[-1][0] == 2
    resume(tmp_path / "parts", SFTConfig)
    whole, parts = outcome(tmp_path / "whole"), outcome(tmp_path / "parts")
    for key in whole:
        assert parts[key] == whole[key], key


def test_one_draw_a_step_is_held_over_all_micro_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draws = []
    inner = IVON.perturbed
    monkeypatch.setattr(IVON, "perturbed", lambda self, draw: draws.append(draw) or inner(self, draw))
    api.train(sft_config(tmp_path / "run", "run.steps=3", "batching.tokens=64"))
    seed = sft_config(tmp_path).run.seed
    assert draws == [Draw(seed, step, 0, Purpose.FINE_TUNING) for step in range(3)]


@pytest.mark.parametrize("kind", ["ivon", "adamw"])
def test_the_first_update_that_is_skipped_warns(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two gradients are not finite: one warning that names the step, and a count."""
    real, calls = sft.cross_entropy, iter(range(4))

    def spoilt(policy: Policy, *arguments: Any) -> float:
        loss = real(policy, *arguments)
        if next(calls) in (1, 2):
            next(policy.model.parameters()).grad[0, 0] = math.nan  # type: ignore[index]
        return loss

    monkeypatch.setattr(sft, "cross_entropy", spoilt)
    with pytest.warns(ThreepoWarning) as caught:
        api.train(sft_config(tmp_path / "run", "run.steps=4", f"optimizer.kind={kind}"))
    said = [str(warning.message) for warning in caught if "skipped" in str(warning.message)]
    assert len(said) == 1
    assert said[0].startswith("a gradient of step 1 was not finite")
    assert [row["optimizer/skipped_steps"] for row in read_metrics(tmp_path / "run")] == [0, 1, 2, 2]


def test_the_learned_posterior_is_saved(tmp_path: Path) -> None:
    api.train(sft_config(tmp_path / "run", "run.steps=4", "optimizer.betas=[0.9, 0.9]"))
    posterior = Posterior.from_pretrained(checkpoints(tmp_path / "run")[-1][1])
    assert posterior.step == 4
    assert all(h.std() > 0 for h in posterior.hessian.values())


def test_what_cannot_be_encoded_is_refused_before_a_folder_is_made(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"\d+ tokens, and the model's context has 16; leave its level out"):
        api.train(sft_config(tmp_path / "run", "model.tiny.context=16"))
    assert not (tmp_path / "run").exists()


def test_a_demonstration_that_is_found_too_long_later_loses_no_step(tmp_path: Path) -> None:
    long = ["demonstrations.levels=[2, 8]", "demonstrations.batch_size=1", "run.steps=60", "model.tiny.context=60"]
    config = sft_config(tmp_path / "run", *long, 'demonstrations.tasks=["sorting"]')
    with pytest.raises(UserError, match="the model's context has 60; leave its level out of demonstrations.levels"):
        api.train(config)
    assert checkpoints(tmp_path / "run")


def test_the_shipped_warm_start_runs(tmp_path: Path) -> None:
    config = load(SFTConfig, "demo/warm_start")
    api.train(replace(config, run=replace(config.run, steps=5, folder=str(tmp_path / "run"))))
    losses = [row["sft/loss"] for row in read_metrics(tmp_path / "run")]
    assert losses[-1] < losses[0] - 0.5
