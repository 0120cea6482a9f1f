"""Settings of the policy loss."""

from typing import Annotated, Literal

from threepo.config.records import Count, CountOrZero, NotNegative, Positive, PositiveShare, Settings, Share, must

Bounds = Annotated[tuple[float, float], must(lambda pair: pair[0] < pair[1], "the first must be below the second")]

WIDEST_GSPO = 0.05
"""A clip range of the ratio of a sequence, a geometric mean over its tokens, beyond which nothing is ever clipped."""


class ObjectiveConfig(Settings, table="objective"):
    """[objective]: the policy loss (method.md 2)."""

    loss: Literal["ppo", "gspo", "cispo", "kl_cov", "clip_cov"] = "ppo"
    """The loss of a token (method.md 2.3): `ppo`: the clipped ratio, as in GRPO. `gspo`: the ratio of its sequence.
    `cispo`: its log-prob, weighted by the clipped ratio. `kl_cov`: a penalty on the tokens of the largest covariance of
    log-prob and advantage, and no clip. `clip_cov`: `ppo` without some of the tokens of a large covariance."""
    clip_low: Share = 0.2
    """The ratio to the old policy is clipped from below at 1 - clip_low (gspo: 3e-4; cispo, clip_cov: 1, no bound)."""
    clip_high: NotNegative = 0.2
    """And from above at 1 + clip_high (clip-higher: 0.28; gspo: 4e-4; cispo: 4; clip_cov: 1). Neither has an effect
    with mini_batches = 1."""
    dual_clip: Annotated[float, must(lambda bound: bound == 0 or bound > 1, "must be 0 (off) or above 1")] = 3.0
    """ppo: bound of the loss of tokens with negative advantage, as a multiple of -advantage; 0: none."""
    kl_cov_share: PositiveShare = 0.002
    """kl_cov: the share of tokens that are penalised, those of the largest covariance."""
    kl_cov_coefficient: Positive = 1.0
    """kl_cov: the penalty is this times |log ratio to the old policy|."""
    clip_cov_share: PositiveShare = 0.0002
    """clip_cov: the share of tokens that lose their gradient, chosen at random among those within the bounds."""
    clip_cov_bounds: Bounds = (1.0, 5.0)
    """clip_cov: bounds of the covariance of these tokens."""
    entropy_mask_share: PositiveShare = 1.0
    """Only this share of the tokens, those of the highest entropy, has a policy gradient; all are counted (0.2 in the
    80/20 paper; method.md 2.4)."""
    entropy_coefficient: NotNegative = 0.0
    """Entropy bonus: the loss falls by this times the mean token entropy (EntReg in the paper: 1e-3)."""
    reference_kl: NotNegative = 0.0
    """The loss grows by this times the KL to a reference model, the one that the run began with (method.md 2.5)."""
    reference_reset_every: CountOrZero = 0
    """The reference becomes the present mean after every so many steps; 0: never."""
    aggregation: Literal["token", "group", "sequence", "constant"] = "token"
    """Mean over all tokens; over each prompt's tokens, then prompts; or over each completion's, then completions.
    `constant`: the sum over tokens, divided by completions * sampling.max_new_tokens (Dr. GRPO)."""
    mini_batches: Count = 1
    """Optimizer steps per batch of prompts; with several, old log-probs are computed before the first."""

    def __post_init__(self) -> None:
        name, several = self.loss, self.mini_batches > 1
        fix = "with one optimizer step per batch the ratio to the old policy is 1, so"
        same = "its gradient is that of loss = 'ppo'; set that, or objective.mini_batches = 4"
        self.check("loss", several or name not in ("gspo", "cispo"), f"{fix} {same}")
        same = "its penalty is 0 and has no gradient; set objective.mini_batches = 4"
        self.check("loss", several or name != "kl_cov", f"{fix} {same}")
        fix = "the objective of gspo is a mean over completions; set objective.aggregation = 'sequence'"
        self.check("aggregation", name != "gspo" or self.aggregation == "sequence", fix)
        for key, value in (("clip_low", 3e-4), ("clip_high", 4e-4)):
            fix = f"the ratio of a sequence, a geometric mean, would never be clipped; set {value:g}, as in the paper"
            self.check(key, name != "gspo" or getattr(self, key) <= WIDEST_GSPO, fix)
        fix = "there is no reference to reset; set objective.reference_kl above 0"
        self.only_if(self.reference_kl > 0, fix, "reference_reset_every")
