"""SIGTERM, SIGHUP and Ctrl-C let the step in progress finish and its state be saved."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from threepo.errors import Interrupted


@dataclass
class StopRequest:
    """Set by a signal; read between steps."""

    signal_number: int = 0

    def obey(
        self, done: int, total: int, folder: Path, unit: str = "step", fix: str = "continue with --resume"
    ) -> None:
        """Raise `Interrupted` if a signal came and not all is done; the state must be saved by now."""
        if self.signal_number and done < total:
            name = signal.Signals(self.signal_number).name
            raise Interrupted(self.signal_number, f"{name} after {unit} {done} of {total}; {fix} {folder}")


@contextmanager
def polite_stop() -> Iterator[StopRequest]:
    """Within the body, the first SIGTERM, SIGHUP or SIGINT only sets the request; a second one ends the process.

    Only the main thread may handle signals; in other threads the request is never set.
    """
    request = StopRequest()
    previous: dict[int, Any] = {}

    def handle(number: int, frame: FrameType | None) -> None:
        request.signal_number = number
        for each, handler in previous.items():
            signal.signal(each, handler)

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            # Started under `nohup`, the process outlives its terminal.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                previous[number] = signal.signal(number, handle)
    try:
        yield request
    finally:
        for each, handler in previous.items():
            signal.signal(each, handler)
