"""What follows from the step alone, so that a resumed run needs no state for it: the learning rate, and what is due."""

import math

from threepo.config import ScheduleConfig


def factor(step: int, steps: int, settings: ScheduleConfig) -> float:
    """Multiplier of the learning rate at training step `step` (0-based) of `steps`.

    Linear warm-up to 1 over the first `warmup_share` of the steps, reached at its last step; then constant, or a
    half cosine from 1 down to `floor`, reached at the last step.
    """
    warmup = math.ceil(settings.warmup_share * steps - 1e-9)  # 0.07 * 100 is 7.000000000000001
    if step < warmup:
        return (step + 1) / warmup
    if settings.kind == "constant":
        return 1.0
    progress = (step - warmup + 1) / max(steps - warmup, 1)
    return settings.floor + (1 - settings.floor) * 0.5 * (1 + math.cos(math.pi * progress))


def due(done: int, every: int, total: int) -> bool:
    """Whether work that happens every so many steps (0: only at the end) is due after `done` of `total` steps."""
    return done == total or (every > 0 and done % every == 0)
