"""Trackers: what each has got of a run, that a resumed run goes on in it, and that none can end a run.

The real packages in their offline modes, as far as they are installed (the extras tensorboard, wandb, trackio, mlflow).
"""

import json
import os
import resource
import struct
import threading
import warnings
from asyncio import CancelledError
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from runs import resume, sft_config, train_config
from threepo import api
from threepo.config import TRACKERS
from threepo.errors import Interrupted, ThreepoWarning, UserError
from threepo.plugins import trackers
from threepo.plugins.trackers import Trackers
from threepo.run_folder import SUMMARY, read_metrics

Points = dict[str, list[tuple[int, float]]]
"""The step and the value of each row, by metric."""


@pytest.fixture(autouse=True)
def _offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tracker writes below the test's folder, and none reaches for a network."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path / 'mlflow'}")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")


def from_tensorboard(folder: Path) -> tuple[Points, Any, Any]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    points = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    texts = [events.Tensors(f"{name}/text_summary")[0].tensor_proto for name in ("config", "summary")]
    return points, *(text.string_val[0].decode() for text in texts)


def wandb_records(file: Path) -> Iterator[bytes]:
    """The records of a file of W&B, which is a log of LevelDB behind seven bytes of W&B's own."""
    data, at, record = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := -at % 32768) and left < 7:  # a header is never split between blocks
            at += left
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def from_wandb(folder: Path) -> tuple[Points, Any, Any]:
    """Records of all files of the run, in order: `wandb sync` joins them by id."""
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()  # waits for the process that writes the files
    points: Points = {}
    config: dict[str, Any] = {}
    summary: dict[str, Any] = {}
    ids = set()
    for file in sorted((folder / "wandb").glob("offline-run-*/*.wandb")):
        for record in map(Record.FromString, wandb_records(file)):
            if record.HasField("run"):
                ids.add(record.run.run_id)
                config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            for name in row.keys() - {"step", "_step", "_timestamp", "_runtime"}:
                points.setdefault(name, []).append((row["step"], row[name]))
            summary |= {i.key or i.nested_key[0]: json.loads(i.value_json) for i in record.summary.update}
    assert ids == {json.loads((folder / "trackers.json").read_text())["wandb"]}
    return points, json.dumps(config), {key.removeprefix("summary/"): value for key, value in summary.items()}


def from_trackio(folder: Path) -> tuple[Points, Any, Any]:
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    (run,) = trackio.Api().runs("threepo")
    assert run.name == json.loads((folder / "trackers.json").read_text())["trackio"]
    points: Points = {}
    for row in SQLiteStorage.get_logs("threepo", run.name):
        for name, value in row.items():
            points.setdefault(name, []).append((row["step"], value))
    summary = {name.removeprefix("summary/"): values[-1][1] for name, values in points.items() if "summary/" in name}
    return points, json.dumps(run.config), summary


def from_mlflow(folder: Path) -> tuple[Points, Any, Any]:
    from mlflow import MlflowClient

    client = MlflowClient()
    experiment = client.get_experiment_by_name("threepo")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    history = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
    points = {name: [(m.step, m.value) for m in found] for name, found in history.items()}
    points["posterior/sigma_to_rms/mlp"] = points["posterior/sigma_to_rms.mlp"]
    return points, json.dumps(run.data.params), {k.removeprefix("summary."): v for k, v in run.data.tags.items()}


READERS: Mapping[str, Callable[[Path], tuple[Points, Any, Any]]] = {
    "tensorboard": from_tensorboard,
    "wandb": from_wandb,
    "trackio": from_trackio,
    "mlflow": from_mlflow,
}


