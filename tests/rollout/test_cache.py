"""The cache's attention, compiled and in torch, against torch's over keys and values that lie in order."""

from collections.abc import Iterator
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from threepo.errors import UserError
from threepo.rollout import cache, decode_attention
from threepo.rollout.cache import Decode, Prefill, RowCache

BORDERS = [1, 2, 15, 16, 17, 31, 32, 33, 100]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def check(
    shape: tuple[int, int, int, int], key: int, value: int, length: int, window: int, dtype: torch.dtype, seed: int = 0
) -> RowCache:
    """Read prompts into rows of many lengths below `length`, then one token more, and compare."""
    draws, width, key_heads, group = shape
    rows, heads = draws * width, key_heads * group
    generator = torch.Generator().manual_seed(seed)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(dtype)

    rows_cache = RowCache(rows + 1, length)  # one slot more than is in use
    slots = torch.randperm(rows, generator=generator)
    q, k, v = (
        random(rows, heads, length, key),
        random(rows, key_heads, length, key),
        random(rows, key_heads, length, value),
    )
    lengths = torch.randint(length, (rows,), generator=generator)
    lengths[0] = length - 1
    if length > 1:
        reading = Prefill(rows_cache, torch.arange(rows), slots)
        with patch("threepo.rollout.cache.repeats_heads", lambda q, k: q.shape[1] > k.shape[1]):  # as on a GPU
            apart = Prefill(RowCache(rows + 1, length), torch.arange(rows), slots).attend(
                0, q[:, :, :-1], k[:, :, :-1], v[:, :, :-1], key**-0.5, window
            )
        out = reading.attend(0, q[:, :, :-1], k[:, :, :-1], v[:, :, :-1], key**-0.5, window)
        for row in range(rows):
            expected = reference(q[row, :, -2], k[row, :, :-1], v[row, :, :-1], window)
            assert (out[row, -1].float() - expected).abs().max() < TOLERANCE[dtype]
            assert (apart[row, -1].float() - expected).abs().max() < TOLERANCE[dtype]
    q, new_k, new_v = random(rows, heads, 1, key), random(rows, key_heads, 1, key), random(rows, key_heads, 1, value)
    out = Decode(rows_cache, lengths, slots, length - 1).attend(0, q, new_k, new_v, key**-0.5, window)
    for row, before in enumerate(lengths.tolist()):
        keys = torch.cat([k[row, :, :before], new_k[row]], dim=1)
        values = torch.cat([v[row, :, :before], new_v[row]], dim=1)
        expected = reference(q[row, :, 0], keys, values, window)
        assert (out[row, 0].float() - expected).abs().max() < TOLERANCE[dtype]
    return rows_cache


def reference(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int) -> torch.Tensor:
    """The last token's attention [H, D] to the tokens that its window reaches."""
    near = keys[:, -window:], values[:, -window:]  # a window of 0 is all
    keys, values = (x.float().unsqueeze(0) for x in near)
    return F.scaled_dot_product_attention(q.float()[None, :, None], keys, values, enable_gqa=True)[0, :, 0]


@pytest.mark.usefixtures("threads")
@pytest.mark.skipif(decode_attention.LIBRARY.loaded is None, reason="no compiled attention here")
@settings(max_examples=40, deadline=None)
@given(
    st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.integers(1, 9)),
    st.integers(1, 16),
    st.integers(1, 16),
    st.sampled_from(BORDERS),
    st.sampled_from([0, *BORDERS, 1000]),
    st.sampled_from(list(TOLERANCE)),
    st.sampled_from([1, 2, 8]),
    st.integers(0, 1000),
)
def test_the_compiled_kernel_attends_like_torch(
    shape: tuple[int, int, int, int],
    key: int,
    value: int,
    length: int,
    window: int,
    dtype: torch.dtype,
    threads: int,
    seed: int,
) -> None:
    """Heads of every width that it serves, keys and values of different ones, and groups of every size."""
    torch.set_num_threads(threads)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_attention, "SERIAL", 0)  # or rows as few as these would have one thread
        assert check(shape, 16 * key, 16 * value, length, window, dtype, seed).layers[0].blocked


@settings(max_examples=30, deadline=None)
@given(
    st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.integers(1, 5)),
    st.sampled_from([8, 12, 24]),
    st.sampled_from(BORDERS),
    st.sampled_from([0, *BORDERS, 1000]),
    st.sampled_from(list(TOLERANCE)),
)
def test_what_the_kernel_does_not_serve_is_done_in_torch(
    shape: tuple[int, int, int, int], width: int, length: int, window: int, dtype: torch.dtype
) -> None:
    assert not check(shape, width, width, length, window, dtype).layers[0].blocked


def test_layers_may_have_heads_of_different_widths() -> None:
    """Each layer decides for itself whether the kernel serves it."""
    rows = RowCache(2, 20)
    first, second = torch.randn(1, 1, 5, 16), torch.randn(1, 1, 5, 12)
    for layer, x in enumerate((first, second)):
        Prefill(rows, torch.tensor([0, 0]), torch.tensor([0, 1])).attend(layer, x, x, x, 0.25, 0)
    rows.move(torch.tensor([1]), torch.tensor([0]), 5)
    lengths, slots = torch.tensor([5, 5]), torch.tensor([1, 0])
    for layer, x in enumerate((first, second)):
        new = torch.randn(2, 1, 1, x.shape[-1])
        out = Decode(rows, lengths, slots, 5).attend(layer, new, new, new, x.shape[-1] ** -0.5, 0)
        for row in range(2):
            every = torch.cat([x[0], new[row]], dim=1)
            assert torch.allclose(out[row, 0], reference(new[row, :, 0], every, every, 0), atol=1e-5)
    assert not rows.layers[1].blocked
    assert rows.layers[0].blocked == cache.decode_attention.serves(first, first)


@pytest.mark.parametrize("name", ["softcap", "s_aux", "position_bias", "sinks"])
def test_attention_of_another_kind_is_refused(name: str) -> None:
    x, rows = torch.zeros(1, 4, 1, 16), Decode(RowCache(1, 16), torch.tensor([0]), torch.tensor([0]), 0)
    with pytest.raises(UserError, match=f"does not support attention with {name}; use engine.kind = 'vllm'"):
        cache.attend(SimpleNamespace(layer_idx=0), x, x, x, None, rows=rows, **{name: 50.0})
