"""Settings of the loss, the optimizers and what changes over a run."""

from typing import Annotated, Literal

from pydantic import Field

from threepo.config.records import (
    Count,
    CountOrZero,
    NotNegative,
    Positive,
    PositiveShare,
    Share,
    must,
    require,
    settings,
)
from threepo.config.sources import LocalPath


@settings("objective")
class ObjectiveConfig:
    """[objective]: the policy loss (method.md 2)."""

    clip_low: Share = 0.2
    """The ratio to the old policy is clipped from below at 1 - clip_low."""
    clip_high: NotNegative = 0.2
    """And from above at 1 + clip_high (clip-higher: 0.28). Neither has an effect with mini_batches = 1."""
    dual_clip: Annotated[float, must(lambda bound: bound == 0 or bound > 1, "must be 0 (off) or above 1")] = 3.0
    """Bound of the loss of tokens with negative advantage, as a multiple of -advantage; 0: none."""
    entropy_coefficient: NotNegative = 0.0
    """Entropy bonus: the loss falls by this times the mean token entropy (EntReg in the paper: 1e-3)."""
    aggregation: Literal["token", "group", "sequence"] = "token"
    """Mean over all tokens of the update; over each prompt's tokens, then prompts; or over each completion's tokens,
    then completions."""
    mini_batches: Count = 1
    """Optimizer steps per batch of prompts; with several, old log-probs are computed before the first."""


Betas = Annotated[
    tuple[float, float], must(lambda betas: all(0 <= beta < 1 for beta in betas), "both must lie in [0, 1)")
]


@settings("optimizer")
class AdamWConfig:
    """[optimizer] with kind = "adamw"."""

    kind: Literal["adamw"] = "adamw"
    """AdamW: a point estimate, without a posterior."""
    lr: Positive = 1e-6
    """Learning rate."""
    betas: Betas = (0.9, 0.999)
    """Decay rates of the two moments."""
    epsilon: Positive = 1e-8
    """Added to the root of the second moment."""
    weight_decay: NotNegative = 0.1
    """Decoupled weight decay."""
    max_grad_norm: NotNegative = 1.0
    """Gradients are scaled down to this total norm; 0: never."""


@settings("optimizer")
class IVONConfig:
    """[optimizer] with kind = "ivon": variational learning of a Gaussian over the weights (method.md 1)."""

    kind: Literal["ivon"] = "ivon"
    """IVON learns the mean and the diagonal Hessian, so sigma = 1 / sqrt(ess * (hessian + weight_decay))."""
    lr: Positive = 1.0
    """Learning rate; with rescale_lr it is multiplied by hess_init + weight_decay (paper: 50 in SFT, 1 in RL at 7B)."""
    ess: Positive = 1e9
    """Effective sample size, lambda: less is more noise. Keep sigma near 5 % of the weights' RMS (method.md 1.6)."""
    hess_init: Positive = 1e-3
    """Initial Hessian, h0, of every weight."""
    betas: Betas = (0.9, 0.9999)
    """Decay rates of momentum and Hessian."""
    weight_decay: NotNegative = 1e-8
    """Delta: precision of the prior, which is also the weight decay."""
    clip_radius: Annotated[float, Field(gt=0, allow_inf_nan=True)] = 1e-3
    """Xi: every coordinate of the preconditioned step is clipped to [-xi, xi]; `inf` never clips."""
    estimator: Literal["price", "gradsq"] = "price"
    """Hessian estimate from noise times gradient (Price's theorem), or from squared gradients."""
    debias: bool = True
    """Divide the momentum by 1 - beta1^t."""
    rescale_lr: bool = True
    """Multiply lr by hess_init + weight_decay."""
    noise_scale: NotNegative = 1.0
    """Multiplies sigma. 0 switches noise off and freezes the Hessian, as a check."""
    noise_shape: Literal["learned", "isotropic"] = "learned"
    """Sigma follows the Hessian, or is the same for all weights: that of hess_init (method.md 1.7)."""
    learn_hessian: bool = True
    """false: the Hessian keeps its initial value; with noise_shape = "isotropic" this is the paper's ablation."""
    load_hessian: LocalPath = ""
    """Start from the Hessian in this folder's posterior.safetensors, for example that of an SFT run."""
    load_momentum: bool = False
    """With load_hessian: load the momentum too, as the paper's released code does (method.md 7)."""

    def __post_init__(self) -> None:
        fix = "name the folder to load from in optimizer.load_hessian"
        require(bool(self.load_hessian) or not self.load_momentum, "optimizer.load_momentum", self.load_momentum, fix)


OptimizerConfig = Annotated[AdamWConfig | IVONConfig, Field(discriminator="kind")]


@settings("schedule")
class ScheduleConfig:
    """[schedule]: the learning rate over the run, as a factor of optimizer.lr."""

    kind: Literal["constant", "cosine"] = "constant"
    """After the warm-up: stay, or fall along a cosine to the floor at the last step."""
    warmup_share: Share = 0.06
    """Linear warm-up over this share of the steps."""
    floor: Share = 0.1
    """Cosine only: the factor at the end (the paper decays to 0.1, its released code to 0)."""


@settings("ess_schedule")
class EssScheduleConfig:
    """[ess_schedule]: optimizer.ess over the run; less ess is more noise (method.md 1.8). Steps are training steps."""

    kind: Literal["constant", "cosine", "linear", "entropy_switch", "entropy_ratio", "controller"] = "constant"
    """Constant; falling over the run; low while entropy is low; following entropy; or steered to `target`."""
    floor: PositiveShare = 0.1
    """cosine, linear: the factor of ess at the end. entropy_switch: the factor while entropy is low."""
    entropy_share: Share = 0.75
    """entropy_switch: entropy is low at or below this share of its highest value so far."""
    metric: Literal["kept_share", "kl"] = "kept_share"
    """controller: hold the share of completions that the correction keeps, or the KL per token between draws (nats)."""
    target: Positive = 0.7
    """controller: the value to hold."""
    gain: PositiveShare = 0.3
    """controller: the share of the measured error that one step corrects; 1 would correct all of it, noise included."""
    lowest: Positive = 1e6
    """controller, entropy_ratio: ess never falls below this."""
    highest: Positive = 1e12
    """controller, entropy_ratio: ess never rises above this."""

    def __post_init__(self) -> None:
        require(self.lowest <= self.highest, "ess_schedule.lowest", self.lowest, "must not exceed ess_schedule.highest")
        possible = self.kind != "controller" or self.metric != "kept_share" or self.target < 1
        require(possible, "ess_schedule.target", self.target, "a kept share to hold must lie below 1")


@settings("batching")
class BatchingConfig:
    """[batching]: how rows are packed for forward and backward passes. It changes speed and memory, not results."""

    tokens: CountOrZero = 0
    """Most tokens of one micro-batch; a longer row goes alone. 0: 4096 on a CPU, 16384 on a GPU. Padding counts only
    for models that need it."""
