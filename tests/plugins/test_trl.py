"""threepo inside TRL: without noise it is TRL, with noise threepo; where gradients are taken; learning; resuming."""

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from pyarrow import parquet
from safetensors.torch import load_file
from torch.nn.utils import parameters_to_vector

if find_spec("trl") is None:
    pytest.skip("trl is not installed", allow_module_level=True)

from datasets import Dataset
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl_models import NOISY, PLAIN, PROMPTS, ROLLOUTS, STRAIGHT, Told, ToldThreepo, ToldTRL, make, new_policy, reward

import threepo
from hub_folder import HubFolder
from threepo import api
from threepo.config import (
    Advantage,
    ArmsConfig,
    Correction,
    LocalEngineConfig,
    Method,
    ModelConfig,
    NoiseConfig,
    PPOConfig,
    SamplingConfig,
)
from threepo.config.arms import MEAN
from threepo.errors import UserError
from threepo.lab.completions import read_completions
from threepo.methods.arms import Bandit, Outcome
from threepo.methods.method import credit, training_batch
from threepo.models.packing import flatten
from threepo.models.policy import Policy, load_policy
from threepo.plugins.trl import ThreepoTrainer
from threepo.plugins.trl_settings import check, check_made, read_settings
from threepo.posterior.gaussian import Posterior
from threepo.posterior.ivon import IVON
from threepo.rewards import math
from threepo.rollout.local import LocalEngine
from threepo.training.update import update_policy
from threepo.types import Completion, CreditedRow, Draw, Problem, Request, Verdict

LATTICE = [threepo.B3PO, threepo.M3PO, threepo.C3PO, threepo.C3PO_REPLAY]
ADAMW = {"method": replace(threepo.B3PO, optimizer="adamw"), "ivon": {}, "noise": {"unit": "rms", "size": 0.05}}
QUIET = {"size": 0.0}
AUTO = {
    "method": "auto",
    "arms": {"sizes": [0.2, 0.65]},
    "learning_rate": 1e-2,
    "max_grad_norm": 0.5,
    "gradient_accumulation_steps": 8,
    "per_device_train_batch_size": 2,
}
"""Eight draws, each with a completion of both prompts: a micro-batch."""
C3PO_AUTO = replace(threepo.C3PO_REPLAY, draws=4)
SEED = 1


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def same(left: Any, right: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left.parameters(), right.parameters(), strict=True))


class AtTheMean(TrainerCallback):  # type: ignore[misc]
    """Lets TRL's own trainer use IVON: the gradient is taken at the mean."""

    def on_pre_optimizer_step(self, *_: Any, optimizer: Any, **__: Any) -> None:
        optimizer.optimizer.observe(None)


def trls_own(kind: type[GRPOTrainer], folder: Path, **settings: Any) -> Any:
    """TRL's trainer with IVON instead of AdamW, trained."""
    trainer = make(kind, folder, callbacks=[AtTheMean()], **settings)
    optimizer = IVON(trainer.model.named_parameters(), lr=1.0, noise_scale=0.0, **STRAIGHT)
    trainer.optimizer = optimizer
    trainer.train()
    return trainer


# Without noise


def test_grpo_takes_what_trl_takes(tmp_path: Path) -> None:
    """Such as completions without a limit, which engines of threepo must have."""
    args = GRPOConfig(str(tmp_path), max_completion_length=None, use_cpu=True, bf16=False, report_to="none")
    assert read_settings(args, "grpo", {}, {}, {}, None, {}).optimizer is None


def test_grpo_is_trls_own(tmp_path: Path) -> None:
    settings = {"learning_rate": 1e-2, "max_grad_norm": 1.0}
    ours = make(ThreepoTrainer, tmp_path, method=threepo.GRPO, **settings)
    ours.train()  # before the other is made, which seeds all random numbers anew
    theirs = make(GRPOTrainer, tmp_path, **settings)
    theirs.train()
    assert losses(ours) == losses(theirs)
    assert same(ours.model, theirs.model)


def test_without_noise_one_draw_is_trl_bitwise(tmp_path: Path) -> None:
    theirs = trls_own(GRPOTrainer, tmp_path)
    assert not same(theirs.model, new_policy().model)
    for method in (replace(threepo.GRPO, optimizer="ivon"), threepo.B3PO):
        ours = make(ThreepoTrainer, tmp_path, method=method, ivon=STRAIGHT, noise=QUIET)
        ours.train()
        assert losses(ours) == losses(theirs), method.name
        assert same(ours.model, theirs.model), method.name


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo"])
def test_without_noise_c3po_is_trl_bitwise(tmp_path: Path, loss_type: str) -> None:
    settings = {"loss_type": loss_type, "max_steps": 1}
    ours = make(ToldThreepo, tmp_path, method=threepo.C3PO, ivon=STRAIGHT, noise=QUIET, **settings)
    ours.train()
    theirs = trls_own(ToldTRL, tmp_path, **settings)
    assert losses(ours) == losses(theirs)
    assert same(ours.model, theirs.model)
    assert all(e["correction/kept_share"] == 1 and e["correction/kl"] == 0 for e in ours.state.log_history[:-1])


def assert_close(ours: Any, theirs: Any) -> None:
    """Weights have moved by the same, but for rounding."""
    start = new_policy().model
    for p, q, old in zip(ours.parameters(), theirs.parameters(), start.parameters(), strict=True):
        assert (p - q).abs().max() <= 1e-5 * (q - old).abs().max() + 2e-7  # an ulp or two of a weight of 1


