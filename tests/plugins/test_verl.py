"""threepo inside verl, on CPUs: the engine against a loop by hand and against verl's own, Ray workers, a step of C3PO.

Run by `make test-verl`, in an environment of its own.
"""

import json
import math
import os
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
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
    "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # 15 by default, with which a busy machine lets them starve
    "TOKENIZERS_PARALLELISM": "false",
}
os.environ.update(ENVIRONMENT)
sys.path += [str(HERE), str(HERE.parent / "ranks")]

import pandas
import verl_program
from hydra import compose, initialize_config_module
from launch import launch_anew
from transformers import AutoModelForCausalLM, AutoTokenizer
from verl.workers.config import FSDPOptimizerConfig, HFModelConfig
from verl_on_cpu import share_of_vowels

from threepo.config import ArmsConfig, Method, ModelConfig, PPOConfig, SamplingConfig, TinyConfig
from threepo.config.presets import PRESETS
from threepo.errors import UserError
from threepo.lab.completions import read_completions
from threepo.methods.arms import Bandit, Tally, arm_metrics, outcomes
from threepo.methods.method import credit, rollout_draws, training_batch
from threepo.models.policy import Policy, load_policy
from threepo.plugins.verl import DrawRouter, IVONEngine
from threepo.plugins.verl_check import ServerCheck
from threepo.plugins.verl_settings import check_config
from threepo.posterior.gaussian import Posterior
from threepo.posterior.ivon import IVON
from threepo.posterior.metrics import Movement
from threepo.posterior.noise_sizes import arm_factor
from threepo.training.update import update_policy
from threepo.types import Completion, Draw, Problem, Verdict

AUTO = "actor_rollout_ref.actor.optim.override_optimizer_config={method: c3po_auto, draws: 2, arms: "
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
        launch_anew(str(HERE / "verl_program.py"), str(folder / str(ranks)), ranks=ranks)
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
    return {method: steps_by_hand(folder, method) for method in ("b3po", "m3po", "c3po_replay", "c3po_auto")}


def steps_by_hand(folder: Path, method: str) -> dict[str, Any]:
    model, steps, with_arms = model_of(folder), [], method == "c3po_auto"
    settings: Any = verl_program.IVON | ({"betas": (0.9, 0.9)} if with_arms else {})
    optimizer = IVON(model.named_parameters(), lr=1.0, **settings)
    written_by = {"b3po": (0,) * 4, "c3po_auto": range(4)}.get(method, verl_program.WRITTEN_BY)
    tokens = [length - 1 for length in verl_program.LENGTHS]
    for step in range(2):
        logprobs, loss = {}, 0.0
        for index in sorted(set(written_by)):
            draw: Draw | None = Draw(3, step, index)
            if with_arms:
                arm = verl_program.ARMS[index]
                draw = Draw(3, step, index, arm=arm) if arm else None
            rows = [row for row, by in enumerate(written_by) if by == index]
            own = sum(tokens[row] for row in rows)
            count = sum(tokens) if method.startswith("c3po") else own
            with optimizer.at(draw):
                for row in rows:
                    logprobs[row] = row_logprobs(model, verl_program.rows()[row])
                part = -torch.cat([logprobs[row] for row in rows]).sum() / count
                part.backward()
            optimizer.observe(draw, weight=own)
            loss += part.item() / (2 if method == "m3po" else 1)
        optimizer.step(divisor=1.0 if method.startswith("c3po") else None)
        optimizer.param_groups[0]["lr"] = 0.5 * (1 + math.cos(math.pi * (step + 1) / 10))  # verl's cosine over 10 steps
        norm = optimizer.step_metrics()["optimizer/grad_norm"]
        steps.append({"logprobs": [logprobs[row].detach() for row in range(4)], "loss": loss, "grad_norm": norm})
    found = {"steps": steps, "lr": optimizer.param_groups[0]["lr"], "mean": dict(optimizer.weights(None))}
    return found | {"hessian": Posterior.of(optimizer).hessian}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("method", ["b3po", "m3po", "c3po_replay", "c3po_auto"])
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
@pytest.mark.parametrize("method", ["m3po", "c3po_replay"])
def test_a_draw_whose_rows_are_all_masked_is_left_out(
    found: dict[int, list[dict[str, Any]]], folder: Path, method: str, ranks: int
) -> None:
    model = model_of(folder)
    optimizer = IVON(model.named_parameters(), lr=1.0, **verl_program.IVON)
    rows = [row for row, by in enumerate(verl_program.WRITTEN_BY) if by == 0]
    with optimizer.at(Draw(3, 0, 0)):
        (-torch.cat([row_logprobs(model, verl_program.rows()[row]) for row in rows]).mean()).backward()
    optimizer.observe(Draw(3, 0, 0))
    optimizer.step()
    for rank in range(ranks):
        metrics = found[ranks][rank][f"{method}, masked"]["metrics"]
        assert metrics["optimizer/skipped_steps"] == [0]
        assert metrics["grad_norm"] == pytest.approx(optimizer.step_metrics()["optimizer/grad_norm"], rel=1e-4)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_hessian_learns_from_each_arm_what_it_reaches(
    found: dict[int, list[dict[str, Any]]], by_hand: dict[str, Any], ranks: int
) -> None:
    for rank in range(ranks):
        got, reference = found[ranks][rank]["c3po_auto"]["hessian"], by_hand["c3po_auto"]["hessian"]
        assert got.keys() == reference.keys()
        for name, value in reference.items():
            learned = float((value - 0.1).abs().max())
            assert float((got[name] - value).abs().max()) < 1e-3 * learned


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("sent", ["draw", "draw_with_arm"])
def test_a_replica_gets_its_own_draw_bitwise(
    folder: Path, found: dict[int, list[dict[str, Any]]], ranks: int, sent: str
) -> None:
    for rank in range(ranks):
        draw = Draw(3, 0, rank, arm=None if sent == "draw" else verl_program.ARMS[1::2][rank])
        model = model_of(folder)
        reference = dict(IVON(model.named_parameters(), **verl_program.IVON).weights(draw))  # type: ignore[arg-type]
        got = found[ranks][rank][sent]
        assert got.keys() == reference.keys()
        assert all(torch.equal(got[name], reference[name]) for name in got)


