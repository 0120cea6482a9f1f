"""Group-relative advantages, by hand and by their invariants."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from threepo.config import Advantage
from threepo.methods.method import group_advantages, zero_variance


def test_by_hand() -> None:
    """Rewards 1, 0, 0, 1, 0: mean 0.4, sum of squares 1.2; ddof 1 gives sqrt(0.3), ddof 0 sqrt(0.24)."""
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0], dtype=torch.float64)
    bessel = group_advantages(rewards, Advantage(epsilon=1e-6))
    assert bessel[0].item() == pytest.approx(0.6 / (math.sqrt(0.3) + 1e-6))
    assert bessel[1].item() == pytest.approx(-0.4 / (math.sqrt(0.3) + 1e-6))
    population = group_advantages(rewards, Advantage(ddof=0, epsilon=1e-4))
    assert population[0].item() == pytest.approx(0.6 / (math.sqrt(0.24) + 1e-4))
    centred = group_advantages(rewards, Advantage(scale="none"))
    assert centred.tolist() == pytest.approx([0.6, -0.4, -0.4, 0.6, -0.4])


@given(st.lists(st.floats(-5, 5, width=32), min_size=2, max_size=16), st.floats(-3, 3, width=32))
def test_they_sum_to_nothing_and_do_not_see_a_shift(values: list[float], shift: float) -> None:
    rewards = torch.tensor(values, dtype=torch.float64)
    result = group_advantages(rewards, Advantage(epsilon=1e-2))
    assert abs(float(result.sum())) < 1e-9 * (1 + float(result.abs().max()))
    torch.testing.assert_close(group_advantages(rewards + shift, Advantage(epsilon=1e-2)), result, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 1 / 3])
@pytest.mark.parametrize("scale", ["std", "none"])
def test_equal_rewards_give_exactly_nothing(value: float, scale: str) -> None:
    assert group_advantages(torch.full((3, 7), value), Advantage(scale=scale)).eq(0).all()


def test_a_group_of_one_is_silent_only_without_reward() -> None:
    assert zero_variance(torch.tensor([[0.0], [1.0]])).tolist() == [True, False]


def test_a_group_of_one_keeps_its_reward() -> None:
    assert group_advantages(torch.tensor([[2.0]]), Advantage()).item() == pytest.approx(2.0, rel=1e-5)


def test_groups_are_independent() -> None:
    rewards = torch.tensor([[0.0, 1.0, 1.0], [1.0, 1.0, 1.0], [5.0, 0.0, 0.0]])
    together = group_advantages(rewards, Advantage())
    for i in range(3):
        assert torch.equal(together[i], group_advantages(rewards[i], Advantage()))
    assert zero_variance(rewards).tolist() == [False, True, False]
