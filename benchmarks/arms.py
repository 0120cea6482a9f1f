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
    """Seeds that learnt, as lines over the number of letters, and each seed's pass@1 as a dot."""
    variants = read_json(summary)["variants"]
    positions = {name: i for i, name in enumerate(variants)}
    for shift, (method, label) in zip((-0.12, 0.0, 0.12), METHODS.items(), strict=True):
        shares = []
        for name, position in positions.items():
            values = list(variants[name]["methods"][method]["final"]["values"].values())
            shares.append(sum(value > LEARNT for value in values) / len(values))
            spread = [position + shift + 0.012 * (i - len(values) / 2) for i in range(len(values))]
            axis.plot(spread, values, ".", color=COLOURS[method], alpha=0.55, markersize=4)
        axis.plot(list(positions.values()), shares, "-o", color=COLOURS[method], label=label, markersize=5)
    axis.set_xticks(list(positions.values()), [name.removeprefix("K") for name in positions])
    axis.set(xlabel="letters that have to be alike", ylim=(-0.03, 1.03), title="Consistent choice")
    axis.set_ylabel("share of seeds that learn (line), pass@1 of each (dots)")
    axis.legend(fontsize=8, loc="center left", frameon=False, bbox_to_anchor=(0.0, 0.42))


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
