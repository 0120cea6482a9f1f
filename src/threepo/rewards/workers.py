"""Processes that do what may hang, eat the memory or crash, and can be killed for it: a time limit for every item.

    with WorkerPool("threepo.rewards.symbolic:judge", timeout_s=10, memory_mib=1024) as pool:
        outcomes = pool.map([["\\\\frac{2}{4}", "0.5"], ["9^{9^{9^9}}", "1"]])

Item and value are what JSON can say, so that a process which a hostile item has taken over can answer nonsense, and no
more. Processes are started anew (no fork, no import of the caller's main module), when they are first needed, and in
sessions of their own, so that Ctrl-C does not reach them. Whatever one of them does costs the item that it had, which
becomes a failure, and a new process. They end with the pool, and with the process that has it, however that one ends.

What this does not do: keep a process from files or from the network. Items are data to the functions that are served,
never programs; programs belong into a sandbox.
"""

import fcntl
import json
import os
import pkgutil
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from threepo.errors import UserError

START_SECONDS = 120.0
"""How long a process may take to import what it serves, on a machine that has much else to do."""
SPARE_MIB = 64
"""Memory that must be left to a process for its items, once it has started."""
DYING_SECONDS = 5.0
"""How long a process that has closed its line may take to end, so that it can be told how it did."""
LONGEST_WAIT = 1.0
"""Seconds after which a wait begins anew."""
_MIB = 2**20
_MODULE = "threepo.rewards.workers"
"""This one, also where it runs as a program."""


@dataclass(frozen=True)
class Outcome:
    """What became of an item."""

    value: Any = None
    failure: str = ""
    """Empty, or why there is no value: `time-out`, `memory`, `killed by SIGSEGV`, `RecursionError: ...`."""


class WorkerPool:
    """Up to `workers` processes that call the function `module:name` on items.

    `warm_up` is an item that each does before its first, without a limit; `memory_field` is what the user calls the
    limit of memory. Calls from several threads wait for each other. After a fork the child has a pool of its own.
    """

    def __init__(
        self,
        function: str,
        *,
        timeout_s: float,
        memory_mib: int,
        workers: int = 0,
        warm_up: Any = None,
        memory_field: str = "memory_mib",
    ) -> None:
        self._settings = {"function": function, "memory_mib": memory_mib, "warm_up": warm_up}
        self._timeout = timeout_s
        self._memory_field = memory_field
        self._size = workers or len(os.sched_getaffinity(0))
        self._start()

    def _start(self) -> None:
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._workers: list[_Worker] = []
        weakref.finalize(self, _end_all, self._workers, self._owner)

    def close(self) -> None:
        """End the processes; it also happens when the pool is collected, and when Python ends."""
        _end_all(self._workers, self._owner)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def map(self, items: Sequence[Any]) -> list[Outcome]:
        """The outcome of each item, at its place."""
        if self._owner != os.getpid():
            self._start()
        with self._lock:
            outcomes: dict[int, Outcome] = {}
            waiting = deque(enumerate(items))
            try:
                while len(outcomes) < len(items):
                    self._hire(len(waiting))
                    self._hand_out(waiting, outcomes)
                    self._listen(outcomes)
            finally:  # after an interrupt, some are still at items that nobody wants
                for worker in [w for w in self._workers if w.item is not None]:
                    self._dismiss(worker)
            return [outcomes[place] for place in range(len(items))]

    def _hire(self, wanted: int) -> None:
        for worker in [w for w in self._workers if w.item is None and w.ready and w.has_ended()]:
            self._dismiss(worker)  # it did so between two calls
        free = sum(worker.item is None for worker in self._workers)
        for _ in range(min(wanted - free, self._size - len(self._workers))):
            self._workers.append(_Worker(self._settings))

    def _hand_out(self, waiting: deque[tuple[int, Any]], outcomes: dict[int, Outcome]) -> None:
        for worker in [w for w in self._workers if w.ready and w.item is None]:
            if not waiting:
                return
            worker.item, item = waiting.popleft()
            worker.deadline = time.monotonic() + self._timeout
            try:
                worker.send(item, self._timeout)
            except OSError as error:  # TimeoutError is one
                self._fail(worker, outcomes, "time-out" if isinstance(error, TimeoutError) else "")

    def _listen(self, outcomes: dict[int, Outcome]) -> None:
        """Wait a while for whatever comes first: something that a process says, its end, or a deadline."""
        listened_to = [worker for worker in self._workers if worker.item is not None or not worker.ready]
        if not listened_to:
            return
        poll = select.poll()
        for worker in listened_to:
            poll.register(worker.connection, select.POLLIN)
        patience = max(0.0, min(worker.deadline for worker in listened_to) - time.monotonic())
        # Ctrl-C just before the wait does not end it; Python raises KeyboardInterrupt after it.
        heard = {descriptor for descriptor, _ in poll.poll(min(patience, LONGEST_WAIT) * 1000 + 1)}
        for worker in listened_to:
            if worker.connection.fileno() in heard:
                self._hear(worker, outcomes)
            elif time.monotonic() >= worker.deadline:
                self._fail(worker, outcomes, "time-out")

    def _hear(self, worker: "_Worker", outcomes: dict[int, Outcome]) -> None:
        try:
            message = worker.receive()
        except (OSError, EOFError, ValueError):  # the last: what came is no message
            self._fail(worker, outcomes, "")
            return
        if message is None:
            return
        if worker.item is None:
            self._welcome(worker, message)
        else:
            outcomes[worker.item] = Outcome(message["value"], message["failure"])
            worker.item = None
            if message["failure"] == "memory":
                self._dismiss(worker)  # what is left of its heap is in pieces

    def _welcome(self, worker: "_Worker", message: dict[str, Any]) -> None:
        worker.ready = True
        if message["needs_mib"] > self._settings["memory_mib"]:
            self._dismiss(worker)
            raise UserError(
                f"{self._memory_field} = {self._settings['memory_mib']}: is too little for a process of "
                f"{self._settings['function']}; it needs {message['needs_mib']} or more"
            )

    def _fail(self, worker: "_Worker", outcomes: dict[int, Outcome], failure: str) -> None:
        """The end of a process, and of what it was doing; without a `failure`, it has ended itself."""
        failure = failure or worker.how_it_ended()
        words = worker.words()
        self._dismiss(worker)
        if worker.item is None:
            raise RuntimeError(f"a process of {self._settings['function']} did not start ({failure}): {words}")
        outcomes[worker.item] = Outcome(failure=failure)

    def _dismiss(self, worker: "_Worker") -> None:
        self._workers.remove(worker)
        worker.end()


