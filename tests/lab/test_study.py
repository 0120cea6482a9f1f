"""Studies: killed and started again, choices, comparisons from folders, and every run accounted for."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from runs import RLVR, TUNED_STUDY, forked
from threepo import api
from threepo.cli import main
from threepo.config.records import to_dict
from threepo.errors import UserError
from threepo.files import lock, write_json, write_text
from threepo.lab.study import forecast, job_devices, run_study, start_run
from threepo.lab.study_config import Cell, Study, StudyRun, load_study
from threepo.lab.study_state import (
    choose_point,
    chosen_point,
    measured,
    outcome,
    refuse_changes,
    reported_runs,
    tuning_runs,
)
from threepo.lab.study_summary import summarise
from threepo.lab.study_view import _panels, markdown, shown_tables, table_rows, write_results

SETTINGS = [*RLVR[:-2], "eval.problems=4", "eval.samples=2"]
SETTINGS.remove("run.threads=1")
KILLED = """
[study]
baseline = "grpo"
seeds = [0, 1]
smoothing = 2
jobs = 2
settings = SETTINGS

[methods.grpo]
settings = ["method.preset=grpo", "optimizer.lr=1e-3", "reward.function=rewards_of_study:even"]
[methods.c3po]
settings = ["method.preset=c3po", "optimizer.lr=1e3", "reward.function=rewards_of_study:even"]
[methods.broken]
settings = ["method.preset=grpo", "reward.function=rewards_of_study:even"]
"""
REWARDS = """
import os, signal
from multiprocessing import parent_process
from pathlib import Path

calls = 0