def test_c3po_scores_rollouts_at_a_fresh_draw(folder: Path, found: dict[int, list[dict[str, Any]]]) -> None:
    model = model_of(folder)
    with IVON(model.named_parameters(), **verl_program.IVON).perturbed(Draw(3, 0, 2)), torch.no_grad():  # type: ignore[arg-type]
        reference = row_logprobs(model, verl_program.rows()[0])
    assert torch.allclose(found[1][0]["at_fresh"][: len(reference)], reference, atol=1e-4)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_weight_check_scores_each_row_at_the_draw_that_is_pushed(
    folder: Path, found: dict[int, list[dict[str, Any]]], ranks: int
) -> None:
    model = model_of(folder)
    optimizer = IVON(model.named_parameters(), **verl_program.IVON)  # type: ignore[arg-type]
    for rank in range(ranks):
        lengths = list(verl_program.LENGTHS[rank::ranks])
        drawn, mean = (found[ranks][rank][at].split(lengths) for at in ("at_pushed_draws", "at_pushed_mean"))
        for row, index in enumerate(range(rank, len(verl_program.LENGTHS), ranks)):
            for got, draw in ((drawn[row], Draw(3, 0, verl_program.WRITTEN_BY[index])), (mean[row], None)):
                with optimizer.at(draw), torch.no_grad():
                    reference = row_logprobs(model, verl_program.rows()[index])
                assert torch.allclose(got[:-1], reference, atol=1e-4)
            assert not torch.allclose(drawn[row][:-1], mean[row][:-1], atol=1e-3)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_goes_on_bitwise(found: dict[int, list[dict[str, Any]]], ranks: int) -> None:
    for rank in range(ranks):
        went_on, resumed = found[ranks][rank]["went_on"], found[ranks][rank]["resumed"]
        assert went_on.keys() == resumed.keys()
        for name, value in went_on.items():
            assert torch.equal(value, resumed[name]) if isinstance(value, torch.Tensor) else value == resumed[name]
        assert found[ranks][rank]["louder"] == 123.0, "what is passed on a resume holds"


@pytest.mark.parametrize("ranks", [1, 2])
def test_without_noise_loss_and_gradient_are_those_of_verl(found: dict[int, list[dict[str, Any]]], ranks: int) -> None:
    for rank in range(ranks):
        mine, verls = (found[ranks][rank][kind]["steps"][0] for kind in ("no_noise", "verl"))
        assert torch.equal(mine["logprobs"], verls["logprobs"])
        assert mine["loss"] == verls["loss"]
        assert mine["grad_norm"] == pytest.approx(verls["grad_norm"], rel=1e-6)


