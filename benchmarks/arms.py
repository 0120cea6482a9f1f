"""The picture of what noise that finds its own place and size learns, and of what it costs where noise is useless.

    threepo study arms_choice && threepo study arms_cost
    PYTHONPATH=src python benchmarks/arms.py runs/studies --picture docs/arms.png

docs/consistent_choice.md has the predictions and the results.
"""

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from threepo.files import read_json

METHODS = {"grpo": "GRPO", "entreg": "GRPO with an entropy bonus", "auto": "auto: noise finds its place and size"}
COLOURS = {"grpo": "#1f6fb4", "entreg": "#c8500a", "auto": "#1a8a3e"}
LEARNT = 0.5
"""Held-out pass@1 from which a seed counts as one that learnt."""


def letters(axis: Axes, summary: Path) -> None:
    """Seeds that learnt, of those of each number of letters."""
    variants = read_json(summary)["variants"]
    for method, label in METHODS.items():
        finals = [variant["methods"][method]["final"]["values"].values() for variant in variants.values()]
        counts = [sum(value > LEARNT for value in values) for values in finals]
        axis.plot(range(len(counts)), counts, "-o", color=COLOURS[method], label=label, markersize=6)
    axis.set_xticks(range(len(variants)), [name.removeprefix("K") for name in variants])
    axis.set(xlabel="letters that have to be alike", ylabel="warm starts of ten that learn", title="Consistent choice")
    axis.legend(fontsize=9, loc=(0.24, 0.12), frameon=False)


def cost(axis: Axes, summary: Path) -> None:
    """Held-out pass@1 on sorting: each seed, and the mean with its 95 % interval."""
    methods = read_json(summary)["variants"][""]["methods"]
    shown = [name for name in METHODS if name in methods]
    for position, method in enumerate(shown):
        final = methods[method]["final"]
        values = list(final["values"].values())
        axis.plot([position - 0.15 + 0.03 * i for i in range(len(values))], values, ".", color=COLOURS[method])
        error = [[final["mean"] - final["low"]], [final["high"] - final["mean"]]]
        axis.errorbar(position + 0.28, final["mean"], yerr=error, fmt="o", capsize=4, color=COLOURS[method])
    axis.set_xticks(range(len(shown)), ["GRPO" if name == "grpo" else name for name in shown])
    axis.set(xlim=(-0.5, len(shown) - 0.4), title="Sorting, where noise is useless", ylabel="held-out pass@1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", type=Path, help="folder of the studies' folders")
    parser.add_argument("--picture", type=Path, required=True)
    options = parser.parse_args()
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained", width_ratios=(2.2, 1))
    letters(left, options.studies / "arms_choice" / "summary.json")
    cost(right, options.studies / "arms_cost" / "summary.json")
    for axis in (left, right):
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(options.picture, dpi=110)


if __name__ == "__main__":
    main()
