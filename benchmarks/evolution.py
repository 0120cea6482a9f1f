"""Evolution strategy, GRPO and C3PO from one warm start at equal rollouts; and the angle between two kinds of update.

    threepo sft demo/warm_start
    PYTHONPATH=src python benchmarks/evolution.py learn --seeds 5
    PYTHONPATH=src python benchmarks/evolution.py angle
    PYTHONPATH=src python benchmarks/evolution.py layers --recipes demo/grpo testbeds/chain testbeds/star

`learn` trains demo/grpo, demo/c3po and demo/es with several seeds of noise, sampling and problems; the seed of the
pilot runs, 100, is not among them. `angle` takes steps that move nothing from the warm start, so that every step is a
fresh measurement: C3PO's gradient beside the strategy's, for several numbers of draws and sizes of the noise. Runs that
are there are not repeated. docs/evolution.md has the results.

`layers` says what tied noise can gain. Tensors of one shape have the same noise, so an estimate from few draws sees
only the sum of their gradients g, and its cosine to the gradient changes by the factor |sum of g| / root of the sum of
|g|^2: 1 if they are orthogonal, at most the root of their number.
The prediction, 0.9 to 1.1, held (docs/evolution.md).
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from safetensors.torch import load_file

from threepo.run_folder import CONFIG, model_folder, read_metrics

FOLDER = Path("runs/evolution")
METHODS = {
    "grpo": ("demo/grpo",),
    "c3po": ("demo/c3po",),
    "es": ("demo/es",),
    "es, antithetic": ("demo/es", "method.antithetic=true"),
}
GRADIENTS = 5
"""Gradients of `layers`, each of 64 prompts of its own."""
WEIGHTS = 821_888
"""Of the demonstration's policy."""
T_95 = {2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26}
"""Student's t, two-sided, by degrees of freedom."""


def run(name: str, *settings: str) -> list[dict[str, float]]:
    """The metrics of a finished run in the folder of this name; it is made if it is not there."""
    folder = FOLDER / name
    if not (folder / "summary.json").is_file():
        command = [sys.executable, "-m", "threepo", "train", *settings, "run.threads=1", f"run.folder={folder}"]
        subprocess.run(command, check=True, capture_output=True)
    return read_metrics(folder)


def mean_and_half_width(values: list[float]) -> tuple[float, float]:
    """Mean and half of the 95 % interval of a few values."""
    return statistics.fmean(values), T_95[len(values) - 1] * statistics.stdev(values) / len(values) ** 0.5


