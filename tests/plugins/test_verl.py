"""threepo inside verl, on CPUs: the engine against a loop by hand and against verl's own, Ray workers, a step of C3PO.

Run by `make test-verl`, in an environment of its own.
"""

import json
import math
import os
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch

if find_spec("verl") is None:
    pytest.skip("verl is not installed", allow_module_level=True)

HERE = Path(__file__).parent
ENVIRONMENT = {
    "VERL_PLATFORM": "cpu",
    "VERL_USE_EXTERNAL_MODULES": "verl_on_cpu",
    "PYTHONPATH": str(HERE),
    "RAY_USAGE_STATS_ENABLED": "0",
    "TOKENIZERS_PARALLELISM": "false",
}
os.environ.update(ENVIRONMENT)
sys.path += [str(HERE), str(HERE.parent / "ranks")]

import pandas
import verl_program
from hydra import compose, initialize_config_module
from launch import launch
from transformers import AutoModelForCausalLM, AutoTokenizer
from verl.workers.config import FSDPOptimizerConfig, HFModelConfig
from verl_on_cpu import share_of_vowels

from threepo.config import ModelConfig, PPOConfig, SamplingConfig, TinyConfig
from threepo.config.presets import PRESETS
from threepo.errors import UserError
from threepo.lab.completions import read_completions
from threepo.methods.method import credit, training_batch
from threepo.models.policy import Policy, load_policy
from threepo.plugins.verl import DrawTrainer, IVONEngine, check_config
from threepo.posterior.ivon import IVON
from threepo.training.update import update_policy
from threepo.types import Completion, Draw, Problem, Verdict

SHAPE = TinyConfig(hidden_size=32, intermediate_size=64, layers=2, heads=2, kv_heads=1, context=128)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model."""
    folder = tmp_path_factory.mktemp("verl")
    load_policy(ModelConfig(path="tiny-qwen2", tiny=SHAPE), seed=7).save(folder / "model")
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """The program's findings, by number of ranks; one for each rank."""
    for ranks in (1, 2):
        (folder / str(ranks)).mkdir()
        (folder / str(ranks) / "model").symlink_to(folder / "model")
        launch(str(HERE / "verl_program.py"), str(folder / str(ranks)), ranks=ranks)
    return {
        ranks: [torch.load(folder / str(ranks) / f"found_{rank}.pt", weights_only=False) for rank in range(ranks)]
        for ranks in (1, 2)
    }


def model_of(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder / "model")


def row_logprobs(model: Any, row: torch.Tensor) -> torch.Tensor:
    logits = model(row[None]).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(-1, row[1:, None])[:, 0]


@pytest.fixture(scope="module")
def by_hand(folder: Path) -> dict[str, Any]:
    """The same two steps of each method, with IVON in a plain loop."""
    return {method: steps_by_hand(folder, method) for method in ("b3po", "m3po", "c3po_replay")}


def steps_by_hand(folder: Path, method: str) -> dict[str, Any]:
    model, steps = model_of(folder), []
    optimizer = IVON(model.named_parameters(), lr=1.0, **verl_program.IVON)  # type: ignore[arg-type]
    written_by = (0,) * 4 if method == "b3po" else verl_program.WRITTEN_BY
    tokens = [length - 1 for length in verl_program.LENGTHS]
    for step in range(2):
        logprobs, loss = {}, 0.0
        for index in sorted(set(written_by)):
            draw = Draw(3, step, index)
            rows = [row for row, by in enumerate(written_by) if by == index]
            count = sum(tokens if method == "c3po_replay" else [tokens[row] for row in rows])
            with optimizer.perturbed(draw):
                for row in rows:
                    logprobs[row] = row_logprobs(model, verl_program.rows()[row])
                part = -torch.cat([logprobs[row] for row in rows]).sum() / count
                part.backward()
            optimizer.observe(draw)
            loss += part.item() / (2 if method == "m3po" else 1)
        optimizer.step(divisor=1.0 if method == "c3po_replay" else None)
        optimizer.param_groups[0]["lr"] = 0.5 * (1 + math.cos(math.pi * (step + 1) / 10))  # verl's cosine over 10 steps
        norm = optimizer.step_metrics()["optimizer/grad_norm"]
        steps.append({"logprobs": [logprobs[row].detach() for row in range(4)], "loss": loss, "grad_norm": norm})
    return {"steps": steps, "lr": optimizer.param_groups[0]["lr"], "mean": dict(optimizer.weights(None))}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("method", ["b3po", "m3po", "c3po_replay"])
