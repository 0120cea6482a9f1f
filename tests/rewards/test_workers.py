"""Processes that can be killed: whatever one of them does costs one item, and nothing is lost."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from threepo.errors import UserError
from threepo.rewards.workers import Outcome, WorkerPool

PATIENCE = 60.0
"""Seconds after which a test is not slow, but stuck."""


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    with WorkerPool("serving:serve", timeout_s=0.5, memory_mib=300, workers=2) as pool:
        yield pool


def is_running(process: int) -> bool:
    """Whether there is such a process; one that has ended and that nobody has asked about does not count."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ends(process: int) -> bool:
    """Whether a process ends soon."""
    until = time.monotonic() + PATIENCE
    while is_running(process) and time.monotonic() < until:
        time.sleep(0.01)
    return not is_running(process)


@pytest.mark.parametrize(
    ("item", "failure"),
    [
        ("hang", "time-out"),
        ("hold on to the interpreter", "time-out"),
        ("crash", "killed by SIGSEGV"),
        ("eat", "memory"),
        ("leave", "ended with exit status 3"),
        ("fail", "ValueError: two lines \ud800"),
        ("say nothing that JSON can", "TypeError: Object of type set is not JSON serializable"),
    ],
)
def test_a_bad_item_costs_itself_only(pool: WorkerPool, item: str, failure: str) -> None:
    assert pool.map(["before", item, "after"]) == [Outcome("before"), Outcome(failure=failure), Outcome("after")]


def test_nothing_is_lost_among_many_bad_ones(pool: WorkerPool) -> None:
    bad = {100: "crash", 101: "leave", 500: "hang", 501: "eat", 900: "fail", 1999: "crash"}
    outcomes = pool.map([bad.get(place, place) for place in range(2000)])
    assert [outcome.value for outcome in outcomes] == [None if place in bad else place for place in range(2000)]
    assert [place for place, outcome in enumerate(outcomes) if outcome.failure] == list(bad)


def test_large_and_strange_items_go_through(pool: WorkerPool) -> None:
    items = ["x" * 5_000_000, "\ud800\0\u202e", "", None, 10**1000, {"a": [1.5]}]
    assert [outcome.value for outcome in pool.map(items * 2)] == items * 2


def test_no_process_is_started_before_it_is_needed(pool: WorkerPool) -> None:
    assert pool.map([]) == []
    assert pool._workers == []
    pool.map([1])
    assert len(pool._workers) == 1


def test_a_process_that_ended_between_two_calls_costs_nothing(pool: WorkerPool) -> None:
    first = pool.map(["who"])[0].value
    os.kill(first, signal.SIGKILL)
    assert ends(first)
    assert pool.map(["well?"]) == [Outcome("well?")]


def test_processes_end_with_the_pool(pool: WorkerPool) -> None:
    named = [outcome.value for outcome in pool.map(["who"] * 50)]
    pool.close()
    assert all(map(ends, set(named)))
    assert pool.map([1]) == [Outcome(1)], "a closed pool starts again when it is asked"


def test_processes_end_when_the_pool_is_collected() -> None:
    pool = WorkerPool("serving:serve", timeout_s=10, memory_mib=300, workers=1)
    process = pool.map(["who"])[0].value
    assert is_running(process)
    del pool
    assert ends(process)


@pytest.mark.parametrize("last", ["'hang'", "'hold on to the interpreter'"])
def test_processes_end_with_a_parent_that_is_killed(last: str) -> None:
    program = (
        "from threepo.rewards.workers import WorkerPool\n"
        "pool = WorkerPool('serving:serve', timeout_s=1000, memory_mib=300, workers=1)\n"
        f"print(pool.map(['who'])[0].value, flush=True)\npool.map([{last}])"
    )
    path = os.pathsep.join(filter(None, sys.path))
    parent = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path}
    )
    assert parent.stdout is not None
    with parent.stdout:
        process = int(parent.stdout.readline())
    time.sleep(0.3)  # let it begin with the second item; ending before is no easier
    assert is_running(process)
    parent.kill()
    parent.wait()
    assert ends(process)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_leaves_a_pool_that_works() -> None:
    with WorkerPool("serving:serve", timeout_s=1000, memory_mib=300, workers=1) as pool:
        process = pool.map(["who"])[0].value
        timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            pool.map(["hang", 1])
        assert ends(process)
        assert pool.map([2]) == [Outcome(2)]


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_is_heard_though_it_wakes_nobody() -> None:
    """As one that comes just before the wait begins: here another thread gets the signal, so the wait goes on."""
    with WorkerPool("serving:serve", timeout_s=1000, memory_mib=300, workers=1) as pool:
        process = pool.map(["who"])[0].value
        woken = threading.Timer(PATIENCE, os.kill, (process, signal.SIGKILL))
        woken.start()
        threading.Timer(0.3, lambda: signal.pthread_kill(threading.get_ident(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            pool.map(["hang"])
        in_time = woken.is_alive()
        woken.cancel()
        assert in_time, "only the end of the process has ended the wait"


def test_threads_take_turns(pool: WorkerPool) -> None:
    results: dict[int, list[Outcome]] = {}
    threads = [
        threading.Thread(target=lambda n=n: results.update({n: pool.map([n] * 200)}))  # type: ignore[misc]
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {n: [Outcome(n)] * 200 for n in range(8)}


def test_a_fork_has_processes_of_its_own(pool: WorkerPool) -> None:
    ours = pool.map(["who"])[0].value
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:  # must not return into pytest
        os.write(writer, str(pool.map(["who"])[0].value).encode())
        pool.close()
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        theirs = int(pipe.read())
    assert os.waitpid(child, 0)[1] == 0
    assert theirs != ours
    assert pool.map(["who"])[0].value == ours


def test_what_does_not_start_says_why() -> None:
    with (
        WorkerPool("serving:refuse", timeout_s=1, memory_mib=300) as pool,
        pytest.raises(RuntimeError, match=r"(?s)serving:refuse did not start \(ended with.*no such luck"),
    ):
        pool.map([1])
    with (
        WorkerPool("serving:serve", timeout_s=1, memory_mib=20) as pool,
        pytest.raises(UserError, match=r"memory_mib = 20: is too little .* needs \d+ or more"),
    ):
        pool.map([1])
