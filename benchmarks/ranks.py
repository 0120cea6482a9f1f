"""Time of a training step on two ranks and in one process, with the same rows, and where the difference goes.

    python benchmarks/ranks.py [--rounds 7] [--draws 2] [--prompts 16] [--width 256] [--set batching.tokens=1024 ...]

It starts itself under torchrun. All sides take turns in the same processes, so a slower machine slows all of them:
rank 0 takes a step alone with one thread, then alone with two, while rank 1 waits; then both take it together with one
thread each. The learning rate is almost zero, so all sides generate and train on the same rows.

Wall time is rank 0's. Processor time is summed over both processes and all their threads: it counts the work, also
on a machine that others use, but not the waiting. Ratios are computed within a round; tables show medians with their
range. The second table has the parts of a step on two ranks that one process does not have, or that both do.
"""

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from transformers.utils import logging

from step import write_model, write_prompts, write_recipe
from threepo.config import Method, TinyConfig, TrainConfig
from threepo.config.method import C3PO, GRPO
from threepo.config.recipes import load
from threepo.errors import ThreepoWarning
from threepo.models.policy import Policy
from threepo.posterior import ivon, perturbation, point_optimizers
from threepo.ranks.launch import join_world
from threepo.ranks.world import ALONE, World
from threepo.training import rlvr

SIDES = {
    "one process, 1 thread": (False, 1),
    "one process, 2 threads": (False, 2),
    "two ranks, 1 thread each": (True, 1),
}
"""Whether both ranks take the step, and with how many threads."""
FIRST = next(iter(SIDES))
PARTS: dict[str, list[tuple[Any, str]]] = {
    "weights gathered for draws": [(perturbation, "whole")],
    "layers gathered": [
        (_fsdp_param_group, "foreach_all_gather"),
        (_fsdp_param_group, "foreach_all_gather_copy_out"),
    ],
    "gradients summed and cut": [(_fsdp_param_group, "foreach_reduce")],
    "objects exchanged, and waiting": [(World, "gather")],
    "prompts encoded (on every rank)": [(Policy, "encode_prompt")],
    "optimizer step": [(ivon.IVON, "step"), (point_optimizers.PointAdamW, "step")],
}
"""Functions whose time is counted, by what they are for."""
ALL_ELSE = "all else: decoding, forward and backward passes, noise"


@dataclass(frozen=True)
class Timing:
    """Seconds of one step."""

    wall: float
    rollout: float
    """With grading; part of `wall`, as `update` is."""
    update: float
    cpu: float
    """Of both processes."""
    parts: dict[str, tuple[float, float]]
    """Wall-clock and processor seconds, means over ranks."""


