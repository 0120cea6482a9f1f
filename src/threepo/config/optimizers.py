"""[optimizer]: what trains, a record for each kind."""

import math
from typing import Annotated, Literal

from threepo.config.records import RECORDS, Kinds, NotNegative, Positive, PositiveOrInfinite, Settings, must
from threepo.config.sources import LocalPath

Betas = Annotated[tuple[float, float], must(lambda pair: all(0 <= b < 1 for b in pair), "both must lie in [0, 1)")]


class OptimizerConfig(Settings, table="optimizer", by="kind"):
    """[optimizer]: what training and plans ask of an optimizer's settings. `code` is the function that builds it."""

    kind: str

    @property
    def rate(self) -> float:
        """The learning rate before its schedule."""
        return float(vars(self)["lr"])

    def noise_scale(self, unit: str, size: float) -> float:
        """noise_scale of a parameter whose noise has this size, in this unit of [noise]."""
        return 0.0 if unit == "posterior" else size

    def memory(self, gradient_draws: int) -> dict[str, int]:
        """Number of float32 tensors of the weights' size, by label; without draws the gradient is at the mean."""
        return {"the mean while perturbed": 1} if gradient_draws else {}


class AdamWConfig(OptimizerConfig):
    """Trains the weights, without a posterior."""

    kind: Literal["adamw"] = "adamw"
    lr: Positive = 1e-6
    """Learning rate."""
    betas: Betas = (0.9, 0.999)
    """Decay rates of the two moments."""
    epsilon: Positive = 1e-8
    """Added to the root of the second moment."""
    weight_decay: NotNegative = 0.1
    """Decoupled weight decay."""
    max_grad_norm: NotNegative = 1.0
    """Gradients are clipped to this total norm; 0: never."""

    code = "threepo.training.optimizers:build_adamw"

    def memory(self, gradient_draws: int) -> dict[str, int]:
        return {"AdamW's moments": 2} | super().memory(gradient_draws)


class IVONConfig(OptimizerConfig):
    """Learns a Gaussian over the weights: a mean, and a Hessian that gives sigma (method.md 1)."""

    kind: Literal["ivon"] = "ivon"
    lr: Positive = 1.0
    """Learning rate (paper: 50 in SFT, 1 in RL at 7B)."""
    step_size: NotNegative = 0.0
    """Sets lr by the most that a step moves a weight, on the scale of AdamW's lr; 0: lr counts."""
    ess: Positive = 1e9
    """Effective sample size, lambda: less is more noise. Compare models by sigma instead (method.md 1.6)."""
    hess_init: Positive = 1e-3
    """Initial Hessian, h0, of every weight."""
    betas: Betas = (0.9, 0.9999)
    """Decay rates of momentum and Hessian."""
    weight_decay: NotNegative = 1e-8
    """Delta: precision of the prior, and weight decay."""
    clip_radius: PositiveOrInfinite = 1e-3
    """Xi: the preconditioned step is clipped to [-xi, xi]; `inf` never clips."""
    estimator: Literal["price", "gradsq"] = "price"
    """Hessian estimate from noise times gradient (Price's theorem), or from squared gradients."""
    debias: bool = True
    """Divide the momentum by 1 - beta1^t."""
    rescale_lr: bool = True
    """Multiply lr by hess_init + weight_decay."""
    noise_shape: Literal["learned", "isotropic"] = "learned"
    """Sigma follows the Hessian, or is the same for all weights (method.md 1.7)."""
    learn_hessian: bool = True
    """false: the Hessian keeps its initial value."""
    load_hessian: LocalPath = ""
    """Start from the Hessian in this folder's posterior.safetensors, such as an SFT run's."""
    load_momentum: bool = False
    """With load_hessian: load the momentum too (method.md 7)."""

    code = "threepo.training.optimizers:build_ivon"

    def __post_init__(self) -> None:
        fix = "name the folder to load from in optimizer.load_hessian"
        self.only_if(self.load_hessian != "", fix, "load_momentum")
        fix = "nothing limits a step with clip_radius = inf; set optimizer.lr instead"
        self.check("step_size", not self.step_size or self.clip_radius < math.inf, fix)

    @property
    def rate(self) -> float:
        scale = self.hess_init + self.weight_decay if self.rescale_lr else 1.0
        return self.step_size / (scale * self.clip_radius) if self.step_size else self.lr

    def noise_scale(self, unit: str, size: float) -> float:
        # Sigma of the initial Hessian is to be `size`, if that is no factor already.
        root = math.sqrt(self.ess * (self.hess_init + self.weight_decay))
        return size if unit == "posterior" else size * root

    def memory(self, gradient_draws: int) -> dict[str, int]:
        held = {"momentum and Hessian": 2} | super().memory(1)
        return held | ({"running means over gradient draws": 2} if gradient_draws > 1 else {})


class SGDConfig(OptimizerConfig):
    """The plain step of an evolution strategy."""

    kind: Literal["sgd"] = "sgd"
    lr: Positive = 5e-7
    """Learning rate: alpha * sigma of ES at scale (method.md 3.9)."""
    max_grad_norm: NotNegative = 0.0
    """Gradients are clipped to this total norm; 0: never."""

    code = "threepo.training.optimizers:build_sgd"


AnyOptimizer = Annotated[AdamWConfig | IVONConfig | SGDConfig, Kinds(OptimizerConfig)]
OPTIMIZERS = RECORDS["optimizer"]
"""The records by kind."""
