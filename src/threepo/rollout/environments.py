"""Processes in which the environments of episodes live, one each, so that what hangs or dies costs one episode.

A first process imports the user's class and forks a process for every episode, which takes some milliseconds
(environment_process.py). Here is the trainer's side: it asks, waits for so long, and ends what does not answer.
"""

import os
import signal
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from multiprocessing.reduction import send_handle
from typing import Any, NamedTuple

from threepo.config.environment import EnvironmentConfig
from threepo.errors import UserError
from threepo.rollout.environment_process import SWEEPING_S, Abilities
from threepo.user_code import find_object
from threepo.workers import Outcome, Process, allow_open_files, cores

STARTING_S = 600
"""Seconds in which the class must be imported and an object made."""
DESCRIPTORS = 3
"""File descriptors that an episode takes, and one to spare."""


class Environments:
    """Environments of a user's class, each in a process of its own."""

    def __init__(self, settings: EnvironmentConfig) -> None:
        """`UserError` for a class that cannot be imported, made with these settings, or used."""
        self._settings = settings
        find_object(settings.factory, "environment.factory")  # here, so that its error has the user's traceback
        # Threads of OpenMP would not live on in a fork, and sets of texts should have the same order in every run.
        single = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        environment = os.environ | single | {"PYTHONHASHSEED": "0"}
        # Not in PYTHONPATH, because what an environment starts may be another Python.
        path = f"import sys; sys.path[:] = {list(filter(None, sys.path))!r}"
        program = f"{path}; from threepo.rollout.environment_process import serve; serve()"
        self._first = Process(program, environment)
        setting = f"environment.factory = {settings.factory!r}"
        answer: Abilities | str = f"{setting}: nothing was made within {STARTING_S} seconds"
        try:
            self._first.connection.send(settings)
            if self._first.connection.poll(STARTING_S):
                answer = self._first.connection.recv()
        except (EOFError, OSError):
            raise UserError(f"{setting}: {self._first.ending()} when made") from None
        if isinstance(answer, str):
            self._first.close()
            raise UserError(answer)
        self.tools, self.steps, self.ends, self.pays = answer
        self._children: list[_Child | None] = []
        self._ending = threading.Lock()
        self._threads = ThreadPoolExecutor(settings.workers or cores())

    def begin(self, count: int) -> None:
        """Start environments for so many episodes; earlier ones end."""
        self.end()
        if count * DESCRIPTORS > (most := allow_open_files()):
            raise UserError(f"environment: {count} episodes at a time need more open files than {most} (ulimit -n)")
        self._children = [self._fork() for _ in range(count)]

    def call(self, calls: Mapping[int, tuple[Any, ...]]) -> dict[int, Outcome]:
        """Answers by episode. An environment that fails has ended.

        ("reset", problem, seed) is answered with an observation or None, ("step", reply) and ("end", reply) with a
        `Turn`, and ("tools", calls, reply) with a text for each call, or a `Turn` of an environment's `call_tools`.
        """
        return dict(zip(calls, self._threads.map(self._call, calls, calls.values()), strict=True))

    def end(self) -> None:
        """End all environments, with all that they have started."""
        for index, child in enumerate(self._children):
            if child:
                self._kill(index, child)
        self._tell("sweep")

    def close(self) -> None:
        """End all processes."""
        self.end()
        self._threads.shutdown()
        self._tell("leave")
        self._first.close()

    def _tell(self, what: str) -> None:
        """Tell the first process, and wait until it has obeyed."""
        if self._first.is_running():
            link = self._first.connection
            with suppress(EOFError, OSError):
                link.send(what)
                while link.poll(2 * SWEEPING_S) and link.recv() != what:
                    pass  # an answer that nobody waited for any more

    def _fork(self) -> "_Child":
        (ours, theirs), (life, alive) = Pipe(), os.pipe()
        try:
            link = self._first.connection
            link.send("fork")
            send_handle(link, theirs.fileno(), self._first.pid)
            send_handle(link, life, self._first.pid)
            return _Child(link.recv(), ours, alive)
        except (EOFError, OSError):
            raise UserError(f"environment: {self._first.ending()} where its processes start") from None
        finally:
            theirs.close()
            os.close(life)

    def _call(self, index: int, call: tuple[Any, ...]) -> Outcome:
        child = self._children[index]
        assert child, "an environment that has failed is not asked again"
        try:
            child.link.send(call)
            answered = child.link.poll(self._settings.timeout_s)
            outcome: Outcome = child.link.recv() if answered else Outcome(failure="time-out")
        except (EOFError, OSError):
            outcome = Outcome(failure="process ended")
        if outcome.failure:
            self._kill(index, child)
        return outcome

    def _kill(self, index: int, child: "_Child") -> None:
        """End a child once, whoever asks first; a thread that is late must not end the child of the next step."""
        with self._ending:
            if self._children[index] is not child:
                return
            self._children[index] = None
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.link.close()
        os.close(child.alive)


class _Child(NamedTuple):
    """The process of an episode, and its ends here."""

    pid: int
    link: Connection
    alive: int
    """The kernel ends the process once this is closed, also when we are killed."""
