"""Optional copies of the metrics for other tools; metrics.jsonl stays the truth, and a tracker never stops a run."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from threepo.errors import ThreepoWarning


class TensorBoard:
    """Writes scalars as TensorBoard event files."""

    def __init__(self, folder: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # purge_step hides rows of a killed run from the step that is made again.
        self._writer: Any = SummaryWriter(str(folder), purge_step=first_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record one step; a failure is reported once and ends the tracking, not the run."""
        if self._writer is None:
            return
        try:
            for name, value in metrics.items():
                self._writer.add_scalar(name, value, step)
            self._writer.flush()
        except Exception as error:
            warnings.warn(f"TensorBoard logging failed and is now off: {error}", ThreepoWarning, stacklevel=2)
            self._writer = None
