"""The optimizers that a recipe can name: config/optimizers.py has a record for each, which names the function here that
builds it from its settings, the model, groups of its parameters with the noise of each, and the noise seed.

An optimizer has the methods of `PolicyOptimizer`. Checkpoints save and restore the tensors of its `state_dict()`.
"""

import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch

from threepo.config import AdamWConfig, IVONConfig, ModelConfig, NoiseConfig, OptimizerConfig, SGDConfig
from threepo.errors import ThreepoWarning, UserError
from threepo.models.adapters import adapter_folder
from threepo.models.four_bit import readable
from threepo.posterior.gaussian import Posterior, has_hessian, saved_groups
from threepo.posterior.ivon import IVON
from threepo.posterior.metrics import posterior_metrics
from threepo.posterior.noise_sizes import by_size, noise_sizes
from threepo.posterior.point_optimizers import PointAdamW, PointSGD
from threepo.posterior.policy_optimizer import PolicyOptimizer, model_name
from threepo.posterior.shards import local
from threepo.run_folder import OPTIMIZER_FILE, model_folder
from threepo.training.checkpoint import restore_optimizer

LOUD_PRIOR = 2.0
"""Sigma of a learned Hessian, relative to hess_init's, above which there is a warning (method.md 1.5)."""
Groups = list[dict[str, Any]]
"""Groups of a model's named parameters, each with its noise."""


def build_adamw(settings: AdamWConfig, model: torch.nn.Module, groups: Groups, seed: int) -> PointAdamW:
    """AdamW, which trains a point estimate."""
    own = _all_but(settings, "kind", "epsilon")
    # torch's other ways on a GPU hold a tensor of the size of all weights during a step.
    fused = all(local(p).is_cuda for p in model.parameters()) or None
    return PointAdamW(groups, eps=settings.epsilon, seed=seed, model=model, fused=fused, **own)


def build_ivon(settings: IVONConfig, model: torch.nn.Module, groups: Groups, seed: int) -> IVON:
    """IVON, which learns a posterior."""
    own = _all_but(settings, "kind", "lr", "step_size", "load_hessian", "load_momentum")
    return IVON(groups, lr=settings.rate, seed=seed, model=model, **own)


def build_sgd(settings: SGDConfig, model: torch.nn.Module, groups: Groups, seed: int) -> PointSGD:
    """The plain gradient step."""
    return PointSGD(groups, seed=seed, model=model, **_all_but(settings, "kind"))


def _all_but(settings: OptimizerConfig, *names: str) -> dict[str, Any]:
    return {name: value for name, value in vars(settings).items() if name not in names}


def begin_ivon(settings: IVONConfig, optimizer: PolicyOptimizer, model: ModelConfig) -> None:
    """Load a learned Hessian, and momentum if asked for, where the recipe names one (method.md 1.5)."""
    assert isinstance(optimizer, IVON)
    if not settings.load_hessian:
        # A posterior over all weights is none over new adapters.
        adapted = model.lora.rank and not adapter_folder(model.path)
        if not adapted and has_hessian(model_folder(Path(model.path))):
            unused = f"threepo: model.path = {model.path!r} has a learned posterior, which is not used; "
            print(unused + f"optimizer.load_hessian={model.path} starts from its Hessian", file=sys.stderr)
        return
    before = posterior_metrics(optimizer)
    folder = model_folder(Path(settings.load_hessian))
    Posterior.from_pretrained(folder).load_into(optimizer)
    if settings.load_momentum:
        if not (folder / OPTIMIZER_FILE).is_file():
            raise UserError(f"{folder}: holds no {OPTIMIZER_FILE}, so no momentum; set optimizer.load_momentum = false")
        restore_optimizer(folder, optimizer)  # with the step count that debiasing needs
        optimizer.param_groups[0]["skipped_steps"] = 0
        for group in optimizer.param_groups:
            group["ess"] = settings.ess
    _warn_of_grown_noise(settings, before, posterior_metrics(optimizer))


def _warn_of_grown_noise(settings: IVONConfig, before: Mapping[str, float], after: Mapping[str, float]) -> None:
    """Warn if a loaded Hessian makes noise much larger than hess_init would, by the metrics of both posteriors."""
    growth = {name.rpartition("/")[2]: after[name] / size for name, size in before.items() if "rms/" in name and size}
    grown = {kind: ratio for kind, ratio in growth.items() if ratio > LOUD_PRIOR}
    if grown:
        kinds = ", ".join(f"{kind} {ratio:.1f}" for kind, ratio in grown.items())
        warnings.warn(
            f"optimizer.load_hessian = {settings.load_hessian!r}: sigma has grown beyond what hess_init = "
            f"{settings.hess_init:g} gives, by factors of: {kinds}; posterior/sigma_to_rms is now "
            f"{after['posterior/sigma_to_rms']:.3f}, and optimizer.ess = "
            f"{settings.ess * max(grown.values()) ** 2:.2g} would undo the largest growth (where noise.unit is not "
            f"'posterior': noise.size divided by {max(grown.values()):.1f})",
            ThreepoWarning,
            stacklevel=3,
        )


def build_optimizer(
    settings: OptimizerConfig, noise: NoiseConfig, model: torch.nn.Module, seed: int, checkpoint: Path | None = None
) -> PolicyOptimizer:
    """A new optimizer with its noise, for a new run or for one that continues from a checkpoint.

    A checkpoint says how large the noise is, because that may depend on the weights with which the run began.
    """
    read = {name: readable(p) for name, p in model.named_parameters()}
    named = {name: p for name, p in read.items() if p.is_floating_point()}  # a base in eight bits is not
    if checkpoint:
        saved = {model_name(name): group.noise_scale for group in saved_groups(checkpoint) for name in group.parameters}
        scales = {name: saved.get(model_name(name), 0.0) for name in named}
    else:
        found = noise_sizes(named.items(), noise)
        scales = {name: settings.noise_scale(noise.unit, size) for name, size in found.items()}
    structure = noise.group_structure
    groups = [
        {"params": [(name, named[name]) for name in names], "noise_scale": scale, "noise_structure": structure}
        for scale, names in by_size(scales).items()
    ]
    return resolve_name(settings.code)(settings, model, groups, seed)  # type: ignore[no-any-return]