def test_without_noise_replay_is_trl_but_for_the_order_of_sums(tmp_path: Path) -> None:
    ours = make(ToldThreepo, tmp_path, method=threepo.C3PO_REPLAY, ivon=STRAIGHT, noise=QUIET)
    ours.train()
    theirs = trls_own(ToldTRL, tmp_path)
    assert losses(ours) == pytest.approx(losses(theirs), abs=1e-6)
    assert_close(ours.model, theirs.model)


def test_without_noise_m3po_is_trl_with_as_many_smaller_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trl_models.Told.uneven", False)  # M3PO averages over draws what TRL averages over tokens
    method = replace(threepo.M3PO, draws=2)
    ours = make(ToldThreepo, tmp_path, method=method, ivon=STRAIGHT, noise=QUIET)
    ours.train()
    prompts = [f"Say {i // 2}: " for i in range(16)]
    theirs = trls_own(ToldTRL, tmp_path, prompts=prompts, num_generations=ROLLOUTS // 2)
    assert losses(ours) == pytest.approx(losses(theirs), abs=1e-6)
    assert_close(ours.model, theirs.model)


# With noise


class Kept(ThreepoTrainer):
    """Keeps the batches, the texts and the draws of all steps."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        batch = super()._generate_and_score_completions(inputs)
        self.kept = [*getattr(self, "kept", []), (batch, list(self._logs["completion"]), self._draws)]
        return batch


class KeptTold(Told, Kept):
    """The same with completions of several lengths."""


def rollouts(trainer: Any, step: int, policy: Policy, optimizer: IVON) -> list[Completion]:
    """A step's completions as threepo's, with log-probs of the draws that wrote them."""
    batch, texts, draws = trainer.kept[step]
    share, found = ROLLOUTS // trainer.method.draws, []
    for row, text in enumerate(texts):
        prompt, tokens = (
            tuple(batch[f"{part}_ids"][row][batch[f"{part}_mask"][row].bool()].tolist())
            for part in ("prompt", "completion")
        )
        draw, right = draws[row % ROLLOUTS // share], reward([text])[0]
        verdict = Verdict(right == 1, "right" if right else "wrong", None, right)
        place = (draw, row % ROLLOUTS, tokens, (0.0,) * len(tokens))
        problem = Problem(f"p{row // ROLLOUTS}", "")
        completion = Completion(problem, prompt, *place, text, "length", 0, verdict=verdict)
        with optimizer.at(draw), torch.no_grad():
            logprobs = policy.logprobs(flatten([CreditedRow.of(completion, 0)], policy.device)).logprobs
        found.append(replace(completion, logprobs=tuple(logprobs.tolist())))
    return found


LOCAL = {"kind": "local"}


@pytest.mark.parametrize(
    ("method", "kind", "settings"),
    [
        *((method, KeptTold, {}) for method in LATTICE),
        (threepo.C3PO, Kept, {"engine": LOCAL}),
        (threepo.C3PO_REPLAY, KeptTold, {"arms": {"choice": "thompson", "sizes": [1, 4]}}),
        (threepo.C3PO, Kept, {"loss_type": "grpo"}),
    ],
    ids=[*(m.name for m in LATTICE), "c3po-engine", "arms", "by rows"],
)
def test_steps_in_trl_are_those_of_threepo(
    tmp_path: Path, method: Method, kind: type[Kept], settings: dict[str, Any]
) -> None:
    prompts = [f"Say {3**i}: " for i in range(8)]  # of several lengths
    trainer = make(kind, tmp_path, prompts, method=method, ivon=NOISY, **settings)
    trainer.train()

    method = replace(method, rollouts_per_prompt=ROLLOUTS, advantage=Advantage(epsilon=1e-4))  # TRL's
    policy, aggregation = new_policy(), "sequence" if "loss_type" in settings else "token"
    optimizer = IVON(policy.model.named_parameters(), lr=1.0, **NOISY)
    for step in range(2):
        groups = credit(method, rollouts(trainer, step, policy, optimizer))
        assert len(groups) == PROMPTS
        batch = training_batch(method, SamplingConfig(), groups, SEED, step)
        before = parameters_to_vector(policy.model.parameters()).detach()
        record = update_policy(policy, optimizer, batch, PPOConfig(aggregation=aggregation))
        moved = (parameters_to_vector(policy.model.parameters()).detach() - before).square().mean().sqrt()
        kept, logged = sum(row.kept_tokens > 0 for row in record.rows), trainer.state.log_history[step]
        assert logged["grad_norm"] == pytest.approx(optimizer.step_metrics()["optimizer/grad_norm"], rel=1e-5)
        assert logged["update/rms"] == pytest.approx(float(moved), rel=1e-3)
        if method.name == "c3po":
            assert 0 < kept < len(record.rows)
            assert logged["correction/kept_share"] == kept / len(record.rows)
            assert logged["correction/kl"] == pytest.approx(record.kl / record.tokens, rel=1e-3)
        else:
            assert all(row.rho == pytest.approx(1, abs=1e-4) for row in record.rows)
    ours = {name: trainer.policy_optimizer.state[p] for name, p in trainer.policy_optimizer.named()}
    for name, p in optimizer.named():
        for what in ("momentum", "hessian"):
            got, reference, start = ours[name][what], optimizer.state[p][what], 0.1 if what == "hessian" else 0.0
            change, spacing = (reference - start).abs().max(), torch.finfo(torch.float32).eps * reference.abs().max()
            # A Hessian near 0.1 is rounded to 0.7e-8 at each step.
            assert (got - reference).abs().max() <= 1e-5 * change + 2 * spacing, (name, what)
    assert_close(trainer.model, policy.model)


class Places:
    """A hook that notes at which weights a model reads: how often with gradients, and how often without."""

    def __init__(self, model: Any) -> None:
        self.seen: dict[bool, list[float]] = {True: [], False: []}
        model.register_forward_pre_hook(self.note)

    def note(self, model: Any, _: Any) -> None:
        value = model.model.layers[0].mlp.up_proj.weight.double().sum().item()
        if value not in self.seen[torch.is_grad_enabled()]:
            self.seen[torch.is_grad_enabled()].append(value)


def weights_of(*draws: Draw | None) -> list[float]:
    """The weights that `Places` should note for these draws."""
    optimizer = IVON(new_policy().model.named_parameters(), **STRAIGHT)
    name = "model.layers.0.mlp.up_proj.weight"
    return [dict(optimizer.weights(draw))[name].double().sum().item() for draw in draws]


WRITE = [Draw(SEED, 0, index) for index in range(4)]


@pytest.mark.parametrize(
    ("method", "at_gradient", "besides"),
    [
        (threepo.B3PO, WRITE[:1], WRITE[:1]),
        (threepo.C3PO, [Draw(SEED, 0, 4)], [*WRITE, Draw(SEED, 0, 4)]),
        (threepo.C3PO_REPLAY, WRITE, WRITE),
        (replace(threepo.C3PO_REPLAY, name="at_the_mean", gradient_at="mean"), [None], WRITE),
    ],
    ids=lambda value: value.name if isinstance(value, Method) else "",
)
def test_where_rollouts_and_gradients_are_made(
    tmp_path: Path, method: Method, at_gradient: list[Draw | None], besides: list[Draw | None]
) -> None:
    """Every row of replay is scored at the very weights that wrote it, so its ratio is 1."""
    trainer = make(ThreepoTrainer, tmp_path, method=method, ivon=STRAIGHT, max_steps=1)
    places = Places(trainer.model)
    trainer.train()
    assert places.seen[True] == weights_of(*at_gradient)
    assert places.seen[False] == weights_of(*besides)


def test_arms_are_chosen_by_what_the_rows_of_each_have_earned(tmp_path: Path) -> None:
    """As threepo's own trainer chooses them, from the rewards that TRL has logged."""
    trainer = make(ThreepoTrainer, tmp_path, save_strategy="steps", log_completions=True, **AUTO)
    trainer.train()
    settings, names = ArmsConfig(choice="thompson", sizes=(0.2, 0.65)), dict(new_policy().model.named_parameters())
    bandit = Bandit(settings, trainer.method, lambda: names)
    pages = sorted((tmp_path / "completions").glob("*.parquet"))
    assert len(pages) == 2
    for step, page in enumerate(pages):
        rows = Dataset.from_parquet(str(page)).to_list()
        chosen = bandit.choose(SEED, step)
        assert [row["draw_arm"] for row in rows[:ROLLOUTS]] == [str(arm or MEAN) for arm in chosen]
        told = [Outcome(row["draw_arm"], row["reward"], judged=True) for row in rows]
        bandit.count([told[:ROLLOUTS], told[ROLLOUTS:]])
        logged = trainer.state.log_history[step]
        assert logged["arms/share/mean"] == sum(arm is None for arm in chosen) / 8
    assert trainer._bandit.tally == bandit.tally
    assert Posterior.from_pretrained(tmp_path / "checkpoint-2").has_arms


def test_the_draws_of_arms_write_and_gradients_are_taken_at_them(tmp_path: Path) -> None:
    trainer = make(ThreepoTrainer, tmp_path, **AUTO | {"max_steps": 1})
    places, name = Places(trainer.model), "model.layers.0.mlp.up_proj.weight"
    trainer.train()
    expected = []
    for draw in trainer._draws:
        model = new_policy().model
        if draw:
            noise = Posterior.around(model.named_parameters(), NoiseConfig(unit="rms", size=1.0))
            noise.perturb_(model.named_parameters(), draw)
        expected.append(dict(model.named_parameters())[name].double().sum().item())
    assert len(set(expected)) > 1
    assert places.seen[True] == places.seen[False] == list(dict.fromkeys(expected))


def test_a_step_whose_rows_are_all_masked_is_skipped_and_counted(tmp_path: Path) -> None:
    method = replace(threepo.C3PO, correction=Correction(kind="seq_mis", low=1e6, high=2e6))
    trainer = make(ThreepoTrainer, tmp_path, method=method, ivon=NOISY)
    trainer.train()
    logged = trainer.state.log_history[:2]
    assert [entry["correction/kept_share"] for entry in logged] == [0, 0]
    assert [entry["optimizer/skipped_steps"] for entry in logged] == [1, 2]
    assert same(trainer.model, new_policy().model)


def test_the_norm_of_gradients_is_logged_as_it_was_before_they_were_clipped(tmp_path: Path) -> None:
    settings = {"method": replace(threepo.B3PO, optimizer="adamw"), "noise": {"unit": "rms", "size": 0.05}}
    norms = []
    for folder, most in (("free", 0.0), ("clipped", 1e-3)):
        trainer = make(ThreepoTrainer, tmp_path / folder, max_grad_norm=most, max_steps=1, **settings)
        trainer.train()
        norms.append(trainer.state.log_history[0]["grad_norm"])
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)
    assert norms[0] > 0.01


