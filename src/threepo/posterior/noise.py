"""Addressed noise: standard normal numbers as a pure function of their address.

    z = noise(seed, step, purpose and index of the draw, parameter name, element index)

Nothing is stored and nothing is advanced, so any slice of any tensor of any draw can be made again, in any order, by
any process: the trainer, the rollout engine, another rank, an analysis next week.

How: the first four parts of the address are hashed to a 128-bit key (BLAKE2b). Element i of the tensor belongs to
block i // 1024; elements j and j + 512 of a block share the counter c = 512 * block + j. SplitMix64 (Steele, Lea and
Flood, 2014), keyed at its start and again between its two multiplications, maps the counter to 64 bits, and
Box-Muller maps those to the two normals:

    b = bits as a signed integer;  u = |b| / 2^63 + 2^-64;  r = sign(b) sqrt(-2 ln u);  x = pi (low 32 bits) / 2^32
    z[j] = r cos x,  z[j + 512] = r sin x        (x lies in [-pi/2, pi/2): the sign of r gives the other half circle)

The logarithm, sine and cosine are polynomials in float32, evaluated with IEEE additions and multiplications in a fixed
order and no fused ones. So the numbers are the same, bit for bit, on every processor, with any number of threads,
in the compiled kernels (native.c, triton_kernels.py) and in the torch code of this file, which defines them.
"""

import hashlib
import math
import struct
from collections.abc import Iterator
from functools import cache

import torch

from threepo.types import Draw

BLOCK = 1024
"""Elements whose noise is made together: the unit of addressing."""
CHUNK = 64 * BLOCK
"""Elements made per pass: enough to hide the interpreter, small enough for the cache of a core."""

_PAIRS = BLOCK // 2

# Minimax polynomials of this file's ranges, in float32; native.c and triton_kernels.py hold the same numbers.
# sin x = x + x q S(q) and cos x = 1 + q C(q) with q = x^2 on [-pi/2, pi/2], absolute error below 6e-8;
# ln(1 + v) = v - v^2/2 + v^3 L(v) on [sqrt(1/2) - 1, sqrt(2) - 1], relative error 6e-9. Highest power first.
SIN = (2.6089324e-06, -0.00019811112, 0.008333088, -0.16666660)
COS = (2.3194384e-05, -0.0013855927, 0.041663989, -0.49999932)
LOG = (-0.076345004, 0.12761582, -0.13160183, 0.14201757, -0.16623357, 0.20001227, -0.25000820, 0.33333331)
LN2 = 0.69314718
SQRT_HALF_BITS = 0x3F3504F3
"""The float32 sqrt(1/2) as an integer: where the mantissa's range is cut."""

_GOLDEN = 0x9E3779B97F4A7C15
_MIX1 = 0xBF58476D1CE4E5B9
_MIX2 = 0x94D049BB133111EB

Key = tuple[int, int]


def _signed(value: int) -> int:
    """A 64-bit pattern as the signed integer that torch takes."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def address_key(domain: str, *parts: int | str) -> Key:
    """128 bits for an address; different domains (noise, sampling, ...) never share numbers."""
    digest = hashlib.blake2b(b"".join(map(_encoded, parts)), digest_size=16, person=domain.encode()).digest()
    return struct.unpack("<2Q", digest)


def _encoded(part: int | str) -> bytes:
    return struct.pack("<cq", b"i", part) if isinstance(part, int) else b"s" + part.encode() + b"\0"


def noise_key(draw: Draw, name: str) -> Key:
    """The key of one parameter's noise in one draw."""
    return address_key("threepo-noise", draw.seed, draw.step, draw.number, name)


def chunk_of(device: torch.device) -> int:
    """Elements that a pass over a tensor takes at a time: the cache of a core holds few, a GPU is busy with many."""
    return CHUNK if device.type == "cpu" else 256 * CHUNK


