"""Processes that can be killed: a bad item costs only itself, and no process outlives its owner."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from threepo.errors import UserError
from threepo.workers import Outcome, Process, WorkerPool, cores

PATIENCE = 60.0
"""Seconds after which a test is stuck, and not slow."""


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    with closing(WorkerPool("serving:serve", timeout_s=1, memory_mib=500, workers=2)) as pool:
        yield pool


def test_ranks_of_a_machine_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = cores()
    assert alone >= 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert cores() == max(1, alone // 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000")
    assert cores() == 1


@pytest.mark.skipif(sys.platform != "linux", reason="has no control groups")
def test_a_limit_of_processor_time_counts_as_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a container: half of a core here, within a job of three."""
    for file, text in {
        "proc/self/cgroup": "0::/job/step\n",
        "sys/fs/cgroup/job/cpu.max": "300000 100000\n",
        "sys/fs/cgroup/job/step/cpu.max": "50000 100000\n",
    }.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(64))
    assert cores() == 64
    monkeypatch.setattr("threepo.workers.Path", lambda path: tmp_path / path.strip("/"))
    assert cores() == 1
    (tmp_path / "sys/fs/cgroup/job/step/cpu.max").write_text("max 100000\n")
    assert cores() == 3


def is_running(process: int) -> bool:
    """True if there is such a process; a zombie does not count."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ends(process: int) -> bool:
    """True if a process ends soon."""
    until = time.monotonic() + PATIENCE
    while is_running(process) and time.monotonic() < until:
        time.sleep(0.01)
    return not is_running(process)


def run(pool: WorkerPool, *items: object) -> list[Outcome]:
    """The outcomes of items of one part."""
    return pool.map([(item,) for item in items])


def start(folder: Path, program: str) -> subprocess.Popen[str]:
    """A script that runs as the main module of a process of its own."""
    (folder / "script.py").write_text(program)
    path = os.pathsep.join(filter(None, sys.path))
    return subprocess.Popen(
        [sys.executable, folder / "script.py"],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
        start_new_session=True,
    )


@pytest.mark.parametrize(
    ("item", "failure"),
    [
        ("hang", "time-out"),
        ("hold on to the interpreter", "time-out"),
        ("crash", "killed by SIGSEGV"),
        ("kill", "killed by SIGKILL"),
        ("eat", "memory"),
        ("leave", "exit status 3"),
        ("exit", "SystemExit: 4"),
        ("fail", "ValueError: two lines \ud800"),
    ],
)
def test_a_bad_item_costs_itself_only(pool: WorkerPool, item: str, failure: str) -> None:
    assert run(pool, "before", item, "after") == [Outcome("before"), Outcome(failure=failure), Outcome("after")]
    assert run(pool, "next") == [Outcome("next")]


def test_nothing_is_lost_among_many_bad_items(pool: WorkerPool) -> None:
    bad = {100: "crash", 101: "leave", 500: "hang", 501: "eat", 900: "fail", 1999: "crash"}
    outcomes = run(pool, *(bad.get(i, i) for i in range(2000)))
    assert [outcome.value for outcome in outcomes] == [None if i in bad else i for i in range(2000)]
    assert [i for i, outcome in enumerate(outcomes) if outcome.failure] == list(bad)


def test_large_items_and_strange_text_go_through(pool: WorkerPool) -> None:
    items = ["x" * 5_000_000, "\ud800\0\u202e", ""]
    assert [outcome.value for outcome in run(pool, *items)] == items


def test_processes_start_when_they_are_needed() -> None:
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    before = children.read_text()
    with closing(WorkerPool("serving:serve", timeout_s=1, memory_mib=500, workers=4)) as pool:
        assert pool.map([]) == []
        assert children.read_text() == before
        assert len({outcome.value for outcome in run(pool, "who")}) == 1


def test_processes_that_ended_between_two_calls_cost_nothing() -> None:
    pool = WorkerPool("serving:serve", timeout_s=1, memory_mib=500, workers=1)
    for wait in (0.0, 0.3):  # at once, and a moment later
        first = run(pool, "who")[0].value
        os.kill(first, signal.SIGKILL)
        assert ends(first)
        time.sleep(wait)
        items = [f"{i} is well" for i in range(3000)]  # more than a pipe holds
        assert [outcome.value for outcome in run(pool, *items)] == items


def test_processes_end_with_the_pool() -> None:
    pool = WorkerPool("serving:serve", timeout_s=10, memory_mib=500, workers=1)
    first = run(pool, "who")[0].value
    pool.close()
    assert ends(first)
    second = run(pool, "who")[0].value  # a closed pool starts again
    del pool
    assert ends(second)


@pytest.mark.parametrize("last", ["'hang'", "'hold on to the interpreter'"])
def test_processes_end_with_an_owner_that_is_killed(last: str, tmp_path: Path) -> None:
    parent = start(
        tmp_path,
        "from threepo.workers import WorkerPool\n"
        "pool = WorkerPool('serving:serve', timeout_s=1000, memory_mib=500, workers=1)\n"
        f"print(pool.map([('who',)])[0].value, flush=True)\npool.map([({last},)])",
    )
    assert parent.stdout is not None
    with parent.stdout:
        process = int(parent.stdout.readline())
    time.sleep(0.5)  # let it begin with the second item; to end before is no harder
    assert is_running(process)
    parent.kill()
    parent.wait()
    assert ends(process)


def test_a_script_without_a_guard_is_not_run_again(tmp_path: Path) -> None:
    program = (
        "print('started')\nfrom threepo.workers import WorkerPool\n"
        "pool = WorkerPool('serving:serve', timeout_s=10, memory_mib=500, workers=2)\n"
        "print(*(outcome.value for outcome in pool.map([('a',), ('b',)])), __import__('__main__').pool is pool)"
    )
    assert start(tmp_path, program).communicate(timeout=PATIENCE)[0] == "started\na b True\n"


def test_two_threads_may_close_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an interrupt, one stops the pool while the other sees that the process has ended."""
    process = Process("import time; time.sleep(1000)", os.environ)
    close = process.connection._close  # type: ignore[attr-defined]

    def slowly() -> None:
        close()  # raises if it is closed
        time.sleep(0.2)

    monkeypatch.setattr(process.connection, "_close", slowly)
    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(process.close) for _ in range(2)]:
            done.result()  # raises what the thread has raised
    assert not process.is_running()


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_leaves_a_pool_that_works() -> None:
    with closing(WorkerPool("serving:serve", timeout_s=1000, memory_mib=500, workers=1)) as pool:
        process = run(pool, "who")[0].value
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            run(pool, "hang", 1)
        assert ends(process)
        assert run(pool, 2) == [Outcome(2)]


