"""The sampled distribution is the one that is reported."""

import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st

from threepo.posterior.noise import address_key, uniforms
from threepo.rollout.sampling import BLOCK, processed_logprobs, sample_tokens

LOGITS = torch.tensor([[2.0, 1.0, 0.5, 0.0, -1.0, -3.0]])
SETTINGS = [(1.0, 1.0, 0), (0.6, 1.0, 0), (1.4, 0.9, 0), (1.0, 1.0, 3), (0.8, 0.7, 4)]


@pytest.mark.parametrize(("temperature", "top_p", "top_k"), SETTINGS)
def test_frequencies_match_the_reported_probabilities(temperature: float, top_p: float, top_k: int) -> None:
    n = 40_000
    logprobs = processed_logprobs(LOGITS, temperature, top_p, top_k)
    u = uniforms([address_key("chi", i) for i in range(n)], 0, 1)[:, 0]
    counts = sample_tokens(logprobs.expand(n, -1), u).bincount(minlength=6)
    p = logprobs[0].double().exp()
    assert counts[p == 0].eq(0).all()
    assert p.sum().item() == pytest.approx(1.0)
    expected = n * p[p > 0] / p.sum()
    assert scipy.stats.chisquare(counts[p > 0], expected).pvalue > 1e-3


def test_frequencies_match_in_a_large_vocabulary() -> None:
    """Tokens are chosen in two steps there, a block first; blocks 1 and 3 of this one have no probability at all."""
    n, size = 40_000, 4 * BLOCK + 7
    p = torch.zeros(size, dtype=torch.float64)
    tokens = torch.tensor([0, 1, BLOCK - 1, 2 * BLOCK, 2 * BLOCK + BLOCK // 2, 3 * BLOCK - 1, 4 * BLOCK, size - 1])
    p[tokens] = torch.tensor([0.05, 0.2, 0.1, 0.25, 0.1, 0.05, 0.15, 0.1], dtype=torch.float64)
    u = uniforms([address_key("chi", i) for i in range(n)], 0, 1)[:, 0]
    counts = torch.cat([sample_tokens(p.float().log().expand(len(part), -1), part) for part in u.split(1000)]).bincount(
        minlength=size
    )
    assert counts.sum() == n
    assert counts[p == 0].eq(0).all()
    assert scipy.stats.chisquare(counts[tokens], n * p[tokens]).pvalue > 1e-3


def test_one_block_is_inverse_transform_by_hand() -> None:
    logprobs = torch.tensor([0.25, 0.5, 0.25]).log().expand(4, -1)
    assert sample_tokens(logprobs, torch.tensor([0.1, 0.3, 0.7, 0.8])).tolist() == [0, 1, 1, 2]


def test_top_k_and_top_p_by_hand() -> None:
    p = LOGITS.softmax(-1)[0].tolist()
    top2 = processed_logprobs(LOGITS, 1.0, 1.0, 2)[0].exp()
    assert top2.tolist() == pytest.approx([p[0] / (p[0] + p[1]), p[1] / (p[0] + p[1]), 0, 0, 0, 0])
    # The first two hold 0.77 of the mass: enough for 0.75, not for 0.8.
    assert processed_logprobs(LOGITS, 1.0, 0.75, 0)[0].isfinite().sum() == 2
    assert processed_logprobs(LOGITS, 1.0, 0.8, 0)[0].isfinite().sum() == 3
    # Of the three that top-k leaves they hold 0.86.
    assert processed_logprobs(LOGITS, 1.0, 0.8, 3)[0].isfinite().sum() == 2
    assert processed_logprobs(LOGITS, 1.0, 1e-6, 0)[0].isfinite().sum() == 1


def test_ties_at_the_cut_leave_exactly_k() -> None:
    assert processed_logprobs(torch.zeros(1, 10), 1.0, 1.0, 3).isfinite().sum() == 3
    assert processed_logprobs(torch.zeros(1, 10), 1.0, 0.3, 0).isfinite().sum() in (3, 4)  # 0.3 in float32


def test_greedy_reports_temperature_one() -> None:
    assert torch.equal(processed_logprobs(LOGITS, 0.0, 0.5, 2), LOGITS.log_softmax(-1))


@given(st.floats(0, 1, exclude_max=True), st.integers(0, 5), st.integers(0, 5))
def test_a_token_without_probability_is_never_chosen(u: float, first: int, second: int) -> None:
    logprobs = torch.full((1, 6), float("-inf"))
    logprobs[0, first] = logprobs[0, second] = torch.tensor(0.5).log()
    logprobs = logprobs.log_softmax(-1)
    assert int(sample_tokens(logprobs, torch.tensor([u], dtype=torch.float64))) in (first, second)


def test_rounding_chooses_no_token_without_probability() -> None:
    """A block's sum may round to more than its tokens one by one; the largest uniform then lies behind the last."""
    generator = torch.Generator().manual_seed(0)
    logits = 12 * torch.randn(200, 2 * BLOCK, generator=generator)
    logits[:, BLOCK // 2 : BLOCK], logits[:, BLOCK + BLOCK // 2 :] = -torch.inf, -torch.inf
    logits[100:, BLOCK:] = -torch.inf
    logprobs = logits.log_softmax(-1)
    chosen = sample_tokens(logprobs, torch.full((200,), 1 - 2.0**-53, dtype=torch.float64))
    assert int(chosen.max()) < 2 * BLOCK
    assert logprobs.gather(1, chosen.unsqueeze(1)).isfinite().all()
