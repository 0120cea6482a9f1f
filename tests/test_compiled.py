"""Work in threads: every piece once, from several callers at a time, and nothing is left running."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from threepo.compiled import in_threads


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def covered(count: int, unit: int, at_least: int = 1) -> None:
    pieces: list[tuple[int, int]] = []

    def work(first: int, size: int) -> int:
        pieces.append((first, size))
        return size

    assert in_threads(count, unit, work, at_least=at_least) == count
    assert sorted(i for first, size in pieces for i in range(first, first + size)) == list(range(count))
    assert all(first % unit == 0 for first, _ in pieces)


@given(st.integers(1, 100), st.integers(1, 20), st.integers(1, 40), st.sampled_from([1, 2, 3, 8]))
def test_every_piece_is_done_once(count: int, unit: int, at_least: int, threads: int) -> None:
    torch.set_num_threads(threads)
    covered(count, unit, at_least)


def test_callers_in_several_threads_do_not_disturb_each_other() -> None:
    def caller(seed: int) -> None:
        for i in range(100):
            torch.set_num_threads(1 + (seed + i) % 8)  # the pool is exchanged under the other callers' feet
            covered(1 + (7 * i + seed) % 50, 1 + i % 3)

    with ThreadPoolExecutor(4) as callers:
        for done in [callers.submit(caller, seed) for seed in range(4)]:
            done.result()


def test_an_error_waits_for_the_others() -> None:
    torch.set_num_threads(2)
    started, finished = threading.Event(), threading.Event()

    def work(first: int, size: int) -> int:
        if first:
            started.set()
            assert not finished.wait(0.05)
            finished.set()
            return 0
        assert started.wait(10)
        raise MemoryError

    with pytest.raises(MemoryError):
        in_threads(2, 1, work)
    assert finished.is_set()
