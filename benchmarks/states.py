"""Does IVON need its momentum and Hessian in float32? Ten seeds of two tasks with both rounded after every step.

    threepo sft demo/warm_start; threepo sft testbeds/chain_start
    python benchmarks/states.py [--out runs/states] [--jobs 2] [--seeds 180 ... 189]

Only the rounding is studied: the numbers stay in float32 tensors, so nothing is saved here. Ways to round:

- `float32`: not at all.
- `bfloat16`: up or down at random, so that the mean is kept.
- `bfloat16, nearest`: to nearest.
- `8 bits`: blocks of 256 numbers with a scale each, up or down at random; the momentum as a signed square, the Hessian
  between the block's smallest and largest.

Prediction, 28 November 2026, before the first of these runs. A step changes a Hessian by about one in ten thousand of
itself, and a bfloat16 has steps of one in 256.

1. `bfloat16` ends within 2 points of float32 on both tasks.
2. `bfloat16, nearest` leaves Hessians where they began (5 % and 95 % quantiles of h / h0 within 0.4 % of 1), and ends
   within 2 points all the same: on models of this size C3PO does not live from what the Hessian learns.
3. `8 bits` ends within 2 points of float32 on both tasks.
4. The mean reward over all steps is within 1 point of float32's, for all three and both tasks.

A prediction is right if the mean difference lies inside; the interval says what these seeds cannot exclude. Said before
the first table was printed: p-values are adjusted among the three ways of a task and a measure.
"""

import argparse
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from threepo import api
from threepo.config import TrainConfig
from threepo.config.recipes import load
from threepo.lab.statistics import paired_differences, t_interval
from threepo.run_folder import read_metrics
from threepo.training import run as training

TASKS = {
    "sorting": ("demo/c3po", ["run.threads=1", "run.checkpoint_every=0"]),
    "chain": ("testbeds/chain", ["method.preset=c3po", "optimizer.kind=ivon", "optimizer.ess=1e9", "optimizer.lr=100"]),
}
BLOCK = 256
LEVELS = {"hessian": 255, "momentum": 127}


def at_random(x: torch.Tensor, dice: torch.Generator) -> torch.Tensor:
    """Whole numbers next to `x`, whose mean is `x`."""
    below = x.floor()
    return below + (torch.rand(x.shape, generator=dice) < x - below)


def to_bfloat16(x: torch.Tensor, name: str, dice: torch.Generator) -> torch.Tensor:
    """To one of the two neighbours in bfloat16, whose mean is `x`."""
    bits = x.contiguous().view(torch.int32)
    noise = torch.randint(1 << 16, x.shape, dtype=torch.int32, generator=dice)
    return ((bits + noise) & ~0xFFFF).view(torch.float32)


def to_nearest_bfloat16(x: torch.Tensor, name: str, dice: torch.Generator) -> torch.Tensor:
    """To nearest."""
    return x.bfloat16().float()


def to_8_bits(x: torch.Tensor, name: str, dice: torch.Generator) -> torch.Tensor:
    """A number of 8 bits in each block's own scale, at random between two neighbours whose mean is `x`."""
    flat = x.reshape(-1)
    blocks = torch.nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    if name == "hessian":
        blocks = torch.where(torch.arange(blocks.numel()).view_as(blocks) < len(flat), blocks, flat[-1])
        low = blocks.amin(1, keepdim=True)
        width = (blocks.amax(1, keepdim=True) - low).clamp_min(1e-30) / LEVELS[name]
        rounded = low + at_random((blocks - low) / width, dice) * width
    else:
        most = blocks.abs().amax(1, keepdim=True).clamp_min(1e-30)
        size = blocks.abs() / most
        code = (size.sqrt() * LEVELS[name]).floor().clamp_max(LEVELS[name] - 1)
        low, high = (code / LEVELS[name]).square(), ((code + 1) / LEVELS[name]).square()
        up = torch.rand(size.shape, generator=dice) < (size - low) / (high - low)
        rounded = torch.where(up, high, low) * most * blocks.sign()
    return rounded.reshape(-1)[: len(flat)].view_as(x)


