"""A posterior whose draws are adapters."""

from dataclasses import replace
from typing import Any

from threepo.config import IVONConfig, NoiseConfig
from threepo.models.policy import Policy
from threepo.training.optimizers import build_optimizer

LINEAR = NoiseConfig(rank=2, where={"*_proj.weight": 1.0})


def low_rank(policy: Policy, noise: NoiseConfig = LINEAR, **settings: Any) -> Any:
    """IVON with one sigma of 0.1, and noise of low rank."""
    own = IVONConfig(ess=1e4, hess_init=1e-2, noise_shape="isotropic")
    return build_optimizer(replace(own, **settings), noise, policy.model, seed=0)
