"""One policy update: contracts 1, 6 and 8, and what the optimizer is given."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from threepo.config import Correction, Method, ObjectiveConfig, PPOConfig, SamplingConfig
from threepo.config.method import B3PO, C3PO, C3PO_REPLAY, GRPO, M3PO
from threepo.methods.method import rollout_draws, training_batch
from threepo.models.packing import flatten, pack
from threepo.models.policy import Policy
from threepo.posterior.ivon import IVON
from threepo.posterior.point_optimizers import PointSGD
from threepo.training.update import update_policy
from threepo.types import CreditedRow, Group, Verdict
from updates import PLAIN, PROMPTS, SAMPLING, Spy, credited, gradient_of, rollouts, solved

OBJECTIVES = [PPOConfig(aggregation=choice) for choice in ("token", "group", "sequence")]
TOKEN, GROUP, SEQUENCE = OBJECTIVES
every_aggregation = pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda o: o.aggregation)


def assert_bitwise(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    for name in a:
        assert torch.equal(a[name], b[name]), f"{name}: up to {(a[name] - b[name]).abs().max():.1e} apart"


def relabelled(groups: list[Group], method: Method) -> list[Group]:
    """The same rows as `method` would have generated them: the draws differ, texts and log-probs do not."""
    draws = rollout_draws(method, 0, 0)
    share = method.rollouts_per_prompt // len(draws)
    return [
        replace(group, completions=tuple(replace(c, draw=draws[c.rollout // share]) for c in group.completions))
        for group in groups
    ]


# Contract 1


@pytest.mark.parametrize(
    ("method", "objective"),
    [
        (B3PO, GROUP),
        *((C3PO, objective) for objective in OBJECTIVES),
        (replace(C3PO, correction=Correction(kind="token_tis")), SEQUENCE),
        (replace(C3PO, draws=16), TOKEN),
    ],
)
def test_without_noise_every_pooled_method_is_grpo_bitwise(
    policy: Policy, method: Method, objective: ObjectiveConfig
) -> None:
    optimizer = IVON(policy.model.named_parameters(), clip_radius=1e-3, noise_scale=0.0)
    groups = rollouts(policy, GRPO, optimizer, by_trainer=False)
    # The engine's log-probs are the trainer's own, as in a batch of the same shape, so every ratio is exactly one.
    groups = with_the_trainers_logprobs(policy, groups)
    expected, grad, _ = gradient_of(policy, GRPO, groups, objective=objective)
    record, other, _ = gradient_of(policy, method, relabelled(groups, method), objective=objective)
    assert record.loss == expected.loss
    assert record.normalizer == expected.normalizer
    assert_bitwise(other, grad)


def with_the_trainers_logprobs(policy: Policy, groups: list[Group]) -> list[Group]:
    rows = [CreditedRow.of(c, i) for i, c in enumerate(c for group in groups for c in group.completions)]
    found = {}
    for bundle in pack(rows, 0, policy.device):
        with torch.no_grad():
            logprobs, *_ = policy.logprobs(flatten(bundle, policy.device))
        for row, own in zip(bundle, logprobs.split([row.loss_tokens for row in bundle]), strict=True):
            found[row.completion.problem.id, row.completion.rollout] = tuple(own.tolist())
    return [
        replace(g, completions=tuple(replace(c, logprobs=found[c.problem.id, c.rollout]) for c in g.completions))
        for g in groups
    ]


@pytest.mark.parametrize(("draws", "objective"), [(2, TOKEN), (4, GROUP), (4, SEQUENCE)])
def test_without_noise_replay_is_grpo_taken_in_as_many_parts(
    policy: Policy, draws: int, objective: ObjectiveConfig
) -> None:
    """The parts' sums are added in another order than one batch would add them, and nothing else differs."""
    method = replace(C3PO_REPLAY, draws=draws)
    groups = rollouts(policy, GRPO, IVON(policy.model.named_parameters(), clip_radius=1e-3, noise_scale=0.0))
    expected, grad, _ = gradient_of(policy, GRPO, groups, objective=objective)
    record, other, _ = gradient_of(policy, method, relabelled(groups, method), objective=objective)
    assert record.loss == pytest.approx(expected.loss, rel=1e-5, abs=1e-5)  # by sequence, advantages sum to nothing
    assert record.normalizer == pytest.approx(expected.normalizer, rel=1e-12)
    for name in grad:
        torch.testing.assert_close(other[name], grad[name], rtol=1e-4, atol=1e-7)


