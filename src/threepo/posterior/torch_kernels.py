"""The operations in torch, for every device, dtype and structure of noise: compiled kernels follow it bit for bit.

Multiplications and additions are separate calls, in a fixed order, because a fused one would round differently. All
tensors are contiguous.
"""

from collections.abc import Iterator, Sequence

import torch

from threepo.posterior.noise import chunk_of
from threepo.posterior.noise_structures import Noise
from threepo.posterior.operations import AddNoiseTimes, Operation, Perturb, Region, Update


def run(operations: Sequence[Operation]) -> list[torch.Tensor]:
    """Do the operations. Returns how many coordinates each Update clipped, 0-dim int64."""
    return [clipped for operation in operations if (clipped := _run(operation)) is not None]


def _run(operation: Operation) -> torch.Tensor | None:
    match operation:
        case Perturb(out, mean, hessian, noise, scalars, region):
            out, mean, hessian = out.view(-1), mean.view(-1), hessian.view(-1)
            for part, z in _numbers(noise, region, len(mean), mean.device):
                out[part] = _wide(mean[part]) + scalars.sigma(hessian[part]).mul_(z)
        case AddNoiseTimes(second, grad, noise, region):
            second, grad = second.view(-1), grad.view(-1)
            for part, z in _numbers(noise, region, len(grad), grad.device):
                second[part] += grad[part].float() * z
        case Update():
            return _update(operation)
    return None


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """Returns float64 tensors as they are, and others in float32."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _numbers(noise: Noise, region: Region, count: int, device: torch.device) -> Iterator[tuple[slice, torch.Tensor]]:
    """Noise of a region's `count` elements in parts, each with its elements. Noise between rows is thrown away."""
    start, row, stride = region
    stop = start + (count - 1) // row * stride + (count - 1) % row + 1
    first = 0
    for offset, z in noise.numbers(start, stop, device):
        if count > row:
            z = z[torch.arange(offset, offset + len(z), device=device) % stride < row]
        yield slice(first, first + len(z)), z
        first += len(z)


def _update(u: Update) -> torch.Tensor:
    """The equations for g, h and m at the top of ivon.py."""
    mean, hessian, momentum, grad = (tensor.view(-1) for tensor in (u.mean, u.hessian, u.momentum, u.grad))
    n, clipped = u.scalars, torch.zeros((), dtype=torch.int64, device=mean.device)
    parts: Iterator[tuple[slice, torch.Tensor | None]]
    if n.estimator == "price" and u.second is None:
        assert u.noise is not None, "the price estimator needs the draw's noise"
        parts = _numbers(u.noise, u.region, len(mean), mean.device)
    else:
        chunk = chunk_of(mean.device)
        parts = ((slice(first, first + chunk), None) for first in range(0, len(mean), chunk))
    for part, z in parts:
        m, h, g, x = mean[part], hessian[part], momentum[part], grad[part].float()
        g.mul_(n.beta1).add_(x * n.grad_weight)
        if n.estimator != "none":
            moment = x * (x if z is None else z) if u.second is None else u.second.view(-1)[part]
            # The estimate f and the correction use the old Hessian.
            f = (moment * n.precision_root(h) if n.estimator == "price" else moment) * n.estimate_factor
            f.clamp_(-n.estimate_bound, n.estimate_bound)
            retraction = (h - f).square_().div_(h + n.weight_decay).mul_(n.retraction_weight)
            h.mul_(n.beta2).add_(f.mul_(n.estimate_weight)).add_(retraction).clamp_(n.hessian_low, n.hessian_high)
        old = _wide(m)
        move = (old * n.weight_decay).add_(g * n.momentum_factor).div_(h + n.weight_decay)
        clipped += (move.abs() > n.clip_radius).sum()
        m.copy_(old - move.clamp_(-n.clip_radius, n.clip_radius).mul_(n.step_size))
        if u.out is not None:
            u.out.view(-1)[part] = m
    return clipped
