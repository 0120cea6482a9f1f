"""Place and size of noise: the [noise] table as a number for every parameter."""

import re
import warnings
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

import torch

from threepo.config import NoiseConfig
from threepo.errors import ThreepoWarning, UserError
from threepo.posterior.shards import local, sum_over_shards
from threepo.types import Arm

KINDS = ("embedding", "head", "norm", "attention", "mlp", "other")
_PARTS = {
    "embed": "embedding",
    "lm_head": "head",
    "norm": "norm",
    "attn": "attention",
    "attention": "attention",  # GPT-NeoX
    "mlp": "mlp",
}
"""Kind of layer by a part of a parameter's name; the first part that fits counts."""


def layer_kind(name: str) -> str:
    """Kind of layer that a parameter belongs to, by the names that Hugging Face decoders share."""
    return next((kind for part, kind in _PARTS.items() if part in name), "other")


def noise_sizes(named: Iterable[tuple[str, torch.Tensor]], settings: NoiseConfig) -> dict[str, float]:
    """The noise of every parameter by name, 0 for none: sigma, or with unit = "posterior" a factor of sigma.

    Frozen parameters have none, unless all are frozen. With unit = "rms" a collective where parameters are sharded.
    `UserError` if a key of `noise.where` fits none.
    """
    parameters = dict(named)
    trained = trained_names(parameters)
    factors = dict.fromkeys(parameters, 0.0) | {name: _factor(name, settings.where) for name in trained}
    for key in settings.where:
        if not fits_any(key, trained):
            kinds = ", ".join(dict.fromkeys(map(layer_kind, trained)))
            raise UserError(
                f"noise.where.{key}: no parameter of this model fits; it has the kinds {kinds} (a tied head is the "
                f"embedding), and a pattern is compared with names such as {trained[0]!r}"
            )
    found = {name: settings.size * factor for name, factor in factors.items()}
    if settings.unit == "rms":
        for name in filter(found.get, found):
            fix = f"{name} adapts weights that cannot be read; load the base in four bits, or without quantization"
            settings.check("unit", scaled_by(name) in parameters, fix)
        asked = found
        found = {name: size and size * root_mean_square(parameters[scaled_by(name)]) for name, size in asked.items()}
        fix = "all weights of noise.where are 0, and so is their RMS; name others"
        settings.check("unit", not settings.size or any(found.values()), fix)
        if zero := [name for name, p in parameters.items() if p.ndim > 1 and asked[name] and not found[name]]:
            warnings.warn(
                f"noise.unit = 'rms': all weights of {zero[0]} ({len(zero)} matrices) are 0, and so is their noise "
                "in the whole run; noise.unit = 'absolute' gives them some",
                ThreepoWarning,
                stacklevel=2,
            )
    return found


def arm_factor(arm: Arm | None, name: str) -> float:
    """Factor by which an arm changes the sigma of a parameter; 0: the parameter has no noise."""
    return 1.0 if arm is None else arm.size if _fits(arm.place, name) else 0.0


def trained_names(parameters: Mapping[str, torch.Tensor]) -> list[str]:
    """The parameters that require gradients; if none does, as in a state dict, all."""
    return [name for name, p in parameters.items() if p.requires_grad] or list(parameters)


def fits_any(key: str, names: Iterable[str]) -> bool:
    """True if a key of `noise.where` fits one of the parameters with these names."""
    return any(_fits(key, name) for name in names)


def scaled_by(name: str) -> str:
    """Name of the parameter whose weights set the scale of noise: for an adapter's B the weights that it adapts.

    Adapters have peft's names (models/adapters.py).
    """
    return re.sub(r"\.lora_B\.[^.]+\.weight$", ".base_layer.weight", name)


def root_mean_square(p: torch.Tensor) -> float:
    """Root mean square of all elements to seven digits, so that the rounding of sums over shards does not matter."""
    square = torch.linalg.vector_norm(local(p.detach()), dtype=torch.float64).square()
    return float(f"{(sum_over_shards([(p, square)]) / p.numel()) ** 0.5:.7g}")


def by_size(found: Mapping[str, float]) -> dict[float, list[str]]:
    """The names of each size, in their order."""
    groups: dict[float, list[str]] = {}
    for name, size in found.items():
        groups.setdefault(size, []).append(name)
    return groups


def _fits(key: str, name: str) -> bool:
    return key in ("all", layer_kind(name)) or fnmatchcase(name, key)


def _factor(name: str, where: dict[str, float]) -> float:
    """A pattern counts more than a kind, a kind more than `all`; of several patterns the last counts."""
    fitting = [key for key in reversed(where) if _fits(key, name)]
    best = max(fitting, key=lambda key: 0 if key == "all" else 1 if key in KINDS else 2, default="")
    return where.get(best, 0.0)