@every_aggregation
def test_without_noise_m3po_is_the_mean_of_grpo_over_its_draws_bitwise(
    policy: Policy, objective: ObjectiveConfig
) -> None:
    """Each draw's rollouts are a GRPO problem of their own with G = 4; their gradients are averaged."""
    groups = rollouts(policy, GRPO, IVON(policy.model.named_parameters(), clip_radius=1e-3, noise_scale=0.0))
    groups = relabelled(groups, M3PO)
    record, together, _ = gradient_of(policy, M3PO, groups, objective=objective)
    total: dict[str, torch.Tensor] = {}
    small, losses = replace(GRPO, rollouts_per_prompt=4), []
    for draw in rollout_draws(M3PO, 0, 0):
        mine = [replace(g, completions=tuple(c for c in g.completions if c.draw == draw)) for g in groups]
        alone, grad, _ = gradient_of(policy, small, mine, objective=objective)
        losses.append(alone.loss / alone.normalizer)
        for name in grad:
            total[name] = total[name] + grad[name] if name in total else grad[name]
    assert_bitwise(together, {name: grad / 4 for name, grad in total.items()})
    assert record.metrics()["policy/loss"] == pytest.approx(sum(losses) / 4, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize(("method", "objective"), [(M3PO, GROUP), (C3PO_REPLAY, SEQUENCE), (C3PO, TOKEN)])
def test_with_one_draw_every_method_is_b3po_bitwise(policy: Policy, method: Method, objective: ObjectiveConfig) -> None:
    method = replace(method, draws=1)
    _, expected, one = gradient_of(policy, B3PO, objective=objective, noise_scale=1.0)
    _, grad, other = gradient_of(policy, method, objective=objective, noise_scale=1.0)
    assert_bitwise(grad, expected)
    for p in policy.model.parameters():
        assert torch.equal(one.state[p]["hessian"], other.state[p]["hessian"])
        assert not one.state[p]["hessian"].eq(1e-3).all()


# Contract 8


@every_aggregation
@pytest.mark.parametrize("method", [C3PO, M3PO], ids=lambda m: m.name)  # one divisor, and one for each draw
def test_the_gradient_does_not_depend_on_the_micro_batches(
    policy: Policy, method: Method, objective: ObjectiveConfig
) -> None:
    groups = rollouts(policy, method, IVON(policy.model.named_parameters(), clip_radius=1e-3, ess=1e6))
    (expected, whole, _), (record, grad, _) = (
        gradient_of(policy, method, groups, objective=objective, token_budget=budget, noise_scale=1.0)
        for budget in (10_000, 40)
    )
    assert record.loss == pytest.approx(expected.loss, rel=1e-4, abs=1e-5)
    assert record.normalizer == pytest.approx(expected.normalizer, rel=1e-9)
    assert record.tokens == expected.tokens
    for name in grad:
        torch.testing.assert_close(grad[name], whole[name], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("teaching", [3, 1])
def test_the_gradient_is_the_textbook_one(policy: Policy, teaching: int) -> None:
    """On-policy GRPO: minus the sum over tokens of A * grad log p, over the number of tokens.

    Also where some prompts have advantages of 0: their tokens are counted, and scored without a gradient.
    """
    groups = rollouts(policy, GRPO, IVON(policy.model.named_parameters(), clip_radius=1e-3))
    groups = [*groups[:teaching], *map(solved, groups[teaching:])]
    passes: dict[bool, int] = {True: 0, False: 0}

    def count(_: object, __: object, settings: dict[str, Any]) -> None:
        passes[torch.is_grad_enabled()] += sum(tile.rows for tile in settings["rows"].tiles)

    hook = policy.model.base_model.register_forward_pre_hook(count, with_kwargs=True)
    record, grad, _ = gradient_of(policy, GRPO, groups)
    hook.remove()
    assert passes == {True: teaching * 16, False: (PROMPTS - teaching) * 16}
    policy.model.zero_grad()
    tokens, loss = 0, 0.0
    for group in groups:
        rewards = torch.tensor([c.verdict.reward for c in group.completions])
        values = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        for completion, value in zip(group.completions, values, strict=True):
            ids = torch.tensor([[*completion.prompt_tokens, *completion.tokens]])
            logprobs = policy.model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1)
            (-value * logprobs[len(completion.prompt_tokens) - 1 :].sum()).backward()
            tokens += len(completion.tokens)
            loss -= float(value) * len(completion.tokens)  # on-policy, every ratio is one
    assert record.normalizer == tokens
    assert record.metrics()["policy/loss"] == pytest.approx(loss / tokens, rel=1e-4)
    for name, p in policy.model.named_parameters():
        torch.testing.assert_close(grad[name], p.grad / tokens, rtol=1e-3, atol=1e-6)


# Contract 6


def test_seq_mis_keeps_everything_without_noise_and_drops_with_much(policy: Policy) -> None:
    calm, _, _ = gradient_of(policy, C3PO, noise_scale=0.0)
    assert all(row.untouched and row.kept_tokens == row.tokens for row in calm.rows)
    assert calm.kl / calm.tokens < 1e-9
    wild, _, _ = gradient_of(policy, C3PO, noise_scale=1.0, ess=1e4)
    dropped = [row for row in wild.rows if row.kept_tokens == 0]
    assert 0.1 < len(dropped) / len(wild.rows) < 1
    assert all(row.weight == 0 and not 0.5 <= row.rho <= 2 for row in dropped)
    assert all(0.5 <= row.rho <= 2 for row in wild.rows if row.kept_tokens)
    assert wild.normalizer == sum(row.kept_tokens for row in wild.rows)
    assert wild.kl / wild.tokens > 0.01


def test_the_normalizer_can_count_all_tokens(policy: Policy) -> None:
    method = replace(C3PO, correction=Correction(kind="seq_mis", normalizer="all"))
    record, _, _ = gradient_of(policy, method, noise_scale=1.0, ess=1e4)
    assert record.normalizer == record.tokens > sum(row.kept_tokens for row in record.rows)


def test_the_recorded_kl_is_by_hand(policy: Policy) -> None:
    """D = 0.5 at every token: the gradient's policy finds the tokens more probable than their generator did."""
    groups = rollouts(policy, GRPO, IVON(policy.model.named_parameters(), clip_radius=1e-3))
    groups = [
        replace(
            g, completions=tuple(replace(c, logprobs=tuple(value - 0.5 for value in c.logprobs)) for c in g.completions)
        )
        for g in groups
    ]
    record, _, _ = gradient_of(policy, GRPO, groups)
    assert record.kl / record.tokens == pytest.approx(math.exp(0.5) - 1 - 0.5, rel=1e-3)
    assert all(row.rho == pytest.approx(math.exp(0.5 * row.tokens), rel=1e-3) for row in record.rows)


def test_replay_makes_every_rollout_on_policy(policy: Policy) -> None:
    record, _, _ = gradient_of(policy, C3PO_REPLAY, noise_scale=1.0, ess=1e4)
    assert all(abs(row.rho - 1) < 1e-3 for row in record.rows)


# Nothing to learn


def test_when_everything_is_dropped_nothing_moves_and_it_is_counted(policy: Policy) -> None:
    method = replace(C3PO, correction=Correction(kind="seq_mis", low=1e6, high=1e7))
    optimizer = IVON(policy.model.named_parameters(), clip_radius=1e-3, ess=1e6)
    before = [p.detach().clone() for p in policy.model.parameters()]
    batch = training_batch(method, SAMPLING, credited(method, rollouts(policy, method, optimizer)), 0, 0)
    record = update_policy(policy, optimizer, batch, PLAIN)
    assert record.normalizer == 0
    assert optimizer.skipped_steps == 1
    assert optimizer.param_groups[0]["step"] == 0
    assert all(torch.equal(p, b) for p, b in zip(policy.model.parameters(), before, strict=True))
    assert all(p.grad is None for p in policy.model.parameters())
    optimizer.state_dict()  # nothing is left pending


@pytest.mark.parametrize("method", [C3PO, M3PO], ids=lambda m: m.name)  # one divisor, and one for each draw
def test_a_gradient_that_is_not_finite_is_recorded_and_moves_nothing(policy: Policy, method: Method) -> None:
    optimizer = IVON(policy.model.named_parameters(), clip_radius=1e-3, ess=1e6)
    before = [p.detach().clone() for p in policy.model.parameters()]
    batch = training_batch(method, SAMPLING, credited(method, rollouts(policy, method, optimizer)), 0, 0)
    hook = next(policy.model.parameters()).register_hook(lambda grad: grad * math.nan)
    record = update_policy(policy, optimizer, batch, PLAIN)
    hook.remove()
    assert (record.finite, optimizer.skipped_steps) == (False, 1)
    assert all(torch.equal(p, b) for p, b in zip(policy.model.parameters(), before, strict=True))


def test_a_learned_hessian_is_told_how_many_tokens_each_draw_is_of(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner, told = IVON.observe, {}

    def observe(self: IVON, draw: Any, *divisor: float, weight: float = 1.0, **settings: Any) -> bool:
        told[draw] = weight
        return inner(self, draw, *divisor, weight=weight, **settings)

    monkeypatch.setattr(IVON, "observe", observe)
    optimizer = IVON(policy.model.named_parameters(), clip_radius=1e-3, ess=1e6)
    groups = credited(C3PO_REPLAY, rollouts(policy, C3PO_REPLAY, optimizer))
    batch = training_batch(C3PO_REPLAY, SAMPLING, groups, 0, 0)
    update_policy(policy, optimizer, batch, PLAIN)
    assert told == {draw: sum(row.loss_tokens for row in rows) for draw, rows in batch.parts.items()}
    assert len(set(told.values())) > 1


def test_equal_rewards_teach_nothing(policy: Policy) -> None:
    """A = 0 and the gradient is 0, so the Hessian only decays."""
    optimizer = IVON(policy.model.named_parameters(), clip_radius=1e-3, ess=1e6, betas=(0.9, 0.99))
    groups = rollouts(policy, C3PO, optimizer)
    groups = [
        replace(g, completions=tuple(replace(c, verdict=Verdict(True, "right", "x")) for c in g.completions))
        for g in groups
    ]
    batch = training_batch(C3PO, SAMPLING, credited(C3PO, groups), 0, 0)
    update_policy(policy, optimizer, batch, PLAIN)
    p = next(policy.model.parameters())
    expected = 0.99 * 1e-3 + 0.5 * 0.01**2 * 1e-3
    torch.testing.assert_close(optimizer.state[p]["hessian"], torch.full_like(p, expected), rtol=1e-5, atol=0)


@pytest.mark.parametrize("method", [GRPO, M3PO, C3PO], ids=lambda m: m.name)
def test_with_learning_rate_zero_the_mean_stays_bitwise(policy: Policy, method: Method) -> None:
    optimizer = IVON(policy.model.named_parameters(), clip_radius=1e-3, ess=1e6)
    optimizer.param_groups[0]["lr"] = 0.0
    before = [p.detach().clone() for p in policy.model.parameters()]
    batch = training_batch(method, SAMPLING, credited(method, rollouts(policy, method, optimizer)), 0, 0)
    update_policy(policy, optimizer, batch, PLAIN)
    assert all(torch.equal(p, b) for p, b in zip(policy.model.parameters(), before, strict=True))


# Several updates a batch


@pytest.mark.parametrize("method", [C3PO, M3PO], ids=lambda m: m.name)
def test_mini_batches_step_several_times_against_the_first_policy(policy: Policy, method: Method) -> None:
    settings = {"clip_radius": 1e-3, "lr": 2e4, "ess": 1e6}  # large steps, so that ratios move
    optimizer = IVON(policy.model.named_parameters(), **settings)
    batch = training_batch(method, SAMPLING, credited(method, rollouts(policy, method, optimizer)), 0, 0)
    record = update_policy(policy, optimizer, batch, PPOConfig(mini_batches=3))
    assert optimizer.param_groups[0]["step"] == 3
    assert len(record.rows) == PROMPTS * 16
    assert record.policy["ratio_mean"] / record.tokens != 1.0
    assert record.policy["clipped_low_share"] + record.policy["clipped_high_share"] > 0


@pytest.mark.parametrize("method", [B3PO, C3PO, M3PO], ids=lambda m: m.name)
def test_old_logprobs_are_those_of_the_draw_whose_gradient_is_taken(policy: Policy, method: Method) -> None:
    """A mean that stays where it is leaves every ratio at one, however loud the noise, at the batch's temperature."""
    optimizer = IVON(
        policy.model.named_parameters(), clip_radius=1e-3, ess=1e4, betas=(0.9, 1 - 1e-9)
    )  # the Hessian stays too
    optimizer.param_groups[0]["lr"] = 0.0
    warm, groups = SamplingConfig(temperature=0.7), credited(method, rollouts(policy, method, optimizer))
    batch = training_batch(method, warm, groups, 0, 0)
    record = update_policy(policy, optimizer, batch, PPOConfig(mini_batches=3))
    assert record.policy["ratio_mean"] / record.tokens == pytest.approx(1, abs=1e-5)
    assert record.policy["clipped_low_share"] + record.policy["clipped_high_share"] == 0


def test_the_correction_is_from_the_generators_to_the_first_policy(policy: Policy) -> None:
    """Decoupled: what the updates of one batch do to the policy is the clip's business, not the correction's."""
    optimizer = IVON(
        policy.model.named_parameters(), clip_radius=1e-3, lr=2e4, ess=1e5
    )  # large steps, so that ratios move
    groups = rollouts(policy, C3PO, optimizer)
    once, _, _ = gradient_of(policy, C3PO, groups, noise_scale=1.0, ess=1e5)
    expected = {row.index: row for row in once.rows}
    batch = training_batch(C3PO, SAMPLING, credited(C3PO, groups), 0, 0)
    record = update_policy(policy, optimizer, batch, PPOConfig(mini_batches=3))
    assert {row.kept_tokens > 0 for row in record.rows} == {True, False}
    assert abs(record.policy["ratio_mean"] / record.tokens - 1) > 0.01
    for row in record.rows:
        assert row.rho == pytest.approx(expected[row.index].rho, rel=1e-4)
        assert row.weight == pytest.approx(expected[row.index].weight, rel=1e-4)
        assert row.kept_tokens == expected[row.index].kept_tokens


@pytest.mark.parametrize("method", [M3PO, C3PO_REPLAY], ids=lambda m: m.name)
def test_cumulative_carries_gradients_from_draw_to_draw(policy: Policy, method: Method) -> None:
    """With four draws, the first gradient counts four times and the last once (method.md 7)."""
    method = replace(method, cumulative=True)
    groups = rollouts(policy, method, IVON(policy.model.named_parameters(), clip_radius=1e-3, ess=1e6))
    record, together, _ = gradient_of(policy, method, groups, noise_scale=1.0)
    batch = training_batch(method, SAMPLING, credited(method, groups), 0, 0)
    total: dict[str, torch.Tensor] = {}
    for times, (draw, rows) in zip((4, 3, 2, 1), batch.parts.items(), strict=True):
        spy = Spy(policy.model.named_parameters(), clip_radius=1e-3, ess=1e6)
        spy.param_groups[0]["lr"] = 0.0
        alone = update_policy(policy, spy, replace(batch, parts={draw: rows}, cumulative=False), PLAIN)
        share = 1 / 4 if method.normalize == "part" else alone.normalizer / record.normalizer
        for name, grad in spy.mean_grad.items():
            total[name] = total.get(name, 0) + times * share * grad
    for name in total:
        torch.testing.assert_close(together[name], total[name], rtol=1e-4, atol=1e-7)


def test_the_first_of_several_updates_is_on_policy(policy: Policy) -> None:
    """Split in three, the first mini-batch's gradient is that of a batch with its prompt alone."""
    optimizer = Spy(policy.model.named_parameters(), clip_radius=1e-3, noise_scale=0.0)
    optimizer.param_groups[0]["lr"] = 0.0
    groups = rollouts(policy, GRPO, optimizer)
    batch = training_batch(GRPO, SAMPLING, credited(GRPO, groups), 0, 0)
    update_policy(policy, optimizer, batch, PPOConfig(mini_batches=3))
    last = dict(optimizer.mean_grad)
    _, alone, _ = gradient_of(policy, GRPO, groups[2:])
    for name in alone:
        torch.testing.assert_close(last[name], alone[name], rtol=1e-4, atol=1e-7)


def test_several_fresh_gradient_draws_are_averaged(policy: Policy) -> None:
    """Decoupled Monte Carlo (method.md 3.2): two fresh draws give the mean of their single gradients."""
    two = replace(C3PO, gradient_draws=2, correction=Correction())
    optimizer = IVON(policy.model.named_parameters(), clip_radius=1e-3, ess=1e6)
    groups = rollouts(policy, two, optimizer)
    _, together, _ = gradient_of(policy, two, groups, noise_scale=1.0)
    batch = training_batch(two, SAMPLING, credited(two, groups), 0, 0)
    total: dict[str, torch.Tensor] = {}
    for draw, rows in batch.parts.items():
        spy = Spy(policy.model.named_parameters(), clip_radius=1e-3, ess=1e6)
        spy.param_groups[0]["lr"] = 0.0
        update_policy(policy, spy, replace(batch, parts={draw: rows}), PLAIN)
        for name, grad in spy.mean_grad.items():
            total[name] = total.get(name, 0) + grad / 2
    for name in total:
        torch.testing.assert_close(together[name], total[name], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("method", [M3PO, C3PO_REPLAY, replace(C3PO, gradient_draws=3)], ids=lambda m: m.name)
def test_a_plain_step_is_along_the_gradient_that_ivon_is_given(policy: Policy, method: Method) -> None:
    """Weights have fixed noise as large as IVON's, with one divisor or one for each draw."""
    named = list(policy.model.named_parameters())
    plain = PointSGD([{"params": named, "noise_scale": 1 / math.sqrt(1e6 * (1e-3 + 1e-8))}], max_grad_norm=0.0, lr=1.0)
    groups, before = rollouts(policy, method, plain), {name: p.detach().clone() for name, p in named}
    _, expected, _ = gradient_of(policy, method, groups, noise_scale=1.0)
    update_policy(policy, plain, training_batch(method, SAMPLING, credited(method, groups), 0, 0), PLAIN, 10_000)
    for name, p in named:
        torch.testing.assert_close(before[name] - p.detach(), expected[name], rtol=1e-3, atol=3e-6)


def test_the_entropy_bonus_raises_entropy(policy: Policy) -> None:
    def entropy_after(coefficient: float) -> float:
        optimizer = IVON(policy.model.named_parameters(), clip_radius=1e-3, lr=100.0, noise_scale=0.0)
        before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
        groups = rollouts(policy, GRPO, optimizer)
        batch = training_batch(GRPO, SAMPLING, credited(GRPO, groups), 0, 0)
        for _ in range(3):
            record = update_policy(policy, optimizer, batch, PPOConfig(entropy_coefficient=coefficient))
        with torch.no_grad():
            for name, p in policy.model.named_parameters():
                p.copy_(before[name])
        return record.policy["entropy"] / record.tokens

    with torch.no_grad():  # peaked distributions: random ones have no entropy to gain
        for p in policy.model.parameters():
            p.mul_(3)
    assert entropy_after(10.0) > entropy_after(0.0) + 0.005


def test_temperature_divides_the_trainers_logits_too(policy: Policy) -> None:
    groups = rollouts(policy, GRPO, IVON(policy.model.named_parameters(), clip_radius=1e-3))
    cold, _, _ = gradient_of(policy, GRPO, groups, sampling=SamplingConfig(temperature=0.5))
    warm, _, _ = gradient_of(policy, GRPO, groups)
    assert cold.policy["entropy"] < warm.policy["entropy"]
    assert cold.kl > 1e-4 > warm.kl
