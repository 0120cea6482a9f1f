"""Programs under torchrun, on this machine: what they said, and no process left behind."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

TIMEOUT = 180.0
"""Seconds after which ranks hang."""


@contextmanager
def working_folder(path: Path, reward: str) -> Iterator[Path]:
    """Work in a folder whose module `first_character` ranks can import."""
    (path / "first_character.py").write_text(reward)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        patch.setenv("PYTHONPATH", os.pathsep.join([str(path), os.environ.get("PYTHONPATH", "")]))
        yield path


def start(*command: str, ranks: int) -> "subprocess.Popen[str]":
    """Start a program in one process (0 ranks) or under torchrun."""
    # All on the loopback: torchrun and gloo would look up the machine's name, and wait where that has no answer.
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={ranks}"]
    # Another number of threads rounds matrix products differently; a stopped rank is killed after so many seconds.
    environment = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "8"} | os.environ | {"OMP_NUM_THREADS": "1"}
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"
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


def launch(*command: str, ranks: int = 0, timeout: float = TIMEOUT) -> None:
    """Run a program to its end; an AssertionError with what it said if it fails or hangs."""
    status, said = ended(start(*command, ranks=ranks), timeout)
    assert status == 0, f"{command}: {status}: {said[-5000:]}"