def test_the_engine_trains_as_a_loop_by_hand(
    found: dict[int, list[dict[str, Any]]], by_hand: dict[str, Any], method: str, ranks: int
) -> None:
    reference = by_hand[method]
    for rank in range(ranks):
        got = found[ranks][rank][method]
        for mine, theirs in zip(got["steps"], reference["steps"], strict=True):
            assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
            assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
            lengths = verl_program.LENGTHS[rank::ranks]
            for row, logprobs in zip(
                mine["logprobs"].split(list(lengths)), theirs["logprobs"][rank::ranks], strict=True
            ):
                assert torch.allclose(row[:-1], logprobs, atol=1e-4)  # the last position predicts nothing
        assert max(float((got["mean"][name] - value).abs().max()) for name, value in reference["mean"].items()) < 1e-5
        assert got["steps"][1]["lr"] == pytest.approx(reference["lr"])


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_replica_gets_its_own_draw_bitwise(folder: Path, found: dict[int, list[dict[str, Any]]], ranks: int) -> None:
    for rank in range(ranks):
        model = model_of(folder)
        reference = dict(IVON(model.named_parameters(), **verl_program.IVON).weights(Draw(3, 0, rank)))  # type: ignore[arg-type]
        got = found[ranks][rank]["draw"]
        assert got.keys() == reference.keys()
        assert all(torch.equal(got[name], reference[name]) for name in got)


def test_c3po_scores_rollouts_at_a_fresh_draw(folder: Path, found: dict[int, list[dict[str, Any]]]) -> None:
    model = model_of(folder)
    with IVON(model.named_parameters(), **verl_program.IVON).perturbed(Draw(3, 0, 2)), torch.no_grad():  # type: ignore[arg-type]
        reference = row_logprobs(model, verl_program.rows()[0])
    assert torch.allclose(found[1][0]["at_fresh"][: len(reference)], reference, atol=1e-4)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_goes_on_bitwise(found: dict[int, list[dict[str, Any]]], ranks: int) -> None:
    for rank in range(ranks):
        went_on, resumed = found[ranks][rank]["went_on"], found[ranks][rank]["resumed"]
        assert went_on.keys() == resumed.keys()
        for name, value in went_on.items():
            assert torch.equal(value, resumed[name]) if isinstance(value, torch.Tensor) else value == resumed[name]


@pytest.mark.parametrize("ranks", [1, 2])
def test_without_noise_loss_and_gradient_are_those_of_verl(found: dict[int, list[dict[str, Any]]], ranks: int) -> None:
    for rank in range(ranks):
        mine, verls = (found[ranks][rank][kind]["steps"][0] for kind in ("no_noise", "verl"))
        assert torch.equal(mine["logprobs"], verls["logprobs"])
        assert mine["loss"] == verls["loss"]
        assert mine["grad_norm"] == pytest.approx(verls["grad_norm"], rel=1e-6)


def composed(*overrides: str) -> Any:
    """verl's configuration for C3PO with two draws on two GPUs, changed by overrides."""
    typed = settings(Path("folder"), "c3po")
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", [*typed, *overrides])


