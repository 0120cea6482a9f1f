"""From a checked recipe to the parts of a run."""

import sys
import warnings
from dataclasses import replace
from pathlib import Path

import torch

from threepo.config import AdamWConfig, ModelConfig, OptimizerConfig
from threepo.errors import ThreepoWarning
from threepo.models.policy import Policy, load_policy
from threepo.posterior.gaussian import FILE_NAME, Posterior
from threepo.posterior.ivon import IVON
from threepo.posterior.policy_optimizer import PointAdamW, PolicyOptimizer
from threepo.posterior.statistics import posterior_metrics, sigma_growth
from threepo.run_folder import checkpoints, model_folder
from threepo.training.checkpoint import TrainState, load_momentum, load_train_state, restore_optimizer

LOUD_PRIOR = 2.0
"""Sigma of a learned Hessian, relative to that of hess_init, above which there is a warning (method.md 1.5)."""


def build_optimizer(settings: OptimizerConfig, model: torch.nn.Module, seed: int) -> PolicyOptimizer:
    """AdamW or IVON over all parameters of the model; IVON with a loaded Hessian if the recipe names one."""
    if isinstance(settings, AdamWConfig):
        return PointAdamW(
            model.named_parameters(),
            max_grad_norm=settings.max_grad_norm,
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.epsilon,
            weight_decay=settings.weight_decay,
        )
    return IVON(
        model.named_parameters(),
        lr=settings.lr,
        ess=settings.ess,
        hess_init=settings.hess_init,
        betas=settings.betas,
        weight_decay=settings.weight_decay,
        clip_radius=settings.clip_radius,
        estimator=settings.estimator,
        debias=settings.debias,
        rescale_lr=settings.rescale_lr,
        noise_scale=settings.noise_scale,
        noise_shape=settings.noise_shape,
        learn_hessian=settings.learn_hessian,
        seed=seed,
    )


def load_prior(settings: OptimizerConfig, optimizer: PolicyOptimizer) -> None:
    """Start IVON from a learned Hessian, and momentum if asked for, where the recipe names one (method.md 1.5)."""
    if isinstance(settings, AdamWConfig) or not settings.load_hessian:
        return
    assert isinstance(optimizer, IVON)
    folder = model_folder(Path(settings.load_hessian))
    Posterior.from_pretrained(folder).load_into(optimizer)
    grown = {kind: ratio for kind, ratio in sigma_growth(optimizer).items() if ratio > LOUD_PRIOR}
    if grown:
        kinds = ", ".join(f"{kind} {ratio:.1f}" for kind, ratio in grown.items())
        warnings.warn(
            f"optimizer.load_hessian = {settings.load_hessian!r}: sigma has grown beyond what hess_init = "
            f"{settings.hess_init:g} gives, by factors of: {kinds}; posterior/sigma_to_rms is now "
            f"{posterior_metrics(optimizer)['posterior/sigma_to_rms']:.3f}, and optimizer.ess = "
            f"{settings.ess * max(grown.values()) ** 2:.2g} would undo the largest growth",
            ThreepoWarning,
            stacklevel=2,
        )
    if settings.load_momentum:
        load_momentum(folder, optimizer)


def tell_of_unused_posterior(model: ModelConfig, settings: OptimizerConfig) -> None:
    """Say on stderr that the model brings a posterior that IVON could start from, where the recipe does not use it."""
    unused = not isinstance(settings, AdamWConfig) and not settings.load_hessian
    if unused and (model_folder(Path(model.path)) / FILE_NAME).is_file():
        print(
            f"threepo: model.path = {model.path!r} has a learned posterior, which is not used; "
            f"optimizer.load_hessian={model.path} starts from its Hessian",
            file=sys.stderr,
        )


def build_or_restore(
    model: ModelConfig, settings: OptimizerConfig, seed: int, run: Path | None
) -> tuple[Policy, PolicyOptimizer, TrainState]:
    """Policy, optimizer and train state as the newest checkpoint of `run` has them, or new ones if it has none."""
    saved = checkpoints(run) if run else []
    if not saved:
        policy = load_policy(model, seed)
        optimizer = build_optimizer(settings, policy.model, seed)
        load_prior(settings, optimizer)
        tell_of_unused_posterior(model, settings)
        return policy, optimizer, TrainState()
    path = saved[-1][1]
    policy = load_policy(replace(model, path=str(path), tokenizer=""), seed)
    optimizer = build_optimizer(settings, policy.model, seed)
    state = load_train_state(path)
    restore_optimizer(path, optimizer, state)
    return policy, optimizer, state
