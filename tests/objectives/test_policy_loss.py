"""The clipped surrogate by hand, and its sums."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from factories import row
from threepo.config import Correction, ObjectiveConfig, PPOConfig
from threepo.config.objective import CISPOConfig, ClipCovConfig, GSPOConfig, KLCovConfig
from threepo.config.records import RECORDS
from threepo.errors import UserError
from threepo.objectives.corrections import correct
from threepo.objectives.policy_loss import (
    divisor,
    row_weights,
    scored_first,
    split_by_gradient,
    statistics,
    token_losses,
)
from threepo.objectives.token_losses import ENTROPY_BONUS, REFERENCE_PENALTY, LossInputs, kl_to_reference, token_loss
from threepo.types import CreditedRow


def inputs_of(ratios: list[float], advantage: float, **fields: Any) -> LossInputs:
    """Tokens of one row with these ratios to the old policy and one advantage, all counted and none corrected."""
    logprobs = torch.tensor(ratios).log()
    everywhere = torch.ones_like(logprobs).bool()
    counted, weights = fields.pop("counted", everywhere), fields.pop("correction_weights", None)
    row_of = fields.get("row_of", torch.zeros(len(ratios), dtype=torch.int64))
    effect = correct(logprobs, logprobs, row_of, fields.get("rows", 1), Correction())
    weights = counted.float() if weights is None else weights
    inputs = LossInputs(
        logprobs=logprobs,
        old_logprobs=torch.zeros_like(logprobs),
        behaviour_logprobs=torch.zeros_like(logprobs),
        entropy=torch.full_like(logprobs, 0.7),
        advantages=torch.full_like(logprobs, advantage),
        weights=torch.ones_like(logprobs),
        correction=replace(effect, weights=weights, counted=counted),
        row_of=row_of,
        rows=1,
        chosen=~everywhere,
        in_mask=everywhere,
    )
    return replace(inputs, **fields)


def objective(loss: str = "ppo", **settings: object) -> ObjectiveConfig:
    """The settings of a loss that a recipe names."""
    record: ObjectiveConfig = RECORDS["objective"][loss](**settings)
    return record


def loss_of(ratios: list[float], advantage: float, **settings: object) -> list[float]:
    return token_losses(inputs_of(ratios, advantage), objective(**settings)).tolist()


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
    losses = token_losses(inputs, PPOConfig(entropy_coefficient=0.1))
    assert losses.tolist() == pytest.approx([-0.05, -0.07, 0.0])


def test_clipped_tokens_are_counted_where_the_clip_acts() -> None:
    settings = PPOConfig()
    gained = statistics(inputs_of([1.5, 1.0, 0.5, 1.5], 1.0), settings)
    assert (gained["clipped_high_share"], gained["clipped_low_share"]) == (2, 0)
    lost = statistics(inputs_of([1.5, 1.0, 0.5, 1.5], -1.0), settings)
    assert (lost["clipped_high_share"], lost["clipped_low_share"]) == (0, 1)
    assert lost["ratio_mean"] == pytest.approx(4.5, rel=1e-5)


def test_on_policy_the_gradient_is_minus_advantage_times_score() -> None:
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    weights = torch.tensor([0.5, 1.0])
    inputs = inputs_of([1.0, 1.0], 1.5, logprobs=logprobs, old_logprobs=logprobs.detach(), correction_weights=weights)
    token_losses(inputs, PPOConfig()).sum().backward()
    assert logprobs.grad.tolist() == [-1.5 * 0.5, -1.5]


def test_a_masked_token_has_a_finite_zero_loss_with_its_graph() -> None:
    logprobs = torch.tensor([-1.0, math.log(1e-30)], requires_grad=True)
    nothing = torch.zeros(2)
    inputs = inputs_of([1.0, 1.0], 1.0, logprobs=logprobs, old_logprobs=logprobs.detach(), correction_weights=nothing)
    losses = token_losses(inputs, PPOConfig())
    losses.sum().backward()
    assert losses.eq(0).all()
    assert logprobs.grad.eq(0).all()


@pytest.mark.parametrize("loss", ["ppo", "gspo", "cispo", "kl_cov", "clip_cov"])
def test_a_ratio_beyond_every_number_leaves_losses_and_gradients_finite(loss: str) -> None:
    """exp(199) is infinite in float32, and 0 times it is no number."""
    own = GSPO if loss == "gspo" else {"loss": loss, **({} if loss in ("ppo", "clip_cov") else {"mini_batches": 4})}
    logprobs = torch.tensor([-1.0, -200.0], requires_grad=True)
    others = torch.tensor([-200.0, -1.0])
    inputs = inputs_of([1.0, 1.0], -2.0, logprobs=logprobs, old_logprobs=others, reference_logprobs=others)
    inputs = replace(inputs, row_of=torch.tensor([0, 1]), rows=2)
    losses = token_losses(inputs, objective(**own, reference_kl=0.1))
    losses.sum().backward()
    assert losses.isfinite().all()
    assert logprobs.grad.isfinite().all()


GSPO = {"loss": "gspo", "aggregation": "sequence", "mini_batches": 4, "clip_low": 0.03, "clip_high": 0.04}


def test_gspo_by_hand() -> None:
    """Ratios 1.21 and 1 have the geometric mean 1.1, clipped to 1.04; the other row's mean is 0.9."""
    rows = {"row_of": torch.tensor([0, 0, 1]), "rows": 2}
    for advantage, expected in ((2.0, [-2.08, -2.08, -1.8]), (-2.0, [2.2, 2.2, 1.94])):
        inputs = inputs_of([1.21, 1.0, 0.9], advantage, **rows)
        assert token_losses(inputs, GSPOConfig(**GSPO)).tolist() == pytest.approx(expected, rel=1e-5)
    sums = statistics(inputs_of([1.21, 1.0, 0.9], 2.0, **rows), GSPOConfig(**GSPO))
    assert sums["ratio_mean"] == pytest.approx(3.1)
    assert (sums["clipped_high_share"], sums["clipped_low_share"]) == (2, 0)


