"""Credit rules, by hand and by their invariants."""

import math
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from factories import completion
from threepo.config import Advantage, Method, SamplingConfig
from threepo.config.method import CREDIT_RULES, GRPO, M3PO
from threepo.errors import UserError
from threepo.methods.credit import group_advantages, unlikely_first
from threepo.methods.method import credit, flat_groups, rollout_draws, split_batch, training_batch
from threepo.training.metrics import rollout_metrics
from threepo.types import Completion, Episode

PASS_AT_2 = {"rule": "pass_at_k", "k": 2}


def credited(rewards: list[Any], **settings: Any) -> torch.Tensor:
    return group_advantages(torch.tensor(rewards, dtype=torch.float64), Advantage(**settings))


def test_grpo_by_hand() -> None:
    """Rewards 1, 0, 0, 1, 0: mean 0.4, sum of squares 1.2; ddof 1 gives sqrt(0.3), ddof 0 sqrt(0.24)."""
    rewards = [1.0, 0.0, 0.0, 1.0, 0.0]
    bessel = credited(rewards)
    assert bessel[0].item() == pytest.approx(0.6 / (math.sqrt(0.3) + 1e-6))
    assert bessel[1].item() == pytest.approx(-0.4 / (math.sqrt(0.3) + 1e-6))
    population = credited(rewards, ddof=0, epsilon=1e-4)
    assert population[0].item() == pytest.approx(0.6 / (math.sqrt(0.24) + 1e-4))


@pytest.mark.parametrize(
    ("rule", "right", "wrong"),
    [
        ("dr_grpo", 0.6, -0.4),
        ("rloo", 1 - 1 / 4, 0 - 2 / 4),  # minus the mean of the other four
        ("maxrl", 0.6 / 0.4, -1.0),
        # Of the C(5, 2) = 10 pairs, 3 have none right: mean 0.7, variance 0.21. A right one is always paid 1; a wrong
        # one in 2 of its 4 pairs.
        ("pass_at_k", 0.3 / math.sqrt(0.21), (0.5 - 0.7) / math.sqrt(0.21)),
    ],
)
def test_the_other_rules_by_hand(rule: str, right: float, wrong: float) -> None:
    found = credited([1.0, 0.0, 0.0, 1.0, 0.0], rule=rule, epsilon=1e-12, **{"k": 2} if rule == "pass_at_k" else {})
    assert found.tolist() == pytest.approx([right, wrong, wrong, right, wrong])


@given(st.lists(st.booleans(), min_size=2, max_size=8), st.integers(1, 7))
def test_pass_at_k_is_the_mean_over_all_sets(right: list[bool], k: int) -> None:
    """Enumerated: each set of k is paid 1 if any of it is right; a completion's advantage is the mean of its sets'."""
    k = min(k, len(right) - 1)
    sets = list(combinations(range(len(right)), k))
    paid = torch.tensor([float(any(right[i] for i in some)) for some in sets], dtype=torch.float64)
    scale = paid.std(correction=0) + 1e-6
    expected = [
        float((torch.stack([p for p, some in zip(paid, sets, strict=True) if i in some]).mean() - paid.mean()) / scale)
        for i in range(len(right))
    ]
    assert credited([float(r) for r in right], rule="pass_at_k", k=k).tolist() == pytest.approx(expected, abs=1e-8)


def test_pass_at_1_is_grpo_with_the_population_deviation() -> None:
    rewards = [1.0, 0.0, 0.0, 1.0, 0.0]
    torch.testing.assert_close(credited(rewards, rule="pass_at_k", k=1), credited(rewards, ddof=0))


@given(st.lists(st.floats(-5, 5, width=32), min_size=2, max_size=16), st.floats(-3, 3, width=32))
@pytest.mark.parametrize("rule", ["grpo", "dr_grpo", "rloo"])
def test_they_sum_to_nothing_and_do_not_see_a_shift(rule: str, values: list[float], shift: float) -> None:
    rewards = torch.tensor(values, dtype=torch.float64)
    settings = Advantage(rule=rule, epsilon=1e-2)
    result = group_advantages(rewards, settings)
    assert abs(float(result.sum())) < 1e-9 * (1 + float(result.abs().max()))
    torch.testing.assert_close(group_advantages(rewards + shift, settings), result, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 1 / 3])
@pytest.mark.parametrize("rule", CREDIT_RULES)
def test_equal_rewards_give_exactly_nothing(rule: str, value: float) -> None:
    if rule != "pass_at_k" or value in (0, 1):
        assert group_advantages(torch.full((3, 7), value), Advantage(rule=rule)).eq(0).all()


