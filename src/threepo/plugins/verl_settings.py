"""Settings of verl's configuration together with threepo's: the method that they make, and what is refused."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from threepo.config import ArmsConfig, IVONConfig, Method, NoiseConfig
from threepo.config.arms import check_arms
from threepo.config.presets import PRESETS
from threepo.config.records import build
from threepo.errors import UserError
from threepo.methods.method import gradient_draws

_SETTINGS = "actor_rollout_ref.actor.optim.override_optimizer_config"
_METHODS = ("grpo", "b3po", "m3po", "c3po", "c3po_replay", "c3po_auto")
"""Presets supported inside verl; verl's own trainer has the losses and credit rules of the others."""
Settings = tuple[Method, ArmsConfig, dict[str, Any]]
"""The method, how it chooses arms, and settings of `threepo.IVON`."""


def read_settings(override: Mapping[str, Any] | None) -> Settings:
    """The settings in verl's `override_optimizer_config`; keys of its `arms` override the preset's."""
    settings: Any = OmegaConf.to_container(OmegaConf.create(override or {}))
    name = settings.pop("method", None)
    if name not in _METHODS:
        raise UserError(f"{_SETTINGS}.method = {name!r}: must be one of {', '.join(_METHODS)}")
    for key in sorted(settings.keys() & {"lr", "step_size"}):
        fix = "leave it out, and set actor_rollout_ref.actor.optim.lr"
        raise UserError(f"{_SETTINGS}.{key} = {settings[key]!r}: {fix}")
    preset = PRESETS[name]
    draws = settings.pop("draws", preset.method.draws)
    method = dataclasses.replace(preset.method, draws=draws, rollouts_per_prompt=2 * max(draws, 1))
    arms = build(ArmsConfig, {**preset.tables.get("arms", {}), **settings.pop("arms", {})}, "arms")
    return method, arms, settings


def ranks_of_replica(rollout: DictConfig) -> int:
    """Number of the trainer's ranks that one rollout replica spans."""
    return int(rollout.tensor_model_parallel_size * rollout.data_parallel_size * rollout.pipeline_model_parallel_size)


def _check_parts(actor: DictConfig) -> None:
    """`UserError` for settings of the actor with which a batch cannot be split by draws."""
    for name, value, why in (
        ("use_dynamic_bsz", True, "which micro-batches of one size do not divide"),
        ("loss_agg_mode", "token-mean", "whose gradients are added up by their tokens"),
    ):
        if actor[name] != value:
            message = f"this method splits a batch by draws, {why}; set it to {value}"
            raise UserError(f"actor_rollout_ref.actor.{name} = {actor[name]!r}: {message}")
    if (loss := actor.policy_loss.loss_mode) in ("sapo", "geo_mean"):
        why = "this method splits a batch by draws, and this loss is no mean over tokens; choose another"
        raise UserError(f"actor_rollout_ref.actor.policy_loss.loss_mode = {loss!r}: {why}")


def _set_correction(method: Method, algorithm: DictConfig, rollout: DictConfig) -> None:
    """Write the method's correction into verl's configuration, unless the user has chosen one."""
    correction, own = method.correction, algorithm.rollout_correction
    if own is None:
        raise UserError("algorithm.rollout_correction = null: this method needs a correction; leave it out")
    if own.get("bypass_mode"):
        fix = "verl's trainer then masks nothing, and this method needs a correction; set it to false"
        raise UserError(f"algorithm.rollout_correction.bypass_mode = True: {fix}")
    if rollout.get("top_p", 1) < 1 or rollout.get("top_k", -1) > 0:
        fix = "they change what the rollouts are drawn from, so that ratios mean nothing; leave them out"
        raise UserError(f"actor_rollout_ref.rollout.top_p, top_k: {fix} (val_kwargs has its own)")
    if own.rollout_is is None and own.rollout_rs is None:
        rollout.calculate_log_probs = True
        own.rollout_is, own.rollout_is_threshold = "sequence", correction.high
        own.rollout_rs, own.rollout_rs_threshold = "seq_sum_k1", f"{correction.low}_{correction.high}"


def check_config(config: DictConfig) -> Settings:
    """Return threepo's settings in verl's configuration, and write the method's correction into the configuration.

    `UserError` for settings that do not fit the method.
    """
    actor, rollout, trainer = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout, config.trainer
    method, arms, ivon = read_settings(actor.optim.override_optimizer_config)
    if actor.strategy != "fsdp2":
        raise UserError(f"actor_rollout_ref.actor.strategy = {actor.strategy!r}: only fsdp2 has an engine with IVON")
    replicas = trainer.nnodes * trainer.n_gpus_per_node // ranks_of_replica(rollout)
    if method.draws > replicas:
        fix = f"each needs a rollout replica of its own, and there are {replicas}; set draws to {replicas} or less"
        raise UserError(f"{_SETTINGS}.draws = {method.draws}: {fix}")
    if method.draws and rollout.n % method.draws:
        fix = f"must be a multiple of draws = {method.draws}, so that each writes the same share of a prompt"
        raise UserError(f"actor_rollout_ref.rollout.n = {rollout.n}: {fix}")
    if method.draws > 1 and method.advantages == "draw" and rollout.n < 2 * method.draws:
        fix = f"leaves each draw one completion of a prompt, to compare with nothing; set {2 * method.draws} or more"
        raise UserError(f"actor_rollout_ref.rollout.n = {rollout.n}: {fix}")
    if len(gradient_draws(method, 0, 0)) > 1:
        _check_parts(actor)
    if arms.active:
        method = dataclasses.replace(method, rollouts_per_prompt=rollout.n)
    estimator = ivon.get("estimator", IVONConfig().estimator)
    check_arms(arms, method, NoiseConfig(), IVONConfig(estimator=estimator))
    if method.correction.kind != "none" and method.draws > 1:
        _set_correction(method, config.algorithm, rollout)
    return method, arms, ivon