def even(completions, **columns):
    global calls
    calls += 1
    Path(f"gpu-{os.environ.get('CUDA_VISIBLE_DEVICES')}").touch()
    if "/runs/broken/" in os.readlink("/proc/self/fd/1"):  # its log
        raise RuntimeError("the verifier is down")
    try:
        if calls == 5:  # of whichever run comes here first
            Path("armed").unlink()
            os.kill(parent_process().pid, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
    except FileNotFoundError:
        pass
    return [float(sum(map(ord, text)) % 2 == 0) for text in completions]
"""


def test_a_study_that_was_killed_gives_what_an_uninterrupted_one_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """SIGKILL of the study and of one of its two runs in the fifth step; the other one goes on, and is waited for."""
    monkeypatch.chdir(tmp_path)
    Path("rewards_of_study.py").write_text(REWARDS)
    # Below, runs get GPUs that need not be there.
    settings = [*SETTINGS, "eval.every=4", "run.steps=8", "run.checkpoint_every=2", "model.device=cpu"]
    Path("tiny.toml").write_text(KILLED.replace("SETTINGS", json.dumps(settings)))
    Path("armed").touch()
    killed = forked("study", "tiny.toml", "study.folder=killed")
    killed.join()
    assert killed.exitcode == -signal.SIGKILL
    study = load_study("tiny.toml", ["study.folder=killed"])
    assert not any((run.folder / "summary.json").is_file() for run in study.reported(Cell("", "grpo"), ())[1:])

    waiting = sum(outcome(run).state == "not begun" for run in reported_runs(study))
    assert waiting > 1
    assert main(["study", "tiny.toml", "study.folder=killed", "--summary"]) == 0
    assert f"left out: {waiting} runs that have not begun; table.md lists them\n" in capfd.readouterr().out

    with monkeypatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "6,7")
        assert main(["study", "tiny.toml", "study.folder=killed"]) == 0
    assert {"gpu-6", "gpu-7"} <= {path.name for path in Path().glob("gpu-*")}, "each of the two has its own"
    said = capfd.readouterr()
    found = summarise(study)
    assert json.loads((study.folder / "summary.json").read_text()) == json.loads(json.dumps(found))
    broken, again = found["left_out"]
    assert (broken["run"], broken["state"]) == ("runs/broken/seed-0", "failed")
    assert "status 2: threepo: reward.function" in broken["reason"]
    assert "the verifier is down" in broken["reason"]
    assert "runs/broken/seed-0 failed: status 2" in said.err
    assert f"left out: runs/broken/seed-0: failed: {broken['reason']}" in said.out
    assert (again["run"], again["state"]) == ("runs/broken/seed-1", "failed")
    logs = [run.log.read_text() for run in reported_runs(study) if "broken" not in run.name]
    assert sum("--resume" in log for log in logs) == 1

    whole = load_study("tiny.toml", ["study.folder=whole"])
    for run in reported_runs(whole):
        if "broken" not in run.name:
            api.train(run.config())
    shutil.copytree(study.folder / "runs" / "broken", whole.folder / "runs" / "broken", dirs_exist_ok=True)
    assert without_times(found) == without_times(summarise(whole))
    values = found["variants"][""]["methods"]["c3po"]["final"]["values"]
    assert set(values) == {"0", "1"}
    assert any(values.values()), "the reward was never given: nothing was compared"


def without_times(summary: dict[str, Any]) -> dict[str, Any]:
    found = json.loads(json.dumps(summary))
    del found["tables"]["study"]["folder"]
    for figures in found["variants"][""]["methods"].values():
        figures.pop("seconds", None)
    return found  # type: ignore[no-any-return]


def test_a_signal_stops_the_study_with_its_runs_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The study is told by one of its own runs, so that it happens in the middle of one."""
    monkeypatch.chdir(tmp_path)
    rewards = REWARDS.replace("parent_process().pid, signal.SIGKILL", "parent_process().pid, signal.SIGTERM")
    Path("rewards_of_study.py").write_text(rewards.replace("os.kill(os.getpid(), signal.SIGKILL)", "pass"))
    settings = [*SETTINGS, "eval.every=400", "run.steps=400", "run.checkpoint_every=0"]
    Path("tiny.toml").write_text(KILLED.replace("SETTINGS", json.dumps(settings)))
    Path("armed").touch()
    stopped = forked("study", "tiny.toml", "study.folder=stopped", "study.jobs=1", said="said.txt")
    stopped.join()
    assert stopped.exitcode == 128 + signal.SIGTERM
    assert "study tiny: SIGTERM: its runs are saved; the same command goes on" in Path("said.txt").read_text()
    first = load_study("tiny.toml", ["study.folder=stopped"]).reported(Cell("", "grpo"), ())[0]
    assert len(list((first.folder / "checkpoints").iterdir())) == 1
    assert "continue with --resume" in first.log.read_text()


def test_ctrl_c_while_the_first_run_is_still_importing_ends_in_one_line(tmp_path: Path) -> None:
    """The terminal sends the signal to the process that forks the runs too."""
    settings = json.dumps([*SETTINGS, "eval.every=4"])
    (tmp_path / "tiny.toml").write_text(KILLED.replace("SETTINGS", settings))
    (tmp_path / "rewards_of_study.py").write_text(REWARDS)
    command = [sys.executable, "-m", "threepo", "study", "tiny.toml", "study.folder=early", "study.jobs=1"]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    study = subprocess.Popen(command, cwd=tmp_path, start_new_session=True, text=True, **pipes)
    while study.poll() is None and not list((tmp_path / "early").glob("runs/*/*.log")):
        time.sleep(0.01)
    time.sleep(0.5)  # importing takes several seconds more
    assert study.poll() is None, study.communicate()
    os.killpg(study.pid, signal.SIGINT)
    said, _ = study.communicate()
    assert study.returncode == 128 + signal.SIGINT, said
    assert "Traceback" not in said
    assert said.endswith("study tiny: SIGINT: its runs are saved; the same command goes on\n")


def test_a_run_does_not_run_the_script_that_has_started_the_study(tmp_path: Path) -> None:
    script = """
from pathlib import Path
from threepo.lab.study import fork

with open("begun", "a") as file:
    file.write("once")
run = fork(["train", "--list"], Path("log"), {})
run.join()
assert run.exitcode == 0
"""
    (tmp_path / "script.py").write_text(script)
    subprocess.run([sys.executable, "script.py"], cwd=tmp_path, check=True)
    assert (tmp_path / "begun").read_text() == "once"
    assert "demo/c3po" in (tmp_path / "log").read_text()


FABRICATED = """
[study]
folder = "FOLDER"
baseline = "grpo"
seeds = [0, 1, 2, 3]
smoothing = 2
settings = SETTINGS
"""


def fabricated(folder: Path, **changes: str) -> Study:
    """A study whose runs are written by hand below: eight steps, evaluated after the last."""
    text = FABRICATED.replace("FOLDER", str(folder / "study")) + TUNED_STUDY
    text = text.replace("SETTINGS", json.dumps([*SETTINGS, "eval.every=8", "run.steps=8"]))
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    (folder / "made.toml").write_text(text)
    return load_study(str(folder / "made.toml"))


def write_run(run: StudyRun, final: float | None, curve: Sequence[float | None], seconds: float = 60.0) -> None:
    """A finished run."""
    rows: list[dict[str, Any]] = [{"step": step, "reward/mean": value} for step, value in enumerate(curve)]
    rows[-1]["eval/pass_at_1"] = final
    write_json(run.folder / "config.json", to_dict(run.config()))
    write_text(run.folder / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    write_json(run.folder / "summary.json", {"seconds": seconds, "rollouts": 256})


def test_each_run_gets_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    assert job_devices(0, 1) == ["2", "5"]
    assert job_devices(3, 1) == ["2", "5", "2"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("threepo.lab.study.cores", lambda: 8)
    assert job_devices(0, 3) == ["", ""], "as many as there is room for"


def test_a_run_that_a_killed_study_left_behind_is_not_started_again(tmp_path: Path) -> None:
    study = fabricated(tmp_path)
    run = study.reported(study.cells[0], ())[0]
    run.log.parent.mkdir(parents=True)
    with lock(run.log):
        assert start_run(run, 1, "") is None
    assert outcome(run).state == "unfinished"
    assert run.log.read_bytes() == b""


def test_a_run_waits_for_its_warm_start(tmp_path: Path) -> None:
    (tmp_path / "warm.toml").write_text('[model]\npath = "tiny-qwen2"\n[demonstrations]\ntasks = ["sorting"]\n')
    start = "[start]\nrecipe = 'warm.toml'\n[methods.grpo]"
    study = fabricated(tmp_path, **{"[methods.grpo]": start, '"model.path=tiny-qwen2", ': ""})
    run = study.reported(study.cells[0], ())[0]
    assert outcome(run).reason == "its warm start start is not finished"
    write_json(study.starts()[0].folder / "summary.json", {"seconds": 1.0})
    assert outcome(run).reason == "it has not begun"


def test_runs_whose_warm_start_failed_are_named_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "warm.toml").write_text('[model]\npath = "nowhere"\n[demonstrations]\ntasks = ["sorting"]\n')
    start = "[start]\nrecipe = 'warm.toml'\n[methods.grpo]"
    changes = {"smoothing = 2": "smoothing = 2\njobs = 1", '"model.path=tiny-qwen2", ': ""}
    changes |= {"[tuning]\nseeds = [100]\ntrials = 2": "", "grid = [[": "# [["}
    study = fabricated(tmp_path, **{"[methods.grpo]": start}, **changes)
    run_study(study)
    said = capsys.readouterr().err
    assert "threepo: runs/c3po/seed-3 is not begun: its warm start start is not finished\n" in said
    assert "study made  9/9  running 0  failed 9" in said


def tuned(study: Study) -> None:
    """Tuning with an answer: the second point for grpo, by its metric; the first for c3po, which learned sooner."""
    late, soon = [0.0] * 7 + [1.0], [0.0] * 4 + [1.0] * 4
    finals = {"grpo": ((0.2, soon), (0.3, late)), "c3po": ((0.3, soon), (0.3, late))}
    for cell in study.cells:
        for runs, (final, curve) in zip(study.tuning(cell), finals[cell.method], strict=True):
            write_run(runs[0], final, curve)
        said = choose_point(study, cell)
        assert said.endswith("it is an end of the grid, which may be too small"), "both of two points are"
        assert ("equal at 2 points, so the curve chose" in said) == (cell.method == "c3po")


def test_tuning_takes_the_best_final_metric_and_then_the_sooner_curve(tmp_path: Path) -> None:
    study = fabricated(tmp_path)
    assert chosen_point(study, study.cells[0]) is None
    assert len(tuning_runs(study)) == 4
    tuned(study)
    assert [chosen_point(study, cell) for cell in study.cells] == [("optimizer.lr=1e-4",), ("optimizer.ess=1e8",)]
    assert tuning_runs(study) == []
    assert {run.config().optimizer.lr for run in reported_runs(study) if "grpo" in run.name} == {1e-4}


def test_a_choice_stays_and_another_grid_is_refused(tmp_path: Path) -> None:
    tuned(fabricated(tmp_path))
    changed = fabricated(tmp_path, **{"optimizer.lr=1e-4": "optimizer.lr=2e-4"})
    with pytest.raises(UserError, match=r"methods.grpo.grid = .*2e-4.*1e-4.* was tuned on; restore it"):
        chosen_point(changed, changed.cells[0])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "method.preset=grpo",
            'method.preset=grpo", "sampling.temperature=2.0',
            "has changed since tuning/grpo/point-0",
        ),
        ("[100]", "[100, 101]", r"tuning.seeds = \[100, 101\]: \[100\] was tuned on; restore it"),
        ("smoothing = 2", "smoothing = 2\nmetric = 'reward/mean'", r"study.metric = .*'eval/pass_at_1' was tuned on"),
    ],
)
def test_a_choice_is_not_used_for_a_study_that_has_changed_since(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    tuned(fabricated(tmp_path))
    changed = fabricated(tmp_path, **{old: new})
    for use in (run_study, summarise, forecast):
        with pytest.raises(UserError, match=message):
            use(changed)


def test_a_point_with_a_run_that_failed_is_not_chosen(tmp_path: Path) -> None:
    study = fabricated(tmp_path)
    cell = study.cells[0]
    good, bad = (runs[0] for runs in study.tuning(cell))
    write_run(good, 0.1, [0.0] * 8)
    write_text(bad.log, "[study] $ threepo train\nTraceback\nValueError: no\n[study] ended with status 1\n")
    said = choose_point(study, cell)
    assert "left out 1 of 2 points, without a result from all of its seeds (to retry, delete grpo from" in said
    assert chosen_point(study, cell) == ("optimizer.lr=1e-3",)
    write_json(study.folder / "chosen.json", {})
    assert bad in tuning_runs(study)
    choose_point(study, cell)
    assert [entry for entry in summarise(study)["left_out"] if entry["run"] == bad.name] == [
        {"run": bad.name, "state": "failed", "reason": "status 1: ValueError: no"}
    ]


def test_nothing_is_chosen_if_every_point_failed(tmp_path: Path) -> None:
    study = fabricated(tmp_path)
    assert choose_point(study, study.cells[0]).endswith("so nothing is chosen")
    reasons = {entry["run"]: entry["reason"] for entry in summarise(study)["left_out"]}
    assert reasons["runs/grpo"] == "its tuning has chosen nothing yet"


BEGUN, STATUS = "[study] $ threepo train\n", "[study] ended with status"


@pytest.mark.parametrize(
    ("log", "state", "reason"),
    [
        ("", "not begun", "it has not begun"),
        (f"{BEGUN}grpo  3/8\n", "unfinished", "it was stopped; start the study again"),
        (f"{BEGUN}threepo: an old error\n{STATUS} 2\n{BEGUN}", "unfinished", "it was stopped; start the study again"),
        (f"{BEGUN}grpo  3/8\n{STATUS}", "unfinished", "it was stopped; start the study again"),
        (f"{BEGUN}grpo  3/8\n{STATUS} -9\n", "failed", "killed by SIGKILL: grpo  3/8"),
        (f"{BEGUN}threepo: a notice\nTraceback\nValueError: no\n{STATUS} 1\n", "failed", "status 1: ValueError: no"),
        (f"{BEGUN}threepo: why\nthreepo: warning: x\nbye\n{STATUS} 2\n", "failed", "status 2: threepo: why"),
    ],
)
def test_a_log_says_how_its_run_ended(tmp_path: Path, log: str, state: str, reason: str) -> None:
    study = fabricated(tmp_path)
    run = study.reported(study.cells[0], ())[0]
    if log:
        write_text(run.log, log)
    found = outcome(run)
    assert (found.state, found.reason) == (state, reason)


def test_settings_that_changed_after_runs_were_made_are_refused(tmp_path: Path) -> None:
    study = fabricated(tmp_path)
    tuned(study)
    shutil.rmtree(study.folder / "tuning")  # whose runs would be refused first
    refuse_changes(study)
    write_run(reported_runs(study)[0], 0.5, [0.5] * 8)
    refuse_changes(study)
    changed = fabricated(tmp_path, **{"method.preset=grpo": 'method.preset=grpo", "optimizer.weight_decay=0.5'})
    message = (
        "made.toml: has changed since runs/grpo/seed-0 began .optimizer.weight_decay = 0.1 then, 0.5 now.; restore it"
    )
    with pytest.raises(UserError, match=message):
        refuse_changes(changed)
    more = fabricated(tmp_path, **{"[0, 1, 2, 3]": "[0, 1, 2, 3, 4]"})
    refuse_changes(more)
    varied = fabricated(tmp_path, **{"[methods.grpo]": "[variants.other]\n[methods.grpo]"})
    with pytest.raises(UserError, match=r"made.toml: variants = other: a study that began without variants has its"):
        refuse_changes(varied)


def test_the_figures_of_a_study_by_hand(tmp_path: Path) -> None:
    """grpo rises by 0.1 a step; c3po is at its end level after three steps, and one of its seeds never learns."""
    study = fabricated(tmp_path)
    tuned(study)
    slow, fast, flat = [0.1 * step for step in range(8)], [0.0, 0.7, 0.7, 0.7, 0.7, 0.7, 0.7, 0.7], [0.0] * 8
    grpo, c3po = (study.reported(cell, chosen_point(study, cell) or ()) for cell in study.cells)
    for run, final in zip(grpo, (0.4, 0.5, 0.6, 0.5), strict=True):
        write_run(run, final, slow)
    for run, final, curve in zip(c3po, (0.5, 0.7, 0.7, 0.1), (fast, fast, fast, flat), strict=True):
        write_run(run, final, curve)
    summary = summarise(study)
    found = summary["variants"][""]
    assert found["target"] == pytest.approx(0.65)  # the mean of 0.6 and 0.7
    assert found["methods"]["grpo"]["final"]["mean"] == pytest.approx(0.5)
    assert found["methods"]["grpo"]["steps_to_target"] == {"0": 8, "1": 8, "2": 8, "3": 8}
    assert found["methods"]["c3po"]["steps_to_target"] == {"0": 3, "1": 3, "2": 3, "3": None}
    assert found["methods"]["c3po"]["median_steps_to_target"] == 3
    assert found["methods"]["c3po"]["area"]["mean"] == pytest.approx(0.7 * 7 / 8 * 3 / 4)
    assert found["metric"]["c3po"]["difference"] == pytest.approx((0.1 + 0.2 + 0.1 - 0.4) / 4)
    assert found["half"]["c3po"]["difference"] == pytest.approx((3 * 0.05 - 0.65) / 4)  # after four steps
    assert summary["left_out"] == []
    write_results(study, summary)
    page = (study.folder / "table.md").read_text()
    assert "| c3po | 4 | 0.500 [0.0" in page
    assert "| c3po | 3 | 3 of 4 | -0.125 [" in page
    assert "| c3po | optimizer.ess=1e8 | 0.300, 0.300 |" in page
    assert (study.folder / "curves.png").read_bytes()[:4] == b"\x89PNG"
    assert not any(curve.bars for panel in _panels(study) for curve in panel.curves), "an axis is as long as its bars"
    assert [table.row_count for table in shown_tables(summary)] == [2]
    for run in grpo:
        write_run(run, 0.0, flat)
    found = summarise(study)["variants"][""]
    assert found["target"] is None, "a baseline that learns nothing sets no target: all would begin there"
    assert found["methods"]["c3po"]["median_steps_to_target"] is None


def test_a_run_without_a_number_is_left_out_and_its_pair_too(tmp_path: Path) -> None:
    study = fabricated(tmp_path)
    tuned(study)
    for run in reported_runs(study):
        write_run(run, None if run.name == "runs/c3po/seed-2" else 0.5, [0.5] * 8)
    summary = summarise(study)
    assert summary["variants"][""]["metric"]["c3po"]["n"] == 3
    reason = "eval/pass_at_1 is no number after the last step"
    assert summary["left_out"] == [{"run": "runs/c3po/seed-2", "state": "finished", "reason": reason}]


def test_a_metric_that_is_not_logged_is_refused(tmp_path: Path) -> None:
    study = fabricated(tmp_path, **{"smoothing = 2": 'smoothing = 2\nmetric = "reward/mine"'})
    for runs in study.tuning(study.cells[0]):
        write_run(runs[0], 0.5, [0.5] * 8)
    with pytest.raises(UserError, match="study.metric = 'reward/mine': is not measured after the last step of tuning"):
        choose_point(study, study.cells[0])
    (runs[0].folder / "metrics.jsonl").unlink()
    with pytest.raises(UserError, match="the last step of tuning/grpo/point-1/seed-100; it has no metrics"):
        measured(study, runs[0])


def test_a_curve_that_is_not_logged_is_refused_when_the_first_run_ends(tmp_path: Path) -> None:
    study = fabricated(tmp_path, **{"smoothing = 2": 'smoothing = 2\ncurve = "reward/maen"\njobs = 1'})
    _, *rest = tuning_runs(study)
    with pytest.raises(UserError, match="study.curve = 'reward/maen': is not logged by tuning.*reward/mean"):
        run_study(study)
    assert not any(run.log.is_file() for run in rest)


def test_a_point_whose_curve_has_no_number_is_not_chosen(tmp_path: Path) -> None:
    study = fabricated(tmp_path)
    without, good = (runs[0] for runs in study.tuning(study.cells[0]))
    write_run(without, 0.9, [None] * 8)
    write_run(good, 0.1, [0.5] * 8)
    assert choose_point(study, study.cells[0])
    assert chosen_point(study, study.cells[0]) == ("optimizer.lr=1e-4",)


def test_several_settings_have_a_table_like_the_papers(tmp_path: Path) -> None:
    study = fabricated(tmp_path, **{"[methods.grpo]": "[variants.K2]\n[variants.K3]\n[methods.grpo]"})
    tuned(study)
    finals = {"K2/grpo": 0.2, "K2/c3po": 0.3, "K3/grpo": 0.6, "K3/c3po": 0.5}
    for run in reported_runs(study):
        noise = 0.01 * (run.seed - 1.5)
        write_run(run, finals["/".join(run.name.split("/")[1:3])] + noise, [0.5] * 8)
    page = markdown(summarise(study))
    # Standard error of 0.01 x (-1.5, -0.5, 0.5, 1.5): 0.00645.
    assert "| grpo | 0.200 ± 0.006 | **0.600 ± 0.006** | **0.400 ± 0.006** | - |" in page
    assert "| c3po | **0.300 ± 0.006** | 0.500 ± 0.006 | **0.400 ± 0.006** | 1 |" in page
    assert "## K3\n" in page


def test_the_table_has_adjusted_p_values() -> None:
    found = {"difference": 0.25, "low": 0.125, "high": 0.375, "detectable": 0.0625, "verdict": "better"}
    found |= {"p": 0.01, "p_adjusted": 0.02, "p_sign_flip": 0.03, "p_sign_flip_adjusted": 0.04}
    variant = {"methods": {"c3po": {"n": 0}}, "metric": {"c3po": found}, "half": {"c3po": found | {"verdict": "worse"}}}
    difference = "+0.250 [0.125, 0.375]"
    assert table_rows(variant) == [
        {"method": "c3po", "seeds": "0", "difference": difference, "p": "0.02", "p of signs": "0.04"}
        | {"verdict": "better", "finds": "0.062", "at half": difference, "ahead at half": "no"}
    ]


def test_the_forecast_goes_by_runs_of_the_same_kind(tmp_path: Path) -> None:
    study = fabricated(tmp_path, **{"smoothing = 2": "smoothing = 2\njobs = 2"})
    tuned(study)
    for run in reported_runs(study)[:2]:
        write_run(run, 0.5, [0.5] * 8, seconds=600.0)
    *lines, last = forecast(study)
    assert [line.split()[0] for line in lines].count("finished") == 2
    assert last == "8 runs, 2 at once; 6 to come take about 30 minutes"  # of ten minutes each
