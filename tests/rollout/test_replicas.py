"""Processes that hold an engine, with small programs in its place; the vLLM engine's own tests are in test_vllm.py."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from threepo.errors import UserError
from threepo.rollout import shared
from threepo.rollout.memory import available_bytes
from threepo.rollout.replicas import Replica, gather
from threepo.rollout.shared import Layout, SharedTensors

PROGRAM = """
import os, subprocess, sys, time
from threepo.rollout.replicas import answer, received_descriptor

class Server:
    def __init__(self, line):
        self.line = line
    def double(self, x):
        return 2 * x
    def sleep(self, seconds):
        time.sleep(seconds)
        return seconds
    def die(self, words):
        print(words, flush=True)
        os._exit(3)
    def child(self):
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"]).pid
    def total(self, layout):
        from threepo.rollout.shared import SharedTensors
        tensors = SharedTensors(layout, received_descriptor(self.line)).tensors
        return {name: float(tensor.double().sum()) for name, tensor in tensors.items()}

answer(int(sys.argv[1]), int(sys.argv[2]), Server)
"""


def gone(pid: int) -> bool:
    """Whether a process has ended, or is a zombie that nobody has waited for; it may still be on its way."""
    for _ in range(100):
        try:
            if "State:\tZ" in Path(f"/proc/{pid}/status").read_text():
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


@pytest.fixture
def replicas(tmp_path: Path) -> Iterator[list[Replica]]:
    started = [Replica(f"replica {i}", PROGRAM, os.environ, tmp_path / f"{i}.log") for i in range(2)]
    yield started
    for replica in started:
        replica.close()
        assert gone(replica.pid)


def test_answers_come_in_the_order_of_the_replicas(replicas: list[Replica]) -> None:
    replicas[0].send("sleep", 0.5)
    replicas[1].send("double", "ab")
    assert gather(replicas) == [0.5, "abab"]


def test_a_failure_has_its_traceback_and_the_process_goes_on(replicas: list[Replica]) -> None:
    replicas[0].send("double", None)
    with pytest.raises(RuntimeError, match=r"(?s)replica 0 failed to double:.*in double\nTypeError"):
        replicas[0].receive()
    replicas[0].send("double", 4)
    assert replicas[0].receive() == 8


def test_a_death_is_told_at_once_with_how_and_the_last_words(replicas: list[Replica]) -> None:
    replicas[0].send("sleep", 60)
    replicas[1].send("die", "out of cheese")
    began = time.monotonic()
    with pytest.raises(UserError, match=r"replica 1 ended with exit status 3 while asked to die; .*out of cheese"):
        gather(replicas)
    replicas[1].waiting_for = ""
    with pytest.raises(UserError, match=r"replica 1 ended with exit status 3 while asked to double"):
        for _ in range(2):  # the first may still go into the pipe
            replicas[1].send("double", 1)
            replicas[1].receive()
    assert time.monotonic() - began < 30


def test_a_kill_is_told_by_its_signal(replicas: list[Replica]) -> None:
    replicas[0].send("sleep", 60)
    os.kill(replicas[0].pid, signal.SIGKILL)
    with pytest.raises(UserError, match=r"replica 0 was killed by SIGKILL while asked to sleep"):
        gather(replicas[:1])


@pytest.mark.parametrize("busy", [False, True])
def test_closing_ends_what_the_process_started_too(tmp_path: Path, busy: bool) -> None:
    replica = Replica("replica", PROGRAM, os.environ, tmp_path / "log")
    replica.send("child")
    child = replica.receive()
    assert not gone_now(child)
    if busy:
        replica.send("sleep", 60)
    began = time.monotonic()
    replica.close()
    assert time.monotonic() - began < 5
    assert gone(replica.pid)
    assert gone(child)


def gone_now(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "1 / 0", "pass"])
def test_no_process_outlives_the_one_that_started_it(tmp_path: Path, end: str) -> None:
    """Killed, failed or finished, without a word to its replica, which is busy."""
    program = f"""
import os
from pathlib import Path
from threepo.rollout.replicas import Replica
replica = Replica("replica", {PROGRAM!r}, os.environ, Path({str(tmp_path / "log")!r}))
replica.send("child")
print(replica.pid, replica.receive(), flush=True)
replica.send("sleep", 100)
{end}
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    pids = [int(pid) for pid in result.stdout.split()]
    assert len(pids) == 2
    assert all(map(gone, pids))


def test_tensors_are_shared_and_not_sent(replicas: list[Replica]) -> None:
    tensors = {
        "weight": torch.ones(3, 5),
        "odd": torch.ones(7, dtype=torch.float64),
        "steps": torch.tensor([1 << 40]),
        "none": torch.ones(0, 4),
    }
    layout = Layout.of(tensors, torch.bfloat16)
    memory = SharedTensors(layout)
    assert {t.dtype for t in memory.tensors.values()} == {torch.bfloat16, torch.int64}
    for name, tensor in tensors.items():
        memory.tensors[name].copy_(tensor)
        assert memory.tensors[name].shape == tensor.shape
    replicas[0].send("total", layout, descriptor=memory.descriptor)
    assert replicas[0].receive() == {"weight": 15, "odd": 7, "steps": 1 << 40, "none": 0}
    memory.close()


def test_memory_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is made small, not the tensors large: if this failed in earnest, the machine would go down with it."""
    assert 0 < available_bytes(torch.device("cpu")) <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    layout = Layout({"weight": (1000,)}, {"weight": torch.bfloat16})
    SharedTensors(layout).close()
    monkeypatch.setattr(shared, "available_bytes", lambda device: 1999)
    with pytest.raises(UserError, match=r"no memory for a copy of the weights: 0\.0 GB, and 0\.0 GB are left"):
        SharedTensors(layout)
