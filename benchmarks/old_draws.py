r"""Can the draws of finished runs teach again, from their addresses and rewards, or from their right texts?

    python benchmarks/old_draws.py RUN... [--shuffle] [--write DIRECTION.safetensors]
    python benchmarks/old_draws.py RUN --move DIRECTION.safetensors [--kinds all] [--greedy] [--rank 1]
    python benchmarks/old_draws.py RUN --loud DIRECTION.safetensors
    python benchmarks/old_draws.py RUN --texts RIGHT.jsonl
    threepo sft model.path=START conversations.source=RIGHT.jsonl conversations.batch_size=64 run.steps=100 \
      conversations.max_tokens=256 optimizer.kind=adamw optimizer.lr=3e-4 optimizer.weight_decay=0 schedule.kind=cosine

A run's files say which draw wrote each completion and what it earned, so the noise z of every draw can be made again.
The direction that paid is the sum of a z over draws, where a is the mean of reward minus the problem's mean reward in
that step. It is made twice, from even and from odd steps, and the two are compared: `z` is the cosine of the two times
the root of the number of weights, which is a standard normal number if there is nothing to find.

`--loud` asks whether noise that is loud where it paid makes better draws. It is as large on the whole in a parameter:
plain; times the size of the direction at each weight; and a random length along the direction, on top of plain
noise. `spectrum` is the share of the direction's square that lies in the first singular direction of its matrices, and
what it is on average of the same numbers in random order.

What there is to find: if one direction explains a share r of the variance of a, n draws of D weights give
z = (n / 2) r / sqrt(D). `r for 3` is the share at which z would be 3, above 1 if no reward could be enough.

The predictions, which stood here before the runs, are in docs/records/old_draws.md.
"""

import argparse
import json
import math
import shutil
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow.parquet
import torch
from safetensors.torch import load_file, save_file

from threepo import api
from threepo.config import NoiseConfig
from threepo.config.recipes import load_evaluation
from threepo.posterior import kernels
from threepo.posterior.noise import noise_key
from threepo.posterior.noise_sizes import noise_sizes
from threepo.posterior.noise_structures import Noise
from threepo.posterior.operations import AddNoiseTimes
from threepo.run_folder import COMPLETIONS, CONFIG, checkpoints, model_folder
from threepo.types import Draw

