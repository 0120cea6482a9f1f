"""Replicas, with small programs instead of an engine; the tests of the vLLM engine are in test_vllm.py."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from threepo import workers
from threepo.config.engine import VLLMConfig, VLLMEngineConfig
from threepo.errors import UserError
from threepo.rollout import memory as shared
from threepo.rollout.memory import SharedTensors, available_bytes, layout_of, own_bytes
from threepo.rollout.payloads import choose_payload
from threepo.rollout.replicas import Replica, call_all
from threepo.rollout.vllm import _environments

PROGRAM = """
import os, signal, struct, subprocess, sys, time
from threepo.rollout.replicas import serve_requests

class Server:
    def __init__(self, report):
        self.report = report
    def double(self, x):
        return 2 * x
    def sleep(self, seconds):
        time.sleep(seconds)
        return seconds
    def work(self, seconds):
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(0.05)
            self.report()
        return seconds
    def die(self, words):
        print(words, flush=True)
        os._exit(3)
    def child(self):
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"]).pid
    def stop_in_the_answer(self):
        os.write(int(sys.argv[1]), struct.pack("!i", 1000) + b"its beginning")
        os.kill(os.getpid(), signal.SIGSTOP)
    def total(self, layout, path):
        from threepo.rollout.memory import SharedTensors
        tensors = SharedTensors(layout, path).tensors
        return {name: float(tensor.double().sum()) for name, tensor in tensors.items()}

serve_requests(Server)
"""


def gone(pid: int) -> bool:
    """True if a process has ended or is an unreaped zombie, within five seconds."""
    for _ in range(100):
        try:
            if "State:\tZ" in Path(f"/proc/{pid}/status").read_text():
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


TIMEOUT = 3.0
PATIENCE = 100.0


def start_two(folder: Path, timeout: float) -> list[Replica]:
    return [Replica(f"replica {i}", PROGRAM, os.environ, folder / f"{i}.log", timeout) for i in range(2)]


def close(started: list[Replica]) -> None:
    """Nothing is left behind, in any state of the processes."""
    for replica in started:
        replica.close()
        assert gone(replica.pid)


@pytest.fixture
def replicas(tmp_path: Path) -> Iterator[list[Replica]]:
    started = start_two(tmp_path, PATIENCE)
    yield started
    close(started)


@pytest.fixture
def impatient(tmp_path: Path) -> Iterator[list[Replica]]:
    """Replicas that may be silent for TIMEOUT, but not until they have started: a busy machine takes its time."""
    started = start_two(tmp_path, TIMEOUT)
    for replica in started:
        replica.limit_silence(PATIENCE)
        assert replica.call("double", 1) == 2
        replica.limit_silence(TIMEOUT)
    yield started
    close(started)


def test_answers_come_in_the_order_of_the_replicas(replicas: list[Replica]) -> None:
    assert call_all({replicas[0]: ("sleep", 0.5), replicas[1]: ("double", "ab")}) == [0.5, "abab"]


def test_a_failure_has_its_traceback_and_the_process_goes_on(replicas: list[Replica]) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)replica 0 failed to double:.*in double\n.*TypeError"):
        replicas[0].call("double", None)
    assert replicas[0].call("double", 4) == 8


def test_a_death_is_an_error_at_once_with_the_end_of_the_log(replicas: list[Replica]) -> None:
    began = time.monotonic()
    with pytest.raises(UserError, match=r"replica 1 ended during 'die' \(exit status 3\); .*out of cheese"):
        call_all({replicas[0]: ("work", 60), replicas[1]: ("die", "out of cheese")})
    assert time.monotonic() - began < 30
    assert all(gone(replica.pid) for replica in replicas)


def test_a_kill_is_an_error_with_its_signal(replicas: list[Replica]) -> None:
    threading.Timer(0.5, os.kill, (replicas[0].pid, signal.SIGKILL)).start()
    with pytest.raises(UserError, match=r"replica 0 ended during 'sleep' \(killed by SIGKILL\)"):
        replicas[0].call("sleep", 60)


def stuck(number: int, request: str) -> str:
    return (
        rf"^replica {number} \(process \d+\) sent nothing for 3 seconds during '{request}': it is stopped or stuck; if "
        r"it only needs longer, raise engine.vllm.timeout_s = 3"
    )


def test_work_may_last_longer_than_the_timeout_while_it_is_reported(impatient: list[Replica]) -> None:
    assert impatient[0].call("work", TIMEOUT + 1.5) == TIMEOUT + 1.5


def test_one_that_is_stuck_is_an_error_though_another_reports(impatient: list[Replica]) -> None:
    with pytest.raises(UserError, match=stuck(1, "sleep")):
        call_all({impatient[0]: ("work", 100), impatient[1]: ("sleep", 100)})


def test_one_that_is_stopped_in_the_middle_of_a_message_is_an_error(impatient: list[Replica]) -> None:
    with pytest.raises(UserError, match=stuck(0, "stop_in_the_answer")):
        impatient[0].call("stop_in_the_answer")
    os.kill(impatient[1].pid, signal.SIGSTOP)
    with pytest.raises(UserError, match=stuck(1, "double")):
        impatient[1].call("double", bytes(10_000_000))


def test_a_job_that_is_stopped_and_continued_as_a_whole_goes_on(tmp_path: Path) -> None:
    """Batch systems stop jobs like this: the replica could not report, and the trainer did not wait."""
    program = f"""
