"""Arms: places and sizes of noise that a run tries, and the rules by which each draw gets one (method.md 3.11).

Before a step every draw gets an arm, or the mean weights; after it, the tally counts what each has earned. All of it
is a function of the recipe, the step and the tally, which checkpoints keep, so every rank and every resumed run
chooses alike.

Legend: M arms, the mean weights being arm 0, n draws to be given away.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import scipy  # loads scipy.special at its first use

from threepo.config import ArmsConfig, Method
from threepo.config.arms import ARM_SHARE, CHOICES, MEAN
from threepo.errors import UserError
from threepo.posterior.noise import address_key, uniforms
from threepo.posterior.noise_sizes import KINDS, fits_any, layer_kind
from threepo.types import Arm, Completion, Draw, Group
from threepo.user_code import find_named

PRIOR = (0.05, 1.0)
"""Pseudo-counts (earned, missed) of an untried arm: mean 1/20, with a long tail towards 1."""

Rule = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
"""From earned [M], missed [M] and uniform numbers [n, M] to the promise of each arm for each draw [n, M]."""


@dataclass(frozen=True)
class Tally:
    """Earnings of the arms so far, by name, discounted by the steps since."""

    earned: Mapping[str, float] = field(default_factory=dict)
    missed: Mapping[str, float] = field(default_factory=dict)
    """What they could have earned and did not."""
    ranges: tuple[tuple[float, float], ...] = ()
    """Lowest and highest reward of each of the last steps, which say what is little and what is much."""
    told_apart: bool = False
    """True once two rewards of a range have differed."""


class Outcome(NamedTuple):
    """A completion's arm, and what it earned."""

    arm: str
    """Its name; `MEAN` for the mean weights."""
    reward: float
    judged: bool
    """False where the verifier itself failed, which says nothing about the arm."""


def outcomes(groups: Sequence[Group]) -> list[list[Outcome]]:
    """The outcomes of graded completions, prompt by prompt."""
    return [[_outcome(completion) for completion in group.completions] for group in groups]


def _outcome(completion: Completion) -> Outcome:
    verdict = completion.verdict
    assert verdict, "only graded completions have rewards"
    return Outcome(arm_name(completion.draw), verdict.reward, verdict.status != "error")


def arm_name(draw: Draw | None) -> str:
    """Name of a draw's arm."""
    return str(draw.arm) if draw and draw.arm else MEAN


class Bandit:
    """Gives each draw of a run an arm, by what the arms have earned so far; does nothing where no arms are chosen."""

    def __init__(self, settings: ArmsConfig, method: Method, noisy: Callable[[], Iterable[str]]) -> None:
        """`noisy` returns the names of the parameters that have noise; it is called when arms are first needed."""
        self.settings, self.method, self.noisy, self.tally = settings, method, noisy, Tally()

    @cached_property
    def arms(self) -> list[Arm]:
        """Each arm once, without the mean weights; `UserError` for a place that fits no parameter with noise."""
        if not self.settings.active:
            return []
        names = list(self.noisy())
        kinds = dict.fromkeys(map(layer_kind, names))
        listed = [Arm.parse(text) for text in self.settings.more]
        places = self.settings.places or ("all", *(kind for kind in KINDS if kind in kinds))
        found = dict.fromkeys([*(Arm(place, size) for place in places for size in self.settings.sizes), *listed])
        for place in (arm.place for arm in found if not fits_any(arm.place, names)):
            key, has = "arms.places" if place in places else "arms.more", ", ".join(kinds)
            raise UserError(f"{key}: no parameter with noise fits {place!r}; it has the kinds {has}")
        return list(found)

    def begin(self, tally: Tally | None = None) -> Tally:
        """Set the tally to a checkpoint's, or else to the prior, and return it."""
        self.tally = tally or self._prior()
        return self.tally

    def _prior(self) -> Tally:
        """The tally before the first step, in which each chance of `arms.prior` counts like a group of completions.

        `UserError` for a prior that names an arm which the run does not have.
        """
        prior, group = self.settings.prior, self.method.rollouts_per_prompt
        chances = {name if name == MEAN else str(Arm.parse(name)): chance for name, chance in prior.items()}
        for name in chances.keys() - {MEAN, *map(str, self.arms)}:
            fix = f"is none of the arms {', '.join(map(str, self.arms))}; add it to arms.more, or remove it"
            raise UserError(f"arms.prior: {name!r} {fix}")
        earned = {name: group * chance for name, chance in chances.items()}
        return Tally(earned, {name: group - value for name, value in earned.items()})

    def choose(self, seed: int, step: int) -> list[Arm | None]:
        """An arm for each independent draw of a step; None: the mean weights, which come first."""
        if not self.arms:
            return []
        count = self.method.independent_draws
        to_mean = self.settings.of_mean(count)
        arms: list[Arm | None] = [None, *self.arms]
        names = [str(arm or MEAN) for arm in arms]
        earned = np.array([self.tally.earned.get(name, 0.0) for name in names])
        missed = np.array([self.tally.missed.get(name, 0.0) for name in names])
        keys = [address_key("threepo-arms", seed, step, index) for index in range(to_mean, count)]
        rule: Rule = find_named(CHOICES, self.settings.choice, "arms.choice")
        promise = rule(earned, missed, uniforms(keys, 0, len(names)).numpy())
        promise[:, 0] *= 1 + self.settings.lead
        return [None] * to_mean + [arms[best] for best in promise.argmax(axis=1)]

    def count(self, groups: Sequence[Sequence[Outcome]]) -> dict[str, float]:
        """Add a step's outcomes, prompt by prompt, to the tally, except those not judged; return its metrics."""
        if not self.arms:
            return {}
        if judged := [outcome for group in groups for outcome in group if outcome.judged]:
            self.tally = _tally_after(self.tally, judged, self.settings.kept)
        return arm_metrics(groups)


