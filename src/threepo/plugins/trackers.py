"""Copies of a run's metrics for TensorBoard, W&B, trackio and MLflow; metrics.jsonl stays the source of truth.

A tracker gets the resolved configuration once, each row of metrics at its step, with `run.show_every` a table of
rollouts now and then, and the summary at the end. A resumed run continues the same run of the tracker, whose id is in
trackers.json. The trackers' own environment variables say where the copies go (docs/analysis.md). An error of a tracker
switches that tracker off, with one warning, and never ends the run. To add a tracker, write a class with these methods
and a line in `TRACKERS` of config/__init__.py.
"""

import html
import os
import re
import time
import uuid
import warnings
from asyncio import CancelledError
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from pyarrow import parquet

from threepo.config import TRACKERS
from threepo.config.records import flat
from threepo.errors import ThreepoWarning
from threepo.files import finite, read_json_as, write_json
from threepo.run_folder import COMPLETIONS
from threepo.user_code import find_named

PROJECT = "threepo"
"""The project or experiment, unless an environment variable names another."""
PATIENCE = 60
"""Seconds that a tracker may take to send what is left when the run has ended."""
IDS = "trackers.json"
"""File in the run folder with the id of the run in each tracker."""
TABLE = ("prompt", "completion", "reward", "status", "parsed_answer", "reference_answer", "draw_index", "draw_arm")
"""Columns of a table of rollouts, of those in completions/."""
ROWS = 64
"""Most rows of a table."""

Values = Mapping[str, Any]


class Tracker(Protocol):
    """An open run of a tracker.

    Its class is called with the run folder, the configuration, the id of the run to continue (empty: a new run) and the
    first step whose row will be logged.
    """

    id: str
    """The id of the run in the tracker, by which a resumed run finds it."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record finite metrics of a training step; -1 is the evaluation before the first."""

    def show(self, step: int, rows: Sequence[Sequence[Any]]) -> None:
        """Record a table of rollouts of a training step, with the columns `TABLE`."""

    def finish(self, summary: Values | None) -> None:
        """End the run with its summary; None: it was interrupted."""


class Trackers:
    """The open trackers of a run."""

    def __init__(self, names: Sequence[str], folder: Path, config: Values, first_step: int, resumed: bool) -> None:
        """`first_step`: rows of earlier steps are there already."""
        self._folder, self._every = folder, config.get("run", {}).get("show_every", 0)
        ids: dict[str, str] = {}
        if resumed and (folder / IDS).is_file():
            ids = read_json_as(folder / IDS, dict[str, str], "delete it: trackers then begin new runs")
        self._open: dict[str, Tracker] = {}
        for name in names:
            with self._off_after_errors(name):
                self._open[name] = find_named(TRACKERS, name, "run.trackers")(
                    folder, config, ids.get(name, ""), first_step
                )
        ids |= {name: tracker.id for name, tracker in self._open.items()}
        if ids:
            write_json(folder / IDS, ids)

    def log(self, row: Mapping[str, Any]) -> None:
        """Send a row of metrics.jsonl, and some of its step's rollouts if they are due."""
        step = row["step"]
        metrics = {name: value for name, value in finite(row).items() if value is not None and name != "step"}
        asked = self._every and (step + 1) % self._every == 0 and "reward/mean" in row  # not an evaluation's own row
        for name, tracker in list(self._open.items()):
            with self._off_after_errors(name):
                tracker.log(step, metrics)
                if asked:
                    tracker.show(step, first_rollouts(self._folder, step))

    def finish(self, summary: Values | None) -> None:
        """Close all; see `Tracker.finish`."""
        for name, tracker in list(self._open.items()):
            with self._off_after_errors(name):
                tracker.finish(summary)

    @contextmanager
    def _off_after_errors(self, name: str) -> Iterator[None]:
        """Switch a tracker off if the body raises, and warn."""
        try:
            yield
        except (Exception, SystemExit, CancelledError) as error:  # all but the user's Ctrl-C
            self._open.pop(name, None)
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            message = f"{name} failed and is now off for this run: {reason}; metrics.jsonl has all"
            warnings.warn(message, ThreepoWarning, stacklevel=3)