def test_c3po_is_corrected_by_seq_mis_unless_the_user_chose() -> None:
    config = composed()
    assert check_config(config).draws == 2
    chosen = config.algorithm.rollout_correction
    assert (chosen.rollout_is, chosen.rollout_is_threshold) == ("sequence", 2.0)
    assert (chosen.rollout_rs, chosen.rollout_rs_threshold) == ("seq_sum_k1", "0.5_2.0")
    assert config.actor_rollout_ref.rollout.calculate_log_probs
    own = composed("algorithm.rollout_correction.rollout_is=token")
    check_config(own)
    assert own.algorithm.rollout_correction.rollout_rs is None


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("actor_rollout_ref.actor.strategy=fsdp", "only fsdp2 has an engine with IVON"),
        ("trainer.n_gpus_per_node=1", "set draws to 1 or less"),
        ("actor_rollout_ref.rollout.n=3", "must be a multiple of draws = 2"),
        ("actor_rollout_ref.actor.optim.override_optimizer_config.method=ppo", "must be one of grpo, b3po"),
        ("actor_rollout_ref.actor.optim.override_optimizer_config=null", "must be one of grpo, b3po"),
    ],
)
def test_what_cannot_be_is_refused(override: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_config(composed(override))


def test_m3po_needs_micro_batches_of_any_size() -> None:
    settings_of = "actor_rollout_ref.actor.optim.override_optimizer_config.method=m3po"
    with pytest.raises(UserError, match="use_dynamic_bsz = False"):
        check_config(composed(settings_of, "actor_rollout_ref.actor.use_dynamic_bsz=False"))


@pytest.mark.parametrize("setting", [{"weight_decay": 0.1}, {"clip_grad": 0.5}, {"betas": (0.8, 0.9)}])
def test_settings_of_adamw_are_refused(setting: dict[str, Any]) -> None:
    engine = IVONEngine.__new__(IVONEngine)
    engine.model_config = HFModelConfig.__new__(HFModelConfig)
    engine.optimizer_config = FSDPOptimizerConfig(override_optimizer_config={"method": "b3po"}, **setting)
    with pytest.raises(UserError, match=next(iter(setting))):
        engine._build_optimizer(torch.nn.Linear(2, 2))


def test_a_verl_that_does_not_call_the_hooks_is_stopped() -> None:
    """The trainer at the end of its first step; an engine that sends draws after its first update."""
    with pytest.raises(UserError, match=r"verl 0\.9\.1 is installed.* step without _init_resource_pool_mgr"):
        DrawTrainer.__new__(DrawTrainer).on_step_end()
    engine = IVONEngine.__new__(IVONEngine)
    engine.replica = 0
    with (
        patch("verl.workers.engine.FSDPEngineWithLMHead.train_batch", lambda *_: {}),
        pytest.raises(UserError, match="step without forward_backward_batch"),
    ):
        engine.train_batch({}, max)


PROMPTS, ROLLOUTS, DRAWS, MOST_TOKENS = 2, 4, 2, 24
STEPS = {"c3po": 2, "m3po": 1}


class Run(NamedTuple):
    """A run's log and files."""

    method: str
    folder: Path

    @property
    def steps(self) -> range:
        return range(STEPS[self.method])


@pytest.fixture(scope="module", params=STEPS)
def run(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Run:
    """A method by verl's own main program: two Ray workers, two rollout servers with a draw each."""
    folder = tmp_path_factory.mktemp("run")
    policy = load_policy(ModelConfig(path="tiny-llama", tiny=SHAPE), seed=7)
    policy.tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    policy.save(folder / "model")
    for split, count in (("train", 2 * PROMPTS), ("val", 1)):
        rows = [
            {
                "data_source": "words",
                "prompt": [{"role": "user", "content": f"word {i}"}],
                "reward_model": {"style": "rule", "ground_truth": ""},
            }
            for i in range(count)
        ]
        pandas.DataFrame(rows).to_parquet(folder / f"{split}.parquet")
    (folder / "records").mkdir()
    os.environ |= {"VERL_RECORDS": str(folder / "records"), "VERL_FILE_LOGGER_PATH": str(folder / "log.jsonl")}
    with tempfile.TemporaryDirectory() as short, patch("launch.TIMEOUT", 400.0):  # paths of sockets must be short
        more = [f"+ray_kwargs.ray_init._temp_dir={short}", f"hydra.run.dir={folder}/hydra"]
        launch("-m", "verl.trainer.main_ppo", *settings(folder, request.param), *more)
    return Run(request.param, folder)


def settings(folder: Path, method: str) -> list[str]:
    """Settings that a user of verl types, and settings that make the run small enough for CPUs."""
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    ivon = ", ".join(f"{name}: {value}" for name, value in verl_program.IVON.items())
    typed = [
        "trainer.v1.trainer_mode=threepo",
        "algorithm.adv_estimator=grpo",
        f"{actor}.strategy=fsdp2",
        f"{actor}.optim.lr=1.0",
        f"{actor}.optim.override_optimizer_config={{method: {method}, draws: {DRAWS}, {ivon}}}",
        f"{rollout}.n={ROLLOUTS}",
    ]
    small = [
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=2",
        f"trainer.default_local_dir={folder}/checkpoints",
        f"trainer.rollout_data_dir={folder}/rollouts",
        "trainer.logger=[file]",
        "trainer.val_before_train=False",
        "trainer.test_freq=1",
        f"trainer.save_freq={STEPS[method]}",
        f"trainer.total_training_steps={STEPS[method]}",
        f"data.train_files={folder}/train.parquet",
        f"data.val_files={folder}/val.parquet",
        f"data.train_batch_size={PROMPTS}",
        "data.max_prompt_length=16",
        f"data.max_response_length={MOST_TOKENS}",
        "data.dataloader_num_workers=0",
        f"actor_rollout_ref.model.path={folder}/model",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        "actor_rollout_ref.model.use_remove_padding=False",
        f"{actor}.ppo_mini_batch_size={PROMPTS}",
        f"{actor}.use_dynamic_bsz=True",
        f"{actor}.ppo_max_token_len_per_gpu=64",
        f"{actor}.fsdp_config.use_torch_compile=False",
        f"+{actor}.fsdp_config.mixed_precision={{param_dtype: fp32, reduce_dtype: fp32}}",
        f"{actor}.fsdp_config.optimizer_offload=True",
        f"{rollout}.name=cpu",
        f"{rollout}.tensor_model_parallel_size=1",
        f"{rollout}.agent.num_workers=1",
        "reward.num_workers=1",
        f"reward.custom_reward_function.path={HERE}/verl_on_cpu.py",
        "reward.custom_reward_function.name=share_of_vowels",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        "transfer_queue.backend.SimpleStorage.total_storage_size=1000",
        "+ray_kwargs.ray_init.num_gpus=2",
        "ray_kwargs.ray_init.num_cpus=32",
        "+ray_kwargs.ray_init.include_dashboard=False",
        "+ray_kwargs.ray_init.object_store_memory=100000000",
    ]
    return typed + small


DRAWN, AFTER_STEP, MEAN, AGAIN = range(4)
"""Updates of the servers' weights: before the first step, after it, for its evaluation, and after that; then as before
from AFTER_STEP on."""


def weights_sent(run: Run, load: int) -> list[dict[str, torch.Tensor]]:
    """The weights that each of the two servers got at its `load`-th update."""
    return [torch.load(run.folder / "records" / f"load_{replica}_{load}.pt") for replica in range(2)]


def written(run: Run, load: int) -> list[list[dict[str, Any]]]:
    """The completions that each server wrote under these weights."""
    files = [(run.folder / "records" / f"requests_{replica}.jsonl").read_text().splitlines() for replica in range(2)]
    return [[row for row in map(json.loads, lines) if row["load"] == load] for lines in files]


def test_every_draw_writes_its_share_of_each_prompt(run: Run) -> None:
    for step in run.steps:
        for rows in written(run, DRAWN + 3 * step):
            share = ROLLOUTS // DRAWS
            assert sorted(Counter(tuple(row["prompt"]) for row in rows).values()) == [share] * PROMPTS


def test_evaluation_is_of_the_mean(run: Run) -> None:
    for step in run.steps:
        mean, same = weights_sent(run, MEAN + 3 * step)
        assert all(torch.equal(mean[name], same[name]) for name in mean)
        assert sum(map(len, written(run, MEAN + 3 * step))) == 1
        assert not any(written(run, AFTER_STEP + 3 * step)), "the draws come back after the evaluation"
        before, after = weights_sent(run, AFTER_STEP + 3 * step)[0], weights_sent(run, AGAIN + 3 * step)[0]
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_what_verl_writes_can_be_analysed(run: Run) -> None:
    groups = read_completions(run.folder / "rollouts", above=0.123)
    assert [step for step, _ in groups] == [step + 1 for step in run.steps for _ in range(PROMPTS)]
    for step in run.steps:
        served = [row["tokens"] for rows in written(run, DRAWN + 3 * step) for row in rows]
        tokenizer = AutoTokenizer.from_pretrained(run.folder / "model")
        texts = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in served]
        right = sum(share_of_vowels("", text, "") > 0.123 for text in texts)
        assert sum(sum(group.right) for (at, _), group in groups.items() if at == step + 1) == right


def test_a_checkpoint_is_saved_on_every_rank(run: Run) -> None:
    saved = run.folder / "checkpoints" / f"global_step_{len(run.steps)}" / "actor"
    assert {path.name for path in saved.glob("optim*")} == {f"optim_world_size_2_rank_{rank}.pt" for rank in range(2)}


def test_a_step_in_verl_is_one_of_threepo(run: Run) -> None:
    """The rows that the servers wrote in the first step, trained on by threepo itself, give the mean that verl has."""
    tokenizer = AutoTokenizer.from_pretrained(run.folder / "model")
    policy: Policy = load_policy(ModelConfig(path=str(run.folder / "model")))
    optimizer = IVON(policy.model.named_parameters(), lr=1.0, **verl_program.IVON)  # type: ignore[arg-type]
    for replica, weights in enumerate(weights_sent(run, DRAWN)):
        reference = dict(optimizer.weights(Draw(3, 0, replica)))
        assert all(torch.equal(weights[name], reference[name]) for name in reference)
    completions = []
    for replica, rows in enumerate(written(run, DRAWN)):
        asked: Counter[str] = Counter()
        for row in rows:
            text = tokenizer.decode(row["tokens"], skip_special_tokens=True)
            reward = share_of_vowels("", text, "")
            prompt = str(row["prompt"])
            rollout = replica * ROLLOUTS // DRAWS + asked[prompt]
            asked[prompt] += 1
            completions.append(
                Completion(
                    Problem(prompt, prompt),
                    tuple(row["prompt"]),
                    Draw(3, 0, replica),
                    rollout,
                    tuple(row["tokens"]),
                    tuple(row["logprobs"]),
                    text,
                    "length",
                    0,
                    verdict=Verdict(reward >= 1, "right", None, reward),
                )
            )
    method = replace(PRESETS[run.method].method, draws=DRAWS, rollouts_per_prompt=ROLLOUTS)
    batch = training_batch(method, SamplingConfig(), credit(method, completions), 3, 0)
    record = update_policy(policy, optimizer, batch, PPOConfig())
    kept = sum(row.untouched for row in record.rows)
    masked = len(record.rows) - kept
    assert 0 < masked < len(record.rows) if run.method == "c3po" else not masked
    log = json.loads((run.folder / "log.jsonl").read_text().splitlines()[0])["data"]
    assert log["actor/grad_norm"] == pytest.approx(optimizer.step_metrics()["optimizer/grad_norm"], rel=1e-4)
    verls = weights_sent(run, MEAN)[0]
    moved = max(float((verls[name] - value).abs().max()) for name, value in optimizer.weights(None))
    assert moved < 1e-5