def composed(*overrides: str) -> Any:
    """verl's configuration for C3PO with two draws on two GPUs, changed by overrides."""
    keys = [override.split("=")[0] for override in overrides]
    typed = [setting for setting in settings(Path("folder"), "c3po") if setting.split("=")[0] not in keys]
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", [*typed, *overrides])


def test_c3po_is_corrected_by_seq_mis_unless_the_user_chose() -> None:
    config = composed()
    assert check_config(config)[0].draws == 2
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
        ("actor_rollout_ref.rollout.top_p=0.8", "they change what the rollouts are drawn from"),
        ("actor_rollout_ref.rollout.top_k=20", "they change what the rollouts are drawn from"),
        ("actor_rollout_ref.actor.strategy=fsdp", "only fsdp2 has an engine with IVON"),
        ("trainer.n_gpus_per_node=1", "set draws to 1 or less"),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size=2", "set draws to 1 or less"),
        ("algorithm.rollout_correction.bypass_mode=true", "bypass_mode = True: verl's trainer then masks nothing"),
        ("actor_rollout_ref.rollout.n=3", "must be a multiple of draws = 2"),
        ("algorithm.rollout_correction=null", "this method needs a correction; leave it out"),
        ("actor_rollout_ref.actor.optim.override_optimizer_config.method=ppo", "must be one of grpo, b3po"),
        ("actor_rollout_ref.actor.optim.override_optimizer_config=null", "must be one of grpo, b3po"),
        (f"{AUTO}{{}}, step_size: 1e-6}}", "step_size = 1e-06: leave it out, and set actor_rollout_ref.actor.optim.lr"),
        (f"{AUTO}{{}}, estimator: gradsq}}", "optimizer.estimator = 'gradsq'"),
    ],
)
def test_what_cannot_be_is_refused(override: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_config(composed(override))


@pytest.mark.parametrize(
    "setting", ["use_dynamic_bsz=False", "loss_agg_mode=seq-mean-token-sum", "policy_loss.loss_mode=sapo"]
)
def test_m3po_needs_parts_that_can_be_added_up(setting: str) -> None:
    settings_of = "actor_rollout_ref.actor.optim.override_optimizer_config.method=m3po"
    with pytest.raises(UserError, match=setting.split("=")[0]):
        check_config(composed(settings_of, f"actor_rollout_ref.actor.{setting}"))


def test_m3po_compares_completions_of_each_draw() -> None:
    m3po = "actor_rollout_ref.actor.optim.override_optimizer_config.method=m3po"
    with pytest.raises(UserError, match=r"rollout.n = 2: leaves each draw one completion .*; set 4 or more"):
        check_config(composed(m3po, "actor_rollout_ref.rollout.n=2"))
    check_config(composed(m3po, "actor_rollout_ref.rollout.n=4"))


def test_the_arms_of_the_preset_can_be_overridden() -> None:
    method, arms, ivon = check_config(composed(f"{AUTO}{{kept: 0.5}}, ess: 1e6}}"))
    assert (method.draws, method.rollouts_per_prompt, ivon) == (2, ROLLOUTS, {"ess": 1e6})
    assert arms == ArmsConfig(choice="thompson", sizes=(1.0, 4.0, 13.0, 20.0), kept=0.5)


@pytest.mark.parametrize("setting", [{"weight_decay": 0.1}, {"clip_grad": 0.5}, {"betas": (0.8, 0.9)}])
def test_settings_of_adamw_are_refused(setting: dict[str, Any]) -> None:
    engine = IVONEngine.__new__(IVONEngine)
    engine.model_config = HFModelConfig.__new__(HFModelConfig)
    engine.optimizer_config = FSDPOptimizerConfig(override_optimizer_config={"method": "b3po"}, **setting)
    with pytest.raises(UserError, match=next(iter(setting))):
        engine._build_optimizer(torch.nn.Linear(2, 2))


def test_servers_that_tell_no_logprobs_are_refused() -> None:
    check = ServerCheck.__new__(ServerCheck)
    check._name, check._tokens, check._push = "rollout.name = 'trtllm'", (1, 2, 3), lambda _: {}
    check._trainer = SimpleNamespace(llm_server_manager=SimpleNamespace(server_addresses=["server"]))
    answers = [SimpleNamespace(token_ids=[1], log_probs=[-1.0], extra_fields={})]
    with (
        patch.multiple(ServerCheck, _expected=lambda *_: [], _ask=lambda *_, **__: answers),
        pytest.raises(UserError, match=r"name = 'trtllm': its servers tell no log-probs of a prompt; choose vllm or"),
    ):
        check.push(1)


PROMPTS, ROLLOUTS, DRAWS, MOST_TOKENS = 2, 4, 2, 24
STEPS = {"c3po": 2, "m3po": 1, "c3po_auto": 3}
ARMS = ArmsConfig(choice="thompson", sizes=(1.0, 4.0), mean_share=0.0)


class Run(NamedTuple):
    """A run's log and files."""

    method: str
    folder: Path

    @property
    def steps(self) -> range:
        return range(STEPS[self.method])


@pytest.fixture(scope="module", params=STEPS)
def run(runs: Callable[[str], Run], request: pytest.FixtureRequest) -> Run:
    return runs(request.param)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    """The run of a method."""
    return cache(lambda method: train(tmp_path_factory.mktemp("run"), method))


def train(folder: Path, method: str, *changed: str) -> Run:
    """A method by verl's own main program: two Ray workers, two rollout servers with a draw each."""
    if not (folder / "model").exists():
        policy = load_policy(ModelConfig(path="tiny-llama", tiny=SHAPE), seed=7)
        policy.tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
        policy.save(folder / "model")
    for split, count in (("train", 3 * PROMPTS), ("val", 1)):
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
    with tempfile.TemporaryDirectory() as short:  # paths of sockets must be short
        more = [f"+ray_kwargs.ray_init._temp_dir={short}", f"hydra.run.dir={folder}/hydra"]
        keys = [override.split("=")[0] for override in changed]
        typed = [setting for setting in settings(folder, method) if setting.split("=")[0] not in keys]
        launch_anew("-m", "verl.trainer.main_ppo", *typed, *changed, *more, timeout=400.0)
    return Run(method, folder)


def settings(folder: Path, method: str) -> list[str]:
    """Settings that a user of verl types, and settings that make the run small enough for CPUs."""
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    ivon = ", ".join(f"{name}: {value}" for name, value in verl_program.IVON.items())
    if method == "c3po_auto":
        ivon += f", arms: {{sizes: {list(ARMS.sizes)}, mean_share: {ARMS.mean_share}}}"
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
        "trainer.save_freq=2",
        f"trainer.total_training_steps={STEPS.get(method, 1)}",
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
        f"{rollout}.dtype=float32",
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


def graded(run: Run, step: int, draws: Sequence[Draw | None]) -> list[Completion]:
    """What the servers wrote in a step, with its rewards."""
    tokenizer = AutoTokenizer.from_pretrained(run.folder / "model")
    completions = []
    for replica, rows in enumerate(written(run, DRAWN + 3 * step)):
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
                    draws[replica],
                    rollout,
                    tuple(row["tokens"]),
                    tuple(row["logprobs"]),
                    text,
                    "length",
                    0,
                    verdict=Verdict(reward >= 1, "right", None, reward),
                )
            )
    return completions