@pytest.mark.parametrize("scale", [1.0, 1e-20, -1e15])
@pytest.mark.parametrize("rule", ["grpo", "dr_grpo", "rloo"])
def test_rewards_that_differ_by_a_rounding_are_equal(rule: str, scale: float) -> None:
    assert 0.1 + 0.2 != 0.3
    assert credited([(0.1 + 0.2) * scale, 0.3 * scale], rule=rule).eq(0).all()
    assert credited([0.3 * scale, 0.3000001 * scale], rule=rule).ne(0).all(), "this is no rounding"


@pytest.mark.parametrize("rule", ["dr_grpo", "rloo", "maxrl"])
def test_a_completion_on_its_own_has_no_advantage(rule: str) -> None:
    assert credited([[1.0], [0.5]], rule=rule).tolist() == [[0.0], [0.0]]


def test_groups_are_independent() -> None:
    rewards = torch.tensor([[0.0, 1.0, 1.0], [1.0, 1.0, 1.0], [5.0, 0.0, 0.0]])
    together = group_advantages(rewards, Advantage())
    for i in range(3):
        assert torch.equal(together[i], group_advantages(rewards[i], Advantage()))


@pytest.mark.parametrize(
    ("rule", "reward"),
    [
        ("maxrl", -1.0),
        ("pass_at_k", 0.5),
        *((rule, bad) for rule in CREDIT_RULES for bad in (math.inf, -math.inf, math.nan)),
    ],
)
def test_a_reward_that_a_rule_is_not_defined_for_is_refused(rule: str, reward: float) -> None:
    with pytest.raises(UserError, match=f"method.advantage.rule = '{rule}'.* has earned {reward:g};"):
        credited([1.0, reward, 0.0, 0.0, 0.0], rule=rule)


def test_the_unlikely_of_the_right_ones_keep_most_of_their_reward() -> None:
    """With ranks 1 (wrong), 0, 3, 2, the factors of the right ones are 1 - 0.25 * 4 / 4, * 1 / 4 and * 2 / 4."""
    found = unlikely_first(
        torch.tensor([0.0, 1.0, 1.0, 1.0]),
        torch.tensor([False, True, True, True]),
        torch.tensor([-2.0, -1.0, -9.0, -3.0]),
        Advantage(unlikeliness=0.25),
    )
    assert found.tolist() == [0, 0.75, 0.9375, 0.875]


def test_completions_that_are_as_likely_are_cut_alike() -> None:
    settings, right = Advantage(unlikeliness=0.5), torch.tensor([True, True])
    assert unlikely_first(torch.ones(2), right, torch.tensor([-1.0, -1.0]), settings).tolist() == [0.5, 0.5]


def of_one_prompt(rewards: list[float]) -> list[Completion]:
    """Completions of a prompt; the later one, the less likely."""
    return [completion(rollout=i, reward=r, logprobs=[-float(i), 0.0, 0.0]) for i, r in enumerate(rewards)]


@pytest.mark.parametrize(
    ("settings", "rewards", "silent"),
    [
        ({}, [1.0, 1.0, 1.0, 1.0], True),
        ({}, [1.0, 0.0, 0.0, 0.0], False),
        ({"rule": "maxrl"}, [0.0, 0.0, 0.0, 0.0], True),
        ({"rule": "maxrl"}, [1.0, 1.0, 1.0, 1.0], True),
        (PASS_AT_2, [1.0, 1.0, 0.0, 0.0], False),
        (PASS_AT_2, [1.0, 1.0, 1.0, 0.0], True),  # no two are both wrong
        ({"unlikeliness": 0.25}, [1.0, 1.0, 1.0, 1.0], False),  # all right, and some more likely than others
        ({"unlikeliness": 0.25}, [0.0, 0.0, 0.0, 0.0], True),
    ],
)
def test_a_group_is_silent_where_all_advantages_are_0(
    settings: dict[str, Any], rewards: list[float], silent: bool
) -> None:
    """This holds for advantages and metrics."""
    method = replace(GRPO, rollouts_per_prompt=4, advantage=Advantage(**settings))
    (group,) = credit(method, of_one_prompt(rewards))
    assert flat_groups(method, group) == [silent]
    assert any(group.advantages) != silent
    assert rollout_metrics(method, [group])["groups/zero_advantage_share"] == silent


def test_likelihoods_are_compared_within_the_group_of_a_draw() -> None:
    """M3PO: the likeliest of each draw's two completions, not of all four."""
    method = replace(M3PO, rollouts_per_prompt=4, draws=2, advantage=Advantage(rule="dr_grpo", unlikeliness=0.5))
    first, second = rollout_draws(method, 0, 0)
    completions = zip(of_one_prompt([1.0, 1.0, 1.0, 1.0]), (first, first, second, second), strict=True)
    (group,) = credit(method, [replace(completion, draw=draw) for completion, draw in completions])
    assert group.advantages == (-0.125, 0.125, -0.125, 0.125)  # rewards 0.5 and 0.75


