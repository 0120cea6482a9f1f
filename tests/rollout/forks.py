"""Replicas of vLLM that are forked from a process that has imported it, which takes 13 of a start's 20 CPU seconds.

Only the start is another: the program, its pipes and its end are those of `threepo.workers`. Engines of TRL, and those
of ranks that torchrun starts for one command, are processes of their own, as users have them.
"""

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from programs import Leader
from threepo import workers


@contextmanager
def replicas_forked() -> Iterator[None]:
    """Fork the replicas that this process starts, unless there is a GPU, whose libraries need not survive it."""
    if torch.cuda.is_available():
        yield
        return
    own = SimpleNamespace(Popen=_popen, PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired)
    with patch.object(workers, "subprocess", own):
        yield


def _popen(command: Sequence[str], *, env: Mapping[str, str], stdout: Any = None, **options: Any) -> Any:
    """A `subprocess.Popen`; forked if the program is a replica's."""
    if "serve_requests" not in command[3]:
        return subprocess.Popen(command, env=env, stdout=stdout, **options)
    return Leader(command[3], env, stdout.name, int(command[4]))
