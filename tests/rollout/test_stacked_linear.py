"""The compiled products: against torch's in float64, and a row's result is its own, to the last bit."""

import mmap
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from threepo.rollout import stacked_linear
from threepo.rollout.stacked_linear import LANES, pack, padded, product

CPU = torch.device("cpu")
BEST = {dtype: stacked_linear.level(dtype) for dtype in (torch.float32, torch.bfloat16)}
DTYPES = [dtype for dtype, level in BEST.items() if level]
"""Processors with matrix units have no compiled products of bfloat16."""
LEVELS = {dtype: range(1, level + 1) for dtype, level in BEST.items()}
"""The levels of stacked_linear.c: a processor that runs one of them runs the lower ones."""

pytestmark = pytest.mark.skipif(
    not stacked_linear.serves(64, torch.float32, CPU), reason="no compiled products for this processor"
)


levels = dict(BEST)
"""The levels in force, for a test to change."""


@pytest.fixture(autouse=True)
def _best_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    levels.update(BEST)
    monkeypatch.setattr(stacked_linear, "level", lambda dtype: levels.get(dtype, 0))


def packed(weights: torch.Tensor) -> torch.Tensor:
    """Weights [N, out, in] as products read them, with rubbish where panels are not full."""
    draws, outputs, inputs = weights.shape
    memory = torch.full((draws, padded(outputs), inputs), torch.nan, dtype=weights.dtype)
    memory[:, :outputs] = weights
    for draw in memory:
        pack(draw)
    return memory


def starts_of(counts: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *counts]).cumsum(0)


def by_torch(x: torch.Tensor, weights: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """The products in float64."""
    return torch.cat([rows.double() @ w.double().T for rows, w in zip(x.split(counts), weights, strict=True)])


def random(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.one_of(st.integers(0, 30), st.sampled_from([180, 193, 400])), min_size=1, max_size=5),
    st.integers(1, 9),
    st.one_of(st.integers(1, 100), st.sampled_from([256, 700])),
    st.sampled_from(DTYPES),
    st.booleans(),
    st.sampled_from([1, 2, 8]),
    st.data(),
)
def test_products_are_torchs(
    counts: list[int], chunks: int, outputs: int, dtype: torch.dtype, biased: bool, threads: int, data: st.DataObject
) -> None:
    """Any number of rows for each draw, none included; any number of outputs; every level of processors."""
    torch.set_num_threads(threads)
    levels[dtype] = data.draw(st.sampled_from(LEVELS[dtype]))
    seed, inputs = data.draw(st.integers(0, 1000)), chunks * LANES * 4 // dtype.itemsize
    x = random(sum(counts), inputs, dtype=dtype, seed=seed)
    weights = random(len(counts), outputs, inputs, dtype=dtype, seed=seed + 1)
    bias = random(len(counts), outputs, dtype=dtype, seed=seed + 2) if biased else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stacked_linear, "_SERIAL", 0)  # or products as small as these would have one thread
        y = product(x, packed(weights), bias, outputs, starts_of(counts))
    expected = by_torch(x, weights, counts)
    if bias is not None:
        expected += bias.double().repeat_interleave(torch.tensor(counts), dim=0)
    error = (y.double() - expected).abs()
    rounding = by_torch(x.abs(), weights.abs(), counts) * inputs * 2.0**-24  # of float32 sums, at worst
    if dtype == torch.bfloat16:
        rounding += expected.abs() * 2.0**-8
    assert y.dtype == dtype
    assert bool((error <= rounding + 1e-6).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rows_result_does_not_depend_on_its_company(dtype: torch.dtype) -> None:
    """The same bits alone and among others, anywhere, with one thread and with several."""
    weights = random(3, 300, 256, dtype=dtype, seed=1)
    bias = random(3, 300, dtype=dtype, seed=2)
    memory = packed(weights)
    row = random(1, 256, dtype=dtype, seed=3)
    for level in LEVELS[dtype]:
        levels[dtype] = level
        alone = product(row, memory[1:2], bias[1:2], 300, starts_of([1]))
        for count in (*range(1, 40), 200, 500):
            for threads in (1, 2):
                torch.set_num_threads(threads)
                others = random(count + 20, 256, dtype=dtype, seed=count)
                index = 7 + count * 5 // 8  # among the first, in the middle, among the last of a tile
                others[index] = row
                many = product(others, memory, bias, 300, starts_of([7, count, 13]))
                assert torch.equal(many[index : index + 1], alone)


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_that_are_none_stay_in_their_rows(dtype: torch.dtype) -> None:
    x = random(20, 64, dtype=dtype, seed=0)
    x[3, 5], x[11, 9] = torch.nan, torch.inf
    weights = random(1, 40, 64, dtype=dtype, seed=1)
    y = product(x, packed(weights), None, 40, starts_of([20]))
    assert bool(y[3].isnan().all())
    assert not bool(y[11].isfinite().any())
    others = [i for i in range(20) if i not in (3, 11)]
    assert bool(y[others].isfinite().all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 8])
