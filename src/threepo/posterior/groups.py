"""Settings of IVON's parameter groups: what they mean together, and which are refused."""

import math
from typing import Any

from threepo.errors import UserError
from threepo.posterior.scalars import Scale, StepNumbers
from threepo.types import Draw

MOST_ESS = 1e20
"""ess times the largest Hessian must not overflow float32."""


def scale_of(group: dict[str, Any]) -> Scale:
    """What a parameter group's Hessians mean."""
    isotropic = group["hess_init"] if group["noise_shape"] == "isotropic" else None
    return Scale(group["ess"], group["weight_decay"], group["noise_scale"], isotropic)


def step_numbers(group: dict[str, Any], steps: int, draws: list[Draw | None], factor: float) -> StepNumbers:
    """Of the update that is a parameter's `steps`-th, from sums over these draws (None: at the mean).

    `factor` turns the sum of the gradients into their mean.
    """
    beta1, beta2 = group["betas"]
    learns = group["learn_hessian"] and group["noise_scale"] > 0 and None not in draws
    return StepNumbers(
        scale=scale_of(group),
        estimator=group["estimator"] if learns else "none",
        beta1=beta1,
        beta2=beta2,
        grad_factor=factor,
        second_factor=factor if group["estimator"] == "price" else len(draws) * factor**2,
        debias=1 - beta1**steps if group["debias"] else 1.0,
        clip_radius=group["clip_radius"],
        step_size=group["lr"] * (group["hess_init"] + group["weight_decay"] if group["rescale_lr"] else 1.0),
    )


def check_group(group: dict[str, Any]) -> None:
    """Raise `UserError` if a parameter group has settings, or parameters, that IVON cannot work with."""
    for name in ("ess", "hess_init", "clip_radius"):
        if not group[name] > 0:
            raise UserError(f"IVON {name} = {group[name]!r}: must be greater than 0")
    for name in ("lr", "weight_decay", "noise_scale"):
        if not group[name] >= 0:
            raise UserError(f"IVON {name} = {group[name]!r}: must be 0 or more")
    for name in ("lr", "ess", "hess_init", "weight_decay", "noise_scale"):
        if not math.isfinite(group[name]):
            raise UserError(f"IVON {name} = {group[name]!r}: must be finite")
    if group["ess"] > MOST_ESS:
        raise UserError(f"IVON ess = {group['ess']!r}: must be at most {MOST_ESS:g}, or float32 overflows")
    if not all(0 <= beta < 1 for beta in group["betas"]):
        raise UserError(f"IVON betas = {group['betas']!r}: both must lie in [0, 1)")
    for name, choices in (("estimator", ("price", "gradsq")), ("noise_shape", ("learned", "isotropic"))):
        if group[name] not in choices:
            raise UserError(f"IVON {name} = {group[name]!r}: must be {' or '.join(map(repr, choices))}")
    for p in group["params"]:
        if not p.dtype.is_floating_point:
            raise UserError(f"IVON params: one has dtype {p.dtype}; leave out what has no gradient")
