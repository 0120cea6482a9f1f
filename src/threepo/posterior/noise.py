"""Addressed noise: standard normal numbers as a pure function of where they belong.

    z = noise(seed, step, draw, parameter name, element index)

Nothing is stored and nothing is advanced, so any slice of any tensor of any draw can be made again, in any order, by
any process: the trainer, the rollout engine, another rank, an analysis next week.

How: the first four parts of the address are hashed to a 128-bit key (BLAKE2b). Element i of the tensor belongs to
block i // 1024; elements j and j + 512 of a block share the counter c = 512 * block + j. SplitMix64 (Steele, Lea and
Flood, 2014), keyed at its start and again between its two multiplications, maps the counter to 64 bits, and
Box-Muller maps those to the two normals. The integer part is exact everywhere; log, sin and cos may differ in the
last bit between processor families (so far only the CPU version exists), but one device type agrees with itself.
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
    encoded = b"".join(
        struct.pack("<cq", b"i", part) if isinstance(part, int) else b"s" + part.encode() + b"\0" for part in parts
    )
    digest = hashlib.blake2b(encoded, digest_size=16, person=domain.encode()).digest()
    return struct.unpack("<2Q", digest)


def noise_key(draw: Draw, name: str) -> Key:
    """The key of one parameter's noise in one draw."""
    return address_key("threepo-noise", draw.seed, draw.step, draw.index, name)


@cache
def _counter_base(device: torch.device) -> torch.Tensor:
    return torch.arange(CHUNK // 2, dtype=torch.int64, device=device) * _signed(_GOLDEN)


def _mix(z: torch.Tensor, second: int | torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    """SplitMix64 in place, from a counter times the golden gamma plus the first half of the key; any int64 shape."""
    # Torch shifts signed integers arithmetically; the masks make the shifts logical.
    z.bitwise_xor_(torch.bitwise_right_shift(z, 30, out=scratch).bitwise_and_((1 << 34) - 1)).mul_(_signed(_MIX1))
    z.bitwise_xor_(second)
    z.bitwise_xor_(torch.bitwise_right_shift(z, 27, out=scratch).bitwise_and_((1 << 37) - 1)).mul_(_signed(_MIX2))
    return z.bitwise_xor_(torch.bitwise_right_shift(z, 31, out=scratch).bitwise_and_((1 << 33) - 1))


def normal_chunks(key: Key, start: int, stop: int, device: torch.device) -> Iterator[tuple[int, torch.Tensor]]:
    """Standard normals for the elements [start, stop) of a flattened tensor, as (offset from start, float32 chunk).

    A chunk is valid until the next one is asked for. Whole blocks are computed, always from their beginning, so that
    an element's number does not depend on which slice it is read with.
    """
    if start >= stop:
        return
    begin = start // BLOCK * BLOCK
    most = min(CHUNK // BLOCK, -(-(stop - begin) // BLOCK))  # blocks a pass
    bits, scratch = torch.empty(2, most * _PAIRS, dtype=torch.int64, device=device).unbind()
    radius, angle, wave = torch.empty(3, most * _PAIRS, dtype=torch.float32, device=device).unbind()
    normals = torch.empty(most * BLOCK, dtype=torch.float32, device=device)
    base = _counter_base(device)[: most * _PAIRS]
    for first in range(begin, stop, most * BLOCK):
        torch.add(base, _signed(first // 2 * _GOLDEN + key[0]), out=bits)
        _mix(bits, _signed(key[1]), scratch)
        angle.copy_(torch.bitwise_left_shift(bits, 32, out=scratch)).mul_(math.pi * 2.0**-63)
        # The leading bits of 63 survive in float32, so small uniforms are fine-grained and tails reach 9.4 sigma.
        # Half a step is added because log(0) has no place here; both factors are powers of two, hence exact.
        radius.copy_(bits.bitwise_and_((1 << 63) - 1)).mul_(2.0**-63).add_(2.0**-64).log_().mul_(-2.0).sqrt_()
        pairs = normals.view(most, 2, _PAIRS)
        torch.mul(radius.view(most, _PAIRS), torch.cos(angle, out=wave).view(most, _PAIRS), out=pairs[:, 0])
        torch.mul(radius.view(most, _PAIRS), angle.sin_().view(most, _PAIRS), out=pairs[:, 1])
        low, high = max(start, first), min(stop, first + most * BLOCK)
        yield low - start, normals[low - first : high - first]


def normal(draw: Draw, name: str, start: int, stop: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Noise of the elements [start, stop) of the flattened parameter `name` under `draw`: float32, [stop - start]."""
    out = torch.empty(stop - start, dtype=torch.float32, device=device)
    for offset, chunk in normal_chunks(noise_key(draw, name), start, stop, out.device):
        out[offset : offset + len(chunk)] = chunk
    return out


def uniforms(keys: list[Key], start: int, stop: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Uniform numbers in [0, 1) of the counters [start, stop) under several keys: float64, [keys, stop - start]."""
    first = torch.tensor([_signed(key[0]) for key in keys], dtype=torch.int64, device=device).unsqueeze(1)
    second = torch.tensor([_signed(key[1]) for key in keys], dtype=torch.int64, device=device).unsqueeze(1)
    counters = torch.arange(start, stop, dtype=torch.int64, device=device) * _signed(_GOLDEN)
    keyed = counters + first
    z = _mix(keyed, second, torch.empty_like(keyed))
    return ((z >> 11) & ((1 << 53) - 1)).to(torch.float64) * 2.0**-53
