"""Schedule, batching, metrics, checkpoints and trackers."""

import copy
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from factories import completion, row
from threepo.config import (
    Correction,
    IVONConfig,
    Method,
    ModelConfig,
    NoiseConfig,
    RunConfig,
    ScheduleConfig,
)
from threepo.config.method import GRPO, M3PO
from threepo.errors import UserError
from threepo.models.packing import flatten, pack
from threepo.models.policy import Policy
from threepo.posterior.ivon import IVON
from threepo.posterior.point_optimizers import PointAdamW
from threepo.posterior.policy_optimizer import PolicyOptimizer
from threepo.ranks.files import save_tensors
from threepo.ranks.world import ALONE
from threepo.run_folder import RunFolder, checkpoints, model_folder
from threepo.training.checkpoint import TrainState, load_train_state, restore_optimizer, save_checkpoint
from threepo.training.metrics import Clock, Metrics, rollout_metrics, time_metrics
from threepo.training.optimizers import begin_ivon, build_optimizer
from threepo.training.rollouts import Rollouts
from threepo.training.run import factor
from threepo.training.update_record import RowRecord, UpdateRecord
from threepo.types import Draw, Group
from updates import credited

CPU = torch.device("cpu")

# Schedule


def test_schedule_by_hand() -> None:
    """Ten steps, 30 % warm-up: thirds up to 1 at the third step, then down a half cosine to the floor at the last."""
    cosine = ScheduleConfig(kind="cosine", warmup_share=0.3, floor=0.1)
    values = [factor(step, 10, cosine) for step in range(10)]
    assert values[:3] == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert values[5] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 3 / 7)))
    assert values[-1] == pytest.approx(0.1)
    constant = ScheduleConfig(warmup_share=0.06)
    assert [factor(step, 100, constant) for step in (0, 5, 6, 99)] == pytest.approx([1 / 6, 1.0, 1.0, 1.0])
    assert factor(0, 1, ScheduleConfig(warmup_share=0.0)) == 1.0
    assert factor(6, 100, ScheduleConfig(warmup_share=0.07)) == 1.0, "seven steps, though 0.07 * 100 > 7"


@given(st.integers(1, 500), st.floats(0, 1), st.floats(0, 1), st.sampled_from(["constant", "cosine"]))
def test_a_schedule_stays_between_nothing_and_one(steps: int, warmup: float, floor: float, kind: str) -> None:
    falls = {"floor": floor} if kind == "cosine" else {}
    values = [factor(step, steps, ScheduleConfig(kind=kind, warmup_share=warmup, **falls)) for step in range(steps)]
    assert all(0 <= value <= 1 + 1e-12 for value in values)
    peak = max(range(steps), key=values.__getitem__)
    assert values[:peak] == sorted(values[:peak])
    assert values[peak:] == sorted(values[peak:], reverse=True)


# Batching


@given(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.integers(1, 1000))
def test_packing_loses_nothing_and_keeps_the_budget(lengths: list[int], budget: int) -> None:
    rows = [row(i, tokens=range(1, n + 1), prompt_tokens=(7, 8)) for i, n in enumerate(lengths)]
    for padding in (True, False):
        bundles = list(pack(rows, budget, CPU, padding=padding))
        assert sorted(r.index for bundle in bundles for r in bundle) == list(range(len(rows)))
        for bundle in bundles:
            tokens = [lengths[r.index] + 2 for r in bundle]
            assert (max(tokens) * len(tokens) if padding else sum(tokens)) <= budget or len(bundle) == 1


def test_without_a_budget_the_device_has_its_own() -> None:
    rows = [row(i, tokens=range(1, 99), prompt_tokens=(7, 8)) for i in range(50)]
    assert [len(bundle) for bundle in pack(rows, 0, CPU)] == [40, 10]  # 4096 // 100


