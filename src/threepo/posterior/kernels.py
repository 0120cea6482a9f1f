"""IVON's arithmetic on whole parameters: finds what lies on this rank, and hands it to the fastest kernels there are.

Compiled C on a CPU (native.py), Triton on CUDA (triton_kernels.py), plain torch (plain.py) everywhere else. Which one
it is changes the time, not a bit of the numbers. Parameters may be plain tensors, of any memory layout, or DTensors;
the Hessian, the momentum and everything else that comes with a parameter have its shape and placement.
"""

import importlib
import importlib.util
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from types import ModuleType
from typing import Any

import torch

from threepo.posterior import native, plain
from threepo.posterior.layout import local, pieces
from threepo.posterior.noise import Key, noise_key
from threepo.posterior.operands import Seen, State
from threepo.posterior.scalars import Scale, StepNumbers
from threepo.types import Draw


@cache
def _triton_kernels() -> ModuleType | None:
    """Triton comes with CUDA builds of torch; where it is missing, plain torch does the work."""
    if importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module("threepo.posterior.triton_kernels")


def backend(*tensors: torch.Tensor | None) -> Any:
    """The module whose kernels take these flat tensors."""
    if native.takes(*tensors):
        return native
    if all(tensor is None or tensor.is_cuda for tensor in tensors):
        kernels = _triton_kernels()
        if kernels is not None and kernels.takes(*tensors):
            return kernels
    return plain


def _check(first: torch.Tensor, others: Sequence[torch.Tensor | None], states: Sequence[torch.Tensor | None]) -> None:
    """The compiled kernels take addresses, so nobody after this would notice."""
    for other in (*others, *states):
        if other is not None and (other.shape != first.shape or local(other).shape != local(first).shape):
            raise RuntimeError(f"shapes differ: {list(first.shape)} and {list(other.shape)}, here or in their shards")
    for state in states:
        if state is not None and state.dtype != torch.float32:
            raise RuntimeError(f"IVON's state is float32, this is {state.dtype}")


class _Flat:
    """The local elements of a tensor, flat and in logical order, for the time of a `with` block.

    Where the memory has another order (channels-last, a transposed view) a copy is worked on, and written back.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = local(tensor.detach())

    def __enter__(self) -> torch.Tensor:
        self.flat = self.tensor.contiguous().view(-1)
        return self.flat

    def __exit__(self, *_: object) -> None:
        if not self.tensor.is_contiguous():
            self.tensor.copy_(self.flat.view(self.tensor.shape))
        elif not self.tensor.is_inference():
            torch.autograd.graph.increment_version(self.tensor)  # what the compiled kernels wrote, autograd shall know


def read(tensor: torch.Tensor) -> torch.Tensor:
    """The local elements of a tensor, flat and in logical order, for reading."""
    return local(tensor.detach()).contiguous().view(-1)


def perturb(
    out: torch.Tensor,
    mean: torch.Tensor,
    hessian: torch.Tensor,
    key: Key,
    scale: Scale,
) -> None:
    """out = mean + sigma * z, added in float32 and rounded once to the dtype of `out`, which may be `mean`."""
    _check(mean, [out], [hessian])
    h = read(hessian)
    with _Flat(out) as target:
        m = target if out is mean else read(mean)
        for piece in pieces(mean):
            part = piece.local
            backend(m, target, h).perturb(target[part], m[part], h[part], key, piece.start, scale)


def add_noise_times(total: torch.Tensor, grad: torch.Tensor, key: Key) -> None:
    """total += z * grad."""
    _check(grad, [], [total])
    t, g = read(total), read(grad)
    for piece in pieces(grad):
        backend(t, g).add_noise_times(t[piece.local], g[piece.local], key, piece.start)


def update(state: State, seen: Seen, numbers: StepNumbers) -> torch.Tensor:
    """One IVON step in place. Returns the number of coordinates clipped on this rank, 0-dim."""
    _check(state.mean, [seen.grad, state.copy], [state.hessian, state.momentum, seen.second])
    low = state.copy is not None and state.mean.dtype != torch.float32
    assert not low, "a copy is of a mean that is not rounded itself"
    flat_seen = Seen(read(seen.grad), None if seen.second is None else read(seen.second), seen.key)
    clipped = torch.zeros((), dtype=torch.int64, device=state.mean.device)
    with _Flat(state.mean) as m, nullcontext() if state.copy is None else _Flat(state.copy) as c:
        flat = State(m, c, read(state.hessian), read(state.momentum))
        kernel = backend(*flat, flat_seen.grad, flat_seen.second).update
        for piece in pieces(state.mean):
            clipped += kernel(flat.part(piece.local), flat_seen.part(piece.local), piece.start, numbers)
    return clipped


def normal(draw: Draw, name: str, start: int, stop: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Noise of the elements [start, stop) of the flattened parameter `name` under `draw`: float32, [stop - start]."""
    assert 0 <= start <= stop, f"elements [{start}, {stop}) do not exist"
    out = torch.empty(stop - start, dtype=torch.float32, device=device)
    backend(out).normal(out, noise_key(draw, name), start)
    return out