def test_the_gradient_of_gspo_is_that_of_its_sequences() -> None:
    """The paper's form: the mean over sequences of A s, with s = exp(mean of log-ratios) differentiated."""
    old, row_of = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([0, 0, 1])
    logprobs = (old + torch.tensor([0.01, -0.02, 0.015])).requires_grad_()
    inputs = inputs_of([1, 1, 1], 1.0, logprobs=logprobs, old_logprobs=old, row_of=row_of, rows=2)
    inputs = replace(inputs, advantages=torch.tensor([1.5, 1.5, -0.5]))
    weights = torch.tensor([0.5, 0.5, 1.0])  # of aggregation = "sequence"
    ((token_losses(inputs, GSPOConfig(**GSPO)) * weights).sum() / 2).backward()
    again = logprobs.detach().requires_grad_()
    d = again - old
    ratios = torch.stack([d[:2].mean(), d[2]]).exp()
    (-(torch.tensor([1.5, -0.5]) * ratios).mean()).backward()
    torch.testing.assert_close(logprobs.grad, again.grad)


def test_cispo_by_hand() -> None:
    """The clipped ratio is a constant weight: no token loses its gradient, whatever the sign of its advantage."""
    settings = CISPOConfig(mini_batches=4, clip_low=1, clip_high=1)
    logprobs = torch.tensor([-0.5, -1.0, -2.0], requires_grad=True)
    old = logprobs.detach() - torch.tensor([5.0, 0.5, 0.25]).log()
    for advantage in (2.0, -2.0):
        inputs = inputs_of([1, 1, 1], advantage, logprobs=logprobs, old_logprobs=old)
        losses = token_losses(inputs, settings)
        (gradient,) = torch.autograd.grad(losses.sum(), logprobs)
        assert gradient.tolist() == pytest.approx([-advantage * 2, -advantage * 0.5, -advantage * 0.25], rel=1e-5)
        assert losses.tolist() == pytest.approx([advantage, advantage * 0.5, advantage * 0.5], rel=1e-5)
        assert statistics(inputs, settings)["clipped_high_share"] == 1


