"""Does mu, before training, say who learns? Exact chances of the warm starts of choices_places; the studies' picture.

    for name in places controls methods corrections; do threepo study choices_$name; done
    PYTHONPATH=src python benchmarks/consistent_choice.py runs/studies --picture docs/consistent_choice.png

Mu is the mean over draws of the probability of the right answer, in one forward pass, with the noise that the study's
runs had. docs/consistent_choice.md has the results.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from scipy.stats import spearmanr

from second_act import problem_rows, right_chance
from threepo.config import ModelConfig, NoiseConfig
from threepo.files import read_json, write_json
from threepo.lab.study_config import Cell, load_study
from threepo.models.policy import load_policy
from threepo.posterior.gaussian import FixedWeights, Posterior
from threepo.run_folder import model_folder, read_metrics
from threepo.types import Draw

DRAWS = 128
FIRST = 5
"""Steps whose right rollouts are counted as found, before much is learnt."""
COLOURS = plt.get_cmap("tab10").colors
PANELS = {
    "controls": "without noise that explores",
    "methods": "with noise that explores",
    "corrections": "with other corrections",
}


def measured(studies: Path) -> dict[str, dict[str, Any]]:
    """For each place: mu, right rollouts of the first steps, and what was reached, of every seed."""
    study, found = load_study("choices_places", [f"study.folder={studies / 'choices_places'}"]), {}
    for name in study.tables.methods:
        runs = study.reported(Cell("", name), ())
        noise = runs[0].config().noise
        found[name] = {
            "mu": [mu(Path(run.config().model.path), noise) for run in runs],
            "first": [round(sum(256 * r["reward/mean"] for r in rewards(run.folder)[:FIRST])) for run in runs],
            "final": [read_metrics(run.folder)[-1]["eval/pass_at_1"] for run in runs],
            "area": [sum(r["reward/mean"] for r in rewards(run.folder)) / run.config().run.steps for run in runs],
        }
        print(name, found[name], flush=True)
    return found


def rewards(run: Path) -> list[dict[str, Any]]:
    return [row for row in read_metrics(run) if row["step"] >= 0]


@torch.no_grad()
def mu(start: Path, noise: NoiseConfig) -> float:
    """The chance of a right answer with this noise, a mean over draws and prompts."""
    policy = load_policy(ModelConfig(path=str(model_folder(start)), device="cpu"))
    rows, length = problem_rows(policy)
    source = FixedWeights(policy.model, Posterior.around(policy.model.named_parameters(), noise))
    total = 0.0
    for index in range(DRAWS):
        with source.at(Draw(1, 0, index)):
            total += right_chance(policy.model, rows, length)
    return total / DRAWS


def draw_picture(found: Mapping[str, Mapping[str, Any]], studies: Path, path: Path) -> None:
    """Left: every run of choices_places. The others: each seed's pass@1 as a dot, its mean as a bar."""
    figure, grid = plt.subplots(2, 2, figsize=(11, 8), layout="constrained")
    axes = list(grid.flat)
    for colour, (name, of) in zip(COLOURS, found.items(), strict=False):
        axes[0].plot(of["mu"], of["area"], "o", color=colour, label=name.replace("_", " "), markersize=5)
    axes[0].set(
        xscale="log", xlabel="mu before training", ylabel="reward, mean over 40 steps", title="where noise goes"
    )
    axes[0].legend(fontsize=8)
    for axis, (study, title) in zip(axes[1:], PANELS.items(), strict=True):
        bars(axis, read_json(studies / f"choices_{study}" / "summary.json"))
        axis.set_title(title)
    figure.savefig(path, dpi=100)


def bars(axis: Axes, summary: Mapping[str, Any]) -> None:
    """Held-out pass@1 of every method of a study."""
    methods = summary["variants"][""]["methods"]
    for y, (_, figures) in enumerate(methods.items()):
        values = list(figures["final"]["values"].values())
        axis.barh(y, figures["final"]["mean"], color="tab:blue", alpha=0.25)
        axis.plot(values, [y + 0.06 * (i - len(values) / 2) for i in range(len(values))], ".", color="tab:blue")
    axis.set_yticks(range(len(methods)), [name.replace("_", " ") for name in methods], fontsize=8)
    axis.set(xlim=(-0.02, 1.02), xlabel="held-out pass@1")
    axis.invert_yaxis()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", type=Path, help="folder of the studies' folders")
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    cache = options.studies / "consistent_choice.json"
    if not cache.exists():
        write_json(cache, measured(options.studies))
    found = read_json(cache)
    columns = {key: [value for of in found.values() for value in of[key]] for key in ("mu", "first", "final", "area")}
    for key in ("first", "final", "area"):
        everywhere = spearmanr(columns["mu"], columns[key])
        within = [spearmanr(of["mu"], of[key]).statistic for of in found.values()]
        print(f"mu and {key}: {everywhere.statistic:.2f}; within places: {', '.join(f'{x:.2f}' for x in within)}")
    if options.picture:
        draw_picture(found, options.studies, options.picture)


if __name__ == "__main__":
    main()