def method_of(run: Run) -> Method:
    return replace(PRESETS[run.method].method, draws=DRAWS, rollouts_per_prompt=ROLLOUTS)


def ivon_of(run: Run) -> tuple[Policy, IVON]:
    """The run's first model, and its optimizer."""
    policy: Policy = load_policy(ModelConfig(path=str(run.folder / "model")))
    return policy, IVON(policy.model.named_parameters(), lr=1.0, **verl_program.IVON)  # type: ignore[arg-type]


def bandit_of(run: Run) -> Bandit:
    """Threepo's own choice of arms for the run, before the first step."""
    settings = ARMS if run.method == "c3po_auto" else ArmsConfig()
    return Bandit(settings, method_of(run), lambda: Posterior.of(ivon_of(run)[1]).noisy_names)


def chosen_by_threepo(run: Run) -> tuple[list[list[Draw | None]], Tally]:
    """The draws of each step with the arms that threepo chooses, and the tally after the last step."""
    method, found = method_of(run), []
    bandit = bandit_of(run)
    for step in run.steps:
        found.append(rollout_draws(method, 3, step, bandit.choose(3, step)))
        bandit.count(outcomes(credit(method, graded(run, step, found[-1]))))
    return found, bandit.tally


def logged(run: Run, step: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run.folder / "log.jsonl").read_text().splitlines()[step])["data"]
    return found


