"""[schedule] and [ess_schedule]: the learning rate and the effective sample size, ess, over the run.

Each kind of ess schedule is a record with its settings and its rule, `factor`. Sigma goes with 1 / sqrt(ess).
"""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from threepo.config.method import Correction
from threepo.config.records import Kinds, Positive, PositiveShare, Settings, Share

NO_NOISE = 1e30
"""A factor of ess that leaves no noise in float32."""
DEAD_ZONE = 1.1
"""kl_steps leaves sigma as it is while the KL is within this factor of its target."""
MOST_AT_ONCE = 2.0
"""The controller changes ess by no more than this factor in one step."""


class ScheduleConfig(Settings, table="schedule"):
    """[schedule]: the learning rate over the run, as a factor of optimizer.lr."""

    kind: Literal["constant", "cosine"] = "constant"
    """After the warm-up: stay, or fall along a cosine to the floor."""
    warmup_share: Share = 0.06
    """Linear warm-up over this share of the steps."""
    floor: Share = 0.1
    """Cosine only: the factor at the end."""


@dataclass(frozen=True)
class Moment:
    """The measurements that a schedule can read before a step."""

    progress: float
    """Share of the run's steps that are done."""
    factor: float
    """ess of the last step, as a multiple of optimizer.ess."""
    value: float
    """The schedule's metric in the last step; finite."""
    first_entropy: float
    highest_entropy: float
    correction: Correction


class EssScheduleConfig(Settings, table="ess_schedule", by="kind"):
    """[ess_schedule]: ess over the run. Where [noise] gives noise a size, ess begins at 1."""

    kind: str

    metric_read: ClassVar[str] = ""
    """The metric of the last step that the schedule follows; empty: it follows none."""

    def factor(self, now: Moment) -> float:
        """ess of the coming step, as a multiple of optimizer.ess."""
        raise NotImplementedError


class ConstantEss(EssScheduleConfig):
    """ess stays as it is."""

    kind: Literal["constant"] = "constant"

    def factor(self, now: Moment) -> float:
        return now.factor


class CosineEss(EssScheduleConfig):
    """ess falls along a cosine."""

    kind: Literal["cosine"] = "cosine"
    floor: PositiveShare = 0.1
    """Factor of ess at the end."""

    def factor(self, now: Moment) -> float:
        return (1 - self.floor) / 2 * math.cos(math.pi * now.progress) + (1 + self.floor) / 2


class LinearEss(EssScheduleConfig):
    """ess falls linearly."""

    kind: Literal["linear"] = "linear"
    floor: PositiveShare = 0.1
    """Factor of ess at the end."""

    def factor(self, now: Moment) -> float:
        return 1 - (1 - self.floor) * now.progress


class StagesEss(EssScheduleConfig):
    """Sigma falls in stages, as in QeRL's code."""

    kind: Literal["stages"] = "stages"
    stages: Annotated[int, Field(ge=3)] = 10
    """Number of stages; the first has no noise, the second the initial sigma."""
    last: PositiveShare = 0.01
    """Sigma of the last stage over the initial sigma."""

    def factor(self, now: Moment) -> float:
        stage = min(int(now.progress * self.stages), self.stages - 1)
        share = self.last ** ((stage - 1) / (self.stages - 2))
        return share**-2 if stage else NO_NOISE


class EntropySwitchEss(EssScheduleConfig):
    """ess is lower while the policy's entropy is low."""

    kind: Literal["entropy_switch"] = "entropy_switch"
    floor: PositiveShare = 0.1
    """Factor of ess while entropy is low."""
    entropy_share: Share = 0.75
    """Entropy is low at or below this share of its highest value so far."""

    metric_read = "policy/entropy"

    def factor(self, now: Moment) -> float:
        return self.floor if now.value <= self.entropy_share * now.highest_entropy else 1.0


class _BoundedEss(EssScheduleConfig):
    """The bounds of schedules that could drive ess anywhere."""

    lowest: PositiveShare = 1e-6
    """Lowest factor of ess."""
    highest: Annotated[float, Field(ge=1)] = 1e6
    """Highest factor of ess."""

    def bounded(self, factor: float) -> float:
        """The nearest factor within the bounds."""
        return min(max(factor, self.lowest), self.highest)


class EntropyRatioEss(_BoundedEss):
    """The factor of ess is the policy's entropy over its first value."""

    kind: Literal["entropy_ratio"] = "entropy_ratio"

    metric_read = "policy/entropy"

    def factor(self, now: Moment) -> float:
        # The product of all steps' ratios, so that a bound that was met once leaves no trace.
        return self.bounded(now.value / now.first_entropy if now.first_entropy else 1.0)


class ControllerEss(_BoundedEss):
    """Keeps a measurement of the importance ratios at a target."""

    kind: Literal["controller"] = "controller"
    metric: Literal["kept_share", "kl"] = "kept_share"
    """What to keep: the share of completions that the correction keeps, or the KL per token between draws (nats)."""
    target: Positive = 0.7
    """Value to keep; a KL has no default."""
    gain: PositiveShare = 0.3
    """Share of the error that one step corrects."""

    def __post_init__(self) -> None:
        if self.metric == "kept_share":
            self.check("target", self.target < 1, "a kept share to hold must lie below 1")
        else:
            fix = "is the default of a kept share; set the KL per token to hold, such as 1e-3"
            self.check("target", self.target != ControllerEss.target, fix)

    @property
    def metric_read(self) -> str:  # type: ignore[override]
        return f"correction/{self.metric}"

    def factor(self, now: Moment) -> float:
        # The KL between draws goes as 1 / ess, so ess times (KL / target) would meet the target; the exponent `gain`
        # damps it. A kept share is first translated into the KL of a sequence that would give it.
        value, target = now.value, self.target
        if self.metric == "kept_share":
            value, target = _divergence(value, now.correction), _divergence(target, now.correction)
        change = math.exp(self.gain * math.log(max(value, 1e-12) / target))
        return self.bounded(now.factor * min(max(change, 1 / MOST_AT_ONCE), MOST_AT_ONCE))


class KLStepsEss(_BoundedEss):
    """Sigma steps up or down by the KL between draw and gradient (PSN)."""

    kind: Literal["kl_steps"] = "kl_steps"
    ratio: Annotated[float, Field(gt=1)] = 1.01
    """Factor of sigma in a step."""
    target: Positive = 0.003
    """The KL per token (nats) above which sigma falls."""

    metric_read = "correction/kl"

    def factor(self, now: Moment) -> float:
        louder = (now.value < self.target / DEAD_ZONE) - (now.value > self.target * DEAD_ZONE)
        return self.bounded(now.factor * self.ratio ** (-2 * louder))


def _divergence(kept: float, correction: Correction) -> float:
    """The D at which a share `kept` of rho, log rho ~ N(-D, 2 D), is within the bounds; by bisection in [1e-3, 1e3]."""
    first, last = (math.log(bound) if bound else -math.inf for bound in (correction.low, correction.high))
    low, high = 1e-3, 1e3
    for _ in range(60):
        middle = math.sqrt(low * high)
        scale = 2 * math.sqrt(middle)  # sqrt(2) standard deviations
        share = 0.5 * (math.erf((last + middle) / scale) - math.erf((first + middle) / scale))
        low, high = (middle, high) if share > kept else (low, middle)
    return math.sqrt(low * high)


AnyEssSchedule = Annotated[
    ConstantEss | CosineEss | LinearEss | StagesEss | EntropySwitchEss | EntropyRatioEss | ControllerEss | KLStepsEss,
    Kinds(EssScheduleConfig),
]