def test_padding_counts_only_where_it_costs() -> None:
    rows = [row(0, tokens=range(1, 99), prompt_tokens=(7, 8)), *(row(i, tokens=(1,)) for i in range(1, 40))]
    assert len(list(pack(rows, 300, CPU))) == 1
    assert [len(bundle) for bundle in pack(rows, 300, CPU, padding=True)] == [39, 1]


def test_a_micro_batch_by_hand() -> None:
    rows = [
        row(7, 0.5, prompt_tokens=(5, 6, 7), tokens=(8, 9)),
        row(8, -1.0, prompt_tokens=(1,), tokens=(2,)),
    ]
    micro = flatten(rows, CPU)
    assert (micro.input_ids.tolist(), micro.row_lengths) == ([5, 6, 7, 8, 1], (4, 1))
    assert micro.loss_positions.tolist() == [2, 3, 4]
    assert micro.targets.tolist() == [8, 9, 2]
    assert micro.row_of.tolist() == [0, 0, 1]


# Metrics


def group(prompt: str, rewards: list[float], **fields: object) -> Group:
    rows = tuple(completion(prompt, i, reward=r, **fields) for i, r in enumerate(rewards))
    return Group(rows, ())


def counted(method: Method, groups: list[Group]) -> Metrics:
    return rollout_metrics(method, credited(method, groups))


def test_zero_advantage_shares_by_hand() -> None:
    groups = [
        group("mixed", [1, 0, 0, 0] * 4),
        group("solved", [1] * 16),
        group("hopeless", [0] * 16),
        group("by draw", [1] * 4 + [0] * 12),
    ]
    pooled = counted(GRPO, groups)
    assert pooled["groups/zero_advantage_share"] == 0.5
    assert pooled["groups/all_right_share"] == 0.25
    assert pooled["reward/mean"] == pytest.approx((4 + 16 + 4) / 64)
    by_draw = counted(M3PO, groups)
    assert by_draw["groups/zero_advantage_share"] == 0.75
    assert by_draw["groups/flat_share"] == pytest.approx(12 / 16)


def test_outcomes_are_counted_without_what_they_quote() -> None:
    """A verdict may quote the answer, which would make a metric of its own; a penalty makes no group wrong."""
    details = ["not a formula: x^", "not a formula: y^", "time-out", ""]
    rows = [completion("a", i, reward=r) for i, r in enumerate([1, 0.5, 1, 0.5])]
    told = [replace(c, verdict=replace(c.verdict, detail=d, correct=True)) for c, d in zip(rows, details, strict=True)]
    metrics = counted(replace(GRPO, rollouts_per_prompt=4), [Group(tuple(told), ())])
    shares = {name: value for name, value in metrics.items() if name.startswith("reward/") and "formula" in name}
    assert shares == {"reward/not_a_formula_share": 0.5}
    assert metrics["reward/time_out_share"] == 0.25
    assert (metrics["groups/all_right_share"], metrics["groups/zero_advantage_share"]) == (1, 0)


def test_outcomes_and_lengths_by_hand() -> None:
    unanswered = completion("a", 0, tokens=(1,) * 7, status="no_answer")
    cut = replace(completion("a", 1, tokens=(1,) * 3, reward=1), finish_reason="length")
    metrics = counted(replace(GRPO, rollouts_per_prompt=2), [Group((unanswered, cut), ())])
    assert (metrics["reward/no_answer_share"], metrics["reward/correct_share"]) == (0.5, 0.5)
    assert (metrics["completions/length_mean"], metrics["completions/length_max"]) == (5, 7)
    assert metrics["completions/cut_share"] == 0.5


