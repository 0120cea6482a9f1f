"""Replicas of vLLM that are forked from a process that has imported it, which takes 13 of a start's 20 CPU seconds.

Only the start is another: the program, its pipes and its end are those of `threepo.workers`. Engines of TRL, and those
of ranks that torchrun starts for one command, are processes of their own, as users have them.
"""

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver
from types import SimpleNamespace
from typing import Any

import pytest

from programs import Leader
from threepo import workers


@contextmanager
def replicas_forked() -> Iterator[None]:
    """Fork the replicas that this process starts, unless there is a GPU, whose libraries need not survive it."""
    import torch  # not above: the process that shares the tests out needs none

    if torch.cuda.is_available():
        yield
        return
    own = SimpleNamespace(Popen=_popen, PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "subprocess", own)
        yield


def _popen(command: Sequence[str], *, env: Mapping[str, str], stdout: Any = None, **options: Any) -> Any:
    """A `subprocess.Popen`; forked if the program is a replica's."""
    if "serve_requests" not in command[3]:
        return subprocess.Popen(command, env=env, stdout=stdout, **options)
    return Leader(command[3], env, stdout.name, int(command[4]))


@pytest.fixture(scope="module")
def forked_replicas() -> Iterator[None]:
    with replicas_forked():
        yield


def pytest_sessionfinish() -> None:
    """End the process that forked them: at its own end, Triton would print 60 lines about itself."""
    if pid := forkserver._forkserver._forkserver_pid:  # type: ignore[attr-defined]
        os.kill(pid, signal.SIGKILL)
