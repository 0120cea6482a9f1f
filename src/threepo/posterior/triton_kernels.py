"""The operations on CUDA tensors, in Triton: one pass over memory each. Same bits as torch_kernels.py.

A program works on one noise block: elements j and j + 512 share a counter, so it hashes 512 counters and uses both
halves of what comes out. Element offsets are 64-bit; blocks divide the whole flattened tensor, so the first and
the last program may have less than a block to do.

For the same bits the compiler must also

- not fuse multiplications and additions, which rounds once where torch_kernels.py rounds twice (`enable_fp_fusion`);
- round roots and quotients correctly: Triton's `sqrt` and `/` are approximations, `sqrt_rn` and `div_rn` are not;
- keep subnormal numbers: Triton before 3.6 flushes them to zero in `sqrt_rn` and `div_rn`, without a switch against it
  (`enable_reflect_ftz`), so `takes` declines everything there.

On an H100 the bits were a CPU's (docs/gpu.md). Without a GPU, tests run Triton's interpreter, which computes with
NumPy, where none of the three can go wrong, and look at the PTX that Triton 3.6 and 3.7 compile, which has only
instructions that round so (tests/posterior/test_triton.py). A NaN, which no finite gradient makes, may have another
payload there.
"""

# Triton reads annotations as its own, so the kernels have none of ours.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from threepo.posterior.noise import BLOCK, _signed
from threepo.posterior.noise_structures import Noise
from threepo.posterior.operations import AddNoiseTimes, Operation, Perturb, Update

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_BLOCK = tl.constexpr(BLOCK)
_PAIRS = tl.constexpr(BLOCK // 2)
_ANGLE = tl.constexpr(math.pi * 2.0**-32)
_jit: Any = triton.jit
# A key is as good as random, and those divisible by 16 would be compiled once more.
_kernel: Any = partial(triton.jit, do_not_specialize=["first", "second"])


_OPTIONS = {"enable_fp_fusion": False, "enable_reflect_ftz": False}
"""Options of every launch; the module's docstring has the reasons."""
available = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 6) and torch.version.hip is None
"""False on AMD, where Triton's output has not been examined."""


def takes(*tensors: torch.Tensor | None) -> bool:
    """True if the kernels take these tensors, and would compute the same bits as torch_kernels.py."""
    return available and all(t is None or (t.is_cuda and t.dtype in _DTYPES) for t in tensors)


@_jit
def _block_normals(block, first, second, sign):
    """The normals of a block times the sign, [512, 2]: elements j and j + 512 in row j. noise.py defines them."""
    # Unsigned, so that shifts are logical. The host passes signed numbers; a small one arrives as 32 bits.
    counter = (block * _PAIRS + tl.arange(0, _PAIRS)).to(tl.uint64)
    b = counter * 0x9E3779B97F4A7C15 + first.to(tl.int64).to(tl.uint64)
    b = (b ^ (b >> 30)) * 0xBF58476D1CE4E5B9
    b = b ^ second.to(tl.int64).to(tl.uint64)
    b = (b ^ (b >> 27)) * 0x94D049BB133111EB
    b = b ^ (b >> 31)
    wide = b.to(tl.int64).to(tl.float32)
    x = b.to(tl.int32).to(tl.float32) * _ANGLE
    u = tl.abs(wide) * 2.0**-63 + 2.0**-64
    u_bits = u.to(tl.int32, bitcast=True)
    exponent = (u_bits - 0x3F3504F3) >> 23
    v = (u_bits - exponent * 8388608).to(tl.float32, bitcast=True) - 1.0
    log = (((v * -0.076345004 + 0.12761582) * v - 0.13160183) * v + 0.14201757) * v - 0.16623357
    log = ((log * v + 0.20001227) * v - 0.25000820) * v + 0.33333331
    squared = v * v
    log = log * v * squared - squared * 0.5 + v
    radius = tl.sqrt_rn((exponent.to(tl.float32) * 0.69314718 + log) * -2.0)
    # copysign, also of zeros: the root of -0 is -0, and some versions negate by subtracting from +0.
    radius = tl.abs(radius) * tl.where(wide < 0, -sign, sign)
    q = x * x
    sine = (((q * 2.6089324e-06 - 0.00019811112) * q + 0.008333088) * q - 0.16666660) * q * x + x
    cosine = (((q * 2.3194384e-05 - 0.0013855927) * q + 0.041663989) * q - 0.49999932) * q + 1.0
    return tl.join(radius * cosine, radius * sine)


