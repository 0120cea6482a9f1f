"""Bytes and time of pushes of changes to inference servers, compared with full pushes, along real training runs.

    python benchmarks/pushes.py [--steps 12] [--width 512]

Each run learns from rollouts of the local engine. After every step the weights are pushed twice, in turns: as mean and
Hessian in float32, and as changes in bfloat16. A server's side reads each push and makes a draw of it. Every draw of
changes is compared, to the bit, with the trainer's. Shown are medians over pushes, without the first one, and for times
the ratio to a full push with its range.
"""

import argparse
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from threepo.config import TrainConfig
from threepo.config.recipes import load
from threepo.posterior.draw_file import PushedWeights, RoundedWeights, file_contents, roundings
from threepo.ranks.pushed_files import PushedFiles
from threepo.ranks.world import ALONE
from threepo.rollout.payloads import parameter_names
from threepo.training import rlvr
from threepo.types import Draw

RUNS = {
    "AdamW, lr 1e-6": ("method.preset=grpo", "optimizer.kind=adamw", "optimizer.lr=1e-6"),
    "AdamW, lr 1e-5": ("method.preset=grpo", "optimizer.kind=adamw", "optimizer.lr=1e-5"),
    "IVON, largest step 1e-6": ("method.preset=c3po", "optimizer.lr=1", "optimizer.ess=1e9"),
    "IVON, largest step 1e-5": ("method.preset=c3po", "optimizer.lr=10", "optimizer.ess=1e9"),
    "IVON, largest step 1e-4": ("method.preset=c3po", "optimizer.lr=100", "optimizer.ess=1e9"),
}
DTYPE = torch.bfloat16
REWARD = """
def reward(completions, **_):
    return [float(bool(c) and c[0] < "P") for c in completions]
"""


def shown(values: Sequence[float]) -> str:
    """The median, and the range."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def changed(files: Sequence[Path], kind: str) -> float:
    """Number of means, or Hessians, in a push of changes."""
    found = 0
    for path in files:
        with safe_open(path, framework="pt") as file:
            names = [name for name in file.keys() if name.startswith(f"at {kind} ")]  # noqa: SIM118 - not a dict
            found += sum(math.prod(file.get_slice(name).get_shape()) for name in names)
    return found


def compare(run: rlvr.RLRun, folder: Path, steps: int) -> dict[str, list[float]]:
    """Of every push of changes: bytes per weight, share of means and Hessians, and times in full pushes."""
    names, weights = parameter_names(run.policy.architecture), sum(p.numel() for p in run.policy.model.parameters())
    files = {every: PushedFiles(folder / str(every), every, ALONE) for every in (1, 1 << 30)}
    servers = {every: PushedWeights() for every in files}
    optimizer: Any = run.optimizer
    found: dict[str, list[float]] = {key: [] for key in ("bytes", "mean", "hessian", "writing", "reading")}
    for step in range(steps + 1):
        written, read, draw = {}, {}, Draw(0, step, 0) if optimizer.has_noise else None
        saved = run.policy.saved_tensors()
        for every in sorted(files, reverse=bool(step % 2)):
            begin = time.perf_counter()
            tensors, metadata = file_contents(optimizer, saved, names, True)
            size = files[every].push(tensors, metadata, roundings(optimizer, tensors))
            between = time.perf_counter()
            servers[every].follow(files[every].full, files[every].changes)
            made = dict(servers[every].draw(draw, DTYPE, torch.device("cpu")))
            written[every], read[every] = between - begin, time.perf_counter() - between
            if every > 1:
                for name, value in RoundedWeights(optimizer).weights(draw):
                    assert torch.equal(value.to(DTYPE), made[names[name]].to(DTYPE)), name
                if step:
                    found["bytes"].append(size / weights)
                    for kind in ("mean", "hessian") if files[every].changes else ():
                        found[kind].append(changed(files[every].changes[-1], kind) / weights)
        if step:
            found["writing"].append(written[1 << 30] / written[1])
            found["reading"].append(read[1 << 30] / read[1])
        rollouts = rlvr.begin_rollouts(run, step)()
        rlvr.learn(run, rollouts, step)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--width", type=int, default=512)
    options = parser.parse_args()
    print(f"{options.steps} steps; torch {torch.__version__}, {torch.get_num_threads()} threads")
    print("| run | means | Hessians | bytes a weight | full | not rounded | writing | reading, and a draw |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        Path("letters.py").write_text(REWARD)
        sys.path.insert(0, folder)
        for number, (name, settings) in enumerate(RUNS.items()):
            common = [
                *("model.path=tiny-qwen2", f"model.tiny.hidden_size={options.width}", "model.tiny.layers=4"),
                *(f"model.tiny.intermediate_size={3 * options.width}", "model.tiny.tied=false", "data.train=sorting"),
                *("data.prompts_per_step=4", "method.rollouts_per_prompt=8", "sampling.max_new_tokens=16"),
                *(f"run.folder=run-{number}", "schedule.kind=constant", "reward.function=letters:reward"),
            ]
            run = rlvr.assemble(load(TrainConfig, "", [*common, *settings]))
            run.set_rates(options.steps, options.steps)  # after the warm-up
            found = compare(run, Path(folder, f"pushes-{number}"), options.steps)
            run.engine.close()
            median, full = statistics.median(found["bytes"]), 4 if "optimizer.kind=adamw" in settings else 8
            shares = [f"{statistics.median(found[kind]):.1%}" if found[kind] else "all" for kind in ("mean", "hessian")]
            times = [shown(found[key]) for key in ("writing", "reading")]
            row = [name, *shares, f"{median:.2f}", str(full // 2), str(full), *times]
            print("|", " | ".join(row), "|", flush=True)


if __name__ == "__main__":
    main()
