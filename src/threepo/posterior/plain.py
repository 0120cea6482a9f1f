"""IVON's kernels in plain torch, for every device and dtype: the definition that the compiled ones follow bit for bit.

Multiplications and additions are separate calls, in a fixed order, because a fused one would round differently. All
tensors are flat and contiguous; `start` is the index of their first element in the whole flattened tensor.
"""

import torch

from threepo.posterior.noise import CHUNK, Key, normal_chunks
from threepo.posterior.operands import Seen, State
from threepo.posterior.scalars import ESTIMATE_BOUND, HESSIAN_RANGE, Scale, StepNumbers


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """In float32, or in float64 if it is that already."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def normal(out: torch.Tensor, key: Key, start: int) -> None:
    """out = z."""
    for offset, z in normal_chunks(key, start, start + len(out), out.device):
        out[offset : offset + len(z)] = z


def perturb(
    out: torch.Tensor,
    mean: torch.Tensor,
    hessian: torch.Tensor,
    key: Key,
    start: int,
    scale: Scale,
) -> None:
    """out = mean + sigma z, rounded once to the dtype of `out`, which may be `mean`."""
    for offset, z in normal_chunks(key, start, start + len(mean), mean.device):
        part = slice(offset, offset + len(z))
        out[part] = _wide(mean[part]) + scale.sigma(hessian[part]).mul_(z)


def add_noise_times(total: torch.Tensor, grad: torch.Tensor, key: Key, start: int) -> None:
    """total += z * grad."""
    for offset, z in normal_chunks(key, start, start + len(grad), grad.device):
        part = slice(offset, offset + len(z))
        total[part] += grad[part].float() * z


def update(state: State, seen: Seen, start: int, numbers: StepNumbers) -> torch.Tensor:
    """One IVON step in place (Shen et al., 2024; method.md 1.2, 1.3). Returns the number clipped, 0-dim int64.

    Where `seen.second` is None it is made here from the gradient, for price with the noise of `seen.key`.
    """
    count = len(state.mean)
    clipped = torch.zeros((), dtype=torch.int64, device=state.mean.device)
    needs_noise = numbers.estimator == "price" and seen.second is None
    if needs_noise:
        assert seen.key is not None, "the price estimator needs the draw's noise"
        chunks = normal_chunks(seen.key, start, start + count, state.mean.device)
    else:
        chunks = ((offset, state.mean[offset : offset + CHUNK]) for offset in range(0, count, CHUNK))
    for offset, chunk in chunks:
        where = slice(offset, offset + len(chunk))
        here, x = state.part(where), seen.grad[where].float()
        if numbers.estimator == "none":
            moment = None
        elif seen.second is not None:
            moment = seen.second[where]
        else:
            moment = x * (chunk if needs_noise else x)
        clipped += _update_chunk(here, x, moment, numbers)
        if here.copy is not None:
            here.copy.copy_(here.mean)
    return clipped


def _update_chunk(state: State, grad: torch.Tensor, moment: torch.Tensor | None, n: StepNumbers) -> torch.Tensor:
    m, h, g = state.mean, state.hessian, state.momentum
    delta = n.scale.weight_decay
    g.mul_(n.beta1).add_(grad * n.grad_weight)
    if moment is not None:
        # The estimate f and the correction use the old Hessian.
        f = (moment * n.scale.precision_root(h) if n.estimator == "price" else moment) * n.estimate_factor
        f.clamp_(-ESTIMATE_BOUND, ESTIMATE_BOUND)
        retraction = (h - f).square_().div_(h + delta).mul_(n.retraction_weight)
        h.mul_(n.beta2).add_(f.mul_(1 - n.beta2)).add_(retraction).clamp_(*HESSIAN_RANGE)
    mean = _wide(m)
    move = (mean * delta).add_(g * (1 / n.debias)).div_(h + delta)
    clipped = (move.abs() > n.clip_radius).sum()
    m.copy_(mean - move.clamp_(-n.clip_radius, n.clip_radius).mul_(n.step_size))
    return clipped