def test_outcomes_of_programs_are_counted_apart() -> None:
    """Two of four ran too long, one passed, and one had no program."""
    rows = []
    for i, detail in enumerate(("time-out", "time-out", "passed", "")):
        row = completion("a", i, reward=float(detail == "passed"))
        assert row.verdict is not None
        rows.append(replace(row, verdict=replace(row.verdict, detail=detail, format_ok=bool(detail))))
    metrics = counted(replace(GRPO, rollouts_per_prompt=4), [Group(tuple(rows), ())])
    assert metrics["reward/time_out_share"] == 0.5
    assert metrics["reward/passed_share"] == 0.25
    assert metrics["reward/format_ok_share"] == 0.75
    assert "reward/wrong_share" not in metrics
    assert "reward/format_ok_share" not in counted(GRPO, [group("a", [1] * 16)])


def record_of(rows: list[RowRecord]) -> UpdateRecord:
    seq_mis = Correction(kind="seq_mis")
    return UpdateRecord(seq_mis, [-0.25, -0.75], -3.0, 6.0, tokens=10, kl=0.1, policy={"entropy": 5.0}, rows=rows)


def test_correction_metrics_by_hand() -> None:
    kept = RowRecord(0, 4, -1.0, rho=1.5, weight=1.5, kept_tokens=4, untouched=True, advantage=0.5)
    dropped = RowRecord(1, 6, -1.0, rho=3.0, weight=0.0, kept_tokens=0, untouched=False, advantage=0.5)
    metrics = record_of([kept, dropped]).metrics()
    assert metrics["policy/loss"] == -0.5
    assert metrics["policy/entropy"] == 0.5
    assert metrics["correction/kept_share"] == 0.5
    assert metrics["correction/kept_token_share"] == 0.4
    assert metrics["correction/effective_sample_share"] == 0.5
    rho = [metrics[f"correction/rho_{name}"] for name in ("min", "p05", "p50", "p95", "max")]
    assert rho == pytest.approx([1.5, 1.575, 2.25, 2.925, 3.0])
    more = replace(dropped, kept_tokens=3)  # truncated, not masked
    assert record_of([kept, dropped, more, more]).metrics()["correction/untouched_share"] == 0.25
    assert (metrics["correction/kept_share_length_q2"], metrics["correction/kept_share_length_q4"]) == (1.0, 0.0)


def test_times_by_hand() -> None:
    """A group to learn from and a discarded one, of two completions of 3 tokens each, in half a second."""
    rollouts = Rollouts([group("a", [1, 0])], [group("b", [0, 0])], costs={"time/rollout": 0.5, "time/reward": 3.0})
    found = time_metrics(Clock({"time/wait": 1.0, "time/update": 2.0, "time/log": 4.0}), rollouts)
    assert (found["time/step"], found["time/tokens_per_second"]) == (3.0, 24.0)


def test_rollouts_that_were_cut_have_no_correction_metrics() -> None:
    """Their log-probs belong to a truncated distribution, the trainer's to the whole one."""
    row = RowRecord(0, 4, -1.0, rho=0.2, weight=1.0, kept_tokens=4, untouched=True, advantage=0.5)
    record = replace(record_of([row]), correction=None)
    assert set(record.metrics()) == {"policy/loss", "policy/entropy"}


# Optimizers and checkpoints


@pytest.mark.parametrize("kind", ["ivon", "adamw", "fused"])
def test_a_checkpoint_restores_the_optimizer_bitwise(policy: Policy, kind: str, tmp_path: Path) -> None:
    def make() -> IVON | PointAdamW:
        named = policy.model.named_parameters()
        fused = kind == "fused" or None
        return IVON(named, ess=1e6) if kind == "ivon" else PointAdamW(named, lr=1e-3, fused=fused)

    def advance(optimizer: IVON | PointAdamW, steps: range) -> None:
        for step in steps:
            draw = Draw(0, step, 0) if kind == "ivon" else None
            with optimizer.at(draw):
                sum(((p - 0.1) ** 2).sum() for p in policy.model.parameters()).backward()
            optimizer.observe(draw)
            optimizer.step()

    optimizer = make()
    advance(optimizer, range(3))
    for _ in range(2):
        optimizer.discard()
    state = TrainState(step=3, streaks={"correction": 4})
    save_checkpoint(tmp_path / "step-000003", policy, optimizer, state)
    saved = [p.detach().clone() for p in policy.model.parameters()]
    advance(optimizer, range(3, 5))
    expected = [p.detach().clone() for p in policy.model.parameters()]
    with torch.no_grad():
        for p, value in zip(policy.model.parameters(), saved, strict=True):
            p.copy_(value)
    resumed = make()
    assert load_train_state(tmp_path / "step-000003") == state
    restore_optimizer(tmp_path / "step-000003", resumed)
    assert resumed.skipped_steps == 2
    advance(resumed, range(3, 5))
    assert all(torch.equal(p, e) for p, e in zip(policy.model.parameters(), expected, strict=True))
    assert (tmp_path / "step-000003" / "posterior.safetensors").exists() is (kind == "ivon")


