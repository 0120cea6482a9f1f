"""Can the draws of finished runs teach again, from their addresses and rewards alone?

    python benchmarks/old_draws.py RUN... [--write DIRECTION.safetensors]

A run's files say which draw wrote each completion and what it earned, so the noise z of every draw can be made again.
The direction that paid is the sum of a z over draws, where a is the mean of reward minus the problem's mean reward in
that step. It is made twice, from even and from odd steps, and the two are compared: `z` is the cosine of the two times
the root of the number of weights, which is a standard normal number if there is nothing to find.

What there is to find: if one direction explains a share r of the variance of a, n draws of D weights give
z = (n / 2) r / sqrt(D). `r for 3` is the share at which z would be 3, above 1 if no reward could be enough.

Prediction, 28 November 2026, for the float32 runs of benchmarks/states.py (C3PO, two tasks, ten seeds from one warm
start, so that the draws of all seeds can be added up). For all weights, `r for 3` is above 1 in a single run, and z of
single runs has mean 0 and deviation 1. Added up over ten seeds, z is below 3 for all weights on both tasks. Norms have
so few weights that `r for 3` is below 0.2 over ten seeds; z is below 3 there too, since noise of norms is quiet.

Prediction, 30 November 2026, for an evolution strategy with 256 draws a step, a greedy rollout of eight problems each,
60 steps, five seeds (76,800 draws of each task; docs/records/old_draws.md has the commands). Added up over seeds, z for
all weights is above 3 on sorting and on forks, where a draw's reward correlates with the gradient's prediction at 0.2
or more, and below 3 on consistent choice, whose wins are few. Norms are below 3 on all three. If z is above 3, the
warm start moved along the direction that paid, by the best of six lengths chosen on one half of held-out problems,
gains less than 5 points on the other half, since its cosine with the gradient stays below 0.02.
"""

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import torch
from safetensors.torch import load_file, save_file

from threepo.posterior import kernels
from threepo.posterior.noise import noise_key
from threepo.posterior.noise_structures import Noise
from threepo.posterior.operations import AddNoiseTimes
from threepo.run_folder import checkpoints
from threepo.types import Draw

KINDS = {
    "embedding": ("embed_tokens", "lm_head"),
    "attention": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "MLP": ("gate_proj", "up_proj", "down_proj"),
    "norms": ("norm",),
    "all": ("",),
}
COLUMNS = ["step", "problem_id", "reward", "draw_seed", "draw_step", "draw_index", "draw_mirrored", "draw_arm"]
Sums = dict[str, torch.Tensor]


def deviations(run: Path) -> Iterator[tuple[int, dict[Draw, float]]]:
    """What each draw of a step earned above its problems' means."""
    for file in sorted((run / "completions").glob("step-*.parquet")):
        table = pyarrow.parquet.read_table(file, columns=COLUMNS).to_pylist()
        problems, draws = defaultdict(list), defaultdict(list)
        for row in table:
            problems[row["problem_id"]].append(row["reward"])
        for row in table:
            above = row["reward"] - float(np.mean(problems[row["problem_id"]]))
            if row["draw_seed"] is None or row["draw_arm"] is not None:
                raise SystemExit(f"{file}: has completions without a draw, or of arms, whose sizes differ")
            sign: Any = -1 if row["draw_mirrored"] else 1
            draws[Draw(row["draw_seed"], row["draw_step"], row["draw_index"], sign=sign)].append(above)
        yield table[0]["step"], {draw: float(np.mean(above)) for draw, above in draws.items()}


def directions(run: Path) -> tuple[list[Sums], int]:
    """The sums over even and odd steps by parameter, and the number of draws."""
    noise = json.loads((run / "config.json").read_text())["noise"]
    if noise.get("rank") or noise.get("tied"):
        raise SystemExit(f"{run}: its noise has a structure, and only independent noise is made again here")
    shapes = load_file(checkpoints(run)[-1][1] / "model.safetensors")
    halves: list[Sums] = [{name: torch.zeros(p.shape) for name, p in shapes.items()} for _ in range(2)]
    ones, count = {name: torch.empty(p.shape) for name, p in shapes.items()}, 0
    for step, earned in deviations(run):
        for draw, above in earned.items():
            count += 1
            kernels.run(
                AddNoiseTimes(total, ones[name].fill_(above), Noise(noise_key(draw, name), draw.sign))
                for name, total in halves[step % 2].items()
            )
    return halves, count


def overlap(halves: list[Sums], kind: str) -> tuple[float, int]:
    """z of the two halves, and the number of weights, for a kind of parameter."""
    names = [name for name in halves[0] if any(part in name for part in KINDS[kind])]
    one, other = (torch.cat([half[name].reshape(-1) for name in names]).double() for half in halves)
    return float(one @ other / (one.norm() * other.norm()) * math.sqrt(len(one))), len(one)


def main() -> None:
    """Print a table of the runs, alone and added up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--write", type=Path, help="write the direction that paid, of all runs and steps, to this file")
    options = parser.parse_args()
    alone: dict[str, list[float]] = defaultdict(list)
    total: list[Sums] = []
    draws = 0
    for run in options.runs:
        halves, count = directions(run)
        draws += count
        for kind in KINDS:
            alone[kind].append(overlap(halves, kind)[0])
        total = (
            [{name: a[name] + b[name] for name in a} for a, b in zip(total, halves, strict=True)] if total else halves
        )
    if options.write:
        save_file({name: total[0][name] + total[1][name] for name in total[0]}, options.write)
    print(f"{len(options.runs)} runs, {draws} draws\n")
    print("| weights | number | z of one run: mean, deviation | r for 3, one run | z, added up | r for 3, added up |")
    print("| --- " * 6 + "|")
    for kind, values in alone.items():
        z, size = overlap(total, kind)
        one, whole = (6 * math.sqrt(size) / n for n in (draws / len(options.runs), draws))
        deviation = np.std(values, ddof=1) if len(values) > 1 else math.nan
        print(f"| {kind} | {size:,} | {np.mean(values):+.2f}, {deviation:.2f} | {one:.2f} | {z:+.2f} | {whole:.2f} |")


if __name__ == "__main__":
    main()
