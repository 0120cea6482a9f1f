"""Draw the pictures that explain: docs/idea.svg and the ones in docs/explanation. None shows a measurement.

python docs/pictures.py
"""

from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("svg")
matplotlib.rcParams.update({"svg.hashsalt": "threepo", "font.size": 11, "axes.spines.top": False})
matplotlib.rcParams.update({"axes.spines.right": False, "figure.facecolor": "white", "savefig.facecolor": "white"})

import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.patches import Ellipse, FancyBboxPatch  # noqa: E402

HERE = Path(__file__).parent
RIGHT, WRONG, MEAN, DRAW, SHADE = "#1a7f5a", "#b3423a", "#333333", "#2f6db5", "#2f6db522"


def save(figure: plt.Figure, name: str) -> None:
    figure.savefig(HERE / name, metadata={"Date": None}, bbox_inches="tight", pad_inches=0.15)
    plt.close(figure)
    print(name)


def box(axes: plt.Axes, x: float, y: float, right: bool) -> None:
    """A rollout, right or wrong."""
    color = RIGHT if right else WRONG
    shape = FancyBboxPatch((x - 0.07, y - 0.032), 0.14, 0.064, boxstyle="round,pad=0.004", fc="white", ec=color, lw=1.4)
    axes.add_patch(shape)
    axes.text(x, y, "right" if right else "wrong", color=color, ha="center", va="center", fontsize=10)


def idea() -> None:
    """One policy whose group fails; four policies from the posterior, of which one is right."""
    figure, pair = plt.subplots(1, 2, figsize=(10, 4.6))
    for axes, title in zip(
        pair, ("One policy, 8 rollouts (GRPO)", "4 drawn policies, 2 rollouts each (C3PO)"), strict=True
    ):
        axes.set(xlim=(0, 1), ylim=(0, 1), xticks=[], yticks=[])
        axes.set_title(title, fontsize=12)
        for side in axes.spines.values():
            side.set_visible(False)
        axes.text(0.15, 0.93, "space of weights", ha="center", color="#555555")
        axes.text(0.78, 0.93, "rollouts of one prompt", ha="center", color="#555555")
    left, right = pair
    left.plot(0.15, 0.53, "o", ms=10, color=MEAN)
    left.text(0.15, 0.44, "mean", ha="center", color=MEAN)
    for i in range(8):
        y = 0.84 - 0.085 * i
        left.plot([0.18, 0.7], [0.53, y], color="#999999", lw=0.9)
        box(left, 0.78, y, False)
    left.text(0.5, 0.1, "all rewards equal: every advantage is 0,\nthe group teaches nothing", ha="center", color=WRONG)
    right.add_patch(Ellipse((0.15, 0.53), 0.29, 0.56, fc=SHADE, ec=DRAW, lw=1))
    right.plot(0.15, 0.53, "o", ms=7, color=MEAN)
    for i, (x, y) in enumerate(((0.1, 0.7), (0.22, 0.6), (0.09, 0.45), (0.2, 0.38))):
        right.plot(x, y, "o", ms=9, color=DRAW)
        for k in range(2):
            z = 0.84 - 0.085 * (2 * i + k)
            right.plot([x + 0.03, 0.7], [y, z], color=DRAW, lw=0.9, alpha=0.6)
            box(right, 0.78, z, i == 1)
    words = "one draw is right: the group has a signal.\nThis helps only if draws are right more often,\n"
    right.text(0.5, 0.045, f"{words}on average, than the mean policy.", ha="center", color=RIGHT)
    save(figure, "idea.svg")


def dead_groups(draws: np.ndarray, chances: np.ndarray, shares: np.ndarray, group: int) -> np.ndarray:
    """D(N) of method.md, section 8, for draws whose success rate is `chances` with probabilities `shares`."""
    return np.array([float(((1 - chances) ** (group / n) * shares).sum() ** n) for n in draws])


def groups() -> None:
    """The chance of a dead group against the number of draws."""
    draws, group, p = np.array([1, 2, 4, 8, 16]), 16, 0.02
    figure, axes = plt.subplots(figsize=(7, 3.8))
    axes.axhline((1 - p) ** group, color=MEAN, ls="--", label=f"mean policy, p = {p}")
    rare = dead_groups(draws, np.array([0.4, 0.01]), np.array([0.1, 0.9]), group)
    axes.plot(draws, rare, "o-", color=RIGHT, label="one draw in ten has 0.4, the others 0.01: mu = 0.049")
    equal = dead_groups(draws, np.array([0.2, 0.0]), np.array([0.1, 0.9]), group)
    axes.plot(draws, equal, "s-", color=WRONG, label="one draw in ten has 0.2, the others 0: mu = 0.02")
    axes.set(xscale="log", xlabel="draws N that share a group of 16", ylabel="chance of a dead group", ylim=(0, 1))
    axes.set_xticks(draws, [str(n) for n in draws])
    axes.minorticks_off()
    axes.legend(frameon=False, loc="lower left", fontsize=10)
    save(figure, "explanation/dead_groups.svg")


def price() -> None:
    """Gradients at draws of a quadratic: their slope against the noise is the curvature."""
    mean, curvature, sigma = 1.0, 2.0, 0.5
    z = np.random.default_rng(3).standard_normal(60)
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.6))
    theta = np.linspace(-0.8, 2.8, 200)
    left.plot(theta, curvature / 2 * theta**2, color=MEAN)
    drawn = mean + sigma * z
    left.plot(drawn, curvature / 2 * drawn**2, "o", ms=4, color=DRAW, alpha=0.6)
    left.plot(mean, curvature / 2 * mean**2, "o", ms=9, color=MEAN)
    left.set(xlabel="weight", ylabel="loss", title="loss $\\theta^2$; mean 1, $\\sigma$ = 0.5")
    right.plot(sigma * z, curvature * drawn, "o", ms=4, color=DRAW, alpha=0.6)
    line = np.array([-1.4, 1.4])
    right.plot(line, curvature * (mean + line), color=RIGHT)
    right.set(xlabel="noise $\\sigma z$ of the draw", ylabel="gradient at the draw", title="slope = curvature = 2")
    figure.tight_layout()
    save(figure, "explanation/price.svg")


def kept() -> None:
    """What Seq-MIS on [0.5, 2] keeps, from the normal approximation of method.md, section 4."""
    from scipy.stats import norm

    tokens = np.array([10, 30, 100, 300, 1000, 3000])
    figure, axes = plt.subplots(figsize=(7, 3.8))
    for kl, color in ((1e-4, RIGHT), (1e-3, DRAW), (1e-2, WRONG)):
        total = tokens * kl
        share = norm.cdf((np.log(2) + total) / np.sqrt(2 * total)) - norm.cdf(
            (np.log(0.5) + total) / np.sqrt(2 * total)
        )
        axes.plot(tokens, share, "o-", color=color, label=f"KL {kl:g} nats a token")
    axes.set(xscale="log", xlabel="tokens of a completion", ylabel="share kept by Seq-MIS", ylim=(0, 1.05))
    axes.set_xticks(tokens, [str(n) for n in tokens])
    axes.minorticks_off()
    axes.legend(frameon=False)
    save(figure, "explanation/seq_mis.svg")


if __name__ == "__main__":
    idea()
    groups()
    price()
    kept()