import os
from pathlib import Path
from threepo.rollout.replicas import Replica
replica = Replica("replica", {PROGRAM!r}, os.environ, Path({str(tmp_path / "log")!r}), {PATIENCE})
replica.call("double", 1)
replica.limit_silence({TIMEOUT})
print(replica.pid, flush=True)
print(replica.call("work", 1.5))
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout
        pids = [trainer.pid, int(trainer.stdout.readline())]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(TIMEOUT + 1)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        assert trainer.stdout.read() == "1.5\n"


@pytest.mark.parametrize("busy", [False, True])
def test_closing_ends_what_the_process_started_too(tmp_path: Path, busy: bool) -> None:
    replica = Replica("replica", PROGRAM, os.environ, tmp_path / "log", PATIENCE)
    child = replica.call("child")
    assert Path(f"/proc/{child}").exists()
    if busy:
        replica.connection.send(("sleep", (60,)))
    began = time.monotonic()
    replica.close()
    assert time.monotonic() - began < 5
    assert gone(replica.pid)
    assert gone(child)


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "1 / 0", "pass"])
def test_no_process_outlives_the_one_that_started_it(tmp_path: Path, end: str) -> None:
    """Killed, failed or finished, without a word to its replica, which is busy."""
    program = f"""
import os
from pathlib import Path
from threepo.rollout.replicas import Replica
replica = Replica("replica", {PROGRAM!r}, os.environ, Path({str(tmp_path / "log")!r}), {PATIENCE})
print(replica.pid, replica.call("child"), flush=True)
replica.connection.send(("sleep", (100,)))
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
    layout = layout_of(tensors, torch.bfloat16)
    memory = SharedTensors(layout)
    assert {t.dtype for t in memory.tensors.values()} == {torch.bfloat16, torch.int64}
    for name, tensor in tensors.items():
        memory.tensors[name].copy_(tensor)
        assert memory.tensors[name].shape == tensor.shape
    totals = {"weight": 15, "odd": 7, "steps": 1 << 40, "none": 0}
    assert replicas[0].call("total", layout, memory.path) == totals
    memory.close()


def test_memory_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is made small, not the tensors large: if this failed in earnest, the machine would go down with it."""
    assert 0 < available_bytes(torch.device("cpu")) <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    layout = layout_of({"weight": torch.ones(1000)}, torch.bfloat16)
    SharedTensors(layout).close()
    monkeypatch.setattr(shared, "available_bytes", lambda device: 1999)
    with pytest.raises(UserError, match=r"no memory for a copy of the weights: 0\.0 GB, and 0\.0 GB are left"):
        SharedTensors(layout)


