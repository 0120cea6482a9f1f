"""Runs of a study as forks of one process that has imported PyTorch and transformers once for all of them.

Importing takes most of the time in which a short run starts (docs/performance.md), and a study starts hundreds.
"""

import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

from threepo.cli import main
from threepo.files import lock

TERMINAL = (signal.SIGINT, signal.SIGHUP)
"""Signals that a terminal sends to the study and to the process that forks: only the study must obey them."""


def fork(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> ForkServerProcess:
    """Start a command of threepo; its process has the lock of its log until it ends, even if the study is killed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["threepo.api", "transformers.modeling_utils"])
    process = context.Process(target=_run, args=(list(command), log, os.getcwd(), dict(environment)))
    # Libraries read the number of threads when they are imported.
    with _without_main(), patch.dict(os.environ, environment):
        resource_tracker.ensure_running()  # which lets signals through again when it has started
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, TERMINAL)  # the process that forks inherits it
        try:
            forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        process.start()
    return process


@contextmanager
def _without_main() -> Iterator[None]:
    """Hide the main module for the body: a fork would run the script that has called us once more."""
    main_module = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main_module


def _run(command: list[str], log: Path, folder: str, environment: Mapping[str, str]) -> None:
    """Run the command in the fork, as `python -m threepo` runs it in `folder`."""
    os.setsid()  # the terminal's Ctrl-C must reach it once, from the study
    signal.pthread_sigmask(signal.SIG_UNBLOCK, TERMINAL)
    with closing(lock(log)) as output:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.environ.update(environment)
    os.chdir(folder)
    sys.path.insert(0, folder)
    sys.exit(main(command))
