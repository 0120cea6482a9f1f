"""The numbers, beside the tensors, that IVON's kernels take; every backend computes with them in float32.

Symbols as in method.md 1: m mean, h diagonal Hessian, g momentum, lam = ess, delta = weight decay, xi = clip radius,
z standard normal noise.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch

from threepo.posterior.noise import sqrt_

ESTIMATE_BOUND = 1e18
"""|f| is cut here. Nothing that trains comes near it; it keeps every operation finite for any finite gradient."""
HESSIAN_RANGE = (1e-30, 1e18)
"""Where h stays for any input: above zero and no subnormal number, which some programs flush to zero; and so small
that ess * h does not overflow."""


@dataclass(frozen=True)
class Scale:
    """What turns a Hessian into a standard deviation: sigma = noise_scale / sqrt(ess * (h + weight_decay))."""

    ess: float
    weight_decay: float
    noise_scale: float
    isotropic_hessian: float | None = None
    """Takes the place of h in sigma, so that one sigma holds for all weights (method.md 1.7)."""

    @property
    def fixed_root(self) -> float:
        """1 / sigma without noise_scale where it is the same for all weights; else 0."""
        return (
            0.0
            if self.isotropic_hessian is None
            else math.sqrt(self.ess * (self.isotropic_hessian + self.weight_decay))
        )

    def precision_root(self, hessian: torch.Tensor) -> torch.Tensor:
        """sqrt(ess * (h + delta)): 1 / sigma without noise_scale. Same shape as `hessian`."""
        if self.isotropic_hessian is not None:
            return torch.full_like(hessian, self.fixed_root)
        return sqrt_((hessian + self.weight_decay).mul_(self.ess))

    def sigma(self, hessian: torch.Tensor) -> torch.Tensor:
        """The posterior's standard deviation per weight. Same shape as `hessian`."""
        root = self.precision_root(hessian)
        return torch.full_like(root, self.noise_scale).div_(root)  # torch's number / tensor is number * reciprocal


@dataclass(frozen=True)
class StepNumbers:
    """The scalars of one update, as method.md 1.2 and 1.3 use them."""

    scale: Scale
    estimator: Literal["price", "gradsq", "none"]
    """`none`: keep the Hessian, because no noise was there to learn it from."""
    beta1: float
    beta2: float
    grad_factor: float
    """Turns the sum of the observed gradients into their mean."""
    second_factor: float
    """The same for the sum of noise times gradient, or of squared gradients."""
    debias: float
    """1 - beta1^t, or 1."""
    clip_radius: float
    step_size: float
    """lr, times (h0 + delta) when the learning rate is rescaled."""

    @property
    def grad_weight(self) -> float:
        """What the observed sum is multiplied by on its way into the momentum."""
        return (1 - self.beta1) * self.grad_factor

    @property
    def estimate_factor(self) -> float:
        """Price: f = (z * grad) / sigma, so this goes with precision_root. Gradsq: f = ess * grad^2."""
        if self.estimator == "gradsq":
            return self.scale.ess * self.second_factor
        return self.second_factor / self.scale.noise_scale if self.scale.noise_scale else 0.0

    @property
    def retraction_weight(self) -> float:
        """Factor of the Riemannian correction."""
        return 0.5 * (1 - self.beta2) ** 2
