"""Processes that each hold an engine: started, called and watched by the trainer, and ended with it.

A request is the name of a method and its arguments; the answer is its result. A process answers one request at a time.
Work may take hours, so its time is not limited. Silence is: the loop that does the work reports that it goes on, and a
process that reports nothing for `timeout` seconds counts as stuck.

Processes do not import the caller's main module. They run in sessions of their own, so Ctrl-C reaches only the trainer,
which saves its state first. They end with the trainer however it ends: each waits for the end of its standard input,
which the kernel closes.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import Pipe, reduction
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

from threepo.errors import UserError

ENDING_SECONDS = 10.0
"""How long a process may take to end once it has closed its connection or was killed."""
TICK_SECONDS = 1.0
"""Least time between two reports of a working process, and longest time between two checks for silence."""
_LOG_LINES = 3


class Replica:
    """A process that runs `program`, which must call `serve_requests`; its output goes to `log`.

    `timeout`: seconds of silence during a request after which the process counts as stuck.
    """

    def __init__(self, name: str, program: str, environment: Mapping[str, str], log: Path, timeout: float) -> None:
        self.name, self.log, self.timeout = name, log, timeout
        self.connection, theirs = Pipe()
        with theirs, log.open("wb") as output:
            self._process = subprocess.Popen(
                # -P: a folder named vllm in the working directory must not be imported instead of the package.
                [sys.executable, "-P", "-c", program, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=dict(environment),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.pid = self._process.pid
        self.request = ""
        """The request that is not answered yet; empty: none."""

    def send(self, request: str, *arguments: Any, descriptor: int | None = None) -> None:
        """Send a request without waiting for its answer; a file descriptor may go along (`Caller.descriptor`)."""
        assert not self.request, f"{self.name} has not answered {self.request} yet"
        self.request = request
        try:
            self.connection.send((request, arguments))
            if descriptor is not None:
                reduction.send_handle(self.connection, descriptor, self.pid)
        except ConnectionError as error:
            raise self._death() from error

    def receive(self) -> tuple[str, Any]:
        """The next message: ("working", None) or ("done", answer). For errors see `gather`."""
        try:
            kind, value = self.connection.recv()
        except (EOFError, ConnectionError) as error:
            raise self._death() from error
        if kind == "working":
            return kind, value
        request, self.request = self.request, ""
        if kind == "failed":
            raise RuntimeError(f"{self.name} failed to {request}:\n{value}")
        return kind, value

    def silence(self) -> UserError:
        """The error for a process that is stuck."""
        return UserError(
            f"{self.name} (process {self.pid}) sent nothing for {self.timeout:g} seconds during {self.request!r}: it "
            f"is stopped or stuck; if it only needs longer, raise engine.vllm.timeout_s = {self.timeout:g}"
            f"{self._end_of_log()}"
        )

    def close(self) -> None:
        """Kill the process and all that it has started: it holds nothing that has to be saved."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        # A process that hangs in a driver ends when the driver returns; there is no use in waiting for that.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(ENDING_SECONDS)
        self.connection.close()
        assert self._process.stdin
        self._process.stdin.close()

    def _death(self) -> UserError:
        try:
            code = self._process.wait(ENDING_SECONDS)
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
        except subprocess.TimeoutExpired:
            how = "closed its connection and does not end"
        return UserError(
            f"{self.name} {how} during {self.request!r}; if the machine ran out of memory, lower "
            f"engine.max_batch_rows or engine.vllm.kv_cache_memory_bytes{self._end_of_log()}"
        )

    def _end_of_log(self) -> str:
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()][-_LOG_LINES:]
        return f"; the end of {self.log}: {' | '.join(lines)}" if lines else ""


def gather(replicas: Sequence[Replica]) -> list[Any]:
    """The answers of all replicas, in their order.

    `UserError` as soon as one of them dies or gets stuck; `RuntimeError` with a traceback if a method raised. Silence
    counts only while this function waits: messages that came before are read first.
    """
    answers: dict[Replica, Any] = {}
    silent = dict.fromkeys(replicas, 0.0)
    while len(answers) < len(replicas):
        waiting = [replica for replica in replicas if replica not in answers]
        began = time.monotonic()
        ready = wait([replica.connection for replica in waiting], TICK_SECONDS)
        # At most one tick: when the machine slept or a batch system stopped the whole job, no replica was silent.
        passed = min(time.monotonic() - began, TICK_SECONDS)
        for replica in waiting:
            if replica.connection in ready:
                silent[replica] = 0.0
                kind, value = replica.receive()
                if kind == "done":
                    answers[replica] = value
            else:
                silent[replica] += passed
                if silent[replica] >= replica.timeout:
                    raise replica.silence()
    return [answers[replica] for replica in replicas]


# In the process


class Caller:
    """The trainer, as the process sees it."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._reported = time.monotonic()

    def report(self) -> None:
        """Say that the work goes on. Call it often, and only from the thread that does the work."""
        if time.monotonic() - self._reported >= TICK_SECONDS:
            self._reported = time.monotonic()
            self.connection.send(("working", None))

    def descriptor(self) -> int:
        """The file descriptor that came with the present request."""
        return int(reduction.recv_handle(self.connection))


def serve_requests(make: Callable[[Caller], Any]) -> NoReturn:
    """The program of a replica: call the methods of `make(caller)` that requests name, until the process is killed."""
    threading.Thread(target=_end_with_trainer, daemon=True).start()
    caller = Caller(Connection(int(sys.argv[1])))
    served = make(caller)
    while True:
        request, arguments = caller.connection.recv()
        try:
            answer = "done", getattr(served, request)(*arguments)
        except Exception:
            answer = "failed", traceback.format_exc()
        caller.connection.send(answer)


def _end_with_trainer() -> None:
    os.read(0, 1)  # nothing is ever written, so this returns when the trainer is gone
    os.killpg(0, signal.SIGKILL)