def test_kl_cov_by_hand() -> None:
    """-A R, without a clip, and |log R| on chosen tokens, whose gradient is the coefficient towards the old policy."""
    settings = KLCovConfig(mini_batches=4, kl_cov_coefficient=0.5)
    logprobs = torch.tensor([5.0, 5.0, 0.2]).log().requires_grad_()
    inputs = inputs_of([1, 1, 1], -2.0, logprobs=logprobs, chosen=torch.tensor([False, True, True]))
    losses = token_losses(inputs, settings)
    (gradient,) = torch.autograd.grad(losses.sum(), logprobs)
    assert losses.tolist() == pytest.approx([10, 10 + 0.5 * math.log(5), 0.4 + 0.5 * math.log(5)])
    assert gradient.tolist() == pytest.approx([10, 10.5, 0.4 - 0.5], rel=1e-5)
    sums = statistics(inputs, settings)
    assert (sums["chosen_share"], sums["clipped_high_share"], sums["clipped_low_share"]) == (2, 0, 0)


def test_clip_cov_by_hand() -> None:
    """Chosen tokens lose their gradient; the others are clipped at 1 + 1."""
    settings = ClipCovConfig(clip_low=1, clip_high=1)
    logprobs = torch.tensor([1.5, 1.5, 2.5]).log().requires_grad_()
    inputs = inputs_of([1, 1, 1], 2.0, logprobs=logprobs, chosen=torch.tensor([True, False, False]))
    losses = token_losses(inputs, settings)
    (gradient,) = torch.autograd.grad(losses.sum(), logprobs)
    assert losses.tolist() == pytest.approx([0, -3, -4], rel=1e-5)
    assert gradient.tolist() == pytest.approx([0, -3, 0], rel=1e-5)


def test_the_entropy_mask_takes_the_policy_gradient_and_nothing_else() -> None:
    settings = PPOConfig(entropy_mask_share=0.5, entropy_coefficient=0.1)
    inputs = inputs_of([1.0, 1.0], 2.0, in_mask=torch.tensor([True, False]))
    assert token_losses(inputs, settings).tolist() == pytest.approx([-2.07, -0.07])


def test_the_kl_to_the_reference_by_hand() -> None:
    """d = ln 2 and -ln 2: 2 - ln 2 - 1 and 1/2 + ln 2 - 1; small ones keep their digits; corrected as the loss is."""
    reference = torch.tensor([2.0, 0.5, 1.0001]).log()
    weights = torch.tensor([1.0, 3.0, 0.0])
    inputs = inputs_of([1.0, 1.0, 1.0], 0.0, reference_logprobs=reference, correction_weights=weights)
    expected = [1 - math.log(2), math.log(2) - 0.5, 5e-9]
    assert kl_to_reference(inputs).tolist() == pytest.approx(expected, rel=1e-2)
    losses = token_losses(inputs, PPOConfig(reference_kl=0.1))
    assert losses.tolist() == pytest.approx([0.1 * expected[0], 0.3 * expected[1], 0], rel=1e-5)
    assert statistics(inputs, PPOConfig(reference_kl=0.1))["reference_kl"] == pytest.approx(0.5, rel=1e-5)


def test_the_mean_of_that_estimate_is_the_kl() -> None:
    policy, reference = (torch.tensor(p, dtype=torch.float64) for p in ([0.7, 0.2, 0.1], [0.3, 0.3, 0.4]))
    inputs = inputs_of([1, 1, 1], 0.0, logprobs=policy.log(), reference_logprobs=reference.log())
    expected = float((policy * (policy / reference).log()).sum())
    assert float((policy * kl_to_reference(inputs)).sum()) == pytest.approx(expected)


POLICY_LOSSES = {name: token_loss(record) for name, record in RECORDS["objective"].items()}
TERMS = {**POLICY_LOSSES, "entropy bonus": ENTROPY_BONUS, "reference penalty": REFERENCE_PENALTY}


