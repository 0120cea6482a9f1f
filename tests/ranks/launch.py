"""Programs on several ranks of this machine: what they said, and no process left behind.

`launch` forks the ranks and gives them torchrun's environment and store; where ends and signals matter, `start` has
torchrun itself, which imports torch anew in each rank and in its own process.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from programs import forked

TESTS = Path(__file__).parents[1]
TIMEOUT = 180.0
"""Seconds after which ranks hang."""
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
"""gloo would look up the machine's name, and wait where that has no answer."""


@contextmanager
def working_folder(path: Path, reward: str) -> Iterator[Path]:
    """Work in a folder whose module `first_character` ranks can import, and the environments of tests."""
    (path / "first_character.py").write_text(reward)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        patch.setenv("PYTHONPATH", os.pathsep.join([str(path), str(TESTS), os.environ.get("PYTHONPATH", "")]))
        yield path


def start(*command: str, ranks: int) -> "subprocess.Popen[str]":
    """Start a program in one process (0 ranks) or under torchrun."""
    # On the loopback, as gloo.
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={ranks}"]
    # Another number of threads rounds matrix products differently; a stopped rank is killed after so many seconds.
    environment = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "8"} | LOOPBACK | os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *(torchrun if ranks else []), *command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )


def ended(process: "subprocess.Popen[str]", timeout: float = TIMEOUT) -> tuple[int, str]:
    """Exit status of a program, and what it said; -1 if it hangs."""
    try:
        said = process.communicate(timeout=timeout)[1]
        return process.returncode, said
    except subprocess.TimeoutExpired:
        # The ranks too: torchrun alone would leave them behind, and they hold the pipe that is read to its end.
        os.killpg(process.pid, signal.SIGKILL)
        return -1, process.communicate()[1]


def launch_anew(*command: str, ranks: int = 0, timeout: float = TIMEOUT) -> None:
    """`launch` without a fork, for Ray and vLLM, which start processes of their own."""
    status, said = ended(start(*command, ranks=ranks), timeout)
    assert status == 0, f"{command}: {status}: {said[-5000:]}"


def launch(*command: str, ranks: int = 0, timeout: float = TIMEOUT) -> None:
    """Run a program, or `-m` and a module, to its end; an AssertionError with what it said if it fails or hangs."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    shared |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "GROUP_RANK": "0"}
    shared["TORCHELASTIC_RESTART_COUNT"] = "0"
    program: Path | str = Path(command[0])
    if command[0] == "-m":
        command = command[1:]
        program = f"import runpy; runpy.run_module({command[0]!r}, run_name='__main__', alter_sys=True)"
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryDirectory() as said:
        files, processes = [Path(said, str(rank)) for rank in range(max(ranks, 1))], []
        for rank, file in enumerate(files):
            own = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks else {}
            environment = LOOPBACK | os.environ | {"OMP_NUM_THREADS": "1"} | own
            processes.append(forked(program, Path.cwd(), command[1:], environment, (os.devnull, str(file))))
        running = {process.sentinel: process for process in processes}
        while running and (over := wait(running, deadline - time.monotonic())):
            if [sentinel for sentinel in over if running.pop(sentinel).exitcode]:
                break  # the others may wait for this rank
        for process in running.values():
            process.kill()
            process.join()
        words = "".join(file.read_text() for file in files)
    assert not any(process.exitcode for process in processes), f"{command}: {words[-5000:]}"