def learn(seeds: int) -> None:
    """Held-out pass@1 before and after, and its difference to GRPO, paired by seed."""
    scores = {
        method: [
            [
                row["eval/pass_at_1"]
                for row in run(
                    f"{method.replace(', ', '_')}-{seed}", *settings, f"run.seed={seed}", f"data.seed={seed + 1}"
                )
                if "eval/pass_at_1" in row
            ]
            for seed in range(seeds)
        ]
        for method, settings in METHODS.items()
    }
    print(f"{seeds} seeds, 95 % intervals\n")
    print("| method | pass@1 before | after 20 steps | after 40 | after 60 | gain | gain beside GRPO's |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for method, found in scores.items():
        at = [f"{100 * statistics.fmean(column):.1f} %" for column in zip(*found, strict=True)]
        gain = mean_and_half_width([100 * (row[-1] - row[0]) for row in found])
        pairs = zip(found, scores["grpo"], strict=True)
        beside = mean_and_half_width([100 * (row[-1] - row[0] - other[-1] + other[0]) for row, other in pairs])
        print(f"| {method} | {' | '.join(at)} | {gain[0]:.1f} ± {gain[1]:.1f} | {beside[0]:.1f} ± {beside[1]:.1f} |")


def angle(picture: Path) -> None:
    """Cosine and correlation, with standard errors over steps, as a table and as a picture."""
    print("| sigma | draws | rollouts a draw and prompt | steps | cosine | sqrt(N / d) | correlation over draws |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    curves: dict[float, list[tuple[int, list[tuple[float, float]]]]] = {}
    for ess, sigma in (("1e9", 1e-3), ("1e7", 1e-2)):
        for draws, each, steps in ((4, 4, 40), (16, 4, 20), (64, 4, 6), (16, 16, 6)):
            rows = run(
                f"angle-{ess}-{draws}-{each}",
                *("demo/c3po", f"run.steps={steps}", "eval.every=0", "optimizer.lr=1e-6", "method.log_evolution=true"),
                *(f"optimizer.ess={ess}", f"method.draws={draws}", f"method.rollouts_per_prompt={draws * each}"),
                *("method.correction.kind=none", "schedule.warmup_share=0"),
            )
            columns = [[row[f"evolution/{name}"] for row in rows] for name in ("cosine", "correlation")]
            found = [(statistics.fmean(v), statistics.stdev(v) / len(v) ** 0.5) for v in columns]
            cells = [f"{mean:.4f} ± {error:.4f}" for mean, error in found]
            share = f"{(draws / WEIGHTS) ** 0.5:.4f}"
            print(f"| {sigma:g} | {draws} | {each} | {steps} | {cells[0]} | {share} | {cells[1]} |", flush=True)
            if each == 4:
                curves.setdefault(sigma, []).append((draws, found))
    draw(curves, picture)


def layers(recipes: Sequence[str]) -> None:
    """For GRPO's gradient at the start of each recipe, the factor by shape, for shapes that several tensors have."""
    print("| recipe | shape | tensors | factor, mean and deviation over steps |\n| --- | --- | --- | --- |")
    once = ("run.steps=1", "eval.every=0", "schedule.warmup_share=0")
    for recipe in recipes:
        found: dict[tuple[int, ...], list[float]] = {}
        sizes: dict[tuple[int, ...], int] = {}
        for seed in range(GRADIENTS):
            name = f"layers-{recipe.replace('/', '-')}-{seed}"
            # With so large an epsilon, AdamW's step is the gradient times 10.
            plain = (
                "optimizer.lr=1e4",
                "optimizer.epsilon=1e3",
                "optimizer.betas=[0.0, 0.0]",
                "optimizer.weight_decay=0",
            )
            run(name, recipe, *plain, *once, f"run.seed={seed}", f"data.seed={seed + 1}", "data.prompts_per_step=64")
            config = json.loads((FOLDER / name / CONFIG).read_text())
            start, end = (
                load_file(model_folder(path) / "model.safetensors")
                for path in (Path(config["model"]["path"]), FOLDER / name)
            )
            shapes: dict[tuple[int, ...], list[torch.Tensor]] = {}
            for tensor, before in start.items():
                if before.ndim == 2:
                    shapes.setdefault(tuple(before.shape), []).append((end[tensor] - before).double())
            for shape, each in shapes.items():
                if len(each) > 1:
                    own = math.sqrt(sum(float(g.square().sum()) for g in each))
                    found.setdefault(shape, []).append(float(torch.stack(each).sum(0).norm()) / own)
                    sizes[shape] = len(each)
        for shape, factors in found.items():
            told = f"{statistics.fmean(factors):.3f}, {statistics.stdev(factors):.3f}"
            print(f"| {recipe} | {' x '.join(map(str, shape))} | {sizes[shape]} | {told} |", flush=True)


def draw(curves: Mapping[float, Sequence[tuple[int, Sequence[tuple[float, float]]]]], picture: Path) -> None:
    """Cosine and correlation over the number of draws, a line for each sigma."""
    figure, axes = plt.subplots(1, 2, figsize=(7.2, 2.9), layout="constrained")
    for sigma, points in curves.items():
        for ax, column in zip(axes, zip(*(found for _, found in points), strict=True), strict=True):
            means, errors = zip(*column, strict=True)
            draws = [draws for draws, _ in points]
            ax.errorbar(draws, means, errors, marker="o", capsize=3, label=f"sigma = {sigma:g}")
    axes[0].plot(draws, [(n / WEIGHTS) ** 0.5 for n in draws], "k--", linewidth=1, label="sqrt(N / d)")
    axes[0].legend(frameon=False)
    for ax, title in zip(axes, ("cosine of the two gradients", "correlation over draws"), strict=True):
        ax.set_xscale("log", base=2)
        ax.set_xticks(draws, [str(n) for n in draws])
        ax.set(title=title, xlabel="draws, 4 rollouts each of a prompt")
        ax.axhline(0, color="k", linewidth=0.6)
        ax.grid(alpha=0.3)
        ax.spines[["top", "right"]].set_visible(False)
    figure.savefig(picture, dpi=110)


def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("learn", "angle", "layers"))
    parser.add_argument("--recipes", nargs="+", default=["demo/grpo"], help="layers: whose gradients")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--picture", type=Path, default=Path("evolution.png"), help="angle: where to draw it")
    options = parser.parse_args()
    if options.what == "learn":
        learn(options.seeds)
    elif options.what == "angle":
        angle(options.picture)
    else:
        layers(options.recipes)


if __name__ == "__main__":
    main()