def first_prompts_of_tables(name: str, folder: Path) -> list[str]:
    """The text of the first cell under the header of every table of rollouts that the tracker has, in order."""
    if name == "tensorboard":
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(folder / "tensorboard"))
        events.Reload()
        texts = [e.tensor_proto.string_val[0].decode() for e in events.Tensors("rollouts/text_summary")]
        return [text.splitlines()[2].split("|")[1].strip().replace("<br>", "\n") for text in texts]
    if name == "mlflow":
        from mlflow import MlflowClient

        client, run = MlflowClient(), json.loads((folder / "trackers.json").read_text())["mlflow"]
        files = sorted(file.path for file in client.list_artifacts(run, "rollouts"))
        assert files == [f"rollouts/step-{step:06d}.json" for step in range(3)]
        texts = [Path(client.download_artifacts(run, file)).read_text() for file in files]
    elif name == "trackio":
        points, *_ = from_trackio(folder)
        return [table["_value"][0]["prompt"] for _, table in points["rollouts"]]  # type: ignore[index]
    else:
        files = sorted((folder / "wandb").glob("offline-run-*/files/media/table/*.json"), key=os.path.getmtime)
        texts = [file.read_text() for file in files]
    return [json.loads(text)["data"][0][0] for text in texts]


def skip_without_package(name: str) -> None:
    if needs := TRACKERS[name].needs:
        pytest.importorskip(needs)


@pytest.mark.parametrize("name", TRACKERS)
def test_a_tracker_has_the_rows_of_a_run_that_was_stopped_and_resumed(name: str, tmp_path: Path) -> None:
    skip_without_package(name)
    folder = tmp_path / "run"
    shown = ("run.show_every=1", "eval.every=3", f'run.trackers=["{name}"]')
    pattern = 'noise.where={all = 1.0, "*.layers.0.*" = 0.5}'  # a name that MLflow refuses
    config = train_config(folder, "run.steps=3", *shown, "method.preset=c3po", pattern)
    with pytest.raises(Interrupted, match="stopped by a callback after step 2 of 3"):
        api.train(config, callbacks=[lambda row: row["step"] == 1])
    resume(folder)
    points, settings, summary = READERS[name](folder)
    rows = read_metrics(folder)
    assert [row["step"] for row in rows] == [-1, 0, 1, 2]
    for metric in ("reward/mean", "policy/entropy", "eval/pass_at_1", "posterior/sigma_to_rms/mlp"):
        expected = {row["step"]: row[metric] for row in rows if row.get(metric) is not None}
        assert [step for step, _ in points[metric]] == list(expected), metric
        assert dict(points[metric]) == pytest.approx(expected), metric
        assert expected
    files = sorted((folder / "completions").glob("*.parquet"))
    first = [parquet.read_table(file)["prompt"][0].as_py() for file in files]
    assert first_prompts_of_tables(name, folder) == first
    assert len(first) == 3
    assert "c3po" in settings
    assert "prompts_per_step" in settings
    if isinstance(summary, str):
        assert f"reward_last: {rows[-1]['reward/mean']}" in summary
    else:
        assert float(summary["reward_last"]) == pytest.approx(rows[-1]["reward/mean"])