def first_rollouts(run: Path, step: int) -> list[list[Any]]:
    """The first `ROWS` rollouts of a step, with the columns `TABLE`."""
    table = parquet.read_table(run / COMPLETIONS / f"step-{step:06d}.parquet", columns=list(TABLE))
    return [[row[column] for column in TABLE] for row in table.slice(0, ROWS).to_pylist()]


class TensorBoard:
    """Event files in the run folder."""

    id = ""

    def __init__(self, folder: Path, config: Values, known: str, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # purge_step hides rows of a killed run from the step that is made again.
        self._writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step)
        if not first_step:
            rows = (f"| {key} | {value} |" for key, value in flat(config))
            self._writer.add_text("config", "\n".join(["| setting | value |", "| --- | --- |", *rows]))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def show(self, step: int, rows: Sequence[Sequence[Any]]) -> None:
        marks = str.maketrans({"|": "&#124;", "\r": "", "\n": "<br>"})
        cells = ([html.escape(str(cell)).translate(marks) for cell in row] for row in rows)
        lines = [TABLE, ["---"] * len(TABLE), *cells]
        self._writer.add_text("rollouts", "\n".join(f"| {' | '.join(line)} |" for line in lines), step)

    def finish(self, summary: Values | None) -> None:
        if summary:
            self._writer.add_text("summary", "\n".join(f"    {key}: {value}" for key, value in flat(summary)))
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
        self._run.define_metric("*", step_metric="step")  # W&B's own count of rows has no step -1

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({**metrics, "step": step})

    def show(self, step: int, rows: Sequence[Sequence[Any]]) -> None:
        import wandb

        self._run.log({"rollouts": wandb.Table(list(TABLE), [list(row) for row in rows]), "step": step})

    def finish(self, summary: Values | None) -> None:
        self._run.summary.update({f"summary/{key}": value for key, value in flat(summary or {})})
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

    def show(self, step: int, rows: Sequence[Sequence[Any]]) -> None:
        import trackio
        from pandas import DataFrame

        self._run.log({"rollouts": trackio.Table(dataframe=DataFrame(rows, columns=TABLE))}, step=step)

    def finish(self, summary: Values | None) -> None:
        if summary:
            self._run.log({f"summary/{key}": value for key, value in flat(summary)})
        self._end()


def _mlflow_name(name: str) -> str:
    """A name that MLflow takes: no star of a pattern, and `a/b.c` for `a/b/c`, because its files cannot be folders."""
    first, slash, rest = re.sub(r"[^\w./: -]", "_", name).partition("/")
    return first + slash + rest.replace("/", ".")


class MLflow:
    """A run of an experiment, on the server or in the file that MLFLOW_TRACKING_URI names."""

    def __init__(self, folder: Path, config: Values, known: str, first_step: int) -> None:
        # With MLflow's own defaults, a run waits for minutes if the server is dead.
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
        settings = [Param(_mlflow_name(key), str(value)) for key, value in flat(config)]
        for first in range(0, len(settings), 100):  # MLflow takes at most 100 at a time
            self._client.log_batch(self.id, params=settings[first : first + 100])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        found = [self._metric(_mlflow_name(name), value, now, step) for name, value in metrics.items()]
        self._client.log_batch(self.id, found)

    def show(self, step: int, rows: Sequence[Sequence[Any]]) -> None:
        table = {"columns": list(TABLE), "data": [list(row) for row in rows]}
        self._client.log_dict(self.id, table, f"rollouts/step-{step:06d}.json")

    def finish(self, summary: Values | None) -> None:
        for key, value in flat(summary or {}):
            self._client.set_tag(self.id, f"summary.{key}", str(value))
        self._client.set_terminated(self.id, "FINISHED" if summary else "KILLED")
