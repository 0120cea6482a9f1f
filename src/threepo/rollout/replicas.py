"""Processes that each hold an engine: started, asked, watched, and ended with the process that started them.

A message is the name of a method and its arguments, the answer its result; one at a time. The processes are started
anew (no fork, no import of the caller's main module) and in sessions of their own, so that Ctrl-C reaches the trainer
alone, which saves its state first. They end with the trainer however it ends: each waits on a pipe whose other end the
kernel closes.
"""

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

DYING_SECONDS = 10.0
"""How long a process that has closed its line may take to end, so that it can be told how it did."""
_LOG_LINES = 3


class Replica:
    """A process that runs `program`, which must call `answer`; `log` takes what it prints."""

    def __init__(self, name: str, program: str, environment: Mapping[str, str], log: Path) -> None:
        self.name = name
        self.log = log
        self.connection, theirs = Pipe()
        ended, self._lifeline = os.pipe()
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                # -P: a folder called vllm where the user stands must not be taken for the package.
                [sys.executable, "-P", "-c", program, str(theirs.fileno()), str(ended)],
                pass_fds=(theirs.fileno(), ended),
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        theirs.close()
        os.close(ended)
        self.waiting_for = ""
        """The message that is not answered yet; empty: none."""

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def send(self, message: str, *arguments: Any, descriptor: int | None = None) -> None:
        """Ask, without waiting for the answer; a file descriptor may go along (`received_descriptor`)."""
        assert not self.waiting_for, f"{self.name} has not answered {self.waiting_for} yet"
        self.waiting_for = message
        try:
            self.connection.send((message, arguments))
            if descriptor is not None:
                reduction.send_handle(self.connection, descriptor, self.pid)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise self._death() from error

    def receive(self) -> Any:
        """The answer. `UserError` if the process has died; `RuntimeError` with its traceback if it raised."""
        try:
            fine, value = self.connection.recv()
        except (EOFError, ConnectionResetError) as error:
            raise self._death() from error
        message, self.waiting_for = self.waiting_for, ""
        if not fine:
            raise RuntimeError(f"{self.name} failed to {message}:\n{value}")
        return value

    def close(self) -> None:
        """End the process and all that it has started, at once: it holds nothing that would have to be saved."""
        self._end()
        self.connection.close()
        os.close(self._lifeline)

    def _end(self) -> None:
        if self._process.returncode is None:  # once it is waited for, its number may be another's
            os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()

    def _death(self) -> UserError:
        until = time.monotonic() + DYING_SECONDS
        how_far = os.WEXITED | os.WNOHANG | os.WNOWAIT
        while self._process.returncode is None and time.monotonic() < until:
            if os.waitid(os.P_PID, self.pid, how_far):
                break
            time.sleep(0.01)
        self._end()
        code = self._process.returncode
        how = f"was killed by {signal.Signals(-code).name}" if code and code < 0 else f"ended with exit status {code}"
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()][-_LOG_LINES:]
        said = f"; its last words in {self.log}: {' | '.join(lines)}" if lines else ""
        return UserError(
            f"{self.name} {how} while asked to {self.waiting_for}; if the machine ran out of memory, lower "
            f"engine.max_batch_rows or engine.vllm.kv_cache_memory_bytes{said}"
        )


def gather(replicas: Sequence[Replica]) -> list[Any]:
    """The answers of all, in their order; raises as soon as one of them has died or failed, not when its turn comes."""
    answers: dict[Any, Any] = {}
    while len(answers) < len(replicas):
        left = {replica.connection: replica for replica in replicas if replica.connection not in answers}
        for ready in wait(list(left)):
            assert isinstance(ready, Connection)
            answers[ready] = left[ready].receive()
    return [answers[replica.connection] for replica in replicas]


# In the process


def answer(connection: int, ended: int, make: Callable[[Connection], Any]) -> NoReturn:
    """Call the methods that messages name on `make(connection)`, until this process is ended from outside."""
    threading.Thread(target=_end_with_parent, args=(ended,), daemon=True).start()
    line = Connection(connection)
    served = make(line)
    while True:
        message, arguments = line.recv()
        try:
            result = (True, getattr(served, message)(*arguments))
        except Exception:
            result = (False, traceback.format_exc())
        line.send(result)


def received_descriptor(connection: Connection) -> int:
    """The file descriptor that came with the present message."""
    return int(reduction.recv_handle(connection))


def _end_with_parent(ended: int) -> None:
    os.read(ended, 1)  # nothing is ever written: it returns when the other end is closed
    os.killpg(0, signal.SIGKILL)
