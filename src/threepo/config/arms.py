"""[arms]: places and sizes of noise among which a run chooses for itself, by what they earn (method.md 3.11)."""

import math
from contextlib import suppress
from dataclasses import field
from typing import Annotated

from pydantic import Field

from threepo.config.method import Method, NoiseConfig
from threepo.config.optimizers import IVONConfig, OptimizerConfig
from threepo.config.records import OWN, Named, NotNegative, OneOf, Settings, Share, must
from threepo.errors import UserError
from threepo.types import Arm

CHOICES = {
    "none": Named("", "all draws have the noise of [noise]"),
    "thompson": Named(
        "threepo.methods.arms:thompson", "the arm with the highest sampled chance of earning (method.md 3.11)"
    ),
    "uniform": Named("threepo.methods.arms:uniform", "any arm with the same chance"),
}
"""To add a rule, write a `Rule` in methods/arms.py and a line here."""

MEAN = "mean"
"""Name of the mean weights among the arms."""
ARM_SHARE = "arms/share/"
"""Metrics of the share of completions that each arm wrote begin with this."""


def _is_arm(text: str) -> bool:
    """True if a text is a place and a size above 0."""
    with suppress(UserError):
        return bool(Arm.parse(text))
    return False


Listed = Annotated[str, must(_is_arm, "must be a place and a size: 'norm 0.3'")]
Prior = dict[
    Annotated[str, must(lambda text: text == MEAN or _is_arm(text), "must be 'mean', or a place and a size")], Share
]
Sizes = tuple[Annotated[float, Field(gt=0)], ...]


class ArmsConfig(Settings, table="arms"):
    """[arms]: a run's own choice of the place and size of noise, draw by draw; the mean weights are always an arm."""

    choice: Annotated[str, OneOf(CHOICES, OWN)] = "none"
    """How each draw gets its arm."""
    places: tuple[str, ...] = ()
    """Places, as in noise.where, each with each size; empty: all, and each kind of layer with noise."""
    sizes: Sizes = (0.05, 0.2, 0.65, 1.0)
    """Factors of the noise that [noise] sets; empty: only `more`."""
    more: tuple[Listed, ...] = ()
    """More arms, each a place and a size: "norm 0.3"."""
    kept: Share = 0.9
    """Share of earnings that still counts a step later; 1 forgets nothing."""
    mean_share: Share = 0.125
    """Share of the draws, rounded up, that the mean weights always get."""
    prior: Prior = field(default_factory=dict)
    """Known chances of a right answer by arm, as from `threepo probe --write`: {"norm 0.3" = 0.02, "mean" = 0.001}.
    Each counts like one group."""
    lead: NotNegative = 0.0
    """An arm must promise to earn more than the mean weights by this share."""

    def of_mean(self, count: int) -> int:
        """The number of draws, or pairs of draws, of `count` that the mean weights get in any case."""
        return math.ceil(self.mean_share * count - 1e-9)

    @property
    def active(self) -> bool:
        """True if arms are chosen."""
        return self.choice != "none"

    def __post_init__(self) -> None:
        self.check("more", bool(self.more or self.sizes), "leaves no arm, as arms.sizes is empty too; name one")
        self.only_if(bool(self.sizes), "arms.sizes is empty; set both", "places")


def check_arms(arms: ArmsConfig, method: Method, noise: NoiseConfig, optimizer: OptimizerConfig) -> None:
    """Raise `UserError` where arms make no sense, and for settings of arms where none are chosen."""
    if not arms.active:
        fix = "no arms are chosen; set arms.choice = 'thompson', or remove [arms], or a method.preset that has it"
        arms.only_if(False, fix)
        drowned = method.draws and noise.unit == "rms" and noise.size * noise.where.get("all", 0) >= 1
        fix = "drowns all weights in noise; set it to 0.05, or arms.choice = 'thompson', which finds a size"
        noise.check("size", not drowned, fix)
        return
    arms.check("choice", method.draws > 1, "compares draws with each other; set method.draws to 2 or more")
    fix = "needs rollouts that differ at the same weights; set method.greedy = false"
    arms.check("choice", not method.greedy, fix)
    fix = "has no arm for a gradient draw that generated nothing; set method.gradient_at = 'generator' or 'mean'"
    arms.check("choice", method.gradient_at in ("generator", "mean"), fix)
    method.only_if(False, "compares draws of the same noise, and arms have several; remove it", "log_evolution")
    if isinstance(optimizer, IVONConfig):
        fix = "arms of IVON are multiples of its posterior; set it to 'posterior', or optimizer.kind = 'adamw'"
        noise.check("unit", noise.unit == "posterior", fix)
        noise.check("size", noise.size > 0, "arms are multiples of it; set it above 0")
        fix = "squared gradients do not say at which arm they were taken; set it to 'price'"
        optimizer.check("estimator", optimizer.estimator == "price", fix)
    else:
        fix = "an evolution strategy has no arms; set optimizer.kind = 'adamw' or 'ivon'"
        optimizer.check("kind", optimizer.kind != "sgd", fix)
    choices = method.independent_draws
    fix = f"leaves no draw or pair of the {choices} to any arm; set it lower, or method.draws higher"
    arms.check("mean_share", arms.of_mean(choices) < choices, fix)
    method.only_if(False, "the mean weights' draws are one part, however many they are; set the default", "normalize")
    method.only_if(False, "draws of one arm do not compete with draws of another; set the default", "advantages")
