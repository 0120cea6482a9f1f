"""[schedule] and [ess_schedule]: the learning rate and the effective sample size, ess, over the run.

Each kind of ess schedule is a record with its settings and its rule, `factor`. To add one, write its class here and
name it in `AnyEssSchedule`. Sigma goes with 1 / sqrt(ess) (method.md 1.8). Steps are training steps.
"""

import math
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from threepo.config.records import Positive, PositiveShare, Settings, Share

NO_NOISE = 1e30
"""A factor of ess that leaves no noise in float32."""
DEAD_ZONE = 1.1
"""kl_steps leaves sigma as it is while the KL is within this factor of its target."""


class ScheduleConfig(Settings, table="schedule"):
    """[schedule]: the learning rate over the run, as a factor of optimizer.lr."""

    kind: Literal["constant", "cosine"] = "constant"
    """After the warm-up: stay, or fall along a cosine to the floor at the last step."""
    warmup_share: Share = 0.06
    """Linear warm-up over this share of the steps."""
    floor: Share = 0.1
    """Cosine only: the factor at the end (the paper decays to 0.1, its released code to 0)."""


class EssScheduleConfig(Settings, table="ess_schedule", by="kind"):
    """[ess_schedule]: ess over the run. Where [noise] gives noise a size, ess begins at 1."""

    kind: str

    metric_read: ClassVar[str] = ""
    """The metric of the last step that the schedule follows; empty: it follows none."""
    starts_without_noise: ClassVar[bool] = False

    def factor(self, progress: float, last: float, value: float) -> float:
        """ess of the coming step, as a multiple of optimizer.ess.

        `progress`: the share of the run's steps that are done. `last`: the factor of the last step, and `value` the
        schedule's metric in it, which is finite.
        """
        raise NotImplementedError


class ConstantEss(EssScheduleConfig):
    """ess stays as it is."""

    kind: Literal["constant"] = "constant"

    def factor(self, progress: float, last: float, value: float) -> float:
        return last


class CosineEss(EssScheduleConfig):
    """ess falls along a cosine until the last step."""

    kind: Literal["cosine"] = "cosine"
    floor: PositiveShare = 0.1
    """The factor of ess at the end."""

    def factor(self, progress: float, last: float, value: float) -> float:
        return (1 - self.floor) / 2 * math.cos(math.pi * progress) + (1 + self.floor) / 2


class StagesEss(EssScheduleConfig):
    """Sigma falls in stages, by the same factor each, as in QeRL's code; the first stage has no noise."""

    kind: Literal["stages"] = "stages"
    stages: Annotated[int, Field(ge=3)] = 10
    """Number of stages. The first has no noise, the second the sigma that the run begins with."""
    last: PositiveShare = 0.01
    """Sigma of the last stage, as a share of the second stage's."""

    starts_without_noise: ClassVar[bool] = True

    def factor(self, progress: float, last: float, value: float) -> float:
        stage = min(int(progress * self.stages), self.stages - 1)
        share = self.last ** ((stage - 1) / (self.stages - 2))
        return share**-2 if stage else NO_NOISE


class KLStepsEss(EssScheduleConfig):
    """Sigma takes a step up or down by the KL between draw and gradient (PSN, variant I in its code)."""

    kind: Literal["kl_steps"] = "kl_steps"
    ratio: Annotated[float, Field(gt=1)] = 1.01
    """Factor of sigma in a step."""
    target: Positive = 0.003
    """The KL per token (nats) above which sigma falls."""
    lowest: PositiveShare = 1e-6
    """ess never falls below this share of its start."""
    highest: Annotated[float, Field(ge=1)] = 1e6
    """ess never rises above this multiple of its start."""

    metric_read = "correction/kl"

    def factor(self, progress: float, last: float, value: float) -> float:
        louder = (value < self.target / DEAD_ZONE) - (value > self.target * DEAD_ZONE)
        return min(max(last * self.ratio ** (-2 * louder), self.lowest), self.highest)


AnyEssSchedule = Annotated[ConstantEss | CosineEss | StagesEss | KLStepsEss, Field(discriminator="kind")]