KINDS = {
    "embedding": ("embed_tokens", "lm_head"),
    "attention": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "MLP": ("gate_proj", "up_proj", "down_proj"),
    "norms": ("norm",),
    "all": ("",),
}
LENGTHS = (0.0, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
SCORED = ["eval.problems=512", "eval.top_p=1", "eval.top_k=0"]
DRAWS = 16
SAMPLED, GREEDY = (4, "eval.temperature=1"), (1, "eval.temperature=0")
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


def directions(run: Path, shuffle: bool) -> tuple[list[Sums], int]:
    """The sums over even and odd steps by parameter, and the number of draws, each with its reward or another's."""
    noise = json.loads((run / "config.json").read_text())["noise"]
    if noise.get("rank") or noise.get("tied"):
        raise SystemExit(f"{run}: its noise has a structure, and only independent noise is made again here")
    shapes = load_file(checkpoints(run)[-1][1] / "model.safetensors")
    halves: list[Sums] = [{name: torch.zeros(p.shape) for name, p in shapes.items()} for _ in range(2)]
    ones, count = {name: torch.empty(p.shape) for name, p in shapes.items()}, 0
    for step, earned in deviations(run):
        if shuffle:
            earned = dict(zip(earned, np.random.default_rng(step).permutation(list(earned.values())), strict=True))
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


def write_right(run: Path, file: Path) -> None:
    """Write the distinct right completions of a run as conversations, and print their number."""
    tables = [pyarrow.parquet.read_table(each) for each in sorted((run / COMPLETIONS).glob("step-*.parquet"))]
    rows = [row for table in tables for row in table.select(["prompt", "completion", "correct"]).to_pylist()]
    right = dict.fromkeys((row["prompt"], row["completion"]) for row in rows if row["correct"])
    lines = [json.dumps({"prompt": prompt, "completion": text}) + "\n" for prompt, text in right]
    file.write_text("".join(lines), encoding="utf-8")
    print(f"{len(lines)} right completions")


def low_rank(direction: Sums, rank: int) -> Sums:
    """The direction with only the first singular directions of its matrices."""
    low = dict(direction)
    for name, total in direction.items():
        if total.ndim == 2:
            u, s, v = torch.linalg.svd(total, full_matrices=False)
            low[name] = u[:, :rank] * s[:rank] @ v[:rank]
    return low


def spectrum(direction: Sums, names: Sequence[str]) -> tuple[float, float]:
    """The share of the square of these matrices that lies in their first singular directions; and in random order."""
    order = torch.Generator().manual_seed(0)
    matrices = [direction[name] for name in names if direction[name].ndim == 2]
    mixed = [m.view(-1)[torch.randperm(m.numel(), generator=order)].view(m.shape) for m in matrices]
    total = sum(float(m.square().sum()) for m in matrices)
    first, by_chance = (
        sum(float(torch.linalg.matrix_norm(m, 2)) ** 2 for m in each) / total if total else math.nan
        for each in (matrices, mixed)
    )
    return first, by_chance


def right(run: Path, moves: Sums, samples: int, temperature: str) -> np.ndarray:
    """Held-out answers [problems, samples] of the model that `run` began with, moved by `moves`: which are right."""
    config = json.loads((run / CONFIG).read_text())
    with TemporaryDirectory() as own:
        folder = Path(own)
        shutil.copytree(model_folder(Path(config["model"]["path"])), folder / "model")
        weights = load_file(folder / "model" / "model.safetensors")
        save_file({name: p + moves.get(name, 0) for name, p in weights.items()}, folder / "model" / "model.safetensors")
        settings = [f"data.train={config['data']['train']}", f"data.levels={config['data']['levels']}", *SCORED]
        settings += [f"eval.max_new_tokens={config['sampling']['max_new_tokens']}"]
        settings += [f"eval.samples={samples}", temperature]
        api.evaluate(load_evaluation(str(folder / "model"), "", settings), folder / "scores")
        (file,) = (folder / "scores" / COMPLETIONS).glob("*.parquet")
        correct = pyarrow.parquet.read_table(file, columns=["correct"])["correct"].to_pylist()
    return np.array(correct).reshape(-1, samples)


def sizes_of(run: Path) -> dict[str, float]:
    """Standard deviation of the noise on each parameter as the run began."""
    config = json.loads((run / CONFIG).read_text())
    start = load_file(model_folder(Path(config["model"]["path"])) / "model.safetensors")
    sizes, own = noise_sizes(start.items(), NoiseConfig(**config["noise"])), config["optimizer"]
    if config["noise"]["unit"] == "posterior":  # IVON's sigma
        sigma = (own["ess"] * (own["hess_init"] + own["weight_decay"])) ** -0.5
        sizes = {name: size * sigma for name, size in sizes.items()}
    return sizes


def move(run: Path, direction: Sums, kinds: Sequence[str], decoding: tuple[int, str]) -> None:
    """Print pass@1 of the model that `run` began with, moved along the direction: the length is chosen on one half."""
    print("| weights | " + " | ".join(f"{length:g} sigma" for length in LENGTHS) + " | the other half, at the best |")
    print("| --- " * (len(LENGTHS) + 2) + "|")
    sizes = sizes_of(run)
    for kind in kinds:
        parts = KINDS[kind]
        mine = {name: total for name, total in direction.items() if any(part in name for part in parts)}
        rms = math.sqrt(sum(float(t.square().sum()) for t in mine.values()) / sum(t.numel() for t in mine.values()))
        scores = []
        for length in LENGTHS:
            correct = right(run, {name: length * sizes[name] / rms * total for name, total in mine.items()}, *decoding)
            scores.append((float(correct[::2].mean()), float(correct[1::2].mean())))
        best = max(range(len(scores)), key=lambda i: scores[i][0])  # the shortest of equals
        before, other = scores[0][1], scores[best][1]
        cells = " | ".join(f"{score:.3f}" for score, _ in scores)
        print(f"| {kind} | {cells} | {other:.3f}; unmoved {before:.3f} |", flush=True)


def loud(run: Path, direction: Sums) -> None:
    """Print how right the draws of three kinds of noise are, on held-out problems, greedily."""
    sizes, rms = sizes_of(run), {name: float(total.square().mean().sqrt()) for name, total in direction.items()}
    print("| noise | size | mean draw | best draw | problems that some draw solves |\n| --- | --- | --- | --- | --- |")
    for size in (0.5, 1.0, 2.0):
        for kind in ("plain", "loud at each weight", "loud along the direction"):
            draws = []
            for index in range(DRAWS):
                numbers = torch.Generator().manual_seed(index)
                along = float(torch.randn((), generator=numbers))
                moves = {}
                for name, total in direction.items():
                    z, paid = torch.randn(total.shape, generator=numbers), total / rms[name]
                    noise = {"plain": z, "loud at each weight": z * paid.abs()}.get(kind, (z + along * paid) / 2**0.5)
                    moves[name] = size * sizes[name] * noise
                draws.append(right(run, moves, *GREEDY)[:, 0])
            solved = np.stack(draws)
            cells = [f"{value:.3f}" for value in (solved.mean(), solved.mean(1).max(), solved.any(0).mean())]
            print(f"| {kind} | {size:g} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Print a table of the runs, alone and added up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--write", type=Path, help="write the direction that paid, of all runs and steps, to this file")
    parser.add_argument("--shuffle", action="store_true", help="as a control, give each draw the reward of another")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS, help="the weights to move")
    parser.add_argument("--move", type=Path, help="move the model that the first run began with along such a direction")
    parser.add_argument("--rank", type=int, help="move along so many singular directions of each matrix only")
    parser.add_argument("--loud", type=Path, help="compare draws of noise that is loud along such a direction")
    parser.add_argument("--greedy", action="store_true", help="score moved models at temperature 0")
    parser.add_argument("--texts", type=Path, help="write the first run's right completions to this file")
    options = parser.parse_args()
    if options.texts:
        write_right(options.runs[0], options.texts)
        return
    if options.move:
        direction = load_file(options.move)
        direction = low_rank(direction, options.rank) if options.rank else direction
        move(options.runs[0], direction, options.kinds, GREEDY if options.greedy else SAMPLED)
        return
    if options.loud:
        loud(options.runs[0], load_file(options.loud))
        return
    alone: dict[str, list[float]] = defaultdict(list)
    total: list[Sums] = []
    draws = 0
    for run in options.runs:
        halves, count = directions(run, options.shuffle)
        draws += count
        for kind in KINDS:
            alone[kind].append(overlap(halves, kind)[0])
        total = (
            [{name: a[name] + b[name] for name in a} for a, b in zip(total, halves, strict=True)] if total else halves
        )
    direction = {name: total[0][name] + total[1][name] for name in total[0]}
    if options.write:
        save_file(direction, options.write)
    print(f"{len(options.runs)} runs, {draws} draws\n")
    head = "weights | number | z of one run: mean, deviation | r for 3, one run | z, added up | r for 3, added up"
    print(f"| {head} | spectrum |\n" + "| --- " * 7 + "|")
    for kind, values in alone.items():
        z, size = overlap(total, kind)
        one, whole = (6 * math.sqrt(size) / n for n in (draws / len(options.runs), draws))
        deviation = np.std(values, ddof=1) if len(values) > 1 else math.nan
        first, by_chance = spectrum(direction, [name for name in direction if any(p in name for p in KINDS[kind])])
        cells = f"{np.mean(values):+.2f}, {deviation:.2f} | {one:.2f} | {z:+.2f} | {whole:.2f}"
        print(f"| {kind} | {size:,} | {cells} | {first:.3f}; {by_chance:.3f} |")


if __name__ == "__main__":
    main()