def test_a_checkpoint_takes_a_tokenizer_that_saves_folders(policy: Policy, tmp_path: Path) -> None:
    """Chat templates beyond the first come in a folder of their own."""
    tokenizer = copy.deepcopy(policy.tokenizer)
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    path = tmp_path / "step-000001"
    save_checkpoint(path, replace(policy, tokenizer=tokenizer), PointAdamW(policy.model.parameters()), TrainState(1))
    assert load_train_state(path) == TrainState(1)
    next(path.glob("*/tool_use.jinja")).write_text("other")
    with pytest.raises(UserError, match=r"tool_use\.jinja: is not the file that was saved"):
        load_train_state(path)


def test_a_resumed_run_debiases_a_parameter_that_joined_late_as_one_that_never_stopped(
    policy: Policy, tmp_path: Path
) -> None:
    late = policy.model.model.norm.weight.requires_grad_(False)
    settings = {"noise_scale": 0.0, "lr": 1.0, "rescale_lr": False, "hess_init": 1.0, "clip_radius": 10.0}

    def advance(optimizer: IVON, steps: int) -> None:
        for _ in range(steps):
            for p in policy.model.parameters():
                p.grad = torch.ones_like(p) if p.requires_grad else None
            optimizer.observe(None)
            optimizer.step()

    optimizer = IVON(policy.model.named_parameters(), **settings)
    advance(optimizer, 3)
    late.requires_grad_(True)
    advance(optimizer, 1)
    save_checkpoint(tmp_path / "step-000004", policy, optimizer, TrainState(step=4))
    saved = late.detach().clone()
    advance(optimizer, 1)
    expected = late.detach().clone()
    with torch.no_grad():
        late.copy_(saved)
    resumed = IVON(policy.model.named_parameters(), **settings)
    restore_optimizer(tmp_path / "step-000004", resumed)
    advance(resumed, 1)
    assert torch.equal(late, expected)


def test_the_first_step_with_a_loaded_momentum_by_hand(policy: Policy, tmp_path: Path) -> None:
    """Twenty-one gradients of 1: the momentum is 1 - 0.9^21, and debiased by these 21 it is 1, so a weight moves by lr.

    Debiased as if the last were the first, it would be (1 - 0.9^21) / 0.1 = 8.9.
    """
    config = IVONConfig(
        lr=0.5,
        ess=1e9,
        rescale_lr=False,
        weight_decay=0.0,
        hess_init=1.0,
        clip_radius=100.0,
        load_hessian=str(tmp_path / "step-000020"),
        load_momentum=True,
    )

    def advance(optimizer: PolicyOptimizer, steps: int) -> None:
        for _ in range(steps):
            for p in policy.model.parameters():
                p.grad = torch.ones_like(p)
            optimizer.observe(None)
            optimizer.step()

    source = build_optimizer(config, NoiseConfig(size=0.0), policy.model, seed=0)
    advance(source, 20)
    save_checkpoint(tmp_path / "step-000020", policy, source, TrainState(step=20))
    weight = policy.model.model.norm.weight
    before = weight.detach().clone()
    optimizer = build_optimizer(config, NoiseConfig(size=0.0), policy.model, seed=0)
    begin_ivon(config, optimizer, ModelConfig(path=str(tmp_path)))
    advance(optimizer, 1)
    torch.testing.assert_close(weight, before - 0.5, rtol=0, atol=1e-5)


