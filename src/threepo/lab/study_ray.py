"""Runs of a study as Ray tasks, on a cluster whose nodes share a file system and have the same environment."""

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

import ray

from threepo.files import lock

_POLL = 0.2
"""Seconds between looks at a process: Ray cannot interrupt a task that sleeps in a system call."""


def connect(address: str, threads: int) -> int:
    """Join the cluster; returns how many runs it takes at once: one for each GPU, or for every `threads` cores."""
    if not ray.is_initialized():
        ray.init(address=address, log_to_driver=False)
    resources = ray.cluster_resources()
    return max(1, int(resources.get("GPU", 0) or resources["CPU"] // threads))


class RayTask:
    """A run on one of the nodes."""

    def __init__(self, arguments: Sequence[str], log: Path, environment: Mapping[str, str], threads: int) -> None:
        gpus = min(1, ray.cluster_resources().get("GPU", 0))
        remote = ray.remote(_run).options(num_cpus=threads, num_gpus=gpus, max_retries=0)
        self._task = remote.remote(list(arguments), log, os.getcwd(), dict(environment))

    def poll(self) -> int | None:
        """The exit status once the process has ended; 1 if the node was lost, or the task never began."""
        if not ray.wait([self._task], timeout=0)[0]:
            return None
        try:
            return int(ray.get(self._task))
        except ray.exceptions.RayError:
            return 1

    def terminate(self) -> None:
        """Let the process save its state and end."""
        ray.cancel(self._task)


def _run(arguments: list[str], log: Path, folder: str, environment: dict[str, str]) -> int:
    """On the node: the process, which holds the lock of its log; its exit status."""
    with closing(lock(log)) as said:
        process = subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            cwd=folder,
            env=os.environ | environment,
            start_new_session=True,
        )
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a cluster begun in the background ignores it
    try:
        while process.poll() is None:
            time.sleep(_POLL)
    except KeyboardInterrupt:  # cancelled
        process.terminate()
    return process.wait()
