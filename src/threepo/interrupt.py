"""SIGTERM, SIGHUP and Ctrl-C let the step in progress finish and its state be saved."""

import signal
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

    Only the main thread may handle signals; in any other the request never comes.
    """
    request = StopRequest()
    previous: dict[int, Any] = {}

    def handle(number: int, frame: FrameType | None) -> None:
        request.signal_number = number
        for each, handler in previous.items():
            signal.signal(each, handler)

    try:
        for number in (int(signal.SIGTERM), int(signal.SIGHUP), int(signal.SIGINT)):
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # started under `nohup`, to outlive its terminal
            previous[number] = signal.signal(number, handle)
    except ValueError:  # not in the main thread
        previous.clear()
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
