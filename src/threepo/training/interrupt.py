"""Stopping politely: SIGTERM, SIGHUP and Ctrl-C end training after the step in progress, with a checkpoint."""

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

    def obey(self, done: int, steps: int, folder: Path) -> None:
        """Raise `Interrupted` if a signal came and there are steps left to do; the state must be saved by now."""
        if self.signal_number and done < steps:
            name = signal.Signals(self.signal_number).name
            raise Interrupted(
                self.signal_number, f"{name} after step {done} of {steps}; continue with --resume {folder}"
            )


@contextmanager
def polite_stop() -> Iterator[StopRequest]:
    """Within the body, the first SIGTERM, SIGHUP or SIGINT only sets the request; a second one ends the process.

    Signal handlers belong to the main thread; in any other the request simply never comes.
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