def test_any_number_of_panels_is_packed(dtype: torch.dtype, threads: int) -> None:
    """More than threads and fewer, of the least rows and of long ones."""
    torch.set_num_threads(threads)
    for count, words in ((1, 16), (3, 1 << 12), (300, 48)):
        weights = random(count * LANES, words * 4 // dtype.itemsize, dtype=dtype, seed=count)
        expected = weights.view(torch.int32).view(count, LANES, words).transpose(1, 2).clone()
        pack(weights)
        assert torch.equal(stacked_linear.panels(weights), expected)


def test_rows_need_not_lie_together() -> None:
    x, weights = random(128, 9, dtype=torch.float32, seed=0).T, packed(random(2, 20, 128, dtype=torch.float32, seed=1))
    expected = product(x.contiguous(), weights, None, 20, starts_of([4, 5]))
    assert torch.equal(product(x, weights, None, 20, starts_of([4, 5])), expected)


def test_inputs_in_no_whole_chunks_are_not_served() -> None:
    assert [n for n in range(0, 65, 8) if stacked_linear.serves(n, torch.float32, CPU)] == [16, 32, 48, 64]
    assert not any(stacked_linear.serves(n, torch.bfloat16, CPU) for n in (0, 16, 48))
    assert not stacked_linear.serves(64, torch.float16, CPU)
    assert not stacked_linear.serves(64, torch.float32, torch.device("meta"))


def test_callers_in_several_threads_do_not_disturb_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two engines may work at a time, each with a team of its own."""
    monkeypatch.setattr(stacked_linear, "_SERIAL", 0)

    def caller(seed: int) -> None:
        torch.set_num_threads(2)
        counts = [20, 20 + seed]
        x = random(sum(counts), 128, dtype=torch.float32, seed=seed)
        weights = random(2, 50, 128, dtype=torch.float32, seed=seed + 1)
        y = product(x, packed(weights), None, 50, starts_of(counts))
        assert torch.allclose(y.double(), by_torch(x, weights, counts), atol=1e-4)

    with ThreadPoolExecutor(4) as callers:
        for done in [callers.submit(caller, seed) for seed in range(40)]:
            done.result()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="only Linux says how much memory a process has")
def test_threads_that_end_leave_no_memory_behind() -> None:
    """The memory that they keep for the next product is freed with them."""
    torch.set_num_threads(1)
    x, weights = torch.ones(1, 1 << 18), torch.ones(1, 16, 1 << 18)

    def pages() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1])

    def once() -> None:
        thread = threading.Thread(target=product, args=(x, weights, None, 16, starts_of([1])))
        thread.start()
        thread.join()

    once()
    before = pages()
    for _ in range(100):
        once()
    grown = (pages() - before) * mmap.PAGESIZE
    assert grown < 30 * x.nbytes, "the allocator has several heaps for threads, and each may keep what was freed"


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_packed_can_be_read_back(dtype: torch.dtype) -> None:
    """The embedding of a tied head reads its packed weights word by word."""
    weights = random(2, 50, 96, dtype=dtype, seed=0)
    words = stacked_linear.panels(packed(weights))
    ids = torch.arange(50)
    for n in range(2):
        assert torch.equal(words[n, ids // LANES, :, ids % LANES].view(dtype), weights[n])
