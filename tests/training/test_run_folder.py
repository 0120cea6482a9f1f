"""Files and run folders: whole or not there, one run, one user, and one line when the disk says no."""

import errno
import fcntl
import math
import resource
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from factories import completion
from threepo import files
from threepo.config import RunConfig, TrainConfig
from threepo.config.recipes import load_resumed
from threepo.errors import UserError
from threepo.evaluation.records import EvaluationFolder
from threepo.files import atomic_file, atomic_folder, parse_json, write_text
from threepo.models.policy import Policy
from threepo.posterior.ivon import IVON
from threepo.run_folder import RunFolder, completion_row, read_metrics, write_parquet
from threepo.training.checkpoint import TrainState, save_checkpoint
from threepo.types import Draw, Verdict


def test_a_file_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "file.txt"
    write_text(path, "one")
    with pytest.raises(ZeroDivisionError), atomic_file(path) as temporary:
        temporary.write_text("half of tw")
        _ = 1 / 0
    assert path.read_text() == "one"
    write_text(path, "two")
    assert path.read_text() == "two"
    with pytest.raises(ZeroDivisionError), atomic_folder(tmp_path / "checkpoint") as folder:
        (folder / "weights").write_text("some")
        _ = 1 / 0
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["file.txt", "folder"]


def test_a_full_disk_is_one_line_and_leaves_nothing(policy: Policy, tmp_path: Path) -> None:
    """The kernel's file-size limit stands in for a full disk: both refuse a write in the middle of a file."""
    optimizer = IVON(policy.model.named_parameters())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
        with pytest.raises(UserError, match=r"cannot write .*big.*; free some space"):
            write_text(tmp_path / "big", "x" * 100_000)
        with pytest.raises(UserError, match=r"cannot write .*step-000001.*; free some space"):
            save_checkpoint(tmp_path / "step-000001", policy, optimizer, TrainState(step=1))
        folder = RunFolder.create(tmp_path / "run", RunConfig())
        with pytest.raises(UserError, match=r"cannot write .*metrics.jsonl.*; free some space"):
            for step in range(1000):
                folder.log({"step": step, "value": 1.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run"]
    assert len(read_metrics(tmp_path / "run")) > 100


def test_a_folder_that_may_not_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UserError, match=r"cannot write .*something else has that name"):
            RunFolder.create(path, RunConfig())
        with pytest.raises(UserError, match=r"cannot write .*something else has that name"):
            EvaluationFolder(path)


def test_a_mistake_leaves_no_folder_of_an_evaluation(tmp_path: Path) -> None:
    with pytest.raises(UserError), EvaluationFolder(tmp_path / "runs" / "eval"):
        raise UserError("fix it")
    assert list(tmp_path.iterdir()) == []


def test_odd_paths_are_refused_in_one_line(tmp_path: Path) -> None:
    for path in (Path("/proc/x.png"), Path("."), tmp_path, tmp_path / ("x" * 300)):
        with pytest.raises(UserError, match="cannot write"), atomic_file(path) as temporary:
            temporary.write_text("a")
    assert list(tmp_path.iterdir()) == []


def test_a_new_run_that_the_user_must_fix_leaves_no_folder(tmp_path: Path) -> None:
    for made in (False, True):
        path = tmp_path / "run"
        if made:
            path.mkdir()
            (path / "notes.txt").write_text("mine")
        with pytest.raises(UserError, match="fix"), RunFolder.create(path, RunConfig(), {"train": {}}):
            raise UserError("fix it")
        assert path.exists() is made
    assert [p.name for p in path.iterdir()] == ["notes.txt"], "what was there before stays"
    with pytest.raises(UserError, match="fix"), RunFolder.create(path, RunConfig()) as folder:
        folder.log({"step": 0})
        raise UserError("fix it")
    assert len(read_metrics(path)) == 1
    with pytest.raises(UserError, match="fix"), RunFolder(path):
        raise UserError("fix it")
    assert (path / "config.json").is_file(), "a run that is being resumed is never deleted"


def test_an_evaluation_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "evaluation.json").write_text("{}")
    with pytest.raises(UserError, match=r"holds an evaluation; choose another run.folder"):
        RunFolder.create(tmp_path, RunConfig())


def test_a_disk_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(UserError, match=r"its disk cannot lock files \(No locks available\)"):
        RunFolder.create(tmp_path / "run", RunConfig())


