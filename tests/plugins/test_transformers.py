"""IVON in the Hugging Face Trainer: the same numbers as a loop by hand, and the Trainer's promises kept."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback, TrainingArguments

from hub_folder import HubFolder
from threepo.config import ModelConfig, TinyConfig
from threepo.errors import ThreepoWarning, UserError
from threepo.models.policy import load_policy
from threepo.plugins.transformers import IVONTrainer
from threepo.posterior.gaussian import FixedWeights, Posterior
from threepo.posterior.ivon import IVON
from threepo.posterior.metrics import Movement
from threepo.run_folder import POSTERIOR_FILE
from threepo.types import Draw

SHAPE = TinyConfig(hidden_size=32, intermediate_size=64, layers=1, heads=2, kv_heads=1, context=32)
IVON_SETTINGS = {"ess": 1e5, "hess_init": 0.1, "clip_radius": 0.1}
BATCH, ACCUMULATED, STEPS = 4, 2, 6


def make_model(dropout: float = 0.0) -> Any:
    model = load_policy(ModelConfig(path="tiny-qwen2", tiny=SHAPE), seed=7).model
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = dropout
    return model


def make_data() -> list[dict[str, torch.Tensor]]:
    """48 rows of labels that are masked to different lengths: micro-batches differ in their number of tokens."""
    generator = torch.Generator().manual_seed(3)
    data = []
    for i in range(BATCH * ACCUMULATED * STEPS):
        ids = torch.randint(20, 40, (12,), generator=generator)
        labels = ids.clone()
        labels[: i % 7] = -100
        data.append({"input_ids": ids, "labels": labels})
    return data


def make_trainer(folder: Path, model: Any = None, **settings: Any) -> IVONTrainer:
    trainer_settings = {
        name: settings.pop(name) for name in ("ivon", "callbacks", "optimizers", "eval_dataset") if name in settings
    }
    arguments = {
        "learning_rate": 1.0,
        "max_grad_norm": 0.0,
        "max_steps": STEPS,
        "per_device_train_batch_size": BATCH,
        "gradient_accumulation_steps": ACCUMULATED,
        "train_sampling_strategy": "sequential",
        "logging_steps": 1,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        **settings,
    }
    return IVONTrainer(
        model or make_model(),
        TrainingArguments(str(folder), **arguments),
        train_dataset=make_data(),
        **{"ivon": IVON_SETTINGS, **trainer_settings},
    )


def assert_same(left: Any, right: Any) -> None:
    """Weights of two models, bitwise."""
    for (name, a), (_, b) in zip(left.named_parameters(), right.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def batches() -> list[dict[str, torch.Tensor]]:
    data = make_data()
    return [
        {key: torch.stack([row[key] for row in data[i : i + BATCH]]) for key in data[0]}
        for i in range(0, len(data), BATCH)
    ]


class Recorder(TrainerCallback):  # type: ignore[misc]
    """Records what a user's callback sees."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.gradients_seen = 0

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **found: Any) -> None:
        self.rates.append(found["optimizer"].param_groups[0]["lr"])
        self.gradients_seen += all(p.grad is not None for p in found["model"].parameters())


