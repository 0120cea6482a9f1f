"""Operations of IVON's kernels: a record for each, which names the tensors that are read (READ) and written (WRITTEN).

Symbols as in method.md 1: h diagonal Hessian, delta = weight decay, f estimate of the Hessian, z noise. All tensors of
an operation have the shape of a parameter, or of one rank's shard of it, and every backend computes in float32.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch

from threepo.posterior.noise import sqrt_
from threepo.posterior.noise_structures import Noise

ESTIMATE_BOUND = 1e18
"""|f| is cut here. Nothing that trains comes near it; it keeps every operation finite for any finite gradient."""
HESSIAN_RANGE = (1e-30, 1e18)
"""Range in which h stays for any input: above zero, never subnormal (some programs flush those to zero), and small
enough that ess * h does not overflow."""


class Region(NamedTuple):
    """Place of local elements in the flat whole tensor: rows of `row` elements that start `stride` apart.

    Local element i is element start + i // row * stride + i % row of the whole. A tensor that is sharded by columns is
    one region, not one for each row.
    """

    start: int = 0
    row: int = 1 << 62
    """The default: everything is one row."""
    stride: int = 1 << 62


WHOLE = Region()


class Scalars(NamedTuple):
    """The numbers of an operation, in the order in which the compiled kernels take them. Only a step needs all."""

    weight_decay: float
    ess: float
    fixed_root: float
    """Isotropic noise: 1 / sigma without noise_scale, the same for all weights (method.md 1.7); 0: h decides."""
    noise_scale: float
    beta1: float = 0.0
    grad_weight: float = 0.0
    """Factor of the sum of the gradients in the momentum: (1 - beta1) / draws."""
    beta2: float = 0.0
    estimate_weight: float = 0.0
    """1 - beta2."""
    retraction_weight: float = 0.0
    """Weight of the Riemannian correction: (1 - beta2)^2 / 2."""
    estimate_factor: float = 0.0
    """Price: f = sum(z * grad) * precision_root * this. Gradsq: f = sum(grad^2) * this."""
    momentum_factor: float = 0.0
    """1 / (1 - beta1^t), or 1 without debiasing."""
    clip_radius: float = 0.0
    step_size: float = 0.0
    """lr, times (h0 + delta) when the learning rate is rescaled."""
    estimate_bound: float = ESTIMATE_BOUND
    hessian_low: float = HESSIAN_RANGE[0]
    hessian_high: float = HESSIAN_RANGE[1]
    estimator: Literal["none", "price", "gradsq"] = "none"
    """`none`: keep the Hessian, because there was no noise to learn it from."""

    def precision_root(self, hessian: torch.Tensor) -> torch.Tensor:
        """sqrt(ess * (h + delta)): 1 / sigma without noise_scale. Same shape as `hessian`."""
        if self.fixed_root:
            return torch.full_like(hessian, self.fixed_root)
        return sqrt_((hessian + self.weight_decay).mul_(self.ess))

    def sigma(self, hessian: torch.Tensor) -> torch.Tensor:
        """The posterior's standard deviation per weight. Same shape as `hessian`."""
        root = self.precision_root(hessian)
        return torch.full_like(root, self.noise_scale).div_(root)  # torch's number / tensor is number * reciprocal


@dataclass(slots=True)
class Perturb:
    """out = mean + sigma * z, added in float32 (float64 if `mean` is) and rounded once to the dtype of `out`."""

    READ: ClassVar = ("mean", "hessian")
    WRITTEN: ClassVar = ("out",)

    out: torch.Tensor
    """May be `mean`."""
    mean: torch.Tensor
    hessian: torch.Tensor
    noise: Noise
    scalars: Scalars
    region: Region = WHOLE


@dataclass(slots=True)
class AddNoiseTimes:
    """second += z * grad."""

    READ: ClassVar = ("grad",)
    WRITTEN: ClassVar = ("second",)

    second: torch.Tensor
    """float32."""
    grad: torch.Tensor
    noise: Noise
    region: Region = WHOLE


@dataclass(slots=True)
class Update:
    """One IVON step in place (Shen et al., 2024; method.md 1.2, 1.3)."""

    READ: ClassVar = ("grad", "second")
    WRITTEN: ClassVar = ("mean", "out", "hessian", "momentum")

    mean: torch.Tensor
    out: torch.Tensor | None
    """Receives the new mean too, rounded to its own dtype; `mean` is float32 then."""
    hessian: torch.Tensor
    """float32, like the momentum."""
    momentum: torch.Tensor
    grad: torch.Tensor
    """Sum over the draws since the last step."""
    second: torch.Tensor | None
    """Sum of z * grad (price) or grad^2 (gradsq), float32. None: there was one draw, so it is made from `grad`."""
    noise: Noise | None
    """The noise of that one draw; None: it had none, or is not needed."""
    scalars: Scalars
    region: Region = WHOLE


Operation = Perturb | AddNoiseTimes | Update