@_jit
def _at(start, row, stride, rows: tl.constexpr):
    """The block of this program, and which of the operation's elements it holds, [512, 2]; below 0: none of them.

    The operation's elements are in the tensor from `start` on, with `rows` in rows that start `stride` apart.
    """
    block = tl.program_id(0).to(tl.int64) + start // _BLOCK
    at = block * _BLOCK - start + tl.arange(0, _PAIRS)[:, None] + _PAIRS * tl.arange(0, 2)[None, :]
    if rows:
        column = at % stride
        # The remainder of an offset below 0 has one sign on a GPU and another in the interpreter.
        at = tl.where((at >= 0) & (column < row), at // stride * row + column, -1)
    return block, at


@_jit
def _wide(value):
    """Casts to float32; bfloat16 is cast in integers, both ways, because the interpreter's own casts are wrong."""
    if value.dtype == tl.bfloat16:
        value = (value.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return value.to(tl.float32)


@_jit
def _narrow(value, pointer):
    """A float32 in the dtype that `pointer` points to; to nearest, ties to even."""
    if pointer.dtype.element_ty == tl.bfloat16:
        bits = value.to(tl.uint32, bitcast=True)
        bits = (bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16
        bits = tl.where(value == value, bits, 0x7FC0)
        value = bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return value.to(pointer.dtype.element_ty)


@_jit
def _load(pointer, at, count):
    return _wide(tl.load(pointer + at, mask=(at >= 0) & (at < count), other=0.0))


@_jit
def _store(pointer, at, count, value):
    tl.store(pointer + at, _narrow(value, pointer), mask=(at >= 0) & (at < count))


@_jit
def _clamp(value, low, high):
    value = tl.where(value < low, low, value)
    return tl.where(value > high, high, value)


@_jit
def _precision_root(h, scalars, isotropic: tl.constexpr):
    """See operations.Scalars.precision_root."""
    weight_decay, ess, fixed_root, _ = scalars
    return tl.zeros_like(h) + fixed_root if isotropic else tl.sqrt_rn((h + weight_decay) * ess)


@_kernel
def _perturb(
    tensors, start, count, row, stride, rows: tl.constexpr, first, second, sign, scalars, isotropic: tl.constexpr
):
    out, mean, hessian = tensors
    _, _, _, noise_scale = scalars
    block, at = _at(start, row, stride, rows)
    root = _precision_root(_load(hessian, at, count), scalars, isotropic)
    sigma = tl.div_rn(tl.zeros_like(root) + noise_scale, root)
    _store(out, at, count, _load(mean, at, count) + sigma * _block_normals(block, first, second, sign))


@_kernel
def _add_noise_times(total, grad, start, count, row, stride, rows: tl.constexpr, first, second, sign):
    block, at = _at(start, row, stride, rows)
    product = _load(grad, at, count) * _block_normals(block, first, second, sign)
    _store(total, at, count, _load(total, at, count) + product)


@_kernel
def _update(
    tensors, clipped, start, count, row, stride, rows: tl.constexpr, first, second, sign,
    scalars, step, estimator: tl.constexpr, isotropic: tl.constexpr,
):  # fmt: skip
    mean, out, hessian, momentum, grad, second_sum = tensors
    weight_decay, _, _, _ = scalars
    beta1, grad_weight, beta2, estimate_weight, retraction_weight, estimate_factor = step[:6]
    momentum_factor, clip_radius, step_size, estimate_bound, hessian_low, hessian_high = step[6:]
    block, at = _at(start, row, stride, rows)
    m, h, x = _load(mean, at, count), _load(hessian, at, count), _load(grad, at, count)
    g = _load(momentum, at, count) * beta1 + x * grad_weight
    _store(momentum, at, count, g)
    if estimator != "none":
        if second_sum is not None:
            moment = _load(second_sum, at, count)
        elif estimator == "price":
            moment = x * _block_normals(block, first, second, sign)
        else:
            moment = x * x
        if estimator == "price":
            moment *= _precision_root(h, scalars, isotropic)
        f = _clamp(moment * estimate_factor, -estimate_bound, estimate_bound)
        gap = h - f
        retraction = tl.div_rn(gap * gap, h + weight_decay) * retraction_weight
        h = _clamp(h * beta2 + f * estimate_weight + retraction, hessian_low, hessian_high)
        _store(hessian, at, count, h)
    move = tl.div_rn(m * weight_decay + g * momentum_factor, h + weight_decay)
    total = tl.sum(((tl.abs(move) > clip_radius) & (at >= 0) & (at < count)).to(tl.int32))
    m = _narrow(m - _clamp(move, -clip_radius, clip_radius) * step_size, mean)
    tl.store(mean + at, m, mask=(at >= 0) & (at < count))
    if out is not None:
        _store(out, at, count, _wide(m))
    # A sum of integers is the same in any order. Most programs clip nothing and add nothing.
    tl.atomic_add(clipped, total.to(tl.int64), mask=total > 0, sem="relaxed")


def run(operations: Sequence[Operation]) -> list[torch.Tensor]:
    """See torch_kernels.run."""
    return [clipped for operation in operations if (clipped := _run(operation)) is not None]


def _run(operation: Operation) -> torch.Tensor | None:
    clipped = None
    match operation:
        case Perturb(out, mean, hessian, scalars=n):
            _launch(_perturb, operation, mean, ((out, mean, hessian),), n[:4], n.fixed_root > 0)
        case AddNoiseTimes(total, grad):
            _launch(_add_noise_times, operation, grad, (total, grad))
        case Update(mean, out, hessian, momentum, grad, second, scalars=n):
            clipped = torch.zeros((), dtype=torch.int64, device=mean.device)
            tensors = (mean, out, hessian, momentum, grad, second)
            _launch(_update, operation, mean, (tensors, clipped), n[:4], n[4:-1], n.estimator, n.fixed_root > 0)
    return clipped


def _launch(kernel: Any, operation: Operation, like: torch.Tensor, before: tuple[Any, ...], *after: Any) -> None:
    """Run over all blocks that the elements of `like` lie in, or that lie between its rows."""
    count = like.numel()
    if count == 0:
        return
    start, row, stride = operation.region
    last = start + (count - 1) // row * stride + (count - 1) % row
    blocks = last // BLOCK - start // BLOCK + 1
    # Without rows, neither is looked at.
    rows = (row, stride, True) if count > row else (1, 1, False)
    noise = operation.noise or Noise((0, 0))
    assert noise.compiled, "torch makes that"
    first, second = map(_signed, noise.key)
    with torch.cuda.device_of(like):  # Triton launches on the current device, wherever the tensors are
        kernel[(blocks,)](*before, start, count, *rows, first, second, float(noise.sign), *after, **_OPTIONS)