def test_arms_are_chosen_as_in_threepo(runs: Callable[[str], Run]) -> None:
    run = runs("c3po_auto")
    chosen, tally = chosen_by_threepo(run)
    bandit = bandit_of(run)
    untold = [rollout_draws(method_of(run), 3, step, bandit.choose(3, step)) for step in run.steps]
    assert chosen[0] == untold[0]
    assert chosen[1:] != untold[1:], "the rewards make no difference"
    for step in run.steps:
        expected = arm_metrics(outcomes(credit(method_of(run), graded(run, step, chosen[step]))))
        got = {name: value for name, value in logged(run, step).items() if name.startswith("arms/")}
        assert got == pytest.approx(expected)
        mean = weights_sent(run, MEAN + 3 * (step - 1))[0] if step else dict(ivon_of(run)[1].weights(None))
        for draw, weights in zip(chosen[step], weights_sent(run, DRAWN + 3 * step), strict=True):
            moved = {name for name, value in weights.items() if not torch.equal(value, mean[name])}
            assert moved == {name for name in weights if draw and arm_factor(draw.arm, name)}
    saved = json.loads((run.folder / "checkpoints" / "global_step_3" / "arms.json").read_text())
    assert saved["earned"] == pytest.approx(tally.earned)
    assert saved["missed"] == pytest.approx(tally.missed)


