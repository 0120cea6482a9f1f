"""Corrections on log-ratios made by hand (method.md 4)."""

import math

import pytest
import torch

from threepo.config import Correction
from threepo.errors import UserError
from threepo.methods.corrections import Corrected, correct, effective_sample_share

LOG = torch.tensor(
    [
        [0.1, 0.2, 0.3],  # sum 0.6, rho 1.822: inside [0.5, 2], though
        [0.3, 0.3, 0.3],  # sum 0.9, rho 2.460: outside
        [-0.8, 0.0, 0.0],  # sum -0.8, rho 0.449: outside
        [-2.0, 1.8, 9.0],  # two tokens: sum -0.2, rho 0.819: inside, but single tokens are not
    ]
)
MASK = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 1, 1], [1, 1, 0]]).bool()


def apply(kind: str, **settings: object) -> Corrected:
    behaviour = torch.full_like(LOG, -1.5)
    return correct(behaviour + LOG, behaviour, MASK, Correction(kind=kind, **settings))


def kept_rows(result: Corrected) -> list[bool]:
    return result.kept.any(dim=1).tolist()


def test_seq_mis_keeps_rows_inside_the_bounds_and_weighs_them_by_rho() -> None:
    result = apply("seq_mis")
    assert kept_rows(result) == [True, False, False, True]
    assert result.weights[0].tolist() == pytest.approx([math.exp(0.6)] * 3, rel=1e-5)
    assert result.weights[1:3].eq(0).all()
    assert result.weights[3].tolist() == pytest.approx([math.exp(-0.2), math.exp(-0.2), 0.0], rel=1e-5)
    assert result.rho.tolist() == pytest.approx([math.exp(x) for x in (0.6, 0.9, -0.8, -0.2)], rel=1e-5)
    assert result.untouched.tolist() == [True, False, False, True]


def test_seq_mis_with_weight_one_only_masks() -> None:
    result = apply("seq_mis", weight="one")
    assert torch.equal(result.weights, result.kept.float())
    assert kept_rows(result) == [True, False, False, True]


def test_reciprocal_bounds_are_symmetric_in_the_log_and_others_are_not() -> None:
    """method.md 4: k1 bounds and rho bounds pick the same set only when reciprocal; ours are on rho."""
    assert kept_rows(apply("seq_mis", low=0.4, high=2.5)) == [True, True, True, True]
    assert kept_rows(apply("seq_mis", low=0.4, high=2.0)) == [True, False, True, True]


def test_seq_tis_truncates_from_above_only() -> None:
    """A ratio of 0.449 keeps its weight, where Seq-MIS drops the row."""
    result = apply("seq_tis", high=2.0)
    assert result.weights[:, 0].tolist() == pytest.approx(
        [math.exp(0.6), 2.0, math.exp(-0.8), math.exp(-0.2)], rel=1e-5
    )
    assert torch.equal(result.kept, MASK)
    assert result.untouched.tolist() == [True, False, True, True]


def test_token_tis_and_token_mis_act_on_single_tokens() -> None:
    truncated = apply("token_tis", high=1.3)
    assert truncated.weights[0].tolist() == pytest.approx([math.exp(0.1), math.exp(0.2), 1.3], rel=1e-5)
    assert truncated.kept.equal(MASK)
    assert truncated.untouched.tolist() == [False, False, True, False]
    masked = apply("token_mis")
    assert masked.kept[2].tolist() == [False, True, True]
    assert masked.kept[3].tolist() == [False, False, False]
    assert masked.weights[0].tolist() == pytest.approx([math.exp(x) for x in (0.1, 0.2, 0.3)], rel=1e-5)


def test_the_geometric_kind_uses_the_mean_and_not_the_sum() -> None:
    result = apply("geometric_mis")
    assert kept_rows(result) == [True, True, True, True]
    assert result.weights[1, 0].item() == pytest.approx(math.exp(0.3), rel=1e-5)
    assert result.weights[3, 0].item() == pytest.approx(math.exp(-0.1), rel=1e-5)  # over two tokens, not three


def test_none_changes_nothing() -> None:
    result = apply("none")
    assert torch.equal(result.weights, MASK.float())
    assert result.untouched.all()


@pytest.mark.parametrize("kind", ["none", "token_tis", "token_mis", "seq_tis", "seq_mis", "geometric_mis"])
def test_padding_has_no_influence(kind: str) -> None:
    behaviour = torch.full_like(LOG, -1.5)
    logprobs = behaviour + LOG
    first = correct(logprobs, behaviour, MASK, Correction(kind=kind))
    logprobs[3, 2], behaviour[3, 2] = math.nan, math.inf
    second = correct(logprobs, behaviour, MASK, Correction(kind=kind))
    assert torch.equal(first.weights, second.weights)
    assert torch.equal(first.rho, second.rho)


@pytest.mark.parametrize("kind", ["token_tis", "token_mis", "seq_tis", "seq_mis", "geometric_mis"])
def test_equal_policies_are_left_alone_and_weights_carry_no_gradient(kind: str) -> None:
    logprobs = torch.randn(4, 3, requires_grad=True)
    result = correct(logprobs, logprobs.detach().clone(), MASK, Correction(kind=kind))
    assert torch.equal(result.weights, MASK.float())
    assert result.untouched.all()
    assert not result.weights.requires_grad


def test_extreme_ratios_are_clamped() -> None:
    """exp(20) = 4.85e8 is the largest ratio there is."""
    result = correct(torch.full((1, 3), -1.0), torch.full((1, 3), -1e6), torch.ones(1, 3).bool(), Correction())
    assert result.rho.item() == pytest.approx(4.85e8, rel=1e-3)


def test_feasibility_curve_of_seq_mis() -> None:
    """method.md 4: with per-token KL k, log rho ~ N(-Tk, 2Tk) and the kept share falls as tabulated."""
    torch.manual_seed(0)
    for tk, expected in ((0.05, 0.97), (0.1, 0.87), (0.3, 0.59), (1.0, 0.30), (2.0, 0.17), (5.0, 0.05)):
        d = -tk / 50 + (2 * tk / 50) ** 0.5 * torch.randn(20_000, 50)
        result = correct(d, torch.zeros_like(d), torch.ones_like(d).bool(), Correction(kind="seq_mis"))
        assert result.untouched.double().mean().item() == pytest.approx(expected, abs=0.012)


def test_effective_sample_share_by_hand() -> None:
    assert effective_sample_share(torch.tensor([1.0, 1.0, 1.0, 1.0])) == pytest.approx(1.0)
    assert effective_sample_share(torch.tensor([1.0, 1.0, 0.0, 0.0])) == pytest.approx(0.5)
    assert effective_sample_share(torch.tensor([3.0, 1.0])) == pytest.approx(16 / 20)
    assert effective_sample_share(torch.zeros(3)) == 0.0


def test_bounds_the_wrong_way_round_are_refused() -> None:
    with pytest.raises(UserError, match=r"low = 2.0: must be below .*high = 0.5"):
        Correction(kind="seq_mis", low=2.0, high=0.5)
