"""Work in threads: in as many as were asked for, from several callers at a time, and nothing is left running."""

import gc
import itertools
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import FrameType
from typing import Any

import pytest

from threepo import compiled
from threepo.compiled import in_threads


@pytest.mark.parametrize("threads", [2, 3, 8])
def test_work_is_done_in_so_many_threads_at_a_time(threads: int) -> None:
    together = threading.Barrier(threads)
    places: list[int] = []

    def work() -> None:
        places.append(together.wait(timeout=10))  # an error unless so many wait at a time

    in_threads(threads, work)
    assert sorted(places) == list(range(threads))


def test_callers_in_several_threads_do_not_disturb_each_other() -> None:
    def caller(seed: int) -> None:
        for i in range(100):
            threads = 2 + (seed + i) % 7  # the pool is exchanged under the other callers' feet
            calls: list[int] = []
            in_threads(threads, partial(calls.append, i))
            assert len(calls) == threads

    with ThreadPoolExecutor(4) as callers:
        for done in [callers.submit(caller, seed) for seed in range(4)]:
            done.result()


def test_an_error_waits_for_the_others() -> None:
    caller, started, finished = threading.get_ident(), threading.Event(), threading.Event()

    def work() -> None:
        if threading.get_ident() != caller:
            started.set()
            assert not finished.wait(0.05)
            finished.set()
            return
        assert started.wait(10)
        raise MemoryError

    with pytest.raises(MemoryError):
        in_threads(2, work)
    assert finished.is_set()


def test_an_error_of_another_thread_is_raised_here() -> None:
    caller = threading.get_ident()

    def work() -> None:
        if threading.get_ident() != caller:
            raise MemoryError

    with pytest.raises(MemoryError):
        in_threads(2, work)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_leaves_no_work_behind_wherever_it_comes(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Work that goes on would write into memory that was given back, or into weights that were just restored."""
    interrupts, late = 0, []
    monkeypatch.setattr(compiled, "_pool", None)  # that threads must be started is part of it
    request.addfinalizer(gc.enable)
    gc.disable()  # finalizers pass over interrupts
    for moment in itertools.count():
        over, left = threading.Event(), moment

        def work(over: threading.Event = over) -> None:
            main = threading.current_thread() is threading.main_thread()
            over.wait(0.001 if main else 0.002)
            late.append(over.is_set())

        def interrupt(frame: FrameType, event: str, argument: object) -> Any:
            nonlocal left
            left -= 1
            if left == -1:
                signal.raise_signal(signal.SIGINT)
            return interrupt

        before = sys.gettrace()
        try:
            sys.settrace(interrupt)
            in_threads(3, work)
        except KeyboardInterrupt:
            interrupts += 1
        finally:
            sys.settrace(before)
            over.set()
            if compiled._pool is not None:
                compiled._pool.shutdown()
                compiled._pool = None
        if left >= 0:  # no line was left to interrupt
            break
    time.sleep(0.1)  # for what should not be there
    assert interrupts == moment
    assert not any(late)


def test_the_kernels_work_in_a_forked_process() -> None:
    """Threads do not survive a fork: a team that was at work before must not be waited for after it."""
    program = """
import os, signal, torch
from threepo.posterior import kernels
from threepo.types import Draw

torch.set_num_threads(2)
before = kernels.normal(Draw(0, 0, 0), "weight", 0, 1 << 20)
child = os.fork()
if not child:
    signal.alarm(30)  # whoever waits forever is not left behind
after = kernels.normal(Draw(0, 0, 0), "weight", 0, 1 << 20)
same = bool((before.numpy() == after.numpy()).all())
if not child:
    os._exit(0 if same else 1)
assert same and os.waitpid(child, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-W", "ignore::DeprecationWarning", "-c", program], check=True, timeout=60)