def test_a_loaded_momentum_leaves_the_noise_of_the_recipe(policy: Policy, tmp_path: Path) -> None:
    """Evaluations before the first step, and TRL, read the group's own ess."""
    warm = build_optimizer(IVONConfig(ess=1e9), NoiseConfig(), policy.model, seed=0)
    save_checkpoint(tmp_path, policy, warm, TrainState())
    config = IVONConfig(ess=1e5, load_hessian=str(tmp_path), load_momentum=True)
    optimizer = build_optimizer(config, NoiseConfig(), policy.model, seed=0)
    begin_ivon(config, optimizer, ModelConfig(path=str(tmp_path)))
    assert [group["ess"] for group in optimizer.param_groups] == [1e5]


def test_momentum_of_another_model_is_refused(policy: Policy, tmp_path: Path) -> None:
    source = build_optimizer(IVONConfig(), NoiseConfig(), policy.model, seed=0)
    save_checkpoint(tmp_path, policy, source, TrainState())
    other = torch.nn.ParameterDict({"weight": torch.zeros(2)})
    with pytest.raises(UserError, match="the model has no parameter model.*; it belongs to another model"):
        restore_optimizer(tmp_path, IVON(other.named_parameters(), ess=1e9))


def test_old_checkpoints_and_leftovers_go(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, RunConfig())
    for step in (1, 2, 10):
        folder.checkpoint_path(step).mkdir(parents=True)
    assert [step for step, _ in checkpoints(tmp_path)] == [1, 2, 10]
    folder.prune_checkpoints(0)
    assert [step for step, _ in checkpoints(tmp_path)] == [1, 2, 10]
    folder.prune_checkpoints(2)
    assert [step for step, _ in checkpoints(tmp_path)] == [2, 10]
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2
    assert model_folder(tmp_path).name == "step-000010"
    folder.close()
    assert model_folder(tmp_path / "checkpoints" / "step-000002").name == "step-000002"
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    with pytest.raises(UserError, match="no complete checkpoint"):
        model_folder(tmp_path / "empty")


def test_metrics_are_plain_json(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, RunConfig())
    folder.log({"step": 0, "a": math.inf, "b": 1e-300})
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 0, "a": None, "b": 1e-300}


def test_no_rank_writes_into_the_page_of_a_header(tmp_path: Path) -> None:
    """On some network disks, what a rank writes takes the rest of its page along."""
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.zeros(0)}
    save_tensors(tmp_path / "file.safetensors", tensors, ALONE)
    assert (8 + int.from_bytes((tmp_path / "file.safetensors").read_bytes()[:8], "little")) % 4096 == 0
    found = load_file(tmp_path / "file.safetensors")
    assert all(torch.equal(found[name], value) for name, value in tensors.items())


def test_fused_adamw_is_adamw(policy: Policy) -> None:
    """On a GPU AdamW is fused, which needs no memory of the weights' size; here both run on the CPU."""
    start = [p.detach().clone() for p in policy.model.parameters()]
    found = []
    for fused in (None, True):
        with torch.no_grad():
            for p, value in zip(policy.model.parameters(), start, strict=True):
                p.copy_(value)
        optimizer = PointAdamW(policy.model.named_parameters(), lr=1e-2, fused=fused)
        for _ in range(3):
            sum(((p - 0.1) ** 3).sum() for p in policy.model.parameters()).backward()
            optimizer.observe(None)
            optimizer.step()
        found.append([p.detach().clone() for p in policy.model.parameters()])
    for one, other, value in zip(*found, start, strict=True):
        assert (one - other).abs().max() < 1e-3 * (one - value).abs().max()
