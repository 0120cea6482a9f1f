"""Small runs for tests: a policy small enough that a step takes a tenth of a second."""

import os
import resource
import signal
import sys
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pyarrow.parquet
from safetensors.torch import load_file

from programs import forkserver, redirect
from threepo.cli import main
from threepo.config import SFTConfig, TrainConfig
from threepo.config.recipes import load, load_resumed
from threepo.run_folder import checkpoints, read_metrics

TINY = (
    "model.path=tiny-qwen2",
    "model.tiny.hidden_size=32",
    "model.tiny.intermediate_size=64",
    "model.tiny.layers=1",
    "model.tiny.heads=2",
    "model.tiny.kv_heads=1",
    "run.threads=1",
)

RLVR = (
    *TINY,
    "data.train=sorting",
    "data.levels=[2, 3]",
    "data.prompts_per_step=4",
    "method.rollouts_per_prompt=8",
    "sampling.max_new_tokens=8",
    "eval.problems=4",
    "eval.samples=2",
)

TUNED_STUDY = """
[tuning]
seeds = [100]
trials = 2

[methods.grpo]
settings = ["method.preset=grpo"]
grid = [["optimizer.lr=1e-3"], ["optimizer.lr=1e-4"]]

[methods.c3po]
settings = ["method.preset=c3po"]
grid = [["optimizer.ess=1e8"], ["optimizer.ess=1e9"]]
"""

VLLM = (
    *RLVR,
    "model.tiny.hidden_size=64",  # the smallest heads that vLLM has on a CPU are 32 wide
    "model.tiny.intermediate_size=96",
    "method.preset=c3po",
    "optimizer.ess=1e9",
    "engine.kind=vllm",
)

BRITTLE = """
import os, signal
from pathlib import Path
from first_character import reward
def when_evaluated(completions, **_):
    left, rank = Path("evaluations-left"), os.environ.get("RANK", "1")
    if not 8 < len(completions) <= 32 and rank == "1" and left.is_file():
        fault, count = left.read_text().split()
        left.write_text(f"{fault} {int(count) - 1}")
        if int(count) <= 0 and fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        assert int(count) > 0, "the verifier is down"
    return reward(completions)
"""
"""A module whose reward fails, alone or on the second rank, once so many evaluations of `RLVR` are over: they have
fewer completions than a step, or more. `evaluations-left` has the fault and the number."""

SFT = (*TINY, 'demonstrations.tasks=["sorting", "sums"]', "demonstrations.batch_size=8")


def train_config(folder: Path, *settings: str) -> TrainConfig:
    """A recipe of a small RLVR run."""
    return load(TrainConfig, "", [*RLVR, f"run.folder={folder}", *settings])


def sft_config(folder: Path, *settings: str) -> SFTConfig:
    """A recipe of a small fine-tuning run."""
    return load(SFTConfig, "", [*SFT, f"run.folder={folder}", *settings])


def resume(folder: Path, kind: Any = TrainConfig, **changes: Any) -> Path:
    """Go on with a run, with changes by table, as `--resume` does."""
    from threepo import api

    return api.train(load_resumed(kind, folder, changes), folder)


def forked(*arguments: str, said: str = os.devnull, most_bytes: int = resource.RLIM_INFINITY) -> ForkServerProcess:
    """Start a command here, in a process of its own that has our imports behind it; they would take five seconds.

    What it prints goes to the file `said`; no file that it writes may have more than `most_bytes`.
    """
    process = forkserver().Process(target=_command, args=(os.getcwd(), arguments, said, most_bytes))
    process.start()
    return process


def kill_after(steps: int, folder: Path, *command: str, seconds: float = 120) -> None:
    """Start a command, and end it by SIGKILL once the run in this folder has made so many steps."""
    process = forked(*command)
    deadline = time.monotonic() + seconds
    while len(read_metrics(folder)) < steps and process.is_alive() and time.monotonic() < deadline:
        time.sleep(0.005)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL, "it had ended before"


def _command(folder: str, arguments: tuple[str, ...], said: str, most_bytes: int) -> None:
    os.chdir(folder)
    sys.path.insert(0, folder)  # as `python -m threepo` has it
    redirect(said, said)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
    sys.exit(main(list(arguments)))


def outcome(run: Path) -> dict[str, Any]:
    """All that must not depend on interruptions: metrics without times, completions, and the last checkpoint."""
    step, last = checkpoints(run)[-1]
    return {
        "step": step,
        "metrics": [{k: v for k, v in row.items() if not k.startswith("time/")} for row in read_metrics(run)],
        "completions": {
            file.name: pyarrow.parquet.read_table(file).to_pylist() for file in (run / "completions").glob("*.parquet")
        },
        "tensors": {
            f"{file.name}/{name}": tensor.tolist()
            for file in sorted(last.glob("*.safetensors"))
            for name, tensor in load_file(file).items()
        },
        "state": (last / "train_state.json").read_text(),
    }