def test_a_resumed_run_chooses_as_one_that_never_stopped(runs: Callable[[str], Run], tmp_path: Path) -> None:
    went_on = runs("c3po_auto")
    saved = Path("checkpoints", "global_step_2")
    shutil.copytree(went_on.folder / saved, tmp_path / saved)
    (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("2")
    shutil.copytree(went_on.folder / "model", tmp_path / "model")
    resumed = train(tmp_path, "c3po_auto")
    for mine, theirs in zip(weights_sent(resumed, DRAWN), weights_sent(went_on, AGAIN + 3), strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    mine, theirs = (
        {name: value for name, value in log.items() if name.startswith(("arms/", "critic/score"))}
        for log in (logged(resumed, 0), logged(went_on, 2))
    )
    assert mine == theirs
    assert mine
    tallies = [(run.folder / "checkpoints" / "global_step_3" / "arms.json").read_text() for run in (resumed, went_on)]
    assert tallies[0] == tallies[1]


def test_a_step_in_verl_is_one_of_threepo(run: Run) -> None:
    """The rows that the servers wrote in the first step, trained on by threepo itself, give the mean that verl has."""
    policy, optimizer = ivon_of(run)
    draws = chosen_by_threepo(run)[0][0]
    for draw, weights in zip(draws, weights_sent(run, DRAWN), strict=True):
        reference = dict(optimizer.weights(draw))
        assert all(torch.equal(weights[name], reference[name]) for name in reference)
    method = method_of(run)
    batch = training_batch(method, SamplingConfig(), credit(method, graded(run, 0, draws)), 3, 0)
    movement = Movement(optimizer)
    record = update_policy(policy, optimizer, batch, PPOConfig())
    assert logged(run, 0)["actor/update/rms"] == pytest.approx(movement.metrics()["update/rms"], rel=1e-3)
    kept = sum(row.untouched for row in record.rows)
    masked = len(record.rows) - kept
    assert 0 < masked < len(record.rows) if run.method == "c3po" else not masked
    assert logged(run, 0)["actor/grad_norm"] == pytest.approx(optimizer.step_metrics()["optimizer/grad_norm"], rel=1e-4)
    verls = weights_sent(run, MEAN)[0]
    moved = max(float((verls[name] - value).abs().max()) for name, value in optimizer.weights(None))
    assert moved < 1e-5


BEHIND, IDLE = "one replica is a push behind", "the push does nothing"
SWAPPED, NORMS, CHANGED = "two draws are swapped", "no norms are pushed", "one down_proj is 5 % off"
STALE = "the prefix cache outlives the push"
BROKEN = {0: IDLE, 2: IDLE, 3: BEHIND, 4: SWAPPED, 5: NORMS, 6: CHANGED, 7: STALE}
"""The fault of each step's push; between them and at the end are pushes without."""


def checked(
    folder: Path, monkeypatch: pytest.MonkeyPatch, method: str, faults: dict[int, str], rounding: float, *changed: str
) -> list[str]:
    """What the check said at the start and at the end of each step; logged differences are below `rounding`."""
    monkeypatch.setenv("VERL_FAULTS", json.dumps(faults))
    steps = max(faults) + 1  # the last has none
    more = ("data.max_prompt_length=40", f"trainer.total_training_steps={steps}", "trainer.test_freq=2")
    run = train(folder, method, *more, *changed)
    rows = [json.loads(line) for line in (run.folder / "records" / "found.jsonl").read_text().splitlines()]
    assert [row["fault"] for row in rows] == [faults.get(step, "") for step in range(steps + 1)]
    off = [logged(run, step - 1).get("certificate/difference") for step in range(1, steps + 1) if step not in faults]
    assert all(0 < x < rounding for x in off)
    return [row["found"] for row in rows]


def test_servers_with_other_weights_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32; every second step pushes the mean for an evaluation, too."""
    found = checked(tmp_path, monkeypatch, "c3po", BROKEN, 1e-5, "trainer.v1.trainer_mode=threepo_faults")
    weights = "^actor_rollout_ref.rollout.name = 'cpu': a rollout server does not compute with the weights of Draw"
    for step, said in {
        0: r"index=0, .* at step 0 on replica 0 \(cpu_server_0\) .* \(allowed by tolerance: 0\.001\)\. Either the push",
        2: r"index=0, .* at step 2 on replica 0 .*; they fit weights of the push before, number 0, which",
        3: r"index=1, .* at step 3 on replica 1 \(cpu_server_1\) .*; they fit weights of the push before, number 1,",
        4: r"index=0, .* at step 4 on replica 0 .*; they fit Draw\(seed=3, step=4, index=1, .*\) at step 4, which",
        5: r"index=0, .* at step 5 on replica 0 .* \(allowed by tolerance: 0\.001\)",
        6: r"index=1, .* at step 6 on replica 1 .* \(root mean square\), where pushes before were off by",
        7: r"index=0, .* at step 7 on replica 0 .* after a fixed prompt .* its prefix cache holds keys and values",
    }.items():
        assert re.search(weights + r"\(seed=3, step=\d, " + said, found[step]), (step, found[step])
    assert not any(said for step, said in enumerate(found) if step not in BROKEN)


def test_servers_of_verls_own_trainer_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With AdamW, in bfloat16."""
    actor = "actor_rollout_ref.actor"
    own = ["trainer.v1.trainer_mode=faults", f"{actor}.optim.override_optimizer_config=null", f"{actor}.optim.lr=0.01"]
    own += ["actor_rollout_ref.rollout.dtype=bfloat16", "actor_rollout_ref.rollout.calculate_log_probs=True"]
    own += [f"+{actor}.fsdp_config.mixed_precision={{param_dtype: bf16, reduce_dtype: fp32}}"]
    faults = {3: BEHIND, 5: IDLE}
    found = checked(tmp_path, monkeypatch, "grpo", faults, 0.03, *own)
    for step, replica in {3: 1, 5: 0}.items():
        place = rf"the mean at step {step} on replica {replica} \(cpu_server_{replica}\)"
        said = f"weights of {place} .*; they fit weights of the push before, number"
        assert re.search(said, found[step]), found[step]
    assert not any(said for step, said in enumerate(found) if step not in faults)


def test_replicas_of_a_draw_share_its_requests_and_turns_stay_where_they_began() -> None:
    router = DrawRouter({f"server {i}": i for i in range(4)}, 2)
    first = [router.acquire_server(f"request {i}", prompt_ids=[1, 2])[1] for i in range(4)]
    assert first == [0, 1, 2, 3]  # draws 0, 1, 0, 1
    for i in range(4, 20_000):  # more than verl remembers by itself
        router.acquire_server(f"request {i}", prompt_ids=[1, 2])
    assert [router.acquire_server(f"request {i}", prompt_ids=[1, 2, 3])[1] for i in range(4)] == first
