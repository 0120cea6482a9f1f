"""Ranks that fail, stop, hang or are killed: all end with a message, and the run goes on from what was saved."""

import json
import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from launch import ended, launch, start
from rank_runs import COMMON, IVON, REWARD, assert_same, train

from runs import BRITTLE, outcome
from threepo.run_folder import checkpoints, read_metrics

PROGRAM = str(Path(__file__).with_name("training_program.py"))


def ranks_of(process: Any) -> list[int]:
    """Their process numbers, under a torchrun."""
    return [int(child) for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def have_ended(processes: list[int]) -> bool:
    """Whether all have; one whose parent does not ask how it ended has. It closes its files a moment before it ends."""
    running = [Path(f"/proc/{process}/stat") for process in processes]
    for _ in range(100):
        with suppress(FileNotFoundError, ProcessLookupError):
            running = [s for s in running if s.exists() and s.read_text().rpartition(")")[2].split()[0] != "Z"]
        if not running:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_ends_all_when_its_time_is_over(rank: int, folder: Path) -> None:
    """Its partner says so within the limit; torchrun then kills it."""
    run = folder / f"stopped-rank-{rank}"
    settings = [*COMMON, "run.steps=100000", "run.checkpoint_every=1", f"run.folder={run}", "parallel.timeout_s=12"]
    process = start("-m", "threepo", "train", *settings, ranks=2)
    while len(read_metrics(run)) < 2 and process.poll() is None:
        time.sleep(0.05)
    children = ranks_of(process)
    os.kill(children[rank], signal.SIGSTOP)
    status, said = ended(process)
    assert status == 1
    assert "another rank has ended, or does not answer within parallel.timeout_s" in said
    assert said.count("Traceback") == 1, "that of torchrun"
    assert checkpoints(run)
    assert have_ended(children)


@pytest.mark.parametrize("where", ["reward", "start", "recipe"])
def test_an_error_ends_all_with_its_message(where: str, folder: Path) -> None:
    """Of a reward on one rank, of a module that one rank cannot import, and of a recipe that none can read."""
    expected = {"reward": "the verifier is down", "start": "not on this node", "recipe": "run.nosuch"}[where]
    (folder / "elsewhere.py").write_text(
        f"import os\nif os.environ.get('RANK') == '1':\n    raise ImportError('{expected}')\n" + REWARD
    )
    function = "elsewhere:reward" if where == "start" else "first_character:fails_on_one_rank"
    failing = [f"reward.function={function}", f"run.folder={folder / where}"]
    status, said = train(2, *COMMON, *failing, *(["run.nosuch=1"] if where == "recipe" else []))
    assert status == 1, "torchrun's own"
    lines = [line for line in said.splitlines() if line.startswith("threepo: ")]
    assert len(lines) == 1, said
    assert expected in lines[0]
    assert not (folder / where).exists(), "nothing was learned, so nothing is left"


def test_an_evaluation_that_failed_on_one_rank_is_made_up_bitwise(folder: Path) -> None:
    """Its reward raises in the middle of the run, and is killed with its rank at the end: all ranks save, then end."""
    (folder / "brittle.py").write_text(BRITTLE)
    settings = [*COMMON, "method.preset=c3po", *IVON, "run.steps=3", "eval.every=2"]
    brittle, parts = "reward.function=brittle:when_evaluated", folder / "evaluated"
    command = [*settings, brittle, f"run.folder={parts}"]
    for fault, evaluations, steps in (("raise", 1, 2), ("kill", 1, 3)):
        (folder / "evaluations-left").write_text(f"{fault} {evaluations}")
        status, said = train(2, *command)
        assert status == 1
        assert ("the verifier is down" if fault == "raise" else "Signal 9 (SIGKILL) received by PID") in said
        assert [row["step"] for row in read_metrics(parts)] == [-1, *range(steps)]
        assert checkpoints(parts)[-1][0] == steps
        command = ["--resume", str(parts)]
    (folder / "evaluations-left").unlink()
    whole = ["train", *settings, f"run.folder={folder / 'evaluated-whole'}"]
    (folder / "made-up.json").write_text(json.dumps([whole, ["train", *command]]))
    launch(PROGRAM, str(folder / "made-up.json"), ranks=2)
    assert outcome(parts) == outcome(folder / "evaluated-whole")


@pytest.mark.parametrize("what", ["pass", "draw"])
def test_an_error_that_a_rank_alone_meets_is_said(what: str, folder: Path) -> None:
    """In the middle of an update, and of the second round of draws, while the others wait in a collective."""
    run = ["train", *COMMON, "method.preset=c3po", "method.draws=4", *IVON, f"run.folder={folder / what}"]
    (folder / "failing.json").write_text(json.dumps([run]))
    status, said = ended(start(PROGRAM, str(folder / "failing.json"), what, ranks=2), 100)
    assert status == 1
    assert "MemoryError: no memory left" in said
    assert "terminate called" not in said, "ranks in different collectives"


def test_an_error_of_one_rank_in_an_evaluation_ends_all_with_a_checkpoint(folder: Path) -> None:
    """One that no user caused: the rank shows where, all agree on it, and the steps before are saved."""
    run = folder / "evaluation"
    (folder / "failing.json").write_text(json.dumps([["train", *COMMON, "eval.every=2", f"run.folder={run}"]]))
    status, said = ended(start(PROGRAM, str(folder / "failing.json"), "evaluation", ranks=2), 100)
    assert status == 1
    lines = [line for line in said.splitlines() if line.startswith("threepo: ")]
    assert lines == ["threepo: rank 1 failed: MemoryError: no memory left"], said
    assert "in failing" in said, "the traceback"
    assert checkpoints(run)[-1][0] == 2


@pytest.mark.parametrize("receiver", ["rank", "torchrun"])
def test_a_signal_stops_all_with_a_checkpoint(receiver: str, folder: Path) -> None:
    run = folder / f"stopped-by-{receiver}"
    settings = [*COMMON, "run.steps=100000", "run.checkpoint_every=0", f"run.folder={run}"]
    process = start("-m", "threepo", "train", *settings, ranks=2)
    while len(read_metrics(run)) < 2 and process.poll() is None:
        time.sleep(0.05)
    children = ranks_of(process)
    os.kill(children[-1] if receiver == "rank" else process.pid, signal.SIGTERM)
    _, said = ended(process)
    assert f"continue with --resume {run}" in said
    assert checkpoints(run)[-1][0] == len(read_metrics(run))
    assert have_ended(children)


def test_a_run_survives_kills_at_any_moment(folder: Path) -> None:
    """Of a rank, of the first during a save, of torchrun itself: all end, and the run goes on as if never killed."""
    run = folder / "killed"
    settings = [
        *COMMON,
        "method.preset=c3po",
        *IVON,
        "run.checkpoint_every=1",
        "run.keep_checkpoints=0",
        "overlap.lag=1",
    ]
    command, wait = ["train", *settings, "run.steps=100000", f"run.folder={run}"], random.Random(0)
    for victim in ("torchrun", "save", "last", "first"):
        done = len(read_metrics(run))
        process = start("-m", "threepo", *command, ranks=2)
        while len(read_metrics(run)) < done + 2 and process.poll() is None:
            time.sleep(0.01)
        children = ranks_of(process)
        time.sleep(wait.uniform(0, 0.3))
        while victim == "save" and process.poll() is None and not list((run / "checkpoints").glob(".step-*/*")):
            pass
        os.kill({"torchrun": process.pid, "last": children[-1]}.get(victim, children[0]), signal.SIGKILL)
        status, said = ended(process)
        assert status == (-signal.SIGKILL if victim == "torchrun" else 1)
        if victim != "torchrun":
            # torchrun may end the other ranks before they have said that one is lost.
            assert "Signal 9 (SIGKILL) received by PID" in said
            assert said.count("Traceback") == 1, "that of torchrun"
        assert have_ended(children)
        assert len(read_metrics(run)) > done, victim
        command = ["train", "--resume", str(run)]
    steps = checkpoints(run)[-1][0] + 2
    whole = ["train", *settings, f"run.steps={steps}", f"run.folder={folder / 'never-killed'}"]
    (folder / "two.json").write_text(json.dumps([["train", "--resume", str(run), f"run.steps={steps}"], whole]))
    launch(PROGRAM, str(folder / "two.json"), ranks=2)
    assert_same(run, folder / "never-killed", tolerance=0)
