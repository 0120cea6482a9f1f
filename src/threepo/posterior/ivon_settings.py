"""IVON's settings: their ranges, warnings about unlikely ones, and the numbers of a step that are made of them."""

import warnings
from collections.abc import Mapping
from typing import Any

from threepo.errors import ThreepoWarning, UserError
from threepo.posterior.noise_structures import check_structure
from threepo.posterior.operations import HESSIAN_RANGE, Scalars
from threepo.posterior.perturbation import sigma_scalars

RANGES = {"lr": (0.0, 1e18), "ess": (1e-8, 1e20), "hess_init": HESSIAN_RANGE, "weight_decay": (0.0, HESSIAN_RANGE[1])}
"""Wider than any useful value. Inside, ess * (h + weight_decay) neither overflows nor vanishes in float32."""
NOISE_SCALES = (1e-10, 1e10)
"""The range of noise_scale; 0, which is no noise, is allowed too."""
ADAMW_LR, SMALL_MOVE = 1e-3, 1e-7
"""An lr up to the first has AdamW's size. If it also moves no weight by more than the second, it is a mistake."""


def step_scalars(
    group: Mapping[str, Any], updates: int, draws: int, factor: float, reach: float = 1.0, size: float = 1.0
) -> Scalars:
    """The numbers of a parameter's `updates`-th update from sums over draws.

    `factor` turns the sum of the gradients into their mean. `reach` is the share of the step's gradients that was taken
    under noise of this parameter: the Hessian learns from those only, and as much less (method.md 3.11). `size` is a
    factor of the noise that the sums do not have in them yet.
    """
    (beta1, beta2), price = group["betas"], group["estimator"] == "price"
    learns = group["learn_hessian"] and group["noise_scale"] > 0 and (reach > 0 if price else reach == 1)
    weight = (1 - beta2) * reach
    if price:
        estimate = factor / (group["noise_scale"] or 1.0) / (reach * size or 1.0)
    else:
        estimate = group["ess"] * (draws * factor**2)
    return sigma_scalars(group)._replace(
        beta1=beta1,
        grad_weight=(1 - beta1) * factor,
        beta2=beta2 if reach == 1 else 1 - weight,
        estimate_weight=weight,
        retraction_weight=0.5 * weight**2,
        estimate_factor=estimate,
        momentum_factor=1 / (1 - beta1**updates) if group["debias"] else 1.0,
        clip_radius=group["clip_radius"],
        step_size=_step_size(group),
        estimator=group["estimator"] if learns else "none",
    )


def _step_size(group: Mapping[str, Any]) -> float:
    return float(group["lr"] * (group["hess_init"] + group["weight_decay"] if group["rescale_lr"] else 1.0))


def check(group: Mapping[str, Any]) -> None:
    """Raise `UserError` if a parameter group has settings, or parameters, that IVON cannot work with."""
    ranges = RANGES | ({"noise_scale": NOISE_SCALES} if group["noise_scale"] != 0 else {})
    for name, (low, high) in ranges.items():
        if not low <= group[name] <= high:
            raise UserError(f"IVON {name} = {group[name]!r}: must lie between {low:g} and {high:g}")
    if not group["clip_radius"] > 0:
        raise UserError(f"IVON clip_radius = {group['clip_radius']!r}: must be greater than 0; inf clips nothing")
    if not all(0 <= beta < 1 for beta in group["betas"]):
        raise UserError(f"IVON betas = {group['betas']!r}: both must lie in [0, 1)")
    for name, choices in (("estimator", ("price", "gradsq")), ("noise_shape", ("learned", "isotropic"))):
        if group[name] not in choices:
            raise UserError(f"IVON {name} = {group[name]!r}: must be {' or '.join(map(repr, choices))}")
    check_structure(group["noise_structure"])
    if not -(2**63) <= group["seed"] < 2**63:
        raise UserError(f"IVON seed = {group['seed']!r}: must be a signed 64-bit number")
    for p in group["params"]:
        if not p.dtype.is_floating_point:
            raise UserError(f"IVON params: one has dtype {p.dtype}; leave out what has no gradient")


def warn_of_small_moves(group: Mapping[str, Any], stacklevel: int) -> None:
    """`ThreepoWarning` if the learning rate is one for AdamW, with which IVON hardly moves.

    A third of AdamW's rate as the largest step: docs/guides/settings.md.
    """
    move = _step_size(group) * group["clip_radius"]
    if 0 < group["lr"] <= ADAMW_LR and 0 < move < SMALL_MOVE:
        factors = "lr * (hess_init + weight_decay)" if group["rescale_lr"] else "lr"
        warnings.warn(
            f"IVON lr = {group['lr']:g}: no weight moves by more than {factors} * clip_radius = {move:.2g} a step; "
            f"set lr (in TrainingArguments: learning_rate) to {group['lr'] / move / 3:.2g} times the rate of AdamW "
            f"that works for this model",
            ThreepoWarning,
            stacklevel=stacklevel + 1,
        )
