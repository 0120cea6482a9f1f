"""IVON's settings: their ranges, and a warning about unlikely ones."""

import warnings
from collections.abc import Mapping
from typing import Any

from threepo.errors import ThreepoWarning, UserError
from threepo.posterior.noise_structures import check_structure
from threepo.posterior.operations import HESSIAN_RANGE

RANGES = {"lr": (0.0, 1e18), "ess": (1e-8, 1e20), "hess_init": HESSIAN_RANGE, "weight_decay": (0.0, HESSIAN_RANGE[1])}
"""Wider than any useful value. Inside, ess * (h + weight_decay) neither overflows nor vanishes in float32."""
NOISE_SCALES = (1e-10, 1e10)
"""The range of noise_scale; 0, which is no noise, is allowed too."""
ADAMW_LR, SMALL_MOVE = 1e-3, 1e-7
"""An lr up to the first has AdamW's size. If it also moves no weight by more than the second, it is a mistake."""


def step_size(group: Mapping[str, Any]) -> float:
    """The learning rate, times h0 + delta if it is rescaled: what the preconditioned step is multiplied by."""
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
    for p in group["params"]:
        if not p.dtype.is_floating_point:
            raise UserError(f"IVON params: one has dtype {p.dtype}; leave out what has no gradient")


def warn_of_small_moves(group: Mapping[str, Any], stacklevel: int) -> None:
    """`ThreepoWarning` if the learning rate is one for AdamW, with which IVON hardly moves.

    A third of AdamW's rate as the largest step: docs/guides/settings.md.
    """
    move = step_size(group) * group["clip_radius"]
    if 0 < group["lr"] <= ADAMW_LR and 0 < move < SMALL_MOVE:
        factors = "lr * (hess_init + weight_decay)" if group["rescale_lr"] else "lr"
        warnings.warn(
            f"IVON lr = {group['lr']:g}: no weight moves by more than {factors} * clip_radius = {move:.2g} a step; "
            f"set lr (in TrainingArguments: learning_rate) to {group['lr'] / move / 3:.2g} times the rate of AdamW "
            f"that works for this model",
            ThreepoWarning,
            stacklevel=stacklevel + 1,
        )
