"""Arms: places and sizes of noise that a run tries, and the rules by which each draw gets one (method.md 3.11).

Before a step every draw gets an arm, or the mean weights; after it, the tally counts what each has earned. All of it
is a function of the recipe, the step and the tally, which checkpoints keep, so every rank and every resumed run
chooses alike.

Legend: M arms, the mean weights being arm 0, n draws to be given away.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import scipy  # loads scipy.special at its first use

from threepo.config import ArmsConfig
from threepo.config.arms import CHOICES, PAYS
from threepo.posterior.noise import address_key, uniforms
from threepo.types import Arm, Completion, Group

MEAN = "mean"
"""Name of the mean weights among the arms."""
PRIOR = (0.05, 1.0)
"""What an arm is taken to have earned and missed before it is tried: one in twenty, but perhaps nearly everything."""

Rule = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
"""From earned [M], missed [M] and uniform numbers [n, M] to the promise of each arm for each draw [n, M]."""
Pay = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""From the rewards [G] of a prompt, scaled to [0, 1], and whether the mean weights wrote them [G], to the pay [G].

Pay is between 0 and 1, or NaN where a completion says nothing about its arm.
"""


@dataclass(frozen=True)
class Tally:
    """What arms have earned so far, by name, discounted by the steps since."""

    earned: Mapping[str, float] = field(default_factory=dict)
    missed: Mapping[str, float] = field(default_factory=dict)
    """What they could have earned besides."""
    rewards: tuple[float, float] | None = None
    """Lowest and highest reward of the run so far, which say what is little and what is much."""


def arms_of(settings: ArmsConfig) -> list[Arm]:
    """The arms of a run, without the mean weights; each once."""
    listed = [Arm(place, float(size)) for place, size in (arm.rsplit(" ", 1) for arm in settings.more)]
    product = [Arm(place, size) for place in settings.places for size in settings.sizes]
    return list(dict.fromkeys([*product, *listed]))


def choose(settings: ArmsConfig, tally: Tally, seed: int, step: int, count: int) -> list[Arm | None]:
    """An arm for each of `count` draws of a step; None: the mean weights, which come first."""
    arms = arms_of(settings)
    to_mean = math.ceil(settings.mean_share * count - 1e-9)
    keys = [address_key("threepo-arms", seed, step, index) for index in range(to_mean, count)]
    names = [MEAN, *map(str, arms)]
    earned, missed = (np.array([counts.get(name, 0.0) for name in names]) for counts in (tally.earned, tally.missed))
    rule: Rule = CHOICES[settings.choice].load()
    promise = rule(earned, missed, uniforms(keys, 0, len(names)).numpy()) if keys else np.zeros((0, len(names)))
    promise[:, 0] *= 1 + settings.lead
    chosen: list[Arm | None] = [None] * to_mean
    return chosen + [arms[best - 1] if best else None for best in promise.argmax(axis=1)]


def thompson(earned: np.ndarray, missed: np.ndarray, random: np.ndarray) -> np.ndarray:
    """Sample each arm's chance to earn from its Beta distribution (Thompson, 1933), by quantiles."""
    return np.asarray(scipy.special.betaincinv(PRIOR[0] + earned, PRIOR[1] + missed, random))


def uniform(earned: np.ndarray, missed: np.ndarray, random: np.ndarray) -> np.ndarray:
    """Promises at random."""
    return random.copy()


def fixed(earned: np.ndarray, missed: np.ndarray, random: np.ndarray) -> np.ndarray:
    """Promises one arm after another, the mean weights last."""
    count, arms = random.shape
    return np.asarray(np.eye(arms)[(np.arange(count) + 1) % arms])


def reward(rewards: np.ndarray, by_mean: np.ndarray) -> np.ndarray:
    """The reward itself."""
    return rewards


def lead(rewards: np.ndarray, by_mean: np.ndarray) -> np.ndarray:
    """The reward above the average of the mean weights, from 1/2 at none to 1 and 0; NaN where they wrote nothing."""
    base = rewards[by_mean].mean() if by_mean.any() else math.nan
    return (1 + rewards - base) / 2


def rescue(rewards: np.ndarray, by_mean: np.ndarray) -> np.ndarray:
    """The reward where the mean weights have earned nothing; NaN elsewhere."""
    return np.full_like(rewards, math.nan) if rewards[by_mean].any() else rewards


def counted(settings: ArmsConfig, tally: Tally, groups: Sequence[Group]) -> Tally:
    """The tally after a step with these groups. Completions that the verifier failed to judge do not count."""
    judged = [[c for c in group.completions if c.verdict and c.verdict.status != "error"] for group in groups]
    rewards = [*(tally.rewards or ()), *(completion_reward(c) for completions in judged for c in completions)]
    if not rewards:
        return tally
    lowest, highest = min(rewards), max(rewards)
    earned, missed = (
        {name: settings.kept * value for name, value in counts.items()} for counts in (tally.earned, tally.missed)
    )
    pay: Pay = PAYS[settings.pay].load()
    for completions in judged:
        scaled = np.array([(completion_reward(c) - lowest) / (highest - lowest or 1.0) for c in completions])
        by_mean = np.array([c.draw is None for c in completions], dtype=bool)
        for completion, value in zip(completions, pay(scaled, by_mean) if completions else (), strict=True):
            if math.isfinite(value):
                name = arm_name(completion)
                earned[name] = earned.get(name, 0.0) + float(value)
                missed[name] = missed.get(name, 0.0) + 1.0 - float(value)
    return Tally(earned, missed, (lowest, highest))


def arm_name(completion: Completion) -> str:
    """Name of the arm that wrote a completion."""
    return str(completion.draw.arm) if completion.draw and completion.draw.arm else MEAN


def completion_reward(completion: Completion) -> float:
    """The reward of a graded completion."""
    assert completion.verdict, "only graded completions have rewards"
    return completion.verdict.reward


def arm_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """What the arms of a step have earned: mean reward and share of the completions of each, and what noise costs.

    `arms/regret`: mean reward of the best arm minus the mean reward of all completions.
    """
    rewards: dict[str, list[float]] = {}
    for completion in (c for group in groups for c in group.completions):
        rewards.setdefault(arm_name(completion), []).append(completion_reward(completion))
    count = sum(map(len, rewards.values()))
    means = {name: math.fsum(values) / len(values) for name, values in rewards.items()}
    total = math.fsum(map(math.fsum, rewards.values())) / count
    return {
        "arms/regret": max(means.values()) - total,
        **{f"arms/share/{name}": len(values) / count for name, values in rewards.items()},
        **{f"arms/reward/{name}": mean for name, mean in means.items()},
    }
