"""Seconds a training step of each method, against GRPO's, on the demonstration's work.

    python benchmarks/methods.py [--rounds 7]

All methods train in one process, in turns, from the same weights and on the same prompts, so a machine that slows
down slows all of them. Every method's ratio to GRPO is taken within a round; the table shows the median ratio with
its range over rounds. Weights do not move (learning rate 0), so that lengths stay comparable.
"""

import argparse
import os
import platform
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from threepo.config import TrainConfig
from threepo.methods.presets import PRESETS
from threepo.training import rlvr
from threepo.training.clock import Clock
from threepo.training.recipe import load

METHODS = ("grpo", "b3po", "m3po", "c3po", "c3po_replay")
PARTS = ("time/rollout", "time/update")


def make(method: str, folder: Path, threads: int) -> rlvr.Run:
    """A run of the demonstration's size on a freshly made model with a steady output length."""
    optimizer = ["optimizer.kind=adamw", "optimizer.lr=1e-30"] if method == "grpo" else ["optimizer.lr=1e-30"]
    settings = [f"run.folder={folder / method}", "model.path=tiny-qwen2", f"run.threads={threads}", *optimizer]
    config = load(TrainConfig, "demo/grpo" if method == "grpo" else "demo/c3po", [*settings, "eval.every=0"])
    return rlvr.start(replace(config, method=PRESETS[method]))


def step_seconds(run: rlvr.Run, step: int) -> dict[str, float]:
    """Wall-clock seconds of the parts of one training step."""
    clock = Clock()
    groups = rlvr.rollout(run, step, clock)
    rlvr.learn(run, groups, step, clock)
    return {part: clock.times[part] for part in PARTS} | {"total": sum(clock.times.values())}


def main() -> None:
    """Measure, and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = {method: make(method, Path(folder), options.threads) for method in METHODS}
        rounds = []
        for step in range(options.rounds + 1):
            seconds = {method: step_seconds(run, step) for method, run in runs.items()}
            if step:  # the first round warms up
                rounds.append(seconds)
    print(f"{platform.processor() or platform.machine()}, {options.threads} threads, torch {torch.__version__}, ")
    print(f"{sum(p.numel() for p in runs['grpo'].policy.model.parameters()):,} parameters, {options.rounds} rounds\n")
    print("| method | s/step | rollout | update | ratio to GRPO (range) |\n| --- | --- | --- | --- | --- |")
    for method in METHODS:
        median = {part: statistics.median(r[method][part] for r in rounds) for part in (*PARTS, "total")}
        ratios = sorted(r[method]["total"] / r["grpo"]["total"] for r in rounds)
        print(
            f"| {method} | {median['total']:.2f} | {median['time/rollout']:.2f} | {median['time/update']:.2f} "
            f"| {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) |"
        )


if __name__ == "__main__":
    main()