@contextmanager
def counted() -> Iterator[dict[str, list[float]]]:
    """Wall-clock and processor seconds of the functions in `PARTS` that the body calls."""
    found: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])

    def timed(label: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            wall, cpu = time.perf_counter(), time.process_time()
            try:
                return function(*arguments, **options)
            finally:
                found[label][0] += time.perf_counter() - wall
                found[label][1] += time.process_time() - cpu

        return call

    with ExitStack() as patches:
        for label, functions in PARTS.items():
            for owner, name in functions:
                patches.enter_context(patch.object(owner, name, timed(label, getattr(owner, name))))
        yield found


def step(run: rlvr.RLRun, number: int, world: World) -> Timing:
    """One step of a run on these ranks."""
    with counted() as parts:
        wall, cpu = time.perf_counter(), time.process_time()
        rollouts = rlvr.begin_rollouts(run, number)()
        between = time.perf_counter()
        rlvr.learn(run, rollouts, number)
        end, cpu = time.perf_counter(), time.process_time() - cpu
    everywhere = world.gather((cpu, dict(parts)))
    means = {
        label: tuple(statistics.mean(own.get(label, (0.0, 0.0))[i] for _, own in everywhere) for i in (0, 1))
        for label in PARTS
    }
    wholes = end - wall, statistics.mean(cpu for cpu, _ in everywhere)
    means[ALL_ELSE] = tuple(whole - sum(mean[i] for mean in means.values()) for i, whole in enumerate(wholes))
    return Timing(end - wall, between - wall, end - between, sum(cpu for cpu, _ in everywhere), means)  # type: ignore[arg-type]


def assembled(method: Method, folder: Path, world: World, options: argparse.Namespace) -> rlvr.RLRun:
    """A new run of the benchmark's work."""
    settings = [
        f"run.folder={folder / f'{method.name}-{world.size}'}",
        f"data.prompts_per_step={options.prompts}",
        f"sampling.max_new_tokens={options.new_tokens}",
        f"method.preset={method.name}",
        *options.set,
    ]
    config = replace(load(TrainConfig, str(folder / "recipe.toml"), settings), method=method)
    return rlvr.assemble(config, None, world)


def measure(method: Method, folder: Path, world: World, options: argparse.Namespace) -> dict[str, list[Timing]]:
    """Steps of all sides in turns; the first round warms up. Only the first rank has the steps of one process."""
    together = assembled(method, folder, world, options)
    alone = assembled(method, folder, ALONE, options) if world.rank == 0 else None
    timings: dict[str, list[Timing]] = {side: [] for side in SIDES}
    for number in range(options.rounds + 1):
        for side, (both, threads) in SIDES.items():
            torch.set_num_threads(threads)
            world.gather(None)  # who waits takes no processor time
            if both:
                timings[side].append(step(together, number, world))
            elif alone:
                timings[side].append(step(alone, number, ALONE))
    return {side: own[1:] for side, own in timings.items()}


def shown(values: Sequence[float]) -> str:
    """Their median, and their range."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def report(name: str, timings: dict[str, list[Timing]]) -> None:
    """Print two tables in Markdown."""
    print(f"\n{name}\n")
    print("| side | wall s/step | rollout | update | processor s/step | wall: ratio | processor: ratio |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for side, own in timings.items():
        seconds = [statistics.median(getattr(t, part) for t in own) for part in ("wall", "rollout", "update", "cpu")]
        pairs = list(zip(own, timings[FIRST], strict=True))
        ratios = [shown([getattr(a, kind) / getattr(b, kind) for a, b in pairs]) for kind in ("wall", "cpu")]
        print(f"| {side} | {' | '.join(f'{value:.3f}' for value in seconds)} | {' | '.join(ratios)} |")
    print(f"\nRatios are to {FIRST}. Seconds of a step in these parts, of one rank; in one process beside it:\n")
    print("| part | wall | processor | wall in one process | processor in one process |")
    print("| --- | --- | --- | --- | --- |")
    for label in (*PARTS, ALL_ELSE):
        cells = [
            f"{statistics.median(t.parts[label][kind] for t in timings[side]):.4f}"
            for side in (list(SIDES)[-1], FIRST)
            for kind in (0, 1)
        ]
        print(f"| {label} | {' | '.join(cells)} |")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--draws", type=int, default=2, help="N of C3PO")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--rollouts", type=int, default=16, help="completions of a prompt")
    parser.add_argument("--new-tokens", type=int, default=64, help="longest completion; all have a geometric length")
    parser.add_argument("--width", type=int, default=256, help="of the model; the MLP is three times as wide")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--set", nargs="*", default=[], help="settings of the runs, as on threepo's command line")
    return parser.parse_args()


def main() -> None:
    """Start both ranks, or be one of them."""
    options = parse()
    if "WORLD_SIZE" not in os.environ:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2"]
        passive = {"OMP_WAIT_POLICY": "passive"}  # a thread that spins would count as work
        command = [sys.executable, *torchrun, __file__, *sys.argv[1:]]
        sys.exit(subprocess.run(command, env=passive | os.environ).returncode)
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=ThreepoWarning)  # of the learning rate
    methods = {"GRPO": GRPO, f"C3PO, N = {options.draws}": replace(C3PO, draws=options.draws)}
    shape = TinyConfig(hidden_size=options.width, intermediate_size=3 * options.width, layers=options.layers)
    with join_world(600.0) as world, tempfile.TemporaryDirectory() as temporary:
        folder = Path(world.gather(temporary)[0])
        if world.rank == 0:
            write_model(folder / "model", shape, 4 / options.new_tokens)
            write_prompts(folder / "prompts.jsonl", options.prompts)
            write_recipe(folder / "recipe.toml", folder / "model", folder / "prompts.jsonl")
            machine = platform.processor() or platform.machine()
            print(f"{machine}, torch {torch.__version__}, {options.rounds} rounds, {vars(options)}", flush=True)
        world.gather(None)
        for name, method in methods.items():
            timings = measure(replace(method, rollouts_per_prompt=options.rollouts), folder, world, options)
            if world.rank == 0:
                report(name, timings)
        world.gather(None)  # the first rank's folder is everyone's
    sys.stdout.flush()
    os._exit(0)  # device meshes keep gloo's threads, which may end badly together with Python


if __name__ == "__main__":
    main()
