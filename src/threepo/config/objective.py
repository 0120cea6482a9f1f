"""[objective]: the policy loss, of which each kind is a record, and the terms that are added to it (method.md 2)."""

import math
from typing import Annotated, ClassVar, Literal

from threepo.config.records import (
    Count,
    CountOrZero,
    Kinds,
    NotNegative,
    Positive,
    PositiveShare,
    Settings,
    Share,
    must,
)

Bounds = Annotated[tuple[float, float], must(lambda pair: pair[0] < pair[1], "the first must be below the second")]
SequenceBound = Annotated[NotNegative, must(lambda x: x <= 0.05, "the ratio of a sequence never gets there; set 4e-4")]


class ObjectiveConfig(Settings, table="objective", by="loss"):
    """[objective]: the keys that all policy losses share. `code` is the loss of a token: a `TokenLoss` or a
    function as its `losses`."""

    loss: str
    entropy_mask_share: PositiveShare = 1.0
    """Share of the tokens, by highest entropy, with a policy gradient (method.md 2.4)."""
    entropy_coefficient: NotNegative = 0.0
    """Weight of the mean token entropy, as a bonus (EntReg: 1e-3)."""
    reference_kl: NotNegative = 0.0
    """Weight of the KL to the model that the run began with (method.md 2.5)."""
    reference_reset_every: CountOrZero = 0
    """Steps between resets of this reference to the present mean; 0: never."""
    aggregation: Literal["token", "group", "sequence", "constant"] = "token"
    """Mean over tokens, over the means of prompts (`group`), or of completions (`sequence`). `constant`: the sum,
    divided by completions * sampling.max_new_tokens (Dr. GRPO)."""
    mini_batches: Count = 1
    """Optimizer steps per batch of prompts."""

    needs_ratio: ClassVar[bool] = False
    """True if the loss is the loss of ppo wherever the ratio to the old policy is 1."""

    def __post_init__(self) -> None:
        fix = "there is no reference to reset; set objective.reference_kl above 0"
        self.only_if(self.reference_kl > 0, fix, "reference_reset_every")
        fix = (
            "with one optimizer step per batch the ratio to the old policy is 1, so its gradient is that of loss = "
            "'ppo'; set that, or objective.mini_batches = 4"
        )
        self.check("loss", self.mini_batches > 1 or not self.needs_ratio, fix)

    @property
    def bounds(self) -> tuple[float, float]:
        """The ratios to the old policy between which nothing is clipped."""
        return (-math.inf, math.inf)


class _Clipped(ObjectiveConfig):
    """The bounds of losses that clip the ratio to the old policy."""

    clip_low: Share = 0.2
    """Ratios are clipped below 1 - clip_low."""
    clip_high: NotNegative = 0.2
    """Ratios are clipped above 1 + clip_high; no effect with mini_batches = 1."""

    @property
    def bounds(self) -> tuple[float, float]:
        return (1 - self.clip_low, 1 + self.clip_high)


class PPOConfig(_Clipped):
    """The clipped ratio, as in GRPO."""

    loss: Literal["ppo"] = "ppo"
    dual_clip: Annotated[float, must(lambda bound: bound == 0 or bound > 1, "must be 0 (off) or above 1")] = 3.0
    """Bound of the loss for negative advantages, as a multiple of -advantage; 0: none."""

    code = "threepo.objectives.token_losses:PPO"


class GSPOConfig(_Clipped):
    """The clipped ratio of the whole sequence."""

    loss: Literal["gspo"] = "gspo"
    aggregation: Literal["sequence"] = "sequence"
    """GSPO has no other."""
    clip_low: SequenceBound = 3e-4
    clip_high: SequenceBound = 4e-4

    code = "threepo.objectives.token_losses:GSPO"
    needs_ratio = True


class CISPOConfig(_Clipped):
    """The log-prob of a token, weighted by its clipped ratio."""

    loss: Literal["cispo"] = "cispo"
    clip_low: Share = 1.0
    clip_high: NotNegative = 4.0

    code = "threepo.objectives.token_losses:CISPO"
    needs_ratio = True


class KLCovConfig(ObjectiveConfig):
    """The ratio, with a penalty on tokens of large covariance (method.md 2.4)."""

    loss: Literal["kl_cov"] = "kl_cov"
    kl_cov_share: PositiveShare = 0.002
    """Share of tokens that are penalised."""
    kl_cov_coefficient: Positive = 1.0
    """The penalty is this times |log ratio to the old policy|."""

    code = "threepo.objectives.token_losses:KL_COV"
    needs_ratio = True


class ClipCovConfig(_Clipped):
    """The clipped ratio, without some tokens of large covariance."""

    loss: Literal["clip_cov"] = "clip_cov"
    clip_low: Share = 1.0
    clip_high: NotNegative = 1.0
    clip_cov_share: PositiveShare = 0.0002
    """Share of tokens that lose their gradient, at random within clip_cov_bounds."""
    clip_cov_bounds: Bounds = (1.0, 5.0)
    """Bounds of the covariance of these tokens."""

    code = "threepo.objectives.token_losses:CLIP_COV"


AnyObjective = Annotated[PPOConfig | GSPOConfig | CISPOConfig | KLCovConfig | ClipCovConfig, Kinds(ObjectiveConfig)]
