"""vLLM on real torchrun ranks: a replica for each rank, which serves draws of its own.

    make test-vllm

One launch makes several runs (vllm_program.py); the others are those in which something is killed or stopped.
"""

import importlib.util
import json
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from launch import ended, start, working_folder

from runs import VLLM, outcome
from threepo.run_folder import checkpoints, read_metrics

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed; `make test-vllm` installs it"
)

PROGRAM = str(Path(__file__).with_name("vllm_program.py"))
REWARD = """
def reward(completions, **_):
    return [float(bool(c) and c[0] < "4") for c in completions]
"""
"""Rewards; at first every fourth completion begins with a digit that `reward` likes."""
COMMON = (
    "train",
    *VLLM,
    "run.steps=10",
    "data.prompts_per_step=8",
    "reward.function=first_character:reward",
    "method.rollouts_per_prompt=16",
    "sampling.max_new_tokens=4",
    "optimizer.lr=1e4",
    "optimizer.ess=1e7",
    "schedule.warmup_share=0",
    "engine.vllm.enforce_eager=true",
    f"engine.vllm.kv_cache_memory_bytes={1 << 28}",
)
FEW = ("run.steps=2", "optimizer.ess=1e6", "method.rollouts_per_prompt=15")
TWO = (*COMMON, "method.draws=2")
RUNS: dict[str, tuple[str, ...]] = {
    "two": (*TWO, "eval.every=10"),
    "replay": (*COMMON, "method.preset=c3po_replay", "method.draws=3", *FEW),
    "shared": (*COMMON, "method.preset=c3po_replay", "method.draws=3", *FEW, "engine.vllm.tensor_parallel=2"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working directory with the reward."""
    with working_folder(tmp_path_factory.mktemp("ranks"), REWARD) as path:
        yield path


@pytest.fixture(scope="module")
def said(folder: Path) -> str:
    """Make all runs on two ranks; what they said."""
    commands: list[tuple[str, str, int, tuple[str, ...]]] = [("another", "another", 2, TWO)]
    commands += [(name, "", 0, settings) for name, settings in RUNS.items()]
    for name, *_ in commands:
        (folder / name).mkdir()
    todo = [(str(folder / name), *rest, [*words, "run.folder=run"]) for name, *rest, words in commands]
    (folder / "commands.json").write_text(json.dumps(todo))
    status, words = ended(start(PROGRAM, str(folder / "commands.json"), ranks=2), timeout=560)
    assert status == 0, words[-5000:]
    return words


def messages(said: str) -> list[str]:
    """Why a run ended."""
    return re.findall("^threepo: (?!warning).*", said, re.MULTILINE)


def completions(run: Path) -> list[dict[str, Any]]:
    return [
        row for file in sorted((run / "completions").iterdir()) for row in pyarrow.parquet.read_table(file).to_pylist()
    ]


def served(path: Path) -> list[list[Counter[int]]]:
    """The number of requests for each draw, by rank and generation."""
    files = [path / f"served-by-{rank}.jsonl" for rank in (0, 1) if (path / f"served-by-{rank}.jsonl").exists()]
    found = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    return [[Counter({int(draw): n for draw, n in counts.items()}) for counts in rank] for rank in found]


def test_c3po_learns_with_a_replica_for_each_rank(folder: Path, said: str) -> None:
    """128 completions a step, of which a quarter is right at first; chance alone stays within 0.11 of that."""
    rewards = [row["reward/mean"] for row in read_metrics(folder / "two" / "run") if row["step"] >= 0]
    assert len(rewards) == 10
    assert rewards[0] < 0.4
    assert rewards[-1] > 0.6
    rows = completions(folder / "two" / "run")
    assert Counter((row["step"], row["draw_step"], row["draw_index"]) for row in rows) == {
        (step, step, draw): 64 for step in range(10) for draw in range(2)
    }
    for rank, generations in enumerate(served(folder / "two")):
        assert [counts for counts in generations if -1 not in counts] == [Counter({rank: 64})] * 10


def test_ranks_share_the_mean_of_an_evaluation(folder: Path, said: str) -> None:
    """More ranks than draws: both replicas hold the mean, and each completes half of the rows."""
    for generations in served(folder / "two"):
        assert [counts for counts in generations if -1 in counts] == [Counter({-1: 4})] * 2
    scored = [row["step"] for row in read_metrics(folder / "two" / "run") if "eval/pass_at_1" in row]
    assert scored == [-1, 9]


@pytest.mark.parametrize("name", ["replay", "shared"])
def test_completions_are_of_the_draws_that_they_name(name: str, folder: Path, said: str) -> None:
    """The trainer makes each draw again, and scores with it the completions that are stamped with it.

    `replay`: three draws for two ranks. `shared`: one replica with tensor parallelism, that of the first rank.
    """
    rows = completions(folder / name / "run")
    assert len(rows) == 240
    for row in rows:
        assert row["behaviour_logprob_sum"] == pytest.approx(row["gradient_logprob_sum"], abs=1e-3)
    by_rank = served(folder / name)
    if name == "replay":
        assert [set(generations[0]) for generations in by_rank] == [{0, 2}, {1}]
    else:
        assert [set(generations[0]) for generations in by_rank] == [{0, 1, 2}]


def test_a_rank_that_writes_another_draw_is_found_out(folder: Path, said: str) -> None:
    """Its replica has what it wrote, and its log-probs are those expected of that; its draw has the second turn."""
    (line,) = messages(said)
    assert re.search(
        r"rank 1: .* were not written as the trainer's model has them under Draw\(.* step=1, index=1", line
    )
    assert [row["step"] for row in read_metrics(folder / "another" / "run")] == [0]


def run_with(fault: int, *command: str, run: Path, after: int) -> tuple[int, list[str], bool]:
    """Send a signal to the second rank's replica once a run has done so many steps.

    Returns the exit status, our lines, and whether all processes have ended.
    """
    process = start(PROGRAM, *command, ranks=2)
    while len(read_metrics(run)) < after and process.poll() is None:
        time.sleep(0.05)
    ranks = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    replicas = [Path(f"replica-of-{rank}").read_text() for rank in (0, 1)]
    os.kill(int(replicas[1]), fault)
    status, words = ended(process)
    return status, messages(words), not any(Path(f"/proc/{pid}").exists() for pid in (*ranks, *replicas))


def test_a_replica_that_dies_or_hangs_ends_all_and_the_run_goes_on(folder: Path, said: str) -> None:
    """First it is killed; after a resume it is stopped; after another, the run ends as if nothing had happened."""
    run = folder / "interrupted"
    status, lines, gone = run_with(signal.SIGKILL, *TWO, f"run.folder={run}", run=run, after=2)
    assert status == 1, "torchrun's own"
    assert len(lines) == 1, lines
    assert "rank 1: engine.vllm: replica 0 ended during" in lines[0]
    assert "killed by SIGKILL" in lines[0]
    assert gone
    done = checkpoints(run)[-1][0]
    assert done >= 2
    status, lines, gone = run_with(signal.SIGSTOP, "train", "--resume", str(run), run=run, after=done + 2)
    assert status == 1
    assert len(lines) == 1, lines
    assert "rank 1: engine.vllm: replica 0 (process" in lines[0]
    assert "sent nothing for 20 seconds" in lines[0]
    assert gone
    assert done < checkpoints(run)[-1][0] < 10
    assert ended(start("-m", "threepo", "train", "--resume", str(run), ranks=2))[0] == 0
    whole, parts = outcome(folder / "two" / "run"), outcome(run)
    assert parts["completions"] == whole["completions"]
    assert parts["tensors"] == whole["tensors"]