@cache
def _counter_base(device: torch.device) -> torch.Tensor:
    return torch.arange(CHUNK // 2, dtype=torch.int64, device=device) * _signed(_GOLDEN)


def _logical_shift(z: torch.Tensor, by: int) -> torch.Tensor:
    return (z >> by).bitwise_and_((1 << (64 - by)) - 1)  # torch shifts signed integers arithmetically


def _mix(z: torch.Tensor, second: int | torch.Tensor) -> torch.Tensor:
    """SplitMix64 in place, from a counter times the golden gamma plus the first half of the key; any int64 shape."""
    z.bitwise_xor_(_logical_shift(z, 30)).mul_(_signed(_MIX1)).bitwise_xor_(second)
    z.bitwise_xor_(_logical_shift(z, 27)).mul_(_signed(_MIX2))
    return z.bitwise_xor_(_logical_shift(z, 31))


def sqrt_(x: torch.Tensor) -> torch.Tensor:
    """Correctly rounded square root in place. Torch's own in float32 is sometimes one bit off on some CPUs.

    A float32's root is never so close to the middle of two float32 that an error in float64 could matter.
    """
    return x.sqrt_() if x.device.type == "mps" else x.copy_(x.double().sqrt_())


def _horner(x: torch.Tensor, coefficients: tuple[float, ...]) -> torch.Tensor:
    """The polynomial with these coefficients, highest power first. Torch fuses nothing across these calls."""
    result = (x * coefficients[0]).add_(coefficients[1])
    for c in coefficients[2:]:
        result.mul_(x).add_(c)
    return result


def _box_muller(bits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two standard normals, float32, of each of some 64 bits (int64, any shape)."""
    x = (bits << 32).float().mul_(math.pi * 2.0**-64)
    signed = bits.float()  # the leading 24 of 63 bits: small u are fine-grained, tails reach 9.4 sigma
    u = signed.abs().mul_(2.0**-63).add_(2.0**-64)  # half a step more, so that it is never 0
    u_bits = u.view(torch.int32)
    exponent = (u_bits - SQRT_HALF_BITS).bitwise_right_shift_(23)
    v = u_bits.sub_(exponent << 23).view(torch.float32).sub_(1.0)  # u = 2^exponent (1 + v)
    squared = v * v
    log = _horner(v, LOG).mul_(v).mul_(squared).sub_(squared.mul_(0.5)).add_(v)
    radius = sqrt_((exponent * LN2).add_(log).mul_(-2.0)).copysign_(signed)
    q = x * x
    return _horner(q, COS).mul_(q).add_(1.0).mul_(radius), _horner(q, SIN).mul_(q).mul_(x).add_(x).mul_(radius)


def normal_chunks(key: Key, start: int, stop: int, device: torch.device) -> Iterator[tuple[int, torch.Tensor]]:
    """Standard normals for the elements [start, stop) of a flattened tensor, as (offset from start, float32 chunk).

    Whole blocks are computed, always from their beginning, so that an element's number does not depend on which slice
    it is read with.
    """
    for first in range(start // BLOCK * BLOCK, stop, CHUNK):
        blocks = min(CHUNK // BLOCK, -(-(stop - first) // BLOCK))
        counters = _counter_base(device)[: blocks * _PAIRS] + _signed(first // 2 * _GOLDEN + key[0])
        pairs = _box_muller(_mix(counters, _signed(key[1])).view(blocks, _PAIRS))
        low, high = max(start, first), min(stop, first + CHUNK)
        yield low - start, torch.cat(pairs, dim=1).view(-1)[low - first : high - first]


def uniforms(keys: list[Key], start: int, stop: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Uniform numbers in [0, 1) of the counters [start, stop) under several keys: float64, [keys, stop - start]."""
    first, second = (
        torch.tensor([[_signed(half)] for half in halves], dtype=torch.int64, device=device)
        for halves in zip(*keys, strict=True)
    )
    counters = torch.arange(start, stop, dtype=torch.int64, device=device) * _signed(_GOLDEN)
    return _logical_shift(_mix(counters + first, second), 11).to(torch.float64) * 2.0**-53
