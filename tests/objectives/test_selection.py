"""Choices of tokens, by hand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from threepo.config.objective import ClipCovConfig, KLCovConfig, PPOConfig
from threepo.objectives.selection import (
    ENTROPY_STEP,
    ChoiceInputs,
    highest_entropy,
    largest_covariance,
    random_in_bounds,
)


def scores(count: int, **fields: list[float]) -> ChoiceInputs:
    """Tokens that are all kept, with these scores; the others are 0."""
    values = {
        "logprobs": [0.0] * count,
        "entropy": [0.0] * count,
        "advantages": [0.0] * count,
        "uniforms": [0.0] * count,
    }
    tensors = {name: torch.tensor(fields.get(name, default)) for name, default in values.items()}
    return ChoiceInputs(**tensors, kept=torch.tensor(fields.get("kept", [1.0] * count)).bool())


def test_the_covariance_is_centred_on_the_tokens_that_are_kept() -> None:
    """The kept tokens have advantages 1, -1, 3 of mean 1, log-probs -1, -2, -6 of mean -3."""
    found = scores(4, advantages=[1, -1, 3, 99], logprobs=[-1, -2, -6, -99], kept=[1, 1, 1, 0]).covariance()
    assert found[:3].tolist() == [0.0, -2.0, -6.0]


def test_kl_cov_chooses_the_largest_covariances() -> None:
    """Products with means 0: 2, 1, -3 and 0; half of four are two."""
    some = scores(4, advantages=[2, 1, -3, 0], logprobs=[1, 1, 1, -3])
    assert largest_covariance(some, KLCovConfig(mini_batches=2, kl_cov_share=0.5)).tolist() == [
        True,
        True,
        False,
        False,
    ]
    assert largest_covariance(some, KLCovConfig(mini_batches=2, kl_cov_share=0.001)).tolist() == [
        True,
        False,
        False,
        False,
    ]


@pytest.mark.parametrize("advantage", [0.0, 0.1])
def test_kl_cov_chooses_nothing_where_every_covariance_is_0(advantage: float) -> None:
    """Advantages of what a correction masks do not matter."""
    some = scores(4, advantages=[*[advantage] * 3, 2], logprobs=[-1, -2, -3, -4], kept=[1, 1, 1, 0])
    assert not largest_covariance(some, KLCovConfig(mini_batches=2, kl_cov_share=1.0)).any()


def test_the_entropy_mask_keeps_the_highest() -> None:
    some = scores(5, entropy=[0.1, 0.9, 0.5, 0.90001, 2.0], kept=[1, 1, 1, 1, 0])
    assert highest_entropy(some, PPOConfig(entropy_mask_share=0.5)).tolist() == [False, True, False, True, False]
    assert highest_entropy(some, PPOConfig(entropy_mask_share=0.25)).tolist() == [
        False,
        True,
        False,
        False,
        False,
    ]


def test_clip_cov_chooses_by_chance_within_the_bounds() -> None:
    """Covariances 2, 6, 3, 4, 15 and 15, three of them within the bounds; the smallest random numbers are chosen."""
    advantages, logprobs = [2.0, 6, 3, 4, -7.5, -7.5], [1.0, 1, 1, 1, -2, -2]
    some = scores(6, advantages=advantages, logprobs=logprobs, uniforms=[0.6, 0.1, 0.5, 0.2, 0.0, 0.0])
    assert some.covariance().tolist() == [2, 6, 3, 4, 15, 15]
    chosen = [random_in_bounds(some, ClipCovConfig(clip_cov_share=share)).tolist() for share in (0.01, 0.4, 1.0)]
    assert chosen[0] == [False, False, False, True, False, False]
    assert chosen[1] == [False, False, True, True, False, False]
    assert chosen[2] == [True, False, True, True, False, False]


def test_nothing_is_chosen_where_nothing_can_be() -> None:
    nothing = scores(3, kept=[0, 0, 0])
    assert not largest_covariance(nothing, KLCovConfig(mini_batches=2)).any()
    assert not highest_entropy(nothing, PPOConfig()).any()
    assert not random_in_bounds(nothing, ClipCovConfig()).any()


@given(st.lists(st.tuples(st.floats(0, 3, width=32), st.booleans()), min_size=1, max_size=30), st.floats(0.01, 1))
def test_the_mask_is_the_share_of_kept_tokens_and_none_outside_is_higher(
    tokens: list[tuple[float, bool]], share: float
) -> None:
    entropy, kept = zip(*tokens, strict=True)
    mask = highest_entropy(
        scores(len(tokens), entropy=list(entropy), kept=list(kept)), PPOConfig(entropy_mask_share=share)
    )
    inside = [e for e, chosen in zip(entropy, mask.tolist(), strict=True) if chosen]
    outside = [e for (e, k), chosen in zip(tokens, mask.tolist(), strict=True) if k and not chosen]
    assert len(inside) == (max(1, int(share * sum(kept))) if any(kept) else 0)
    assert not outside or max(outside) <= min(inside) + ENTROPY_STEP
