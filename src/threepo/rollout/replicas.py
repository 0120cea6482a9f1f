"""Processes that each hold an engine, watched by the trainer.

A request is the name of a method and its arguments; the answer is its result. Work may take hours, so not its time is
limited but silence: the loop that does the work reports that it is running, and a process that reports nothing for some
time counts as stuck.
"""

import math
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from threepo.errors import UserError
from threepo.workers import Process, owner

TICK_SECONDS = 1.0
"""Least time between two reports of a working process."""


class ReplicaError(RuntimeError):
    """A method raised in a replica, whose log has the traceback too."""


class Replica(Process):
    """A process that runs `program`, which must call `serve_requests`; its output goes to `log`."""

    def __init__(self, name: str, program: str, environment: Mapping[str, str], log: Path, timeout: float) -> None:
        with log.open("wb") as output:
            super().__init__(program, environment, output)
        self.name, self.log = name, log
        self.limit_silence(timeout)

    def limit_silence(self, timeout: float) -> None:
        """Set the seconds of silence, also in the middle of a message, after which the process counts as stuck."""
        self.timeout = timeout
        # The kernel counts them for each system call, and starts anew after this process was stopped.
        with socket.fromfd(self.connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as link:
            for direction in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
                link.setsockopt(socket.SOL_SOCKET, direction, struct.pack("ll", math.ceil(timeout), 0))

    def call(self, request: str, *arguments: Any) -> Any:
        """The answer. `UserError` if the process dies or gets stuck; `ReplicaError` if the method raised."""
        try:
            self.connection.send((request, arguments))
            while not (answer := self.connection.recv()):  # a report that the work is running
                pass
        except BlockingIOError as error:
            raise UserError(
                f"{self.name} (process {self.pid}) sent nothing for {self.timeout:g} seconds during {request!r}: it is "
                f"stopped or stuck; if it only needs longer, raise engine.vllm.timeout_s = {self.timeout:g}"
                f"{self._end_of_log()}"
            ) from error
        except (EOFError, ConnectionError) as error:
            raise UserError(
                f"{self.name} ended during {request!r} ({self.ending()}); if the machine ran out of memory, lower "
                f"engine.max_batch_rows or engine.vllm.kv_cache_memory_bytes{self._end_of_log()}"
            ) from error
        result, failure = answer
        if failure:
            raise ReplicaError(f"{self.name} failed to {request}:\n{failure}")
        return result

    def _end_of_log(self) -> str:
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()][-3:]
        return f"; the end of {self.log}: {' | '.join(lines)}" if lines else ""


def call_all(requests: Mapping[Replica, tuple[Any, ...]]) -> list[Any]:
    """The answers of replicas that work at the same time, each on its own request; after an error all are closed."""
    return drive_all({replica: partial(replica.call, *request) for replica, request in requests.items()})


def drive_all(work: Mapping[Replica, Callable[[], Any]]) -> list[Any]:
    """The results of functions that use a replica each, at the same time; after an error all replicas are closed."""
    with ThreadPoolExecutor(len(work) or 1) as threads:
        results = [threads.submit(function) for function in work.values()]
        try:
            for result in as_completed(results):
                result.result()
        except BaseException:
            for replica in work:
                replica.close()
            raise
    return [result.result() for result in results]


def serve_requests(make: Callable[[Callable[[], None]], Any]) -> NoReturn:
    """The program of a replica: call the methods of `make(report)` that requests name, until the process is killed.

    `report()` says that the work is running. Call it often, and only from the thread that does the work.
    """
    connection, reported = owner(), time.monotonic()

    def report() -> None:
        nonlocal reported
        if time.monotonic() - reported >= TICK_SECONDS:
            reported = time.monotonic()
            connection.send(())

    served = make(report)
    while True:
        request, arguments = connection.recv()
        try:
            answer = getattr(served, request)(*arguments), ""
        except Exception:
            answer = None, traceback.format_exc()
            print(answer[1], file=sys.stderr, flush=True)
        connection.send(answer)
