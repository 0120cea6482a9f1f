"""The clipped surrogate by hand, and its sums."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from factories import row
from threepo.config import ObjectiveConfig
from threepo.objectives.policy_loss import (
    TERMS,
    LossInputs,
    clip_statistics,
    row_weights,
    split_by_gradient,
    token_losses,
)
from threepo.types import TrainingRow


def inputs_of(ratios: list[float], advantage: float, **fields: torch.Tensor) -> LossInputs:
    """Tokens with these ratios to the old policy and one advantage, all counted and none corrected."""
    logprobs = torch.tensor(ratios).log()
    counted = fields.get("counted", torch.ones_like(logprobs).bool())
    return LossInputs(
        logprobs=fields.get("logprobs", logprobs),
        old_logprobs=fields.get("old_logprobs", torch.zeros_like(logprobs)),
        entropy=fields.get("entropy", torch.full_like(logprobs, 0.7)),
        advantages=torch.full_like(logprobs, advantage),
        correction_weights=fields.get("correction_weights", counted.float()),
        counted=counted,
    )


def loss_of(ratios: list[float], advantage: float, **settings: object) -> list[float]:
    return token_losses(inputs_of(ratios, advantage), ObjectiveConfig(**settings)).tolist()


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
    assert loss_of([ratio], advantage) == pytest.approx([expected], rel=1e-5)


def test_clip_higher_and_dual_clip_are_their_own_settings() -> None:
    assert loss_of([1.5], 1.0, clip_high=0.28) == pytest.approx([-1.28], rel=1e-5)
    assert loss_of([0.1], -1.0, clip_low=0.4) == pytest.approx([0.6], rel=1e-5)
    assert loss_of([5.0], -1.0, dual_clip=0.0) == pytest.approx([5.0], rel=1e-5)


def test_the_entropy_bonus_lowers_the_loss_of_counted_tokens_only() -> None:
    inputs = inputs_of(
        [1.0, 1.0, 1.0],
        0.0,
        entropy=torch.tensor([0.5, 0.7, 99.0]),
        counted=torch.tensor([True, True, False]),
    )
    losses = token_losses(inputs, ObjectiveConfig(entropy_coefficient=0.1))
    assert losses.tolist() == pytest.approx([-0.05, -0.07, 0.0])


def test_clipped_tokens_are_counted_where_the_clip_acts() -> None:
    settings = ObjectiveConfig()
    gained = clip_statistics(inputs_of([1.5, 1.0, 0.5, 1.5], 1.0), settings)
    assert (gained["clipped_high_share"], gained["clipped_low_share"]) == (2, 0)
    lost = clip_statistics(inputs_of([1.5, 1.0, 0.5, 1.5], -1.0), settings)
    assert (lost["clipped_high_share"], lost["clipped_low_share"]) == (0, 1)
    assert lost["ratio_mean"] == pytest.approx(4.5, rel=1e-5)


def test_on_policy_the_gradient_is_minus_advantage_times_score() -> None:
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    weights = torch.tensor([0.5, 1.0])
    inputs = inputs_of([1.0, 1.0], 1.5, logprobs=logprobs, old_logprobs=logprobs.detach(), correction_weights=weights)
    token_losses(inputs, ObjectiveConfig()).sum().backward()
    assert logprobs.grad.tolist() == [-1.5 * 0.5, -1.5]


def test_a_masked_token_has_a_finite_zero_loss_with_its_graph() -> None:
    logprobs = torch.tensor([-1.0, math.log(1e-30)], requires_grad=True)
    nothing = torch.zeros(2)
    inputs = inputs_of([1.0, 1.0], 1.0, logprobs=logprobs, old_logprobs=logprobs.detach(), correction_weights=nothing)
    losses = token_losses(inputs, ObjectiveConfig())
    losses.sum().backward()
    assert losses.eq(0).all()
    assert logprobs.grad.eq(0).all()


@pytest.mark.parametrize("name", list(TERMS))
def test_a_term_has_no_gradient_for_the_rows_that_it_leaves_out(name: str) -> None:
    """What a term says of a row is held against the gradient that it really has, with advantages of either kind."""
    settings = ObjectiveConfig(entropy_coefficient=0.1)
    for advantage in (0.0, 0.5, -0.5):
        logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
        inputs = inputs_of([1.0, 1.0], advantage, logprobs=logprobs, old_logprobs=logprobs.detach() + 0.1)
        # An entropy depends on the same weights as the log-probs do.
        inputs = replace(inputs, entropy=logprobs.square())
        (gradient,) = torch.autograd.grad(TERMS[name].losses(inputs, settings).sum(), logprobs)
        assert TERMS[name].has_gradient(row(advantage=advantage)) == bool(gradient.ne(0).any())


def test_rows_need_a_backward_pass_where_a_term_in_use_says_so() -> None:
    rows = [row(0, 0.0), row(1, 1.0), row(2, 0.0)]

    def indices(rows: Sequence[TrainingRow], **settings: float) -> tuple[list[int], ...]:
        return tuple([r.index for r in part] for part in split_by_gradient(rows, ObjectiveConfig(**settings)))

    assert indices(rows) == ([1], [0, 2])
    assert indices(rows, entropy_coefficient=0.1) == ([0, 1, 2], [])
    assert indices([rows[0], rows[2]]) == ([0], [2]), "the optimizer needs a gradient to observe"


def test_row_weights_of_each_aggregation_by_hand() -> None:
    rows = [
        row(0, prompt="a", tokens=(1, 2)),
        row(1, prompt="a", tokens=(1, 2, 3, 4, 5, 6)),
        row(2, prompt="b", tokens=(1, 2, 3, 4)),
    ]
    assert row_weights(rows, "token") == {0: 1, 1: 1, 2: 1}
    assert row_weights(rows, "group") == {0: 1 / 8, 1: 1 / 8, 2: 1 / 4}
    assert row_weights(rows, "sequence") == {0: 1 / 2, 1: 1 / 6, 2: 1 / 4}
    for aggregation, units in (("token", 12), ("group", 2), ("sequence", 3)):
        weights = row_weights(rows, aggregation)
        assert sum(weights[r.index] * len(r.completion.tokens) for r in rows) == pytest.approx(units)
