"""The terminal output of a run, and the ways to stop it."""

import io
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from programs import run_program
from runs import train_config
from threepo import api
from threepo.errors import Interrupted
from threepo.evaluation.tables import bold, cells, markdown, table
from threepo.progress import obey, polite_stop, progress
from threepo.run_folder import SUMMARY, checkpoints


def shown_at(width: int) -> str:
    """The output of a loop at its tenth step on a terminal of this width."""
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=width)
    with progress("c3po", 100, console=console) as reporter:
        numbers = {"reward": 0.125, "held-out": 0.75, "update": 6e-5, "noise": 0.05, "kept": 0.9, "tok/s": 12345}
        reporter.update(10, numbers)
    return screen.getvalue()


def test_a_narrow_terminal_keeps_what_matters() -> None:
    numbers = "reward 0.125", "held-out 0.75", "update 6e-05", "noise 0.05", "kept 0.9", "tok/s 12,345"
    for width, shown in ((40, 2), (80, 3), (120, 6), (160, 6)):
        text = shown_at(width)
        assert all(part in text for part in ("c3po", "10/100", *numbers[:shown])), width
        assert not any(part in text for part in numbers[shown:]), width
        assert ("━" in text) is (width == 160)
        assert ("left" in text) is (width > 40)
        assert "…" not in text, "nothing is cut"


def test_without_a_terminal_there_is_a_line_at_the_start_and_one_at_the_end() -> None:
    screen = io.StringIO()
    with progress("c3po", 5, 2, Path("runs/x"), Console(file=screen, width=80)) as reporter:
        for done in (3, 4, 5):
            reporter.update(done, {"reward": 0.5})
    lines = screen.getvalue().splitlines()
    assert lines[0] == "c3po: 5 steps, from step 2, in runs/x"
    assert len(lines) == 2
    assert lines[1].startswith("c3po  5/5  reward 0.5")


def test_a_run_goes_on_when_nobody_reads_what_it_says(tmp_path: Path) -> None:
    """As after `threepo train ... 2>&1 | head -1`."""
    reading, writing = os.pipe()
    os.close(reading)
    with suppress(BrokenPipeError), os.fdopen(writing, "w") as closed, pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "stderr", closed)
        api.train(train_config(tmp_path, "run.steps=3", "run.show_every=1"))
    assert checkpoints(tmp_path)[-1][0] == 3
    assert (tmp_path / SUMMARY).is_file()


def test_names_with_brackets_are_no_markup() -> None:
    console = Console(file=io.StringIO(), width=100)
    with progress("c3po", 1, folder=Path("runs/[/tmp]x[a1]"), console=console):
        pass
    assert "runs/[/tmp]x[a1]" in console.file.getvalue()  # type: ignore[attr-defined]
    found = table("runs", [{"run": "[/x]seed[a]", "score": bold("1.0")}])
    console.print(found)
    assert "[/x]seed[a]" in console.file.getvalue()  # type: ignore[attr-defined]
    assert cells(found)["rows"] == [("[/x]seed[a]", bold("1.0"))]
    assert "| [/x]seed[a] | **1.0** |" in markdown(found)


END = "import ctypes, sys; print('done'); sys.stdout.flush(); ctypes.pythonapi.Py_Exit(0)"
"""What a Python of its own does at its end; one that was forked leaves that out."""


def test_python_ends_though_a_thread_computes(tmp_path: Path) -> None:
    """Until Python 3.13, the end of the process aborts a thread that is in torch."""
    program = (
        "import torch; from threepo.training.overlap import in_thread; x = torch.ones(1500, 1500)\n"
        f"in_thread(lambda: [x @ x for _ in range(3)])\n{END}"
    )
    done = run_program(program, tmp_path)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_python_ends_though_programs_are_graded(tmp_path: Path) -> None:
    """Groups of a stream that come too late for the run, here with programs that sleep for 100 s."""
    program = (
        "import time; from threepo.config import RewardConfig; from threepo.rewards.code import CodeGrader\n"
        "from threepo.config.records import build\n"
        "from threepo.rewards.code_tests import parse_tests; from threepo.training import overlap\n"
        "overlap.LEAVING_S, tests = 0.0, parse_tests({'inputs': [''], 'outputs': ['']})\n"
        "sandbox = {'backend': 'unconfined', 'workers': 1, 'timeout_s': 100.0}\n"
        "grader = CodeGrader(build(RewardConfig, {'function': 'code', 'sandbox': sandbox}))\n"
        "overlap.in_thread(lambda: grader.grade_all([('```python\\nimport time; time.sleep(100)\\n```', tests)] * 3))\n"
        f"time.sleep(0.5)\n{END}"
    )
    began = time.monotonic()
    done = run_program(program, tmp_path)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    assert time.monotonic() - began < 100


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_the_first_signal_asks_and_the_second_one_does_not(number: int, tmp_path: Path) -> None:
    received = []
    previous = signal.signal(number, lambda *_: received.append("second"))
    try:
        with polite_stop() as stop:
            obey(stop.signal_number, 3, 10, tmp_path)
            os.kill(os.getpid(), number)
            assert stop.signal_number == number
            assert received == []
            os.kill(os.getpid(), number)
            assert received == ["second"]
            obey(stop.signal_number, 10, 10, tmp_path)  # all steps are done: nothing to interrupt
            with pytest.raises(Interrupted, match=r"after step 3 of 10; continue with --resume"):
                obey(stop.signal_number, 3, 10, tmp_path)
    finally:
        signal.signal(number, previous)


def test_a_signal_that_comes_too_late_to_save_waits_for_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    def late(*arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:  # before the first step, before its evaluation, and now it is over; no checkpoint was due
            os.kill(os.getpid(), signal.SIGTERM)
        obey(*arguments)

    monkeypatch.setattr("threepo.training.run.obey", late)
    with pytest.raises(Interrupted, match="SIGTERM after step 2 of 4"):
        api.train(train_config(tmp_path / "run", "run.steps=4", "run.checkpoint_every=0"))
    assert [step for step, _ in checkpoints(tmp_path / "run")] == [2]


def test_nohup_stays_nohup() -> None:
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with polite_stop() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.signal_number == 0
    finally:
        signal.signal(signal.SIGHUP, previous)


def test_without_a_terminal_there_is_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    now, screen = [0.0], io.StringIO()
    monkeypatch.setattr("threepo.progress.time", SimpleNamespace(monotonic=lambda: now[0]))
    with progress("c3po", 100, 10, Path("runs/x"), Console(file=screen, width=80)) as reporter:
        for now[0], done in ((10.0, 11), (20.0, 12), (25.0, 13), (40.0, 14)):
            reporter.update(done, {"reward": 0.5})
    assert screen.getvalue().splitlines()[1:] == [
        "c3po  12/100  reward 0.5  880 s left",  # 20 s for two steps, and 88 are left
        "c3po  14/100  reward 0.5  860 s left",  # 40 s for four, and 86
    ]
