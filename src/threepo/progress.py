"""Progress on the terminal: a live bar; or, where the output is no terminal, a line now and then."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

LINE_EVERY = 15.0
"""Seconds between lines when the output is no terminal."""
TIMES_FROM, BAR_FROM = 75, 110
"""Widths of terminals: narrower ones show only the first number and no times, or no bar."""


class Reporter:
    """Shows how far a loop is, and its latest numbers."""

    def __init__(self, title: str, total: int, start: int, console: Console, bar: Progress | None) -> None:
        self._title, self._total, self._console, self._bar = title, total, console, bar
        self._began, self._start, self._last_line = time.monotonic(), start, time.monotonic()
        if bar is not None:
            bar.add_task(title, total=total, completed=start, numbers="")

    def update(self, done: int, numbers: Mapping[str, float]) -> None:
        """`done` of the total are finished; `numbers` are shown by name."""
        text = "  ".join(f"{name} {value:.3g}" for name, value in numbers.items())
        if self._bar is not None:
            text = text if self._console.width >= TIMES_FROM else text.partition("  ")[0]
            self._bar.update(self._bar.task_ids[0], completed=done, numbers=text)
            return
        now = time.monotonic()
        if now - self._last_line >= LINE_EVERY or done == self._total:
            self._last_line = now
            left = (now - self._began) / max(done - self._start, 1) * (self._total - done)
            self._console.print(f"{self._title}  {done}/{self._total}  {text}  {left:.0f} s left", highlight=False)


@contextmanager
def progress(
    title: str, total: int, start: int = 0, folder: Path = Path(), console: Console | None = None, unit: str = "step"
) -> Iterator[Reporter]:
    """A reporter, to standard error, for a loop of `total` units; the first `start` are done already."""
    console = console or Console(stderr=True)
    if not console.is_terminal:
        begin = f", from {unit} {start}" if start else ""
        console.print(f"{title}: {total} {unit}s{begin}, in {folder}", highlight=False, soft_wrap=True)
        yield Reporter(title, total, start, console, None)
        return
    columns: list[ProgressColumn] = [TextColumn("[bold]{task.description}"), MofNCompleteColumn()]
    columns.append(TextColumn("{task.fields[numbers]}"))
    if console.width >= TIMES_FROM:
        columns += [TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn()]
    if console.width >= BAR_FROM:
        columns.insert(1, BarColumn(bar_width=24))
    with Progress(*columns, console=console) as bar:
        yield Reporter(title, total, start, console, bar)