WAYS: dict[str, Callable[[torch.Tensor, str, torch.Generator], torch.Tensor] | None] = {
    "float32": None,
    "bfloat16": to_bfloat16,
    "bfloat16, nearest": to_nearest_bfloat16,
    "8 bits": to_8_bits,
}


def run(task: str, way: str, seed: int, folder: Path) -> None:
    """One training, in this process."""
    recipe, settings = TASKS[task]
    config = load(TrainConfig, recipe, [*settings, f"run.folder={folder}", f"run.seed={seed}"])
    dice, rounding = torch.Generator().manual_seed(seed), WAYS[way]
    build = training.build_optimizer  # type: ignore[attr-defined]

    def rounded(optimizer: Any, *_: Any) -> None:
        for state in optimizer.state.values():
            for name in LEVELS:
                if rounding:
                    state[name].copy_(rounding(state[name], name, dice))

    def built(*arguments: Any) -> Any:
        optimizer: Any = build(*arguments)
        optimizer.register_step_post_hook(rounded)
        return optimizer

    with patch.object(training, "build_optimizer", built):
        api.train(config)


def ends_and_means(rows: list[dict[str, Any]]) -> tuple[float, float]:
    """pass@1 at the end, and the mean reward over all steps, of a run."""
    rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
    return [row["eval/pass_at_1"] for row in rows if "eval/pass_at_1" in row][-1], sum(rewards) / len(rewards)


def table(out: Path, seeds: list[int]) -> str:
    """Ends and mean rewards, and their differences to float32 with 95 % intervals and p-values by Holm."""
    lines = [
        "| task | measure | states | mean | difference to float32 | p | h / h0, 5 % and 95 % |",
        "| --- " * 7 + "|",
    ]
    for task in TASKS:
        rows = {way: [read_metrics(out / task / way / str(seed)) for seed in seeds] for way in WAYS}
        for i, measure in enumerate(("pass@1 at the end", "mean reward")):
            found = {way: [ends_and_means(each)[i] for each in runs] for way, runs in rows.items()}
            families = [[a - b for a, b in zip(found[way], found["float32"], strict=True)] for way in list(WAYS)[1:]]
            tests = dict(zip(list(WAYS)[1:], paired_differences(families), strict=True))
            for way, values in found.items():
                mean, test = t_interval(values), tests.get(way)
                told = (
                    f"{test.difference:+.4f} ({test.low:+.4f} to {test.high:+.4f}) | {test.p_adjusted:.2f}"
                    if test
                    else "|"
                )
                last = [[row for row in each if "posterior/hessian_p05" in row][-1] for each in rows[way]]
                spread = (sum(row[f"posterior/hessian_{end}"] for row in last) / len(last) for end in ("p05", "p95"))
                numbers = f"{mean.value:.3f} ({mean.low:.3f} to {mean.high:.3f}) | {told}"
                lines.append(f"| {task} | {measure} | {way} | {numbers} | {', '.join(f'{h:.4f}' for h in spread)} |")
    return "\n".join(lines)


def main() -> None:
    """Make the runs that are missing, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/states"))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seeds", type=int, nargs="*", default=list(range(180, 190)))
    parser.add_argument("--one", nargs=3, metavar=("TASK", "STATES", "SEED"), help="one run, in this process")
    options = parser.parse_args()
    if options.one:
        task, way, seed = options.one
        run(task, way, int(seed), options.out / task / way / seed)
        return
    wanted = [(task, way, seed) for seed in options.seeds for task in TASKS for way in WAYS]
    missing = [(t, w, s) for t, w, s in wanted if not (options.out / t / w / str(s) / "summary.json").is_file()]

    def start(one: tuple[str, str, int]) -> None:
        command = [sys.executable, __file__, "--out", str(options.out), "--one", *map(str, one)]
        done = subprocess.run(command, capture_output=True, text=True)
        print(*one, "done" if done.returncode == 0 else done.stderr[-2000:], flush=True)

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(start, missing))
    print(table(options.out, options.seeds))


if __name__ == "__main__":
    main()