def test_an_interrupt_at_the_keyboard_reaches_the_owner_alone(tmp_path: Path) -> None:
    """The terminal sends SIGINT to every process of the group, also to one that is just starting."""
    owner = start(
        tmp_path,
        "import signal\nsignal.signal(signal.SIGINT, lambda *_: print('heard', flush=True))\n"
        "from threepo.workers import WorkerPool\nprint('ready', flush=True)\n"
        "pool = WorkerPool('serving:serve', timeout_s=1000, memory_mib=500, workers=2)\n"
        "print([outcome.value for outcome in pool.map([(n,) for n in range(300)])], flush=True)",
    )
    assert owner.stdout is not None
    assert owner.stdout.readline() == "ready\n"
    for _ in range(20):
        os.killpg(owner.pid, signal.SIGINT)
        time.sleep(0.05)
    lines = owner.communicate(timeout=PATIENCE)[0].splitlines()
    assert lines.count("heard") >= 1
    assert str(list(range(300))) in lines


def test_threads_take_turns(pool: WorkerPool) -> None:
    results: dict[int, list[Outcome]] = {}
    threads = [
        threading.Thread(target=lambda n=n: results.update({n: run(pool, *[n] * 50)}))  # type: ignore[misc]
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {n: [Outcome(n)] * 50 for n in range(4)}


@pytest.mark.parametrize("ending", ["os._exit(0)", "sys.exit()"])
def test_a_fork_has_processes_of_its_own(ending: str, tmp_path: Path) -> None:
    program = (
        "import os, sys\nfrom threepo.workers import WorkerPool\n"
        "pool = WorkerPool('serving:serve', timeout_s=10, memory_mib=500, workers=1)\n"
        "ours = pool.map([('who',)])[0].value\n"
        "if not (child := os.fork()):\n"
        f"    print(pool.map([('who',)])[0].value != ours, flush=True)\n    pool.close()\n    {ending}\n"
        "os.waitpid(child, 0)\nprint(pool.map([('who',)])[0].value == ours)"
    )
    assert start(tmp_path, program).communicate(timeout=PATIENCE)[0] == "True\nTrue\n"


def test_what_does_not_start_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    with (
        closing(WorkerPool("serving:missing", timeout_s=1, memory_mib=500)) as pool,
        pytest.raises(RuntimeError, match="the process for serving:missing ended before its first item"),
    ):
        run(pool, 1)
    assert "has no attribute 'missing'" in capfd.readouterr().err
    with (
        closing(WorkerPool("serving:serve", timeout_s=1, memory_mib=20)) as pool,
        pytest.raises(UserError, match=r"reward.memory_mib = 20: is too small .* set it to \d+"),
    ):
        run(pool, 1)


def test_a_fork_closes_nothing_and_waits_for_nothing() -> None:
    """The lock of its copy may be held by a thread that it does not have."""
    process = Process("import time; time.sleep(1000)", os.environ)
    with closing(process):
        with process._closing:
            child = os.fork()
            if not child:
                process.close()
                os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert process.is_running()