@pytest.mark.parametrize("name", list(TERMS))
def test_a_term_has_no_gradient_for_the_rows_that_it_leaves_out(name: str) -> None:
    """A term's claim about a row is compared with its actual gradient, with advantages of either kind."""
    terms = {"entropy_coefficient": 0.1, "reference_kl": 0.1}
    settings = objective(name if name in RECORDS["objective"] else "ppo", mini_batches=2, **terms)
    if isinstance(settings, GSPOConfig):
        settings = replace(settings, clip_low=0.05, clip_high=0.05)
    for advantage, chosen in ((0.0, False), (0.5, False), (-0.5, False), (0.0, True)):
        logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
        old = logprobs.detach() + 0.01
        inputs = inputs_of([1.0, 1.0], advantage, logprobs=logprobs, old_logprobs=old, reference_logprobs=old)
        # An entropy depends on the same weights as the log-probs do.
        inputs = replace(inputs, entropy=logprobs.square(), chosen=torch.tensor([chosen, False]))
        (gradient,) = torch.autograd.grad(TERMS[name].losses(inputs, settings).sum(), logprobs)
        assert TERMS[name].has_gradient(row(advantage=advantage), chosen) == bool(gradient.ne(0).any())


def test_rows_need_a_backward_pass_where_a_term_in_use_says_so() -> None:
    rows = [row(0, 0.0), row(1, 1.0), row(2, 0.0)]

    def indices(rows: Sequence[CreditedRow], **settings: Any) -> tuple[list[int], ...]:
        return tuple([r.index for r in some] for some, _ in split_by_gradient(rows, objective(**settings)))

    assert indices(rows) == ([1], [0, 2])
    assert indices(rows, entropy_coefficient=0.1) == ([0, 1, 2], [])
    assert indices(rows, reference_kl=0.1) == ([0, 1, 2], [])
    assert indices([rows[0], rows[2]]) == ([0], [2]), "the optimizer needs a gradient to observe"
    kl_cov = KLCovConfig(mini_batches=2)
    assert [r.index for r in split_by_gradient(rows, kl_cov, chosen={2})[0][0]] == [1, 2]


def test_rows_are_scored_before_the_update_where_something_needs_it() -> None:
    assert not scored_first(PPOConfig(reference_kl=0.1, entropy_coefficient=0.1))
    for settings in ({"mini_batches": 2}, {"loss": "clip_cov"}, {"entropy_mask_share": 0.2}):
        assert scored_first(objective(**settings)), settings


def test_row_weights_of_each_aggregation_by_hand() -> None:
    rows = [
        row(0, prompt="a", tokens=(1, 2)),
        row(1, prompt="a", tokens=(1, 2, 3, 4, 5, 6)),
        row(2, prompt="b", tokens=(1, 2, 3, 4)),
    ]
    assert row_weights(rows, "token") == row_weights(rows, "constant") == {0: 1, 1: 1, 2: 1}
    assert row_weights(rows, "group") == {0: 1 / 8, 1: 1 / 8, 2: 1 / 4}
    assert row_weights(rows, "sequence") == {0: 1 / 2, 1: 1 / 6, 2: 1 / 4}
    for aggregation, units in (("token", 12), ("group", 2), ("sequence", 3)):
        weights = row_weights(rows, aggregation)
        assert sum(weights[r.index] * r.loss_tokens for r in rows) == pytest.approx(units)


def test_a_constant_divisor_does_not_see_how_many_tokens_there_are() -> None:
    assert divisor(12.0, 3, "token", 10) == 12
    assert divisor(12.0, 3, "constant", 10) == divisor(1.0, 3, "constant", 10) == 30
    assert divisor(0.0, 3, "constant", 10) == 0, "all is masked, so there is nothing to learn from"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"loss": "kl_cov"},
            "objective.loss = 'kl_cov': with one optimizer step per batch .* gradient is that of loss = 'ppo'",
        ),
        ({"loss": "cispo"}, "objective.loss = 'cispo': .* its gradient is that of loss = 'ppo'"),
        ({**GSPO, "mini_batches": 1}, "objective.loss = 'gspo': .* its gradient is that of loss = 'ppo'"),
        ({**GSPO, "aggregation": "token"}, "objective.aggregation = 'token': must be 'sequence'"),
        ({**GSPO, "clip_high": 0.2}, "objective.clip_high = 0.2: the ratio of a sequence.* set 4e-4"),
        ({"loss": "clip_cov", "clip_cov_bounds": (5.0, 1.0)}, "objective.clip_cov_bounds = .*the first must be below"),
    ],
)
def test_what_makes_no_sense_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        objective(**settings)
