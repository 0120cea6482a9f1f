"""Progress of a loop on the terminal, and polite ways to stop it.

A live bar, or a line now and then if that is no terminal. A signal lets the step in progress finish and be saved.
"""

import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from threepo.errors import Interrupted

LINE_EVERY = 15.0
"""Seconds between lines when the output is no terminal."""
TIMES_FROM, BAR_FROM = 75, 160
"""Widths of terminals: narrower ones show no times, or no bar."""


class StandardError:
    """Standard error for a console. A closed pipe or terminal is no reason to end a run: what it is told is lost."""

    @property
    def _stream(self) -> Any:
        """Standard error, in whose place rich has its own beside a live bar."""
        return getattr(sys.stderr, "rich_proxied_file", sys.stderr)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> None:
        """Write the text, if that is possible."""
        with suppress(OSError):
            self._stream.write(text)

    def flush(self) -> None:
        """Flush what is written, if that is possible."""
        with suppress(OSError):
            self._stream.flush()


def stderr_console(quiet: bool = False) -> Console:
    """A console on standard error, for progress."""
    return Console(file=cast(IO[str], StandardError()), quiet=quiet)


class Reporter:
    """Shows the progress of a loop, and its latest numbers."""

    def __init__(self, title: str, total: int, start: int, console: Console, bar: Progress | None) -> None:
        self._title, self._total, self._start, self._console, self._bar = title, total, start, console, bar
        self._began = self._last_line = time.monotonic()

    def update(self, done: int, numbers: Mapping[str, float]) -> None:
        """`done` of the total are finished; `numbers` are shown by name, the first of them as far as there is room."""
        texts = [f"{name} {value:{'.3g' if abs(value) < 1000 else ',.0f'}}" for name, value in numbers.items()]
        text, now = "  ".join(texts), time.monotonic()
        if self._bar:
            width = self._console.width
            taken = len(f"{self._title} {self._total}/{self._total} ") + 21 * (width >= TIMES_FROM)
            while len(text) > width - taken - 25 * (width >= BAR_FROM) and len(texts) > 1:
                text = "  ".join(texts := texts[:-1])
            self._bar.update(self._bar.task_ids[0], completed=done, numbers=text)
        elif now - self._last_line >= LINE_EVERY or done == self._total:
            self._last_line = now
            left = (now - self._began) / max(done - self._start, 1) * (self._total - done)
            line = f"{self._title}  {done}/{self._total}  {text}  {left:.0f} s left"
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def progress(
    title: str, total: int, start: int = 0, folder: Path = Path(), console: Console | None = None, unit: str = "step"
) -> Iterator[Reporter]:
    """A reporter, to standard error, for a loop of `total` units; the first `start` are done already."""
    console = console or stderr_console()
    if not console.is_terminal:
        begin = f", from {unit} {start}" if start else ""
        begins = f"{title}: {total} {unit}s{begin}, in {folder}"
        console.print(begins, markup=False, highlight=False, soft_wrap=True)
        yield Reporter(title, total, start, console, None)
        return
    bar = [BarColumn(bar_width=24)] if console.width >= BAR_FROM else []
    times = [TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn()] if console.width >= TIMES_FROM else []
    texts = TextColumn("[bold]{task.description}"), MofNCompleteColumn(), TextColumn("{task.fields[numbers]}")
    with Progress(texts[0], *bar, *texts[1:], *times, console=console) as live:
        live.add_task(title, total=total, completed=start, numbers="")
        yield Reporter(title, total, start, console, live)


CALLBACK = 1000
"""Stands for a signal's number where a callback has asked the loop to stop."""


class StopRequest:
    """Set by a signal, at any moment: read it once a step."""

    signal_number = 0


def obey(
    signal_number: int, done: int, total: int, run: Path, unit: str = "step", fix: str = "continue with --resume"
) -> None:
    """Raise `Interrupted` if there is a signal, or `CALLBACK`, and work is left; the state must be saved before."""
    if signal_number and done < total:
        name = "stopped by a callback" if signal_number == CALLBACK else signal.Signals(signal_number).name
        raise Interrupted(signal_number, f"{name} after {unit} {done} of {total}; {fix} {run}")


@contextmanager
def polite_stop() -> Iterator[StopRequest]:
    """Within the body, the first SIGTERM, SIGHUP or SIGINT only sets the request; a second one ends the process.

    Only the main thread may handle signals; in other threads the request is never set.
    """
    request = StopRequest()
    with ExitStack() as previous:

        def handle(number: int, _: Any) -> None:
            request.signal_number = number
            previous.close()

        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                # Started under `nohup`, the process outlives its terminal.
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                    previous.callback(signal.signal, number, signal.signal(number, handle))
        yield request