def test_a_run_folder_has_one_user_and_one_run(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", RunConfig(steps=5))
    for begin in (RunFolder, lambda path: RunFolder.create(path, RunConfig(steps=5))):
        with pytest.raises(UserError, match="is in use by another process"):
            begin(tmp_path / "run")
    folder.close()
    with pytest.raises(UserError, match=r"holds a run of another config \(steps = 5 there, 6 here\)"):
        RunFolder.create(tmp_path / "run", RunConfig(steps=6))
    with pytest.raises(UserError, match="holds this run already; continue it with --resume"):
        RunFolder.create(tmp_path / "run", RunConfig(steps=5))
    RunFolder(tmp_path / "run").close()
    with pytest.raises(UserError, match="holds no run"):
        load_resumed(TrainConfig, tmp_path / "elsewhere")
    (tmp_path / "run" / "config.json").write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        load_resumed(TrainConfig, tmp_path / "run")


def test_the_completions_of_several_steps_are_one_table(tmp_path: Path) -> None:
    """Also where a step has no answer at all, or no draw."""
    for step, (answer, draw) in enumerate([(None, None), ("4", Draw(0, 1, 2))]):
        row = completion_row(step, replace(completion(draw=draw), verdict=Verdict(False, "wrong", answer)))
        write_parquet(tmp_path / f"step-{step}.parquet", [row])
    table = pyarrow.parquet.read_table(tmp_path).to_pydict()
    assert (table["parsed_answer"], table["draw_index"]) == ([None, "4"], [None, 2])


def test_the_lock_of_a_killed_process_is_gone_with_it(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from threepo.config import RunConfig;"
        "from threepo.run_folder import RunFolder;"
        "f = RunFolder.create(Path(sys.argv[1]), RunConfig()); print('locked', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "run")], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"locked\n"
    with pytest.raises(UserError, match="in use"):
        RunFolder(tmp_path / "run")
    process.kill()
    process.wait()
    RunFolder(tmp_path / "run").close()


def test_what_killed_processes_left_goes_when_the_folder_is_opened_again(tmp_path: Path) -> None:
    """It goes before anything is saved: half-written checkpoints of a large model would fill the disk."""
    program = (
        "import os, signal, sys; from pathlib import Path; from threepo.files import atomic_file, atomic_folder\n"
        "make = atomic_folder if 'checkpoints' in sys.argv[1] else atomic_file\n"
        "with make(Path(sys.argv[1])): os.kill(os.getpid(), signal.SIGKILL)"
    )
    RunFolder.create(tmp_path / "run", RunConfig()).close()
    for name in ("checkpoints/step-000001", "completions/step-000001.parquet", "summary.json"):
        killed = subprocess.run([sys.executable, "-c", program, str(tmp_path / "run" / name)], check=False)
        assert killed.returncode == -signal.SIGKILL
    (tmp_path / "run" / "checkpoints" / ".mine").mkdir()
    left = {path.name.split(".unf")[0].rpartition(".")[0] for path in tmp_path.rglob("*.unfinished")}
    assert left == {".step-000001", ".step-000001.parquet", ".summary.json"}
    RunFolder(tmp_path / "run").close()
    assert list(tmp_path.rglob("*.unfinished")) == []
    assert (tmp_path / "run" / "checkpoints" / ".mine").is_dir(), "threepo did not make it"


def test_saving_leaves_what_another_process_is_writing_into_the_folder(tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "run" / "report" / "pages"):
        with RunFolder.create(tmp_path / "run", RunConfig()) as folder:
            folder.prune_checkpoints(2)
        RunFolder(folder.path).close()
    assert (tmp_path / "run" / "report" / "pages").is_dir()


def test_an_evaluation_is_logged_without_reading_all_rows_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else evaluations every few steps take longer and longer: 4,000 rows are read in half a second."""
    folder, parsed = RunFolder.create(tmp_path, RunConfig()), []
    monkeypatch.setattr(files, "parse_json", lambda *given: parsed.append(given) or parse_json(*given))
    folder.add_to_row({"step": -1, "score": 0.0})
    for step in range(9):
        folder.log({"step": step, "value": 1.0})
    folder.add_to_row({"step": 8, "score": 0.5})
    folder.close()
    assert len(parsed) == 1
    assert [r["step"] for r in read_metrics(tmp_path)] == list(range(-1, 9))
    assert read_metrics(tmp_path)[-1] == {"step": 8, "value": 1.0, "score": 0.5}


def test_metrics_survive_a_half_written_line_and_can_be_taken_back(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, RunConfig())
    for step in range(5):
        folder.log({"step": step, "value": math.nan if step == 2 else 0.1 * step})
        folder.write_completions(step, [completion_row(step, completion(draw=Draw(1, step, 2)))])
    folder.close()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "val')
    rows = read_metrics(tmp_path)
    assert [r["step"] for r in rows] == [0, 1, 2, 3, 4]
    assert rows[2]["value"] is None
    assert rows[3]["value"] == 0.1 * 3
    folder = RunFolder(tmp_path)
    (copy := tmp_path / "completions" / "step-000009 (copy).parquet").touch()  # a file manager's
    folder.forget_after(3)
    copy.unlink()
    folder.log({"step": 3, "value": 9.0})
    folder.add_to_row({"step": 3, "score": 0.5})
    folder.close()
    assert [(r["step"], r["value"]) for r in read_metrics(tmp_path)] == [(0, 0.0), (1, 0.1), (2, None), (3, 9.0)]
    assert [r.get("score") for r in read_metrics(tmp_path)] == [None, None, None, 0.5]
    assert sorted(p.name for p in (tmp_path / "completions").iterdir()) == [f"step-00000{i}.parquet" for i in range(3)]
    saved = pyarrow.parquet.read_table(tmp_path / "completions" / "step-000001.parquet").to_pylist()[0]
    assert (saved["draw_seed"], saved["draw_step"], saved["draw_index"]) == (1, 1, 2)
    assert (saved["status"], saved["tokens"]) == ("wrong", [11, 12, 13])
    assert (saved["detail"], saved["format_ok"]) == ("", None)
    assert saved["behaviour_logprob_sum"] == -3.0
