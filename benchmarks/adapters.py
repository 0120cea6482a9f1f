"""Time and memory of a C3PO step whose draws are adapters, beside draws of all weights, on the same work.

    python benchmarks/adapters.py [--engine vllm] [--rank 16] [--draws 4] [--width 256] [--memory]

The work is as in step.py with rows of equal lengths: a new model of the given shape, P prompts, G completions each,
one optimizer step. Contenders take turns in one process; tables show medians over rounds, and ratios to draws of all
weights within a round with their range. There are also draws of low-rank noise around all weights, which vLLM serves as
adapters, and with vLLM adapters that are multiplied out, so that every draw is pushed as all weights.

`--memory` takes two steps of each contender in a process of its own, and prints peaks of resident memory: of that
process, and of the processes that vLLM runs in. Memory that both see counts for both.
"""

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from step import resident, write_model, write_prompts, write_recipe
from threepo.config import TinyConfig, TrainConfig
from threepo.config.recipes import load
from threepo.training import rlvr

FULL = "all weights"
PARTS = ("step", "push", "decode", "update")


class Timed:
    """An engine whose `load` is timed."""

    def __init__(self, engine: Any) -> None:
        self._engine, self.seconds = engine, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def load(self, *arguments: Any) -> int:
        """See `RolloutEngine.load`."""
        begin = time.perf_counter()
        written: int = self._engine.load(*arguments)
        self.seconds = time.perf_counter() - begin
        return written


class Contender:
    """A run that takes one step at a time."""

    def __init__(self, folder: Path, name: str, settings: list[str], options: argparse.Namespace) -> None:
        common = [
            f"run.folder={folder / name.replace(' ', '-')}",
            f"run.threads={options.threads}",
            f"data.prompts_per_step={options.prompts}",
            f"sampling.max_new_tokens={options.new_tokens}",
            "method.preset=c3po",
            f"method.draws={options.draws}",
            f"method.rollouts_per_prompt={options.rollouts}",
            f"engine.kind={options.engine}",
            f"engine.dtype={options.dtype}",
            f"model.compute_dtype={options.dtype}",
            "optimizer.ess=1e9",
        ]
        self._run = rlvr.assemble(load(TrainConfig, str(folder / "recipe.toml"), [*common, *settings]))
        self._run.engine = self._engine = Timed(self._run.engine)
        self._step = 0

    def step(self) -> tuple[float, ...]:
        """Seconds of a step, and of its `PARTS`; decoding includes grading."""
        begin = time.perf_counter()
        rollouts = rlvr.begin_rollouts(self._run, self._step)()
        between = time.perf_counter()
        rlvr.learn(self._run, rollouts, self._step)
        end, push = time.perf_counter(), self._engine.seconds
        self._step += 1
        return end - begin, push, between - begin - push, end - between

    def children(self) -> list[int]:
        """The processes of the engine."""
        return [replica.pid for replica in getattr(self._engine, "_replicas", [])]


def contenders(options: argparse.Namespace) -> dict[str, list[str]]:
    """Settings of each by its name."""
    served = f"adapters, rank {options.rank}"
    adapted = [f"model.lora.rank={options.rank}"]
    found = {FULL: [], served: adapted}
    if options.dtype == "bfloat16":
        found |= {f"{served}, rounded base": [*adapted, "model.lora.base_dtype=bfloat16"]}
    if options.engine == "vllm":
        found |= {f"{served}, multiplied out": [*adapted, "engine.vllm.adapters=0"]}
    rank = [f"noise.rank={options.rank}", "optimizer.noise_shape=isotropic"]
    rank += ['noise.where={all = 0.0, "*_proj.weight" = 1.0}']
    return found | {f"all weights, noise of rank {options.rank}": rank}


def table(seconds: dict[str, list[tuple[float, ...]]]) -> str:
    """Medians over rounds, in Markdown."""
    head = ["draws", *(f"{part}, s" for part in PARTS), "step / step of all weights"]
    lines = [" | ".join(head), " | ".join("---" for _ in head)]
    for name, own in seconds.items():
        ratios = sorted(a[0] / b[0] for a, b in zip(own, seconds[FULL], strict=True))
        ratio = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        medians = [f"{statistics.median(column):.3f}" for column in zip(*own, strict=True)]
        lines.append(" | ".join([name, *medians, "1" if name == FULL else ratio]))
    return "\n".join(f"| {line} |" for line in lines)


def peak_of(pid: int) -> float:
    """MiB that a process had at most."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


def main() -> None:
    """Measure, and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("local", "vllm"), default="local")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--draws", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--rollouts", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--width", type=int, default=256, help="of the model; the MLP is three times as wide")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--memory", action="store_true", help="measure peaks of memory instead of time")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    shape = TinyConfig(
        hidden_size=options.width, intermediate_size=3 * options.width, layers=options.layers, heads=options.width // 64
    )
    print(
        f"{platform.machine()}, {options.threads} threads, torch {torch.__version__}, {options.engine} engine, ", end=""
    )
    print(f"{options.dtype}, {options.draws} draws, width {options.width}, {options.layers} layers\n")
    if options.memory and not options.memory_of:
        for name in contenders(options):
            command = [sys.executable, __file__, *sys.argv[1:], "--memory-of", name]
            print(name, subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_model(folder / "model", shape, 0.0)
        write_prompts(folder / "prompts.jsonl", options.prompts)
        write_recipe(folder / "recipe.toml", folder / "model", folder / "prompts.jsonl")
        if options.memory_of:
            before = resident("VmRSS")
            run = Contender(folder, "run", contenders(options)[options.memory_of], options)
            for _ in range(2):
                run.step()
            engines = [f"{peak_of(pid):,.0f} MiB" for pid in run.children()]
            print(f"trainer {resident('VmHWM') - before:,.0f} MiB more than before; engine {', '.join(engines) or '-'}")
            return
        runs = {name: Contender(folder, name, own, options) for name, own in contenders(options).items()}
        seconds: dict[str, list[tuple[float, ...]]] = {name: [] for name in runs}
        for _ in range(options.rounds + 1):
            for name, run in runs.items():
                seconds[name].append(run.step())
    print(table({name: own[1:] for name, own in seconds.items()}))  # the first round warms up


if __name__ == "__main__":
    main()
