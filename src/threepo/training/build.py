"""From a checked recipe to the parts of a run."""

import warnings
from dataclasses import replace
from pathlib import Path

import torch

from threepo.config import (
    AdamWConfig,
    DataConfig,
    EngineConfig,
    EvalConfig,
    ModelConfig,
    OptimizerConfig,
    RewardConfig,
    SamplingConfig,
)
from threepo.data.source import open_heldout
from threepo.errors import ThreepoWarning
from threepo.evaluation.evaluate import Examination
from threepo.models.policy import Policy, load_policy
from threepo.posterior.gaussian import Posterior
from threepo.posterior.ivon import IVON
from threepo.posterior.policy_optimizer import PointAdamW, PolicyOptimizer
from threepo.posterior.statistics import posterior_metrics, sigma_growth
from threepo.rewards.grading import load_grader
from threepo.rollout.engine import RolloutEngine
from threepo.rollout.local import LocalEngine
from threepo.runs import checkpoints, model_folder
from threepo.training.checkpoint import TrainState, load_momentum, load_train_state, restore_optimizer

LOUD_PRIOR = 2.0
"""A learned Hessian that makes sigma this many times larger than hess_init would is worth a warning (method.md 1.5)."""


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
    grown = sigma_growth(optimizer)
    if grown > LOUD_PRIOR:
        warnings.warn(
            f"optimizer.load_hessian = {settings.load_hessian!r}: sigma is {grown:.1f} times what hess_init = "
            f"{settings.hess_init:g} gives, {posterior_metrics(optimizer)['posterior/sigma_to_rms']:.3f} of the "
            f"weights' RMS; optimizer.ess = {settings.ess * grown**2:.2g} would undo the growth",
            ThreepoWarning,
            stacklevel=2,
        )
    if settings.load_momentum:
        load_momentum(folder, optimizer)


def build_or_restore(
    model: ModelConfig, settings: OptimizerConfig, seed: int, run: Path | None
) -> tuple[Policy, PolicyOptimizer, TrainState]:
    """Policy, optimizer and train state as the newest checkpoint of `run` has them, or new ones if it has none."""
    saved = checkpoints(run) if run else []
    if not saved:
        policy = load_policy(model, seed)
        optimizer = build_optimizer(settings, policy.model, seed)
        load_prior(settings, optimizer)
        return policy, optimizer, TrainState()
    path = saved[-1][1]
    policy = load_policy(replace(model, path=str(path)), seed)
    optimizer = build_optimizer(settings, policy.model, seed)
    state = load_train_state(path)
    restore_optimizer(path, optimizer, state)
    return policy, optimizer, state


def build_engine(settings: EngineConfig, policy: Policy) -> RolloutEngine:
    """The rollout engine that the recipe names."""
    return LocalEngine(policy, settings)


def build_examination(
    data: DataConfig, reward: RewardConfig, settings: EvalConfig, sampling: SamplingConfig, seed: int
) -> Examination:
    """The held-out problems of a recipe, with their grader."""
    source = open_heldout(data)
    grader = load_grader(reward, source.verify)
    return Examination(source.problems.first(settings.problems), grader, data, settings, sampling, seed)