class PretendedGPU:
    """Counts as the driver and torch's allocator do: freed tensors stay with the allocator, whole blocks at a time."""

    total, driver, allocated, reserved = 80_000, 2_000, 0, 0

    def allocate(self, size: int) -> None:
        self.allocated += size
        self.reserved = max(self.reserved, -(-self.allocated // 1000) * 1000)

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return self.total - self.driver - self.reserved, self.total

    def memory_reserved(self, device: torch.device) -> int:
        return self.reserved

    def memory_allocated(self, device: torch.device) -> int:
        return self.allocated


def test_memory_that_a_step_has_freed_is_there_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights take 20,000 bytes, and an update 50,500 more for a while; 58,000 are free before it and after it."""
    gpu, device = PretendedGPU(), torch.device("cuda", 0)
    for name in ("mem_get_info", "memory_reserved", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, getattr(gpu, name))
    gpu.allocate(20_000)
    before = available_bytes(device)
    gpu.allocate(50_500)
    during = available_bytes(device)
    gpu.allocate(-50_500)
    assert (before, during, available_bytes(device)) == (52_200, 6_750, 52_200)  # nine tenths
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert own_bytes(device) == 52_200, "every rank has a GPU"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says how much memory is free")
def test_memory_is_what_a_control_group_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine tenths of it; files that the kernel drops when memory is short count as free. A job limits its steps."""
    group = tmp_path / "sys/fs/cgroup/job"
    for file, text in {
        tmp_path / "proc/self/cgroup": "1:memory:/other\n0::/job/step\n",
        tmp_path / "proc/meminfo": "MemTotal: 9000 kB\nMemAvailable:  8000 kB\n",
        group / "memory.max": "3000000\n",
        group / "memory.current": "2500000\n",
        group / "memory.stat": "anon 1\ninactive_file 500000\n",
    }.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    for module in (shared, workers):
        monkeypatch.setattr(module, "Path", lambda path: tmp_path / path.strip("/"))
    cpu = torch.device("cpu")
    assert available_bytes(cpu) == 900_000
    (group / "memory.current").write_text("4000000\n")
    assert available_bytes(cpu) == 0
    (group / "memory.max").write_text("max\n")
    assert available_bytes(cpu) == 7_372_800


@pytest.mark.skipif(not torch.cuda.is_available(), reason="asks the driver of a GPU")
def test_memory_that_a_tensor_has_freed_on_a_gpu_is_available() -> None:
    device = torch.device("cuda", 0)
    before = available_bytes(device)
    tensor = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    assert before - available_bytes(device) == pytest.approx(0.9 * tensor.numel(), rel=0.05)
    del tensor
    assert available_bytes(device) == pytest.approx(before, rel=0.01)


@pytest.mark.parametrize(
    ("settings", "gpus"),
    [
        (VLLMConfig(replicas=2), ["4", "5"]),
        (VLLMConfig(replicas=2, gpus=(3, 0)), ["7", "4"]),
        (VLLMConfig(replicas=2, tensor_parallel=2), ["4,5", "6,7"]),
        (VLLMConfig(tensor_parallel=2, gpus=(2, 3)), ["6,7"]),
    ],
)
def test_each_replica_sees_its_own_gpus(settings: VLLMConfig, gpus: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not see torchrun's variables of its owner: vLLM would take itself for that rank."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    for name in ("RANK", "LOCAL_RANK", "GROUP_WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("RANKING", "mine")
    found = _environments(settings, "float32")
    assert [environment["CUDA_VISIBLE_DEVICES"] for environment in found] == gpus
    kept = {"RANK", "RANKING", "LOCAL_RANK", "GROUP_WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"}
    assert kept & found[0].keys() == {"RANKING"}
    assert found[0]["TRITON_F32_DEFAULT"] == "ieee"
    assert "TRITON_F32_DEFAULT" not in _environments(settings, "bfloat16")[0]
    monkeypatch.setenv("TRITON_F32_DEFAULT", "tf32x3")
    assert _environments(settings, "float32")[0]["TRITON_F32_DEFAULT"] == "tf32x3"


def test_adapters_in_float32_are_refused_where_vllm_has_none() -> None:
    """The device decides, which is not here."""
    policy: Any = SimpleNamespace(has_adapters=True, device=torch.device("cuda"), model=torch.nn.Linear(1, 1))
    with pytest.raises(UserError, match=r"engine.dtype = 'float32': vLLM has no adapters in float32 on a GPU"):
        choose_payload(policy, VLLMEngineConfig(dtype="float32"))