class _Worker:
    """One process, and the line to it."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.connection, theirs = socket.socketpair()
        lifeline, self._lifeline = os.pipe()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        # -P: what stands in the working directory is not the package of that name. The path is ours, to find the same.
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONHASHSEED": "0"}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", _MODULE, str(theirs.fileno()), str(lifeline), json.dumps(settings)],
            pass_fds=(theirs.fileno(), lifeline),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        theirs.close()
        os.close(lifeline)
        self._heard = bytearray()
        self.ready = False
        self.item: int | None = None
        """Place of the item that it is at."""
        self.deadline = time.monotonic() + START_SECONDS

    def send(self, item: Any, timeout_s: float) -> None:
        """Hand over an item; `TimeoutError` if it is not taken in time."""
        self.connection.settimeout(timeout_s)
        self.connection.sendall(_packed(item))

    def receive(self) -> Any:
        """The answer, or None as long as there is more of it to come; to be called when something has come."""
        data = self.connection.recv(2**20)
        if not data:
            raise EOFError
        self._heard += data
        size = int.from_bytes(self._heard[:8])
        if len(self._heard) < 8 + size:
            return None
        answer = json.loads(bytes(self._heard[8:]))
        self._heard.clear()
        return answer

    def has_ended(self) -> bool:
        """Whether there is no process any more."""
        return self._process.poll() is not None

    def how_it_ended(self) -> str:
        """For a failure, once it has closed the line."""
        try:
            code = self._process.wait(DYING_SECONDS)
        except subprocess.TimeoutExpired:
            return "closed its line"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"

    def words(self) -> str:
        """The end of what it has printed; only until it is ready is there any."""
        self._log.seek(0)
        return self._log.read()[-2000:].decode(errors="replace").strip()

    def end(self) -> None:
        """End the process and all that it has started, at once."""
        if self._process.returncode is None:  # once it is waited for, its number may be another's
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self.connection.close()
        self._log.close()
        os.close(self._lifeline)


def _end_all(workers: list[_Worker], owner: int) -> None:
    if os.getpid() == owner:  # a fork has a copy of the list, and must let its parent's be
        while workers:
            workers.pop().end()


def _packed(message: Any) -> bytes:
    data = json.dumps(message).encode("ascii")
    return len(data).to_bytes(8) + data


# In the process


def _serve(line: int, lifeline: int, function: str, memory_mib: int, warm_up: Any) -> None:
    """Answer items until the line is closed."""
    _end_with_parent(lifeline)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=line) as connection:
        call = pkgutil.resolve_name(function)
        call(warm_up)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (memory_mib * _MIB, memory_mib * _MIB))
        connection.sendall(_packed({"needs_mib": _address_space() // _MIB + SPARE_MIB}))
        _be_silent()
        requests = connection.makefile("rb")
        while header := requests.read(8):
            connection.sendall(_answered(call, requests.read(int.from_bytes(header))))


def _answered(call: Any, request: bytes) -> bytes:
    try:
        return _packed({"value": call(json.loads(request)), "failure": ""})
    except MemoryError:
        failure = "memory"
    except Exception as error:  # whatever an item makes it do
        failure = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return _packed({"value": None, "failure": failure})


def _end_with_parent(lifeline: int) -> None:
    """Have the kernel end this process when the other end of the pipe is closed, whatever Python is doing then.

    Not PR_SET_PDEATHSIG: that is about the parent's thread, and a pool may be used by one after the other.
    """
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_ASYNC)  # SIGIO, which ends a process that does not handle it
    if select.select([lifeline], [], [], 0)[0]:
        sys.exit("its parent has ended")


def _address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def _be_silent() -> None:
    """What a library prints from now on would fill the log for as long as the process runs."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


if __name__ == "__main__":
    _serve(int(sys.argv[1]), int(sys.argv[2]), **json.loads(sys.argv[3]))