def test_the_trainer_is_a_loop_by_hand(tmp_path: Path) -> None:
    recorder = Recorder()
    trainer = make_trainer(tmp_path, callbacks=[recorder], seed=5)
    trainer.train()

    model = make_model()
    optimizer = IVON(model.named_parameters(), lr=1.0, seed=5, **IVON_SETTINGS)
    model.train()
    movement, moved = Movement(optimizer), []
    rates, norms, data = [], [], batches()
    for step in range(STEPS):
        parts = data[step * ACCUMULATED : (step + 1) * ACCUMULATED]
        tokens = sum(part["labels"][:, 1:].ne(-100).sum() for part in parts)
        rates.append(1.0 - step / STEPS)
        optimizer.param_groups[0]["lr"] = rates[-1]
        draw = Draw(5, step, 0)
        with optimizer.perturbed(draw):
            for part in parts:
                model(**part, num_items_in_batch=tokens).loss.backward()
        optimizer.observe(draw)
        optimizer.step()
        norms.append(optimizer.step_metrics()["optimizer/grad_norm"])
        moved.append(movement.metrics()["update/rms"])

    assert_same(trainer.model, model)
    assert any(not torch.equal(p, q) for p, q in zip(model.parameters(), make_model().parameters(), strict=True))
    for p, q in zip(trainer.model.parameters(), model.parameters(), strict=True):
        for name in ("hessian", "momentum"):
            assert torch.equal(trainer.ivon.state[p][name], optimizer.state[q][name])
    assert recorder.rates == pytest.approx(rates), "the linear schedule"
    assert recorder.gradients_seen == STEPS
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert [row["grad_norm"] for row in rows] == pytest.approx(norms, rel=1e-5)
    assert [row["update/rms"] for row in rows] == moved
    assert all(row["posterior/sigma_to_rms"] > 0 for row in rows)
    assert [row["optimizer/skipped_steps"] for row in rows] == [0.0] * STEPS


