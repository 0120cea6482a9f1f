"""The arithmetic of IVON on one tensor, in blocks that stay in cache; plain torch, exact for any blocking.

Everything here is a free function of tensors and numbers. All arithmetic is float32; symbols as in method.md 1:
m mean, h diagonal Hessian, g momentum, lam = ess, delta = weight decay, xi = clip radius, z standard normal noise.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from threepo.posterior.noise import CHUNK, Key, normal_chunks


@dataclass(frozen=True)
class Scale:
    """What turns a Hessian into a standard deviation: sigma = noise_scale / sqrt(ess * (h + weight_decay))."""

    ess: float
    weight_decay: float
    noise_scale: float

    def precision_root(self, hessian: torch.Tensor) -> torch.Tensor:
        """sqrt(ess * (h + delta)): the noise-free 1 / sigma. Same shape as `hessian`."""
        return (hessian + self.weight_decay).mul_(self.ess).sqrt_()

    def sigma(self, hessian: torch.Tensor) -> torch.Tensor:
        """The posterior's standard deviation per weight. Same shape as `hessian`."""
        return self.noise_scale / self.precision_root(hessian)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """A one-dimensional view; parameters must be dense, so that element i means the same to everyone."""
    return tensor.detach().view(-1)


def write_perturbed(out: torch.Tensor, mean: torch.Tensor, hessian: torch.Tensor, key: Key, scale: Scale) -> None:
    """out = mean + sigma * z, added in float32 and rounded once to the dtype of `out`. `out` may be `mean`."""
    target, m, h = flat(out), flat(mean), flat(hessian)
    for start, z in normal_chunks(key, 0, m.numel(), m.device):
        part = slice(start, start + len(z))
        target[part] = m[part].float() + scale.sigma(h[part]).mul_(z)


def add_noise_times(out: torch.Tensor, grad: torch.Tensor, key: Key) -> None:
    """out += z * grad."""
    total, g = flat(out), flat(grad)
    for start, z in normal_chunks(key, 0, g.numel(), g.device):
        total[start : start + len(z)].addcmul_(z, g[start : start + len(z)])


@dataclass(frozen=True)
class StepNumbers:
    """The scalars of one update; `update` below uses them in the order of method.md 1.3."""

    scale: Scale
    step_size: float
    """lr, times (h0 + delta) when the learning rate is rescaled."""
    beta1: float
    beta2: float
    clip_radius: float
    debias: float
    """1 - beta1^t, or 1."""
    grad_factor: float
    """Turns the sum of the observed gradients into their mean."""
    second_factor: float
    """The same for the sum of noise times gradient, or of squared gradients."""
    estimator: Literal["price", "gradsq", "none"]
    """`none`: keep the Hessian, because no noise was there to learn it from."""


@dataclass(frozen=True)
class Statistics:
    """What was observed for one parameter: sums over the draws of a step."""

    grad: torch.Tensor
    """float32, in the parameter's shape."""
    second: torch.Tensor | None
    """Sum of z * grad (price) or grad^2 (gradsq); None: one draw only, so it is made from `grad` on the way."""
    key: Key | None
    """Noise key of that one draw."""


def update(
    mean: torch.Tensor, hessian: torch.Tensor, momentum: torch.Tensor, seen: Statistics, numbers: StepNumbers
) -> torch.Tensor:
    """One IVON step in place (Shen et al., 2024; method.md 1.2, 1.3). Returns the number clipped, 0-dim."""
    m, h, g, grad = flat(mean), flat(hessian), flat(momentum), flat(seen.grad)
    second = None if seen.second is None else flat(seen.second)
    clipped = torch.zeros((), dtype=torch.int64, device=m.device)
    if numbers.estimator == "price" and second is None:
        assert seen.key is not None, "the price estimator needs the draw's noise"
        for start, z in normal_chunks(seen.key, 0, m.numel(), m.device):
            part = slice(start, start + len(z))
            x = grad[part]
            clipped += _update_chunk(m[part], h[part], g[part], x, x * z, numbers)
        return clipped
    for start in range(0, m.numel(), CHUNK):
        part = slice(start, start + CHUNK)
        x = grad[part]
        moment = None if numbers.estimator == "none" else x.square() if second is None else second[part]
        clipped += _update_chunk(m[part], h[part], g[part], x, moment, numbers)
    return clipped


def _update_chunk(
    m: torch.Tensor,
    h: torch.Tensor,
    g: torch.Tensor,
    grad: torch.Tensor,
    moment: torch.Tensor | None,
    n: StepNumbers,
) -> torch.Tensor:
    delta = n.scale.weight_decay
    g.mul_(n.beta1).add_(grad, alpha=(1 - n.beta1) * n.grad_factor)
    if moment is not None:
        # The estimate f and the correction use the old Hessian.
        if n.estimator == "price":
            f = n.scale.precision_root(h).mul_(moment).mul_(n.second_factor / n.scale.noise_scale)
        else:
            f = moment.mul(n.scale.ess * n.second_factor)
        retraction = (h - f).square_().div_(h + delta).mul_(0.5 * (1 - n.beta2) ** 2)
        h.mul_(n.beta2).add_(f, alpha=1 - n.beta2).add_(retraction)
    move = m.float().mul(delta).add_(g, alpha=1 / n.debias).div_(h + delta)
    clipped = (move.abs() > n.clip_radius).sum()
    m.sub_(move.clamp_(-n.clip_radius, n.clip_radius).mul_(n.step_size))
    return clipped
