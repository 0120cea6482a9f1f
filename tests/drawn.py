"""The noise of a draw by itself, as the kernels add it."""

import torch

from threepo.posterior import kernels
from threepo.posterior.noise import noise_key
from threepo.posterior.noise_structures import Noise
from threepo.posterior.operations import Perturb, Region, Scalars
from threepo.types import Draw

UNIT = Scalars(weight_decay=0.0, ess=1.0, fixed_root=0.0, noise_scale=1.0)
"""Scalars with which sigma is 1 where the Hessian is 1."""


def normal(draw: Draw, name: str, start: int, stop: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Noise of the elements [start, stop) of the flattened parameter `name` under `draw`: float32, [stop - start]."""
    z, ones = torch.zeros(stop - start, device=device), torch.ones(stop - start, device=device)
    kernels.backend(z).run([Perturb(z, z, ones, Noise(noise_key(draw, name), draw.sign), UNIT, Region(start))])
    return z
