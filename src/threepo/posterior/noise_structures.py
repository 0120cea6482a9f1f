"""Structures of noise: how the numbers of one parameter in one draw depend on each other.

All numbers have mean 0 and variance 1 and no two of a parameter are correlated, whatever the structure, so sigma keeps
its meaning and IVON learns the same Hessian (but with tied noise, the coupling of parameters of one shape adds to it).
To add a structure of matrices, write a subclass of `Noise` with `_numbers`, and add it to `STRUCTURES`.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from threepo.config.records import is_own
from threepo.errors import UserError
from threepo.posterior.noise import Key, chunk_of, noise_key, normal_chunks
from threepo.types import Draw

Structure = str
"""The setting of [noise] that gives matrices their structure, with its value: `rank=2`; empty: independent numbers.

It is text because it is an entry of optimizers' parameter groups, of which PyTorch's distributed checkpoints keep plain
values only: an empty dictionary gets lost."""
Chunks = Iterator[tuple[int, torch.Tensor]]


@dataclass(frozen=True)
class Noise:
    """Noise of one parameter in one draw: independent normal numbers, which the compiled kernels make from the key."""

    compiled: ClassVar = True
    """True if the numbers are `normal_chunks` of the key, times the sign: the compiled kernels make only those."""
    key: Key
    sign: int = 1

    def __init_subclass__(cls) -> None:
        cls.compiled = cls._numbers is Noise._numbers

    @classmethod
    def of(cls, draw: Draw, name: str, shape: torch.Size) -> "Noise":
        """The noise in `draw` of the parameter `name`, which has this shape as a whole."""
        return cls(noise_key(draw, name), draw.sign)

    def numbers(self, start: int, stop: int, device: torch.device) -> Chunks:
        """The elements [start, stop) of the flattened parameter, as (offset from start, new float32 chunk).

        A number does not depend on the slice that it is read with.
        """
        for offset, z in self._numbers(start, stop, device):
            yield offset, z if self.sign > 0 else z.neg_()

    def _numbers(self, start: int, stop: int, device: torch.device) -> Chunks:
        """The numbers with sign 1."""
        return normal_chunks(self.key, start, stop, device)


@dataclass(frozen=True)
class StructuredNoise(Noise):
    """Noise of a matrix whose numbers depend on each other."""

    rows: int = 0
    columns: int = 0
    value: int = 0
    """The value of the setting that gives it its structure."""


class LowRankNoise(StructuredNoise):
    """U V^T / sqrt(rank), with normal U [rows, rank] and V [columns, rank] (EGGROLL, Sarkar et al., 2511.16652).

    The key's first rows * rank numbers are U, the next ones V. Products and sums are separate, k = 0 first.
    """

    def _numbers(self, start: int, stop: int, device: torch.device) -> Chunks:
        numbers = [z for _, z in normal_chunks(self.key, 0, (self.rows + self.columns) * self.value, device)]
        u, v = torch.split(torch.cat(numbers).view(-1, self.value), [self.rows, self.columns])
        step = max(1, chunk_of(device) // self.columns)
        for row in range(start // self.columns, -(-stop // self.columns), step):
            z = torch.zeros((), device=device)
            for k in range(self.value):
                z = u[row : row + step, k, None] * v[:, k] + z
            first = row * self.columns
            low, high = max(start, first), min(stop, first + z.numel())
            yield low - start, z.mul_(self.value**-0.5).view(-1)[low - first : high - first]


TIED = "tied"
"""The structure of parameters that share their noise with all others of their shape."""
STRUCTURES: dict[str, type[StructuredNoise]] = {"rank": LowRankNoise}
"""Class of each structure by its setting of [noise]."""


def noise_of(draw: Draw, name: str, shape: torch.Size, structure: Structure) -> Noise:
    """The noise in `draw` of the parameter `name`, which has this shape as a whole; only matrices have a rank."""
    if structure == TIED:
        return Noise(noise_key(draw, f"{TIED} {'x'.join(map(str, shape))}"), draw.sign)
    if is_own(structure):
        return _own(structure).of(draw, name, shape)
    key = noise_key(draw, name)
    if len(shape) != 2 or not structure:
        return Noise(key, draw.sign)
    setting, _, value = structure.partition("=")
    return STRUCTURES[setting](key, draw.sign, *shape, int(value))


def _own(structure: Structure) -> type[Noise]:
    """The user's class `module:Class`, which must have been imported: a file of weights that names one runs nothing."""
    module, _, name = structure.partition(":")
    found = getattr(sys.modules.get(module), name, None)
    if not (isinstance(found, type) and issubclass(found, Noise)):
        fix = f"must be a subclass of {Noise.__module__}.Noise in a module that is imported; set noise.structure, or "
        raise UserError(f"noise_structure = {structure!r}: {fix}import {module} first")
    return found


def check_structure(structure: Structure) -> None:
    """Raise `UserError` for more than one setting, an unknown one, or a value below 1."""
    if is_own(structure):
        _own(structure)
        return
    setting, _, value = structure.partition("=")
    if structure not in ("", TIED) and not (setting in STRUCTURES and value.isdecimal() and int(value) >= 1):
        known = ", ".join(f"'{name}=n'" for name in STRUCTURES)
        fix = f"must be '' or '{TIED}' or one of {known}, with n of 1 or more"
        raise UserError(f"noise_structure = {structure!r}: {fix}")
