"""Where the time of a training step goes, and when periodic work is due."""

import time
from dataclasses import dataclass, field


@dataclass
class Clock:
    """Wall-clock seconds of the parts of a step."""

    times: dict[str, float] = field(default_factory=dict)
    _last: float = field(default_factory=time.perf_counter)

    def lap(self, name: str) -> None:
        """Book the time since the last lap under `name`."""
        now = time.perf_counter()
        self.times[name], self._last = now - self._last, now


def due(done: int, every: int, total: int) -> bool:
    """Whether work that happens every so many steps (0: only at the end) is due after `done` of `total` steps."""
    return done == total or (every > 0 and done % every == 0)