@pytest.mark.parametrize("cut", [16, 8])
def test_rows_that_trl_leaves_out_are_not_those_of_the_correction(
    cut: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL leaves out the truncated rows of 16; the correction keeps all rows that it sees."""

    def told(self: Any, prompt_ids: list[list[int]], *_: Any, **__: Any) -> Any:
        ids = [[65] * 7 + [self.processing_class.eos_token_id] for _ in prompt_ids]
        return [[*row[:-1], 65] if i < cut else row for i, row in enumerate(ids)], None

    monkeypatch.setattr("trl_models.Told._generate_single_turn", told)
    settings = {"ivon": STRAIGHT, "noise": QUIET, "max_steps": 1, "mask_truncated_completions": True}
    trainer = make(ToldThreepo, tmp_path, method=threepo.C3PO, **settings)
    trainer.train()
    logged = trainer.state.log_history[0]
    assert logged.get("correction/kept_share") == (1.0 if cut < 16 else None)
    assert logged["loss"] == pytest.approx(0, abs=1e-6)  # equal texts have equal rewards
    assert all(p.isfinite().all() for p in trainer.model.parameters())


@pytest.mark.parametrize("engine", [None, {"kind": "local"}])
def test_rollouts_and_ratios_are_without_dropout_and_neftune(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: dict[str, str] | None
) -> None:
    """With noise 0, rollouts and gradients have the same weights, so nothing is masked."""
    policy = new_policy()
    for layer in policy.model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    monkeypatch.setattr("trl_models.new_policy", lambda: policy)
    settings = {"ivon": STRAIGHT, "noise": QUIET, "max_steps": 2, "engine": engine, "temperature": 0.7}
    trainer = make(Kept, tmp_path, method=threepo.C3PO, neftune_noise_alpha=50.0, **settings)
    modes: dict[bool, set[bool]] = {True: set(), False: set()}
    embedding = trainer.model.get_input_embeddings()
    embedding.register_forward_hook(lambda module, *_: modes[torch.is_grad_enabled()].add(module.training))
    trainer.train()
    assert modes == {True: {True}, False: {False}}, "gradients are taken in training mode, all else is not"
    steps = [entry for entry in trainer.state.log_history if "correction/kl" in entry]
    assert len(steps) == 2
    assert all(step["correction/kept_share"] == 1 and step["correction/kl"] < 1e-9 for step in steps)


def test_adamw_around_draws_decays_what_trls_does(tmp_path: Path) -> None:
    """Noise that is lost to rounding leaves TRL's own trainer: norms and biases do not decay."""
    settings = {"learning_rate": 1e-2, "weight_decay": 0.5, "max_grad_norm": 1.0}
    settings["adam_epsilon"] = 1e-3  # or gradients that are 0 but for rounding would be scaled up
    method = replace(threepo.B3PO, optimizer="adamw")
    ours = make(ToldThreepo, tmp_path, method=method, noise={"unit": "rms", "size": 1e-30}, **settings)
    ours.train()
    theirs = make(ToldTRL, tmp_path, **settings)
    theirs.train()
    for (name, p), q in zip(ours.model.named_parameters(), theirs.model.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-5, atol=1e-6), name
    assert {group["weight_decay"] for group in ours.policy_optimizer.param_groups} == {0.0, 0.5}


def test_evaluation_is_of_the_mean(tmp_path: Path) -> None:
    data = Dataset.from_dict({"prompt": ["Say 9: "]})
    settings = {"ivon": STRAIGHT, "eval_dataset": data, "per_device_eval_batch_size": ROLLOUTS, "max_steps": 1}
    trainer = make(ThreepoTrainer, tmp_path, method=threepo.C3PO, **settings)
    trainer.train()
    places = Places(trainer.model)
    mean = dict(trainer.policy_optimizer.weights(None))["model.layers.0.mlp.up_proj.weight"].double().sum().item()
    trainer.evaluate()
    assert places.seen == {True: [], False: [mean]}


def written(policy: Policy, weights: Any, step: int, prompts: list[str], draws: Sequence[Draw | None]) -> list[str]:
    """The local engine's completions, a row for each prompt and draw."""
    engine = LocalEngine(policy, LocalEngineConfig())
    engine.load(weights, draws, step)
    ids = [tuple(policy.tokenizer(prompt).input_ids) for prompt in prompts]
    rows = enumerate(zip(ids, draws, strict=True))
    requests = [Request(Problem(str(list(prompt)), ""), prompt, draw, row) for row, (prompt, draw) in rows]
    return [made.text for made in engine.generate(requests, SamplingConfig(max_new_tokens=8), SEED)]


def test_an_engine_writes_with_the_weights_of_the_draws_and_in_evaluations_of_the_mean(tmp_path: Path) -> None:
    data = Dataset.from_dict({"prompt": ["Say 9: ", "Say 10: "]})
    # An evaluation of two batches.
    settings = {"ivon": NOISY, "eval_dataset": data, "per_device_eval_batch_size": ROLLOUTS, "max_steps": 1}
    trainer = make(Kept, tmp_path, method=threepo.C3PO, engine=LOCAL, **settings)
    trainer.train()
    (_, texts, _), policy = trainer.kept[0], new_policy()
    start = IVON(policy.model.named_parameters(), lr=1.0, **NOISY)
    prompts = [f"Say {row // ROLLOUTS}: " for row in range(PROMPTS * ROLLOUTS)]
    draws = [WRITE[row % ROLLOUTS // 2] for row in range(PROMPTS * ROLLOUTS)]
    assert texts == written(policy, start, 0, prompts, draws)
    trainer.evaluate()
    read = list(trainer._logs["prompt"])[-2 * ROLLOUTS :]
    for first in (0, ROLLOUTS):
        prompts, draws = read[first : first + ROLLOUTS], [None] * ROLLOUTS
        _, texts, _ = trainer.kept[1 + first // ROLLOUTS]
        assert texts[-ROLLOUTS:] == written(policy, trainer.policy_optimizer, 1, prompts, draws)
    assert {*read} == {"Say 9: ", "Say 10: "}


def logged_draws(folder: Path) -> list[int | None]:
    """The draw of every logged completion."""
    files = sorted((folder / "completions").glob("*.parquet"))
    return [index for file in files for index in parquet.read_table(file).column("draw_index").to_pylist()]


def test_rows_of_an_evaluation_are_of_no_draw(tmp_path: Path) -> None:
    data = Dataset.from_dict({"prompt": ["Say 9: ", "Say 10: "]})
    settings = {"eval_dataset": data, "per_device_eval_batch_size": ROLLOUTS, "eval_strategy": "steps", "eval_steps": 1}
    settings |= {"method": threepo.C3PO, "ivon": STRAIGHT, "max_steps": 1, "log_completions": True}
    make(ThreepoTrainer, tmp_path, **settings).train()
    (group, *others) = read_completions(tmp_path).values()
    assert len(others) == 1
    assert len(group.right) == ROLLOUTS
    assert set(logged_draws(tmp_path)) == {None}


def test_an_engine_has_no_dropout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's probe compares log-probs of the copy of the model, which would be random."""
    policy = new_policy()
    policy.model.train()
    monkeypatch.setattr("trl_models.new_policy", lambda: policy)
    trainer = make(ThreepoTrainer, tmp_path, method=threepo.C3PO, ivon=NOISY, engine=LOCAL)
    assert not any(module.training for module in trainer._architecture.modules())


def test_a_posterior_over_adapters_of_peft_is_read_by_threepo(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    policy = new_policy()
    policy.save(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    own = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    arguments = GRPOConfig(str(tmp_path / "out"), **{**PLAIN, "max_steps": 1})
    data = Dataset.from_dict({"prompt": ["Say 0: ", "Say 1: "]})
    settings = {"processing_class": policy.tokenizer, "method": threepo.C3PO, "ivon": STRAIGHT}
    trainer = ThreepoTrainer(own, reward, arguments, train_dataset=data, **settings)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    (written,) = api.sample(tmp_path / "saved", tmp_path / "draws", range(1))
    saved = Posterior.from_pretrained(tmp_path / "saved")
    draw = saved.draw(0)
    read = load_policy(ModelConfig(path=str(written))).model.state_dict()
    assert len(draw) == 4
    assert all(torch.equal(read[name], value) for name, value in draw.items())
    with trainer.policy_optimizer.perturbed(saved.address(0)):
        inside = trainer.model.state_dict()
        assert all(torch.equal(inside[f"base_model.model.{name}"], value) for name, value in draw.items())


@pytest.mark.parametrize(("name", "bits"), [("default", 4), ("default", 8), ("other", 16)])
def test_noise_of_adapters_goes_by_the_weights_that_they_adapt(name: str, bits: int, tmp_path: Path) -> None:
    """However the base is stored, and whatever the adapter is called."""
    peft = pytest.importorskip("peft")
    pytest.importorskip("bitsandbytes")
    new_policy().save(tmp_path / "base")
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    packed = BitsAndBytesConfig(load_in_4bit=bits == 4, load_in_8bit=bits == 8) if bits < 16 else None
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", quantization_config=packed)
    lora = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    arguments = GRPOConfig(str(tmp_path / "out"), **{**PLAIN, "max_steps": 1, "learning_rate": 1e-6})
    data = Dataset.from_dict({"prompt": ["Say 0: ", "Say 1: "]})
    own = (peft.get_peft_model(model, lora, name), reward, arguments, data, None, new_policy().tokenizer)
    if bits == 8:
        with pytest.raises(UserError, match=r"unit = 'rms': .*lora_B.default.weight adapts weights that cannot"):
            ThreepoTrainer(*own, method="fixed_replay").train()
        learned = ThreepoTrainer(*own[:2], GRPOConfig(str(tmp_path), **PLAIN), *own[3:], method="c3po", ivon=STRAIGHT)
        learned.train()
        assert learned.policy_optimizer.skipped_steps == 0
        return
    trainer = ThreepoTrainer(*own, method="fixed_replay")
    trainer.train()
    sizes = {
        name: group.noise_scale for group in Posterior.of(trainer.policy_optimizer).groups for name in group.parameters
    }
    for layer in range(2):
        weight = dense.get_parameter(f"model.layers.{layer}.self_attn.q_proj.weight").detach()
        size = sizes[f"model.layers.{layer}.self_attn.q_proj.lora_B.{name}.weight"]
        assert size == pytest.approx(0.05 * float(weight.square().mean().sqrt()), rel=0.02)
    logged = trainer.state.log_history[0]["posterior/sigma_to_rms"]
    assert logged == pytest.approx(0.05, rel=0.01)


@pytest.mark.parametrize(
    "settings",
    [
        {"method": threepo.C3PO, "ivon": {"ess": 1e5}},
        {
            "method": replace(threepo.C3PO_REPLAY, optimizer="adamw"),
            "noise": {"unit": "rms", "size": 0.05},
            "learning_rate": 1e-2,
            "max_grad_norm": 0.5,
        },
        AUTO,
        {"method": C3PO_AUTO, "ivon": {"ess": 1e5}, "arms": {"choice": "thompson", "sizes": [1, 4]}, "engine": LOCAL},
    ],
    ids=["c3po", "fixed_replay", "auto", "c3po_auto by an engine"],
)
def test_a_resumed_run_is_one_that_never_stopped(tmp_path: Path, settings: dict[str, Any]) -> None:
    went_on = make(ThreepoTrainer, tmp_path, save_strategy="steps", save_steps=1, **settings)
    went_on.train()
    resumed = make(ThreepoTrainer, tmp_path / "resumed", **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert losses(resumed) == losses(went_on)
    assert [e["reward"] for e in resumed.state.log_history[:2]] == [e["reward"] for e in went_on.state.log_history[:2]]
    assert same(went_on.model, resumed.model)
    ours, theirs = (trainer.policy_optimizer for trainer in (resumed, went_on))
    for (name, p), (_, q) in zip(ours.named(), theirs.named(), strict=True):
        for key, value in theirs.state[q].items():
            assert torch.equal(ours.state[p][key], value), (name, key)
    assert resumed._bandit.tally == went_on._bandit.tally
    saved = Posterior.from_pretrained(tmp_path / "checkpoint-2")
    assert saved.groups == Posterior.of(ours).groups
    assert all(torch.equal(saved.hessian[name], value) for name, value in Posterior.of(ours).hessian.items())
    assert load_file(tmp_path / "checkpoint-2" / "model.safetensors")


def test_what_is_passed_on_a_resume_holds_but_for_what_the_hessian_began_with(tmp_path: Path) -> None:
    settings = {"method": threepo.B3PO, "max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    first = make(ThreepoTrainer, tmp_path, ivon=STRAIGHT, **settings)
    first.train()
    other = make(
        ThreepoTrainer, tmp_path / "other", ivon={"ess": 1e7, "hess_init": 0.2, "clip_radius": 1.0}, **settings
    )
    other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    (group,) = other.policy_optimizer.param_groups
    assert (group["ess"], group["hess_init"], group["clip_radius"], group["step"]) == (1e7, 0.1, 1.0, 2)
    assert Posterior.from_pretrained(tmp_path / "other" / "checkpoint-2").groups[0].ess == 1e7


def test_noise_cannot_change_on_a_resume(tmp_path: Path) -> None:
    around = {"method": replace(threepo.C3PO_REPLAY, optimizer="adamw"), "max_steps": 2, "save_strategy": "steps"}
    settings = {**around, "save_steps": 1, "noise": {"unit": "rms", "size": 0.05}, "max_grad_norm": 0.5}
    make(ThreepoTrainer, tmp_path, **settings).train()
    checkpoint = str(tmp_path / "checkpoint-1")
    for other, said in (
        ({"noise": {"unit": "rms", "size": 0.5}}, r"other noise \(noise.size = 0.05 there, 0.5 here\)"),
        (AUTO | {"noise": {"size": 0.05}}, "has other noise"),
    ):
        with pytest.raises(UserError, match=said):
            make(ThreepoTrainer, tmp_path / "other", **{**settings, **other}).train(resume_from_checkpoint=checkpoint)
    for name in ("optimizer.pt", "noise.json"):  # as with save_only_model
        (tmp_path / "checkpoint-2" / name).unlink()
    with pytest.raises(UserError, match="has no state of the optimizer; copy the whole checkpoint"):
        make(ThreepoTrainer, tmp_path / "o", **settings).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    resumed = make(ThreepoTrainer, tmp_path / "other", **{**settings, "max_grad_norm": 0.1})
    resumed.train(resume_from_checkpoint=checkpoint)
    assert {group["max_grad_norm"] for group in resumed.policy_optimizer.param_groups} == {0.1}
    make(GRPOTrainer, tmp_path / "trl", max_steps=1, save_strategy="steps", save_steps=1).train()
    with pytest.raises(UserError, match="is not of a method with draws or IVON"):
        make(ThreepoTrainer, tmp_path / "a", **settings).train(
            resume_from_checkpoint=str(tmp_path / "trl" / "checkpoint-1")
        )


class Interrupts(Kept):
    """Fails once, in the middle of a step."""

    fails = True
    seen: ClassVar[list[tuple[int, int]]] = []

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        self.seen.append((self.state.global_step, self._step % 4))
        if self.fails and self.state.global_step == 1 and self._step % 4 == 2:
            self.fails = False
            raise KeyboardInterrupt
        return super().training_step(model, inputs, num_items_in_batch)


def test_a_trainer_that_was_interrupted_begins_with_a_whole_step(tmp_path: Path) -> None:
    """As in a notebook, where the cell is interrupted and run again."""
    trainer = make(Interrupts, tmp_path, method=threepo.M3PO, ivon=NOISY)
    held, observe = [], IVON.observe

    def counted(self: IVON, draw: Draw | None, *rest: Any, **settings: Any) -> Any:
        held.append(bool(self.gradients()))
        return observe(self, draw, *rest, **settings)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(IVON, "observe", counted)
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        Interrupts.seen.clear()
        held.clear()
        trainer.train()
    assert Interrupts.seen == [(step, micro) for step in range(2) for micro in range(4)]
    assert held == 2 * [False, True, True, True], "only this step's gradients"


def test_an_engine_that_was_interrupted_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of vLLM has closed itself."""

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    trainer = make(ThreepoTrainer, tmp_path, method=threepo.C3PO, ivon=NOISY, engine=LOCAL)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(LocalEngine, "generate", interrupted)
        trainer.train()
    assert "_engine" not in vars(trainer)
    trainer.train()
    assert trainer.state.global_step == trainer.args.max_steps


def test_uploads_during_training_have_the_posterior_of_their_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = HubFolder(tmp_path / "hub")
    monkeypatch.setattr("transformers.trainer.hf_api", lambda: hub)
    settings = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "push_to_hub": True, "hub_token": "none"}
    make(ThreepoTrainer, tmp_path / "run", method=threepo.B3PO, ivon=STRAIGHT, **settings).train()
    assert [Posterior.from_pretrained(upload).step for upload in hub.uploads] == [1, 2]


def share_of_digits(completions: list[str], **columns: Any) -> list[float]:
    return [sum(c.isdigit() for c in text) / 4 for text in completions]


def test_a_policy_learns(tmp_path: Path) -> None:
    settings = {"per_device_train_batch_size": 16, "num_generations": 16, "max_completion_length": 4, "max_steps": 9}
    settings |= {"ivon": {"ess": 1e8, "clip_radius": 10.0}, "reward_funcs": share_of_digits}
    settings |= {"gradient_accumulation_steps": 1, "learning_rate": 4.0}
    trainer = make(ThreepoTrainer, tmp_path, method=threepo.C3PO, **settings)
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    assert sum(rewards[:3]) / 3 < 0.1
    assert sum(rewards[-3:]) / 3 > 0.3


def test_rewards_of_threepo_grade_and_what_trl_logs_can_be_explored(tmp_path: Path) -> None:
    settings = {"method": threepo.C3PO, "ivon": STRAIGHT, "reward_funcs": [math.reward], "max_steps": 2}
    trainer = make(ThreepoTrainer, tmp_path, log_completions=True, **settings)
    trainer.train_dataset = trainer.train_dataset.add_column("answer", ["7"] * len(trainer.train_dataset))
    trainer.train()
    groups = read_completions(tmp_path)
    assert [step for step, _ in groups] == [1, 1, 2, 2]
    assert logged_draws(tmp_path) == [0, 0, 1, 1, 2, 2, 3, 3] * 4


def test_lines_of_the_readme_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With GRPOConfig's own values, but for a step that is short."""
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    [block] = re.findall(r"```python\n(from threepo\.plugins\.trl.*?)```", text, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    policy = new_policy()
    policy.save(Path("model"))
    names = {
        "GRPOConfig": partial(
            GRPOConfig, max_steps=1, max_completion_length=8, use_cpu=True, bf16=False, report_to="none"
        ),
        "model": "model",
        "reward_funcs": reward,
        "data": Dataset.from_dict({"prompt": ["Say 1: "] * 8}),
    }
    exec(compile(block, "README.md", "exec"), names)
    trainer: Any = names["trainer"]
    trainer.train()
    assert trainer.state.global_step == 1
    assert len(trainer._draws) == 8


def test_python_on_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "trl.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    new_policy().save(Path("my-model"))
    exec(compile("\n".join(blocks), "docs/trl.md", "exec"), {})
    load_policy(ModelConfig(path="my_policy"))  # raises for half a policy
    assert Posterior.from_pretrained("my_posterior").step == 2
    assert [len(read_completions(Path(run))) for run in ("my_run", "my_c3po")] == [8, 4]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_grad_norm": 1.0}, "max_grad_norm = 1.0: IVON learns its Hessian"),
        ({"weight_decay": 0.1}, "set ivon={'weight_decay': ...}"),
        ({"fp16": True}, "mixed_precision = 'fp16': float16 scales gradients"),
        ({"num_iterations": 2}, "num_iterations = 2: draws are of one step"),
        ({"steps_per_generation": 2}, "leave it at gradient_accumulation_steps = 4"),
        ({"top_p": 0.9}, "ratios to it have no meaning"),
        ({"top_k": 5}, "ratios to it have no meaning"),
        ({"generation_kwargs": {"top_p": 0.5}}, "generation_kwargs = {'top_p': 0.5}: it may change the rollouts'"),
        ({"beta": 0.1}, "beta = 0.1: TRL has no place for the correction's weights in its KL"),
        ({"off_policy_mask_threshold": 0.1}, "off_policy_mask_threshold = 0.1: the correction already leaves out"),
        ({"loss_type": "bnpo"}, "loss_type = 'bnpo': it divides by all tokens of a micro-batch"),
        ({"optim": "adafactor"}, "GRPOConfig optim = 'adafactor': threepo's IVON ignores it"),
        ({"adam_beta1": 0.8}, "GRPOConfig adam_beta1 = 0.8: threepo's IVON ignores it"),
        ({**ADAMW, "optim": "sgd"}, "GRPOConfig optim = 'sgd': threepo's AdamW ignores it"),
        ({"use_vllm": True}, "pass engine={'kind': 'vllm'} to ThreepoTrainer instead"),
        ({"engine": {"kind": "vlm"}}, "vlm"),
        ({"engine": "vllm"}, "engine = 'vllm': is a table"),
        ({"engine": LOCAL, "min_p": 0.1, "method": threepo.B3PO}, "min_p = 0.1: an engine of threepo's"),
        ({"engine": LOCAL, "repetition_penalty": 1.1, "method": threepo.B3PO}, "repetition_penalty = 1.1: an engine"),
        ({"engine": LOCAL, "method": threepo.GRPO, "ivon": {}}, "TRL's own trainer, which has use_vllm"),
        ({"engine": LOCAL, "max_completion_length": None}, "max_completion_length = None: an engine needs a limit"),
        ({"enable_jit_checkpoint": True}, "it saves between the gradients of a step and the step"),
        ({"use_transformers_continuous_batching": True}, "loses the mean"),
        ({"tools": [reward]}, "tools = .*draws only write plain answers"),
        ({"optimizers": (None, 1)}, "optimizers = ['NoneType', 'int']: the method has IVON"),
        ({"method": replace(threepo.C3PO, gradient_draws=2)}, "method.gradient_draws = 2"),
        ({"method": replace(threepo.C3PO, draws=3, rollouts_per_prompt=9)}, "the 3 draws write equal shares"),
        (
            {"method": threepo.C3PO_REPLAY, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 8},
            "set a multiple of the 4 draws",
        ),
        ({"method": threepo.GRPO}, "'grpo' has the optimizer 'adamw'"),
        (
            {"method": replace(threepo.C3PO_REPLAY, correction=Correction(kind="seq_mis"))},
            "method.correction.kind = 'seq_mis': the weights that write take the gradient too",
        ),
        ({"method": replace(threepo.C3PO, optimizer="adamw"), "ivon": {}}, "needs a size and a use"),
        ({"method": threepo.GRPO, "ivon": {}, "noise": {"unit": "rms", "size": 0.1}}, "pass a method with draws"),
        ({"ivon": {"es": 1e9}}, "es"),
        ({"ivon": {"ess": 1e6, "lr": 1.0}}, "ivon: lr = 1.0: leave it out, and set GRPOConfig learning_rate"),
        ({"ivon": {"step_size": 1e-6}}, "ivon: step_size = 1e-06: leave it out, and set GRPOConfig learning_rate"),
        ({"method": "C3PO"}, "method = 'C3PO': must be a threepo.Method, or one of grpo, .*, c3po,"),
        ({"method": "entreg"}, "method = 'entreg': TRL has no place for all that it sets; take one of grpo, b3po"),
        ({"arms": {"choice": "thompson"}}, "arms.choice = 'thompson': has no arm for a gradient draw"),
        ({"arms": {"kept": 0.5}}, "arms.kept = 0.5: no arms are chosen"),
        ({"arms": "thompson"}, "arms = 'thompson': is a table"),
        ({"method": "rloo", "ivon": {}}, "TRL has no place for all that it sets"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=re.sub(r"([(\[{])", r"\\\1", message)):
        make(ThreepoTrainer, tmp_path, **{"method": threepo.C3PO, "ivon": {"ess": 1e6}, **settings})


def test_what_is_refused_by_name_is_refused_by_position_and_by_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, args = new_policy(), GRPOConfig(str(tmp_path), **PLAIN)
    data = Dataset.from_dict({"prompt": ["Say 0: "] * 8})
    given = (policy.model, reward, args, data, None, policy.tokenizer, None, None)
    settings = {"method": threepo.C3PO, "ivon": STRAIGHT}
    ThreepoTrainer(*given, (None, None), **settings)  # TRL's default
    with pytest.raises(UserError, match=r"optimizers = \['SGD', 'NoneType'\]: the method has IVON"):
        ThreepoTrainer(*given, (torch.optim.SGD(policy.model.parameters()), None), **settings)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    with pytest.raises(UserError, match="mixed_precision = 'fp16': float16 scales gradients"):
        make(ThreepoTrainer, tmp_path, **settings)


def test_settings_of_the_model_that_trl_leaves_to_it_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = new_policy()
    monkeypatch.setattr("trl_models.new_policy", lambda: policy)
    settings = {"method": threepo.C3PO, "ivon": STRAIGHT}
    policy.model.generation_config.update(top_p=0.8, top_k=20, repetition_penalty=1.1, temperature=0.7)  # TRL sets them
    make(ThreepoTrainer, tmp_path, **settings)
    with pytest.raises(UserError, match=r"model\.generation_config\.top_k = 20: it may change the rollouts'"):
        make(ThreepoTrainer, tmp_path, **settings, top_k=None)
    for name, value in (("min_p", 0.1), ("no_repeat_ngram_size", 2)):
        policy.model.generation_config.update(**{name: value})
        with pytest.raises(UserError, match=rf"model\.generation_config\.{name} = {value}: it may change"):
            make(ThreepoTrainer, tmp_path, **settings)
        policy.model.generation_config.update(**{name: None})


def test_an_engine_wants_all_weights_to_be_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = new_policy()
    policy.model.model.embed_tokens.requires_grad_(False)
    monkeypatch.setattr("trl_models.new_policy", lambda: policy)
    with pytest.raises(UserError, match=r"model\.embed_tokens\.weight is frozen"):
        make(ThreepoTrainer, tmp_path, method=threepo.C3PO, ivon=NOISY, engine=LOCAL)


def test_a_process_must_hold_whole_groups(tmp_path: Path) -> None:
    """On one rank TRL ensures it; on two, a group could be split between them."""
    rows = PROMPTS * ROLLOUTS
    with pytest.raises(UserError, match=f"whole groups of num_generations = {2 * rows}"):
        check(replace(threepo.C3PO, rollouts_per_prompt=2 * rows), GRPOConfig(str(tmp_path), **PLAIN), NoiseConfig())


def test_text_for_a_model_that_reads_images_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processors such as Gemma 3's give token types without images, too: those of the rows of a draw go with them."""
    asked = []

    def noted(_: Any, prompt_ids: list[list[int]], images: None, fields: dict[str, Any], *rest: Any) -> Any:
        asked.append((prompt_ids, fields))
        return prompt_ids, None

    trainer = make(ThreepoTrainer, tmp_path, method=threepo.C3PO, ivon=STRAIGHT)
    trainer.create_optimizer()
    trainer.model.train()
    trainer._draws = WRITE
    rows = [[row] for row in range(ROLLOUTS)]
    monkeypatch.setattr(GRPOTrainer, "_generate_single_turn", noted)
    assert trainer._generate_single_turn(rows, None, {"token_type_ids": rows}, ROLLOUTS) == (rows, None)
    assert asked == [([[row], [row + 1]], {"token_type_ids": [[row], [row + 1]]}) for row in range(0, ROLLOUTS, 2)]


def test_images_and_flattened_parameters_are_refused(tmp_path: Path) -> None:
    trainer = make(ThreepoTrainer, tmp_path, method=threepo.C3PO, ivon=STRAIGHT)
    trainer.model.train()
    with pytest.raises(UserError, match="train_dataset: has images, which draws do not read"):
        trainer._generate_single_turn([[65]], [["an image"]], {}, ROLLOUTS)
    trainer.is_deepspeed_enabled = True
    with pytest.raises(UserError, match="DeepSpeed and FSDP1 flatten parameters"):
        check_made(trainer, None)