def test_a_step_has_one_draw_and_the_model_the_mean_between(tmp_path: Path) -> None:
    """Weights that forward passes see: two micro-batches the same, each step others, evaluation the mean."""
    model = make_model()
    seen: list[tuple[bool, torch.Tensor]] = []
    weight = model.model.norm.weight
    model.register_forward_pre_hook(lambda module, _: seen.append((module.training, weight.detach().clone())))
    trainer = make_trainer(
        tmp_path, model, eval_strategy="steps", eval_steps=1, eval_dataset=make_data()[:2], max_steps=3
    )
    means: list[torch.Tensor] = []

    class Means(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            means.append(weight.detach().clone())

        on_substep_end = on_step_end

    trainer.add_callback(Means())
    trainer.train()
    drawn = [value for training, value in seen if training]
    evaluated = [value for training, value in seen if not training]
    assert len(drawn) == len(means) == 6
    assert len(evaluated) == 3
    for step in range(3):
        first, second = drawn[2 * step : 2 * step + 2]
        assert torch.equal(first, second)
        assert not torch.equal(first, means[2 * step])
        assert torch.equal(evaluated[step], means[2 * step + 1])
    assert not torch.equal(drawn[0], drawn[2])
    assert trainer.ivon.param_groups[0]["step"] == 3


class Broken(Exception):
    pass


def test_an_exception_leaves_the_mean_and_training_can_go_on(tmp_path: Path) -> None:
    model = make_model()
    calls = 0

    def fail(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:  # the second micro-batch of the first step
            raise Broken

    model.model.norm.register_forward_hook(fail)
    trainer = make_trainer(tmp_path / "broken", model)
    with pytest.raises(Broken):
        trainer.train()
    assert_same(model, make_model())
    trainer.ivon.state_dict()  # not perturbed, nothing half observed

    # A run that is then resumed in the same trainer has the draws of one that never failed.
    whole = make_trainer(tmp_path / "whole", save_strategy="steps", save_steps=3)
    whole.train()
    trainer.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert_same(trainer.model, whole.model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resuming_equals_never_stopping(tmp_path: Path, dtype: torch.dtype) -> None:
    """With dropout, shuffling, warmup and, in bfloat16, a float32 mean that no model file holds."""
    settings = {"save_strategy": "steps", "save_steps": 3, "warmup_steps": 2, "train_sampling_strategy": "random"}
    whole = make_trainer(tmp_path, make_model(dropout=0.2).to(dtype), **settings)
    whole.train()
    again = make_trainer(tmp_path, make_model(dropout=0.2).to(dtype), **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert_same(again.model, whole.model)
    halfway = load_file(tmp_path / "checkpoint-3" / "model.safetensors")
    assert any(not torch.equal(p, halfway[name]) for name, p in whole.model.named_parameters() if name in halfway)
    for p, q in zip(again.model.parameters(), whole.model.parameters(), strict=True):
        assert again.ivon.state[p].keys() == whole.ivon.state[q].keys()
        for name, value in again.ivon.state[p].items():
            assert value.dtype == torch.float32
            assert torch.equal(value, whole.ivon.state[q][name]), name
    counts = [{**trainer.ivon.param_groups[0], "params": None} for trainer in (again, whole)]
    assert counts[0] == counts[1]
    assert counts[0]["step"] == STEPS


def test_every_saved_model_has_its_posterior(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, save_strategy="steps", save_steps=2, save_only_model=True)
    trainer.save_model(str(tmp_path / "untrained"))
    assert not (tmp_path / "untrained" / POSTERIOR_FILE).exists(), "nothing was learned yet"
    trainer.train()
    trainer.save_model(str(tmp_path / "final"))
    assert all((tmp_path / f"checkpoint-{step}" / POSTERIOR_FILE).is_file() for step in (2, 4, 6))
    policy = load_policy(ModelConfig(path="tiny-qwen2", tiny=SHAPE), seed=1)
    policy.model.load_state_dict(load_file(tmp_path / "final" / "model.safetensors"), strict=False)
    posterior = Posterior.from_pretrained(tmp_path / "final")
    assert posterior.step == STEPS
    draw = posterior.address(0)
    expected = dict(trainer.ivon.weights(draw))
    for name, value in FixedWeights(policy.model, posterior).weights(draw):
        assert torch.equal(value, expected[name]), name
    assert Posterior.from_pretrained(tmp_path / "checkpoint-2").step == 2
    with pytest.raises(UserError, match=r"checkpoint-2'.*: has no state of the optimizer; copy the whole checkpoint"):
        make_trainer(tmp_path / "again").train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_uploads_during_training_have_the_posterior_of_their_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = HubFolder(tmp_path / "hub")
    monkeypatch.setattr("transformers.trainer.hf_api", lambda: hub)
    trainer = make_trainer(tmp_path / "run", save_strategy="steps", save_steps=2, push_to_hub=True, hub_token="none")
    trainer.train()
    assert [Posterior.from_pretrained(upload).step for upload in hub.uploads] == [2, 4, 6]
    for step, upload in zip((2, 4, 6), hub.uploads, strict=True):
        for name in (POSTERIOR_FILE, "model.safetensors"):
            saved = tmp_path / "run" / f"checkpoint-{step}" / name
            assert (upload / name).read_bytes() == saved.read_bytes()
    trainer.push_to_hub()
    assert Posterior.from_pretrained(hub.uploads[-1]).step == 6


def test_what_is_passed_on_a_resume_holds_but_for_what_the_hessian_began_with(tmp_path: Path) -> None:
    make_trainer(tmp_path, save_strategy="steps", save_steps=3).train()
    checkpoint = str(tmp_path / "checkpoint-3")
    other = make_trainer(tmp_path / "other", ivon={"ess": 1e6, "hess_init": 0.2})
    other.train(resume_from_checkpoint=checkpoint)
    (group,) = other.ivon.param_groups
    assert (group["ess"], group["hess_init"], group["step"]) == (1e6, 0.1, STEPS)
    kept = make_trainer(tmp_path / "kept", ivon={})  # the defaults were not asked for
    kept.train(resume_from_checkpoint=checkpoint)
    assert (kept.ivon.param_groups[0]["ess"], kept.ivon.param_groups[0]["hess_init"]) == (1e5, 0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_best_model_has_the_best_models_posterior(tmp_path: Path, dtype: torch.dtype) -> None:
    settings = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    trainer = make_trainer(
        tmp_path / "run",
        make_model().to(dtype),
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        greater_is_better=True,  # the worst, which is not the last: what is learned here lowers the loss
        eval_dataset=make_data()[:8],
        **settings,
    )
    trainer.train()
    best = tmp_path / "run" / "checkpoint-2"
    assert Path(trainer.state.best_model_checkpoint) == best
    trainer.save_model(str(tmp_path / "best"))
    folders = (tmp_path / "best", best, tmp_path / "run" / "checkpoint-6")
    saved, kept, last = (Posterior.from_pretrained(folder).hessian for folder in folders)
    for name, p in trainer.model.named_parameters():
        assert torch.equal(saved[name], kept[name])
        assert torch.equal(trainer.ivon.state[p]["hessian"], kept[name])
        with trainer.ivon.perturbed(Draw(0, 0, 0)):
            pass  # restores its mean: the best weights, not those of the last step
        assert torch.equal(p, load_file(best / "model.safetensors")[name])
    assert any(not torch.equal(saved[name], last[name]) for name in saved)


def test_what_is_frozen_has_no_noise_and_own_groups_are_possible(tmp_path: Path) -> None:
    model = make_model()
    frozen = model.model.embed_tokens.weight.requires_grad_(False)
    before = frozen.detach().clone()
    trainer = make_trainer(tmp_path / "frozen", model, max_steps=1)
    trainer.train()
    assert torch.equal(frozen, before)
    assert not any(p is frozen for group in trainer.ivon.param_groups for p in group["params"])

    model = make_model()
    named = list(model.named_parameters())
    optimizer = IVON([{"params": named[:2], "noise_scale": 0.0}, {"params": named[2:]}], **IVON_SETTINGS)
    trainer = make_trainer(tmp_path / "groups", model, max_steps=1, ivon=None, optimizers=(optimizer, None))
    trainer.train()
    assert trainer.ivon is optimizer
    assert optimizer.param_groups[0]["step"] == 1


def test_a_gradient_that_is_not_finite_skips_the_step(tmp_path: Path) -> None:
    model = make_model()
    calls = 0

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return gradient * float("nan") if calls == 2 else gradient

    model.model.norm.weight.register_hook(spoil)
    trainer = make_trainer(tmp_path, model, max_steps=3)
    trainer.train()
    assert trainer.ivon.skipped_steps == 1
    assert trainer.ivon.param_groups[0]["step"] == 2
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_grad_norm": 1.0}, "max_grad_norm = 1.0.*set it to 0.0"),
        ({"weight_decay": 0.1}, "precision of the prior"),
        ({"fp16": True}, "bf16=True"),
        ({"optim": "adamw_torch"}, "TrainingArguments optim = 'adamw_torch': threepo's IVON ignores it; leave it out"),
        ({"optim_args": "a=1"}, "optim_args = 'a=1'"),
        ({"adam_beta2": 0.95}, "adam_beta2 = 0.95: threepo's IVON ignores it"),
        ({"fsdp": True}, "does not shard"),
        ({"ivon": {"lr": 1.0}}, "learning_rate"),
        ({"ivon": {"es": 1e6}}, "unknown setting 'es'"),
        ({"optimizers": (torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]), None)}, "is no threepo.IVON of"),
        ({"optimizers": (IVON([("a", torch.nn.Parameter(torch.ones(1)))]), None)}, "has no effect"),
        ({"optimizers": (IVON([torch.nn.Parameter(torch.ones(1))]), None)}, "is no threepo.IVON of"),
    ],
)
def test_what_ivon_cannot_have_is_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_trainer(tmp_path, **settings)


def test_adamws_learning_rate_is_warned_of(tmp_path: Path) -> None:
    """The Trainer's default, with IVON's: no weight moves by more than 5e-5 * 1e-3 * 1e-3 a step."""
    with pytest.warns(ThreepoWarning, match=r"lr = 5e-05: .*= 5e-11 a step; .*in TrainingArguments: learning_rate"):
        make_trainer(tmp_path, learning_rate=5e-5, ivon=None).create_optimizer()