def _tally_after(tally: Tally, judged: Sequence[Outcome], kept: float) -> Tally:
    """The tally after a step with these outcomes: what was earned and missed before counts `kept` times as much."""
    rewards = [outcome.reward for outcome in judged]
    ranges = (*tally.ranges, (min(rewards), max(rewards)))
    if kept < 1:  # as many steps as count for anything
        ranges = ranges[-math.ceil(1 / (1 - kept) - 1e-9) :]
    lowest, highest = min(low for low, _ in ranges), max(high for _, high in ranges)
    if kept == 1:  # all steps count
        ranges = ((lowest, highest),)
    # Equal rewards are failures until others have been seen; later they say nothing about arms.
    if highest == lowest and tally.told_apart:
        return replace(tally, ranges=ranges)
    earned = {arm: kept * value for arm, value in tally.earned.items()}
    missed = {arm: kept * value for arm, value in tally.missed.items()}
    for outcome in judged:
        value = (outcome.reward - lowest) / (highest - lowest or 1.0)
        earned[outcome.arm] = earned.get(outcome.arm, 0.0) + value
        missed[outcome.arm] = missed.get(outcome.arm, 0.0) + (1.0 - value)
    return Tally(earned, missed, ranges, told_apart=tally.told_apart or highest > lowest)


def thompson(earned: np.ndarray, missed: np.ndarray, random: np.ndarray) -> np.ndarray:
    """Sample each arm's chance to earn from its Beta distribution (Thompson, 1933), by quantiles."""
    return np.asarray(scipy.special.betaincinv(PRIOR[0] + earned, PRIOR[1] + missed, random))


def uniform(earned: np.ndarray, missed: np.ndarray, random: np.ndarray) -> np.ndarray:
    """Promises at random."""
    return random.copy()


def arm_metrics(groups: Sequence[Sequence[Outcome]]) -> dict[str, float]:
    """Metrics of a step's arms: share of the completions, mean reward of those with a verdict, and what noise costs.

    `arms/regret`: mean reward of the mean weights minus the mean reward of all; below 0, noise pays.
    """
    outcomes = [outcome for group in groups for outcome in group]
    rewards: dict[str, list[float]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.judged:
            rewards[outcome.arm].append(outcome.reward)
    means = {name: math.fsum(values) / len(values) for name, values in rewards.items()}
    overall = math.fsum(map(math.fsum, rewards.values())) / max(sum(map(len, rewards.values())), 1)
    wrote = Counter(outcome.arm for outcome in outcomes)
    return {
        **({"arms/regret": means[MEAN] - overall} if MEAN in means else {}),
        **{f"{ARM_SHARE}{name}": count / len(outcomes) for name, count in wrote.items()},
        **{f"arms/reward/{name}": mean for name, mean in means.items()},
    }