def test_a_run_of_wandb_that_the_user_has_open_stays_theirs(tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb")
    theirs = wandb.init(project="own", dir=str(tmp_path))
    api.train(train_config(tmp_path / "run", "run.steps=1", 'run.trackers=["wandb"]'))
    assert json.loads((tmp_path / "run" / "trackers.json").read_text())["wandb"] != theirs.id
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*"))
    theirs.log({"a": 1})
    assert theirs.summary["a"] == 1
    theirs.finish()


def test_fine_tuning_is_tracked_too(tmp_path: Path) -> None:
    api.train(sft_config(tmp_path / "run", "run.steps=2", 'run.trackers=["tensorboard"]'))
    points, *_ = from_tensorboard(tmp_path / "run")
    assert [step for step, _ in points["sft/loss"]] == [0, 1]


def test_a_missing_package_is_said_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("threepo.training.run.find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"run\.trackers: 'mlflow' needs the package; .*pip install '\.\[mlflow\]'"):
        api.train(train_config(tmp_path / "run", 'run.trackers=["mlflow"]'))
    assert not (tmp_path / "run").exists()


class Dead:
    """A tracker that fails whenever it is used after it was opened."""

    id = "dead"

    def __init__(self, kind: type[BaseException]) -> None:
        self.kind, self.calls = kind, 0

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.calls += 1
        raise self.kind("nobody\nanswers")

    def show(self, step: int, rows: Sequence[Any]) -> None:
        self.calls += 1

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        raise self.kind("nobody answers")


@pytest.mark.parametrize("kind", [ConnectionError, SystemExit, CancelledError])
def test_a_tracker_that_fails_is_said_once_and_the_others_go_on(
    kind: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = Dead(kind)
    monkeypatch.setattr(trackers, "MLflow", lambda *_: dead)  # type: ignore[arg-type]
    monkeypatch.setattr("threepo.training.run.find_spec", lambda _: True)
    with pytest.warns(ThreepoWarning) as said:
        api.train(train_config(tmp_path / "run", "run.steps=3", 'run.trackers=["mlflow", "tensorboard"]'))
    (warning,) = (str(w.message) for w in said if issubclass(w.category, ThreepoWarning))
    assert f"mlflow failed and is now off for this run: {kind.__name__}: nobody answers" in warning
    assert dead.calls == 1
    points, *_ = from_tensorboard(tmp_path / "run")
    assert len(points["reward/mean"]) == len(read_metrics(tmp_path / "run")) == 3


@pytest.mark.parametrize("name", TRACKERS)
def test_a_folder_that_a_tracker_cannot_write_ends_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_without_package(name)
    folder = tmp_path / "run"
    (file := tmp_path / "file").write_text("no folder")
    folder.mkdir()
    (folder / "tensorboard").write_text("no folder")
    monkeypatch.setenv("WANDB_DIR", str(file))
    monkeypatch.setenv("TRACKIO_DIR", str(file))
    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", file, raising=False) if name == "trackio" else None
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{file}/runs")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        api.train(train_config(folder, "run.steps=2", f'run.trackers=["{name}"]'))
    assert (folder / SUMMARY).is_file()
    assert len(read_metrics(folder)) == 2


@contextmanager
def small_files() -> Iterator[None]:
    """No file may grow above 2 kB, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_full_disk_switches_tensorboard_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)  # its writing thread would print a traceback
    trackers = Trackers(["tensorboard"], tmp_path, {"a": 1}, 0, resumed=False)
    with small_files():
        with pytest.warns(ThreepoWarning, match=r"tensorboard failed and is now off .*File too large"):
            _log_a_hundred_rows(trackers)
        trackers.finish({"steps": 100})


def _log_a_hundred_rows(trackers: Trackers) -> None:
    for step in range(100):
        trackers.log({"step": step, "reward/mean": 0.5})


def test_tables_come_as_often_as_was_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the step has a row of its evaluation besides."""
    shown: list[int] = []

    class Records:
        id = ""

        def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

        def show(self, step: int, rows: Sequence[Any]) -> None:
            shown.append(step)

        def finish(self, summary: Mapping[str, Any] | None) -> None: ...

    monkeypatch.setattr(trackers, "TensorBoard", lambda *_: Records())
    settings = ("run.steps=4", "run.show_every=2", "eval.every=2", 'run.trackers=["tensorboard"]')
    api.train(train_config(tmp_path / "run", *settings))
    assert shown == [1, 3]


def test_steps_that_are_made_again_are_seen_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed run has told of steps after its last checkpoint."""
    from tensorboard.summary.writer import event_file_writer as files

    # Files of one second are read in the order of their names, where 10 comes before 9.
    monkeypatch.setattr(files, "_global_uid", files.AtomicCounter(0))
    for first, values in ((0, (0.25, 0.5, 0.75)), (1, (1.0, 2.0))):
        followers = Trackers(["tensorboard"], tmp_path, {"a": 1}, first, resumed=first > 0)
        for step, value in enumerate(values, start=first):
            followers.log({"step": step, "x": value})
        followers.finish({"steps": 3})
    assert from_tensorboard(tmp_path)[0] == {"x": [(0, 0.25), (1, 1.0), (2, 2.0)]}
