"""The clipped surrogate by hand, and its sums."""

import math

import pytest
import torch

from factories import row
from threepo.config import ObjectiveConfig
from threepo.objectives.aggregate import weigh_rows
from threepo.objectives.policy_loss import LossSums, policy_loss


def loss_of(ratios: list[list[float]], advantages: list[float], **settings: object) -> LossSums:
    """Sums for tokens with these ratios to the old policy, all of them counted."""
    logprobs = torch.tensor(ratios).log()
    mask = torch.ones_like(logprobs).bool()
    return policy_loss(
        logprobs,
        torch.zeros_like(logprobs),
        torch.full_like(logprobs, 0.7),
        torch.tensor(advantages),
        mask,
        correction_weights=torch.ones_like(logprobs),
        counted=mask,
        row_weights=torch.ones(len(ratios)),
        settings=ObjectiveConfig(**settings),
    )


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (1.0, 2.0, -2.0),
        (1.1, 2.0, -2.2),
        (1.5, 2.0, -2.4),  # clipped at 1.2
        (0.5, 2.0, -1.0),  # not clipped: the bound would make it look better than it is
        (0.5, -2.0, 1.6),  # clipped at 0.8
        (1.5, -2.0, 3.0),
        (5.0, -2.0, 6.0),  # dual clip: at most 3 * 2
        (5.0, 0.0, 0.0),
    ],
)
def test_token_losses_by_hand(ratio: float, advantage: float, expected: float) -> None:
    assert loss_of([[ratio]], [advantage]).loss.item() == pytest.approx(expected, rel=1e-5)


def test_clip_higher_and_dual_clip_are_their_own_settings() -> None:
    assert loss_of([[1.5]], [1.0], clip_high=0.28).loss.item() == pytest.approx(-1.28, rel=1e-5)
    assert loss_of([[0.1]], [-1.0], clip_low=0.4).loss.item() == pytest.approx(0.6, rel=1e-5)
    assert loss_of([[5.0]], [-1.0], dual_clip=0.0).loss.item() == pytest.approx(5.0, rel=1e-5)


def test_the_entropy_bonus_lowers_the_loss() -> None:
    plain = loss_of([[1.0, 1.0]], [1.0])
    bonus = loss_of([[1.0, 1.0]], [1.0], entropy_coefficient=0.1)
    assert plain.loss.item() - bonus.loss.item() == pytest.approx(0.1 * 2 * 0.7, rel=1e-5)


def test_the_entropy_bonus_is_for_counted_tokens_only() -> None:
    logprobs = torch.tensor([[-1.0, -1.0, -1.0], [-1.0, -1.0, -1.0]])
    kept = torch.tensor([[True, True, False], [False, False, False]])
    sums = policy_loss(
        logprobs,
        logprobs,
        torch.tensor([[0.5, 0.7, 99.0], [11.0, 13.0, 17.0]]),
        torch.zeros(2),
        torch.tensor([[True, True, False], [True, True, True]]),
        correction_weights=kept.float(),
        counted=kept,
        row_weights=torch.tensor([2.0, 1.0]),
        settings=ObjectiveConfig(entropy_coefficient=0.1),
    )
    assert sums.loss.item() == pytest.approx(-0.1 * 2 * (0.5 + 0.7), rel=1e-5)
    assert sums.normalizer == 4


def test_clipped_tokens_are_counted_where_the_clip_acts() -> None:
    sums = loss_of([[1.5, 1.0, 0.5, 1.5]], [1.0])
    assert (sums.clipped_high, sums.clipped_low) == (2, 0)
    sums = loss_of([[1.5, 1.0, 0.5, 1.5]], [-1.0])
    assert (sums.clipped_high, sums.clipped_low) == (0, 1)
    assert sums.ratio == pytest.approx(4.5, rel=1e-5)


def test_on_policy_the_gradient_is_minus_advantage_times_score() -> None:
    logprobs = torch.tensor([[-1.0, -2.0, -3.0]], requires_grad=True)
    mask = torch.tensor([[True, True, False]])
    sums = policy_loss(
        logprobs,
        logprobs.detach(),
        torch.zeros(1, 3),
        torch.tensor([1.5]),
        mask,
        correction_weights=torch.tensor([[0.5, 1.0, 7.0]]),
        counted=mask,
        row_weights=torch.tensor([2.0]),
        settings=ObjectiveConfig(),
    )
    sums.loss.backward()
    assert logprobs.grad.tolist() == [[-1.5 * 0.5 * 2.0, -1.5 * 2.0, 0.0]]
    assert sums.normalizer == 4.0


def test_all_rows_rejected_leave_a_finite_zero_with_its_graph() -> None:
    logprobs = torch.tensor([[-1.0, math.log(1e-30)]], requires_grad=True)
    nothing = torch.zeros(1, 2)
    sums = policy_loss(
        logprobs,
        logprobs.detach(),
        nothing,
        torch.tensor([1.0]),
        torch.ones(1, 2).bool(),
        correction_weights=nothing,
        counted=nothing.bool(),
        row_weights=torch.ones(1),
        settings=ObjectiveConfig(),
    )
    sums.loss.backward()
    assert sums.loss.item() == 0
    assert sums.normalizer == 0
    assert logprobs.grad.eq(0).all()


def test_row_weights_of_each_aggregation_by_hand() -> None:
    rows = [
        row(0, prompt="a", tokens=(1, 2)),
        row(1, prompt="a", tokens=(1, 2, 3, 4, 5, 6)),
        row(2, prompt="b", tokens=(1, 2, 3, 4)),
    ]
    assert [r.weight for r in weigh_rows(rows, "token")] == [1, 1, 1]
    assert [r.weight for r in weigh_rows(rows, "group")] == [1 / 8, 1 / 8, 1 / 4]
    assert [r.weight for r in weigh_rows(rows, "sequence")] == [1 / 2, 1 / 6, 1 / 4]
    for aggregation, units in (("token", 12), ("group", 2), ("sequence", 3)):
        normalizer = sum(r.weight * len(r.completion.tokens) for r in weigh_rows(rows, aggregation))
        assert normalizer == pytest.approx(units)
