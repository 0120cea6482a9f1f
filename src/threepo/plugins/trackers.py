"""Copies of a run's metrics for TensorBoard, W&B, trackio and MLflow; metrics.jsonl stays the source of truth.

A tracker gets the resolved configuration once, each row of metrics at its step, and the summary at the end. A run that
is resumed goes on in the same run of the tracker, whose id is in trackers.json. Where the copies go is for the
trackers' own environment variables to say (docs/trackers.md). Whatever a tracker raises switches that tracker off, with
one warning, and never ends the run. To add a tracker, write a class with these methods and a line in `TRACKERS`
of config.
"""

import os
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from threepo.config import TRACKERS
from threepo.errors import ThreepoWarning
from threepo.files import finite, read_json_as, write_json

PROJECT = "threepo"
"""The project or experiment, unless an environment variable names another."""
PATIENCE = 60
"""Seconds that a tracker may take to send what is left when the run has ended."""
IDS = "trackers.json"
"""In the run folder: the id of the run in each tracker."""

Values = Mapping[str, Any]


class Tracker(Protocol):
    """An open run of a tracker.

    It is made from the run folder, the configuration, the id of the run to go on with (empty: a new one) and the first
    step of which rows will come.
    """

    id: str
    """By which a resumed run finds it again."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record finite metrics of a training step; -1 is the evaluation before the first."""

    def finish(self, summary: Values | None) -> None:
        """End the run with its summary; None: it was interrupted."""


class Trackers:
    """The trackers of a run, on the rank that writes its folder."""

    def __init__(self, names: Sequence[str], folder: Path, config: Values, first_step: int, resumed: bool) -> None:
        """`first_step`: rows of earlier steps are there already."""
        fix, known = "delete it: trackers then begin new runs", resumed and (folder / IDS).is_file()
        ids = read_json_as(folder / IDS, dict[str, str], fix) if known else {}
        self._open: dict[str, Tracker] = {}
        for name in names:
            try:
                self._open[name] = TRACKERS[name].load()(folder, config, ids.get(name, ""), first_step)
            except KeyboardInterrupt:  # the user's
                raise
            except BaseException as error:
                _warn(name, error)
        ids |= {name: tracker.id for name, tracker in self._open.items()}
        if ids:
            write_json(folder / IDS, ids)

    def log(self, row: Mapping[str, Any]) -> None:
        """Send a row of metrics.jsonl."""
        metrics = {name: value for name, value in finite(row).items() if value is not None and name != "step"}
        self._each(lambda tracker: tracker.log(row["step"], metrics))

    def finish(self, summary: Values | None) -> None:
        """Close all; see `Tracker.finish`."""
        self._each(lambda tracker: tracker.finish(summary))

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._open.items()):
            try:
                call(tracker)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                del self._open[name]
                _warn(name, error)


def _warn(name: str, error: BaseException) -> None:
    reason = " ".join(str(error).split())[:300]
    message = f"{name} failed and is now off for this run: {type(error).__name__}: {reason}; metrics.jsonl has all"
    warnings.warn(message, ThreepoWarning, stacklevel=2)


def _flat(values: Values, name: str = "") -> Iterator[tuple[str, Any]]:
    """Nested settings by their dotted keys."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{name}{key}.")
        else:
            yield f"{name}{key}", value


class TensorBoard:
    """Event files in the run folder."""

    id = ""

    def __init__(self, folder: Path, config: Values, known: str, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # purge_step hides rows of a killed run from the step that is made again.
        self._writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step)
        if not first_step:
            rows = (f"| {key} | {value} |" for key, value in _flat(config))
            self._writer.add_text("config", "\n".join(["| setting | value |", "| --- | --- |", *rows]))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def finish(self, summary: Values | None) -> None:
        if summary:
            self._writer.add_text("summary", "\n".join(f"    {key}: {value}" for key, value in _flat(summary)))
        self._writer.close()


class WeightsAndBiases:
    """A run of W&B, whose files are in the run folder unless WANDB_DIR names another."""

    def __init__(self, folder: Path, config: Values, known: str, first_step: int) -> None:
        import wandb

        self.id = known or uuid.uuid4().hex[:8]
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=os.environ.get("WANDB_NAME", folder.name),
            id=self.id,
            resume="allow",
            reinit="create_new",  # the user may have a run open in this process
            dir=os.environ.get("WANDB_DIR", str(folder)),
            config=dict(config),
            settings=wandb.Settings(finish_timeout=PATIENCE),
        )
        self._run.define_metric("*", step_metric="step")  # its own count of rows knows no step -1

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({**metrics, "step": step})

    def finish(self, summary: Values | None) -> None:
        self._run.summary.update({f"summary/{key}": value for key, value in _flat(summary or {})})
        self._run.finish(exit_code=0 if summary else 1)


class Trackio:
    """A run of trackio, which finds a run again by its name; it waits for 30 s at most when the run ends."""

    def __init__(self, folder: Path, config: Values, known: str, first_step: int) -> None:
        import trackio

        self.id = known or f"{folder.name}-{uuid.uuid4().hex[:8]}"
        project = os.environ.get("TRACKIO_PROJECT", PROJECT)
        self._run: Any = trackio.init(project, self.id, config=dict(config), resume="allow", embed=False)
        self._end = trackio.finish  # unlike the run's own, it also forgets the run

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def finish(self, summary: Values | None) -> None:
        if summary:
            self._run.log({f"summary/{key}": value for key, value in _flat(summary)})
        self._end()


class MLflow:
    """A run of an experiment, on the server or in the file that MLFLOW_TRACKING_URI names."""

    def __init__(self, folder: Path, config: Values, known: str, first_step: int) -> None:
        # Its own defaults keep a run waiting for minutes where the server is dead.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", str(PATIENCE // 3))
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._client, self._metric = MlflowClient(), Metric
        self.id = known
        if known:
            self._client.update_run(known, status="RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self._client.create_experiment(name)
        self.id = self._client.create_run(experiment, run_name=folder.name).info.run_id
        settings = [Param(key, str(value)) for key, value in _flat(config)]
        for first in range(0, len(settings), 100):  # as many as it takes at a time
            self._client.log_batch(self.id, params=settings[first : first + 100])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        # Its files cannot hold both a/b and a/b/c: that is a/b.c here.
        names = {name: "/".join(name.replace("/", ".").split(".", 1)) for name in metrics}
        self._client.log_batch(self.id, [self._metric(names[key], v, now, step) for key, v in metrics.items()])

    def finish(self, summary: Values | None) -> None:
        for key, value in _flat(summary or {}):
            self._client.set_tag(self.id, f"summary.{key}", str(value))
        self._client.set_terminated(self.id, "FINISHED" if summary else "KILLED")