@pytest.mark.parametrize("rule", [{"rule": r} for r in ("grpo", "dr_grpo", "rloo", "maxrl")] + [PASS_AT_2], ids=str)
def test_failed_episodes_are_left_out_of_their_group(rule: dict[str, Any]) -> None:
    """The others get what a group of them alone would; the update has no row of a failed one."""
    method = Method(draws=0, rollouts_per_prompt=5, advantage=Advantage(**rule))
    rewards = [1.0, 0.0, 0.0, None, None]
    rows = []
    for rollout, reward in enumerate(rewards):
        status = "failed" if reward is None else "done"
        episode = Episode(((0, 3),), (), (), reward, status)  # type: ignore[arg-type]
        rows.append(replace(completion(rollout=rollout, reward=reward or 0.0), episode=episode))
    (group,) = credit(method, rows)
    alone = group_advantages(torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64), method.advantage).tolist()
    assert any(alone)
    assert group.advantages == (*alone, 0.0, 0.0)
    batch = training_batch(method, SamplingConfig(), [group], 0, 0)
    assert [row.index for part in batch.parts.values() for row in part] == [0, 1, 2]


def test_failed_episodes_count_in_no_place() -> None:
    """Of three right ones with a failed one beside them, the places are 0, 1 and 2 of three."""
    method = Method(draws=0, rollouts_per_prompt=4, advantage=Advantage(rule="dr_grpo", unlikeliness=1.0))
    rows = []
    for rollout, logprob in enumerate((-3.0, -2.0, -1.0, 0.0)):
        episode = Episode(((0, 1),), (), (), 1.0, "failed" if rollout == 3 else "done")
        rows.append(replace(completion(rollout=rollout, reward=1.0, tokens=(1,), logprobs=(logprob,)), episode=episode))
    (group,) = credit(method, rows)
    assert group.advantages == pytest.approx((1 / 3, 0, -1 / 3, 0))


@pytest.mark.filterwarnings("error")
def test_one_that_is_left_of_a_group_has_nobody_to_be_compared_with() -> None:
    rows = [completion(rollout=0, reward=1.0)]
    failed = Episode(((0, 3),), (), (), None, "failed")
    rows.append(replace(completion(rollout=1), episode=failed))
    (group,) = credit(Method(draws=0, rollouts_per_prompt=2), rows)
    assert group.advantages == (0.0, 0.0)


def test_pass_at_k_compares_nothing_if_failures_leave_fewer_than_k() -> None:
    assert credited([1.0, 0.0], rule="pass_at_k", k=3).tolist() == [0.0, 0.0]
    assert credited([1.0, 0.0], rule="pass_at_k", k=2).tolist() == [0.0, 0.0], "one set alone"


def test_a_draw_whose_episodes_all_failed_has_no_part() -> None:
    method = Method(draws=2, rollouts_per_prompt=4, gradient_at="generator", advantages="prompt", optimizer="adamw")
    draws, rows = rollout_draws(method, 0, 0), []
    for rollout in range(4):
        failed = rollout < 2
        episode = Episode(() if failed else ((0, 3),), (), (), None if failed else 1.0, "failed" if failed else "done")
        tokens = () if failed else (11, 12, 13)
        made = completion(rollout=rollout, reward=float(rollout == 2), tokens=tokens, draw=draws[rollout // 2])
        rows.append(replace(made, episode=episode))
    groups = credit(method, rows)
    batch = training_batch(method, SamplingConfig(), groups, 0, 0)
    assert list(batch.parts) == [draws[1]]
    assert [list(piece.parts) for piece in split_batch(batch, 2)] == [[draws[1]]]


@pytest.mark.parametrize("gradient_at", ["mean", "generator", "fresh"])
def test_a_batch_of_failed_episodes_alone_is_no_update_and_no_evolution(gradient_at: Any) -> None:
    method = Method(draws=2, rollouts_per_prompt=2, gradient_at=gradient_at, optimizer="adamw", log_evolution=True)
    episode = Episode((), (), (), None, "failed")
    rows = [
        replace(completion(rollout=i, tokens=(), draw=rollout_draws(method, 0, 0)[i]), episode=episode) for i in (0, 1)
    ]
    batch = training_batch(method, SamplingConfig(), credit(method, rows), 0, 0)
    assert not batch.parts
    assert not batch.fitness
