"""Corrections on log-ratios made by hand (method.md 4)."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from threepo.config import Correction
from threepo.errors import UserError
from threepo.objectives.corrections import CorrectionEffect, correct, effective_sample_share

LOG = torch.tensor(
    [
        *(0.1, 0.2, 0.3),  # sum 0.6, rho 1.822: inside [0.5, 2], though
        *(0.3, 0.3, 0.3),  # sum 0.9, rho 2.460: outside
        *(-0.8, 0.0, 0.0),  # sum -0.8, rho 0.449: outside
        *(-2.0, 1.8),  # sum -0.2, rho 0.819: inside, but its tokens are not
    ]
)
ROW_OF = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3])


def apply(kind: str, **settings: object) -> CorrectionEffect:
    behaviour = torch.full_like(LOG, -1.5)
    return correct(behaviour + LOG, behaviour, ROW_OF, 4, Correction(kind=kind, **settings))


def kept_rows(result: CorrectionEffect) -> list[bool]:
    return [bool(result.kept[row == ROW_OF].any()) for row in range(4)]


def test_seq_mis_keeps_rows_inside_the_bounds_and_weighs_them_by_rho() -> None:
    result = apply("seq_mis")
    assert kept_rows(result) == [True, False, False, True]
    assert result.weights.tolist() == pytest.approx([math.exp(0.6)] * 3 + [0.0] * 6 + [math.exp(-0.2)] * 2, rel=1e-5)
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
    """A ratio of 0.449 keeps its weight, where Seq-MIS masks the row."""
    result = apply("seq_tis", high=2.0)
    by_row = result.weights[[0, 3, 6, 9]].tolist()
    assert by_row == pytest.approx([math.exp(0.6), 2.0, math.exp(-0.8), math.exp(-0.2)], rel=1e-5)
    assert result.kept.all()
    assert result.untouched.tolist() == [True, False, True, True]


def test_token_tis_and_token_mis_act_on_single_tokens() -> None:
    truncated = apply("token_tis", high=1.3)
    assert truncated.weights[:3].tolist() == pytest.approx([math.exp(0.1), math.exp(0.2), 1.3], rel=1e-5)
    assert truncated.kept.all()
    assert truncated.untouched.tolist() == [False, False, True, False]
    masked = apply("token_mis")
    assert masked.kept[6:].tolist() == [False, True, True, False, False]
    assert masked.weights[:3].tolist() == pytest.approx([math.exp(x) for x in (0.1, 0.2, 0.3)], rel=1e-5)
    assert masked.untouched.tolist() == [True, True, False, False]


def test_the_geometric_kind_uses_the_mean_and_not_the_sum() -> None:
    result = apply("geometric_mis")
    assert kept_rows(result) == [True, True, True, True]
    assert result.weights[3].item() == pytest.approx(math.exp(0.3), rel=1e-5)
    assert result.weights[9].item() == pytest.approx(math.exp(-0.1), rel=1e-5)  # over two tokens, not three


def test_none_changes_nothing() -> None:
    """Its bounds belong to the other kinds and have no meaning."""
    result = apply("none", high=0.6)
    assert result.weights.eq(1).all()
    assert result.untouched.all()


def test_a_ratio_that_is_not_a_number_is_masked() -> None:
    logprobs = torch.tensor([-1.0, math.nan, -1.0])
    result = correct(logprobs, torch.full((3,), -1.0), torch.tensor([0, 0, 1]), 2, Correction(kind="seq_mis"))
    assert result.weights.tolist() == [0, 0, 1]


@pytest.mark.parametrize("kind", ["none", "token_tis", "token_mis", "seq_tis", "seq_mis", "geometric_mis"])
@given(st.data())
def test_a_row_is_corrected_alike_alone_and_with_others(kind: str, data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=5), min_size=2, max_size=5))
    settings = Correction(kind=kind)
    flat = torch.tensor([x for row in rows for x in row])
    row_of = torch.tensor([i for i, row in enumerate(rows) for _ in row])
    together = correct(flat, torch.zeros_like(flat), row_of, len(rows), settings)
    for i, row in enumerate(rows):
        alone = correct(torch.tensor(row), torch.zeros(len(row)), torch.zeros(len(row), dtype=torch.int64), 1, settings)
        assert torch.equal(alone.weights, together.weights[row_of == i])
        assert torch.equal(alone.kept, together.kept[row_of == i])
        assert alone.rho.item() == together.rho[i].item()
        assert alone.untouched.item() == together.untouched[i].item()


@pytest.mark.parametrize("kind", ["token_tis", "token_mis", "seq_tis", "seq_mis", "geometric_mis"])
def test_equal_policies_are_left_alone_and_weights_carry_no_gradient(kind: str) -> None:
    logprobs = torch.randn(len(ROW_OF), requires_grad=True)
    result = correct(logprobs, logprobs.detach().clone(), ROW_OF, 4, Correction(kind=kind))
    assert result.weights.eq(1).all()
    assert result.untouched.all()
    assert not result.weights.requires_grad


def test_extreme_ratios_are_clamped() -> None:
    """exp(20) = 4.85e8 is the largest ratio there is."""
    result = correct(torch.full((3,), -1.0), torch.full((3,), -1e6), torch.zeros(3).long(), 1, Correction())
    assert result.rho.item() == pytest.approx(4.85e8, rel=1e-3)


def test_feasibility_curve_of_seq_mis() -> None:
    """Price and Seq-MIS: with per-token KL k, log rho ~ N(-Tk, 2Tk), and the share that is kept falls with Tk."""
    torch.manual_seed(0)
    row_of = torch.arange(20_000).repeat_interleave(50)
    for tk, expected in ((0.05, 0.97), (0.1, 0.87), (0.3, 0.59), (1.0, 0.30), (2.0, 0.17), (5.0, 0.05)):
        d = -tk / 50 + (2 * tk / 50) ** 0.5 * torch.randn(20_000 * 50)
        result = correct(d, torch.zeros_like(d), row_of, 20_000, Correction(kind="seq_mis"))
        assert result.untouched.double().mean().item() == pytest.approx(expected, abs=0.012)


def test_effective_sample_share_by_hand() -> None:
    assert effective_sample_share(torch.tensor([1.0, 1.0, 1.0, 1.0])) == pytest.approx(1.0)
    assert effective_sample_share(torch.tensor([1.0, 1.0, 0.0, 0.0])) == pytest.approx(0.5)
    assert effective_sample_share(torch.tensor([3.0, 1.0])) == pytest.approx(16 / 20)
    assert effective_sample_share(torch.zeros(3)) == 0.0


def test_bounds_the_wrong_way_round_are_refused() -> None:
    with pytest.raises(UserError, match=r"low = 2.0: must be below .*high = 0.5"):
        Correction(kind="seq_mis", low=2.0, high=0.5)


def by_row(log_ratio: torch.Tensor, row_of: torch.Tensor, rows: int, settings: Correction) -> torch.Tensor:
    """A user's own: rows 0 to 3 are left alone, masked, halved and doubled."""
    assert log_ratio.tolist() == pytest.approx(LOG.tolist(), abs=1e-6)
    assert rows == 4
    return torch.tensor([1.0, 0.0, 0.5, settings.high])[row_of]


def test_a_users_own_correction_gives_the_weights() -> None:
    result = apply("test_corrections:by_row")
    assert result.weights.tolist() == [1.0] * 3 + [0.0] * 3 + [0.5] * 3 + [2.0] * 2
    assert kept_rows(result) == [True, False, True, True]
    assert torch.equal(result.counted, result.kept)
    assert result.untouched.tolist() == [True, False, False, False]
