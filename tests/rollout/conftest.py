"""Fixtures of the tests of engines."""

import os
import signal
from collections.abc import Iterator
from multiprocessing import forkserver

import pytest


@pytest.fixture(scope="module")
def forked_replicas() -> Iterator[None]:
    """See `forks.replicas_forked`."""
    from rollout.forks import replicas_forked  # not above: the process that shares the tests out needs no torch

    with replicas_forked():
        yield


def pytest_sessionfinish() -> None:
    """End the process that forked them: at its own end, Triton would print 60 lines about itself."""
    if pid := forkserver._forkserver._forkserver_pid:  # type: ignore[attr-defined]
        os.kill(pid, signal.SIGKILL)
