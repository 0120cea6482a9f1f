"""IVON's kernels in plain torch, for every device and dtype: the definition that the compiled ones follow bit for bit.

Multiplications and additions are separate calls, in a fixed order, because a fused one would round differently. All
tensors are contiguous.
"""

from collections.abc import Iterator, Sequence

import torch

from threepo.posterior.noise import BLOCK, CHUNK, Key, normal_chunks
from threepo.posterior.operands import AddNoiseTimes, Perturb, Place, State, Update
from threepo.posterior.scalars import ESTIMATE_BOUND, HESSIAN_RANGE, StepNumbers

_LONG_ROW = 8 * BLOCK
"""Rows shorter than this are made several at a time, together with the noise that lies between them."""


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """In float32, or in float64 if it is that already."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def normal(out: torch.Tensor, key: Key, place: Place) -> None:
    """out = z."""
    for part, z in _noise(key, place, out.numel(), out.device):
        out.view(-1)[part] = z


def perturb(jobs: Sequence[Perturb]) -> None:
    """See Perturb."""
    for job in jobs:
        out, mean, hessian = job.out.view(-1), job.mean.view(-1), job.hessian.view(-1)
        for part, z in _noise(job.key, job.place, len(mean), mean.device):
            out[part] = _wide(mean[part]) + job.scale.sigma(hessian[part]).mul_(z)


def add_noise_times(jobs: Sequence[AddNoiseTimes]) -> None:
    """See AddNoiseTimes."""
    for job in jobs:
        total, grad = job.total.view(-1), job.grad.view(-1)
        for part, z in _noise(job.key, job.place, len(grad), grad.device):
            total[part] += grad[part].float() * z


def update(jobs: Sequence[Update]) -> list[torch.Tensor]:
    """See Update. Returns the numbers of clipped coordinates, 0-dim int64.

    Where `seen.second` is None it is made here from the gradient, for price with the noise of `seen.key`.
    """
    return [_update(job) for job in jobs]


def _noise(key: Key, place: Place, count: int, device: torch.device) -> Iterator[tuple[slice, torch.Tensor]]:
    """Noise of the `count` elements of a place, in parts: which elements, and theirs, valid until the next part."""
    start, row, stride = place
    if count <= row or row >= _LONG_ROW:
        for first in range(0, count, row):
            begin = start + first // row * stride
            for offset, z in normal_chunks(key, begin, begin + min(row, count - first), device):
                yield slice(first + offset, first + offset + len(z)), z
        return
    rows, rest = divmod(count, row)
    stop = start + rows * stride + rest if rest else start + (rows - 1) * stride + row
    first = 0
    for offset, z in normal_chunks(key, start, stop, device):
        columns = torch.arange(offset, offset + len(z), device=device) % stride
        z = z[columns < row]
        yield slice(first, first + len(z)), z
        first += len(z)


def _update(job: Update) -> torch.Tensor:
    state, seen, numbers = job.state.flat(), job.seen.flat(), job.numbers
    count, device = len(state.mean), state.mean.device
    clipped = torch.zeros((), dtype=torch.int64, device=device)
    needs_noise = numbers.estimator == "price" and seen.second is None
    chunks: Iterator[tuple[slice, torch.Tensor | None]]
    if needs_noise:
        assert seen.key is not None, "the price estimator needs the draw's noise"
        chunks = _noise(seen.key, job.place, count, device)
    else:
        chunks = ((slice(first, first + CHUNK), None) for first in range(0, count, CHUNK))
    for where, z in chunks:
        here, x = state.part(where), seen.grad[where].float()
        if numbers.estimator == "none":
            moment = None
        elif seen.second is not None:
            moment = seen.second[where]
        else:
            moment = x * (x if z is None else z)
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
