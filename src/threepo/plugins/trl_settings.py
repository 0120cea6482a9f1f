"""Settings of TRL's GRPOConfig together with threepo's: the optimizer that they make, and the ones that are refused."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from trl import GRPOConfig

from threepo.config import (
    AdamWConfig,
    AnyEngine,
    ArmsConfig,
    IVONConfig,
    Method,
    NoiseConfig,
    OptimizerConfig,
    SamplingConfig,
)
from threepo.config.arms import check_arms
from threepo.config.engine import EngineConfig
from threepo.config.presets import PRESETS, Preset
from threepo.config.records import build
from threepo.errors import UserError
from threepo.methods.method import gradient_draws
from threepo.plugins.transformers import check_optimizer_arguments

_FILTERED = "it may change the rollouts' distribution, so that ratios to it have no meaning; leave it out"
_FILTERS = ("temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty", "no_repeat_ngram_size")
"""Settings of `generate` that come with a model where TRL sets none."""
BY_TOKENS = ("dapo", "cispo", "vespo")
"""Losses of TRL that divide by a number of tokens that a correction can set."""
BY_ROWS = ("grpo", "sapo", "luspo")
"""Losses of TRL that divide by all rows."""


@dataclass(frozen=True)
class TrainerSettings:
    """The settings of a `ThreepoTrainer`, checked together with TRL's."""

    method: Method
    noise: NoiseConfig
    arms: ArmsConfig
    optimizer: OptimizerConfig | None = None
    """None: TRL makes the optimizer, and there are no draws."""
    engine: EngineConfig | None = None
    """None: TRL's `generate` writes the completions."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """Decoding settings of the engine."""


def read_settings(
    args: GRPOConfig,
    method: Method | str,
    ivon: Mapping[str, Any],
    noise: Mapping[str, Any],
    arms: Mapping[str, Any],
    engine: Mapping[str, Any] | None,
    others: Mapping[str, Any],
) -> TrainerSettings:
    """Settings of a trainer from its arguments, of which `others` are GRPOTrainer's; `UserError` for refused ones."""
    for name, table in {"ivon": ivon, "noise": noise, "arms": arms, "engine": engine or {}}.items():
        if not isinstance(table, Mapping):
            raise UserError(f"ThreepoTrainer {name} = {table!r}: is a table; pass one like {{'size': 0.05}}")
    if isinstance(method, Method):
        check_axes(method)
    else:
        preset = find_preset(method)
        method, tables = preset.method, preset.tables
        noise, arms = {**tables.get("noise", {}), **noise}, {**tables.get("arms", {}), **arms}
    if args.num_generations % max(method.draws, 1):
        fix = f"the {method.draws} draws write equal shares; set a multiple of {method.draws}"
        raise UserError(f"GRPOConfig num_generations = {args.num_generations}: {fix}")
    own = TrainerSettings(
        method=replace(method, rollouts_per_prompt=args.num_generations),
        noise=build(NoiseConfig, noise, "noise"),
        arms=build(ArmsConfig, arms, "arms"),
    )
    if not (method.draws or method.optimizer != "adamw" or ivon or noise or arms):
        if engine is not None:
            fix = "this method around AdamW is TRL's own trainer, which has use_vllm; leave it out"
            raise UserError(f"ThreepoTrainer engine = {engine!r}: {fix}")
        return own
    optimizer = optimizer_settings(method, args, ivon)
    check(own.method, args, own.noise, engine is not None)
    check_arms(own.arms, own.method, own.noise, optimizer)
    for name in ("tools", "rollout_func", "environment_factory"):
        if others.get(name):
            fix = "draws only write plain answers; leave it out, or use episodes of `threepo train` (docs/episodes.md)"
            raise UserError(f"ThreepoTrainer {name} = {others[name]!r}: {fix}")
    if any(passed := others.get("optimizers") or ()):
        names, own_name = [type(part).__name__ for part in passed], type(optimizer).__name__.removesuffix("Config")
        fix = f"the method has {own_name}, which is set up by GRPOConfig and ivon; leave it out"
        raise UserError(f"ThreepoTrainer optimizers = {names}: {fix}")
    if engine is None:
        return replace(own, optimizer=optimizer)
    kinds: Any = AnyEngine
    if args.max_completion_length is None:
        raise UserError("GRPOConfig max_completion_length = None: an engine needs a limit; set one")
    decoding = {"temperature": args.temperature, "top_p": args.top_p, "top_k": max(args.top_k or 0, 0)}  # -1 is off
    return replace(
        own,
        optimizer=optimizer,
        engine=build(kinds, {"kind": "local", **engine}, "engine"),
        sampling=SamplingConfig(max_new_tokens=args.max_completion_length, **decoding),
    )


def find_preset(name: str) -> Preset:
    """The preset of this name; `UserError` if there is none, or TRL has no place for all that it sets."""
    fitting = {
        own: preset
        for own, preset in PRESETS.items()
        if preset.tables.keys() <= {"noise", "arms"} and not _foreign(preset.method)
    }
    if name not in fitting:
        fix = f"must be a threepo.Method, or one of {', '.join(fitting)}"
        if name in PRESETS:
            fix = f"TRL has no place for all that it sets; take one of {', '.join(fitting)}, and set the rest in TRL"
        raise UserError(f"ThreepoTrainer method = {name!r}: {fix}")
    return fitting[name]


def _foreign(method: Method) -> list[str]:
    """The axes of a method that TRL has no place for."""
    plain, axes = Method(), ("greedy", "cumulative", "log_evolution", "gradient_draws", "advantage")
    return [axis for axis in axes if getattr(method, axis) != getattr(plain, axis)]


def check_axes(method: Method) -> None:
    """Raise `UserError` for an axis of a method that TRL has no place for."""
    for axis in _foreign(method):
        value = getattr(method, axis)
        raise UserError(f"ThreepoTrainer method.{axis} = {value!r}: TRL has no place for it; leave it out")
    kind, elsewhere = method.correction.kind, method.draws > 0 and method.gradient_at != "generator"
    if kind != "none" and not elsewhere:
        fix = "the weights that write take the gradient too, and TRL gets no correction then; leave it out"
        raise UserError(f"ThreepoTrainer method.correction.kind = {kind!r}: {fix}")


def optimizer_settings(method: Method, args: Any, ivon: Mapping[str, Any]) -> OptimizerConfig:
    """Settings of the method's optimizer; `UserError` for settings of TRL's optimizers that it does not have."""
    for name in sorted(ivon.keys() & {"lr", "step_size"}):
        raise UserError(f"ThreepoTrainer ivon: {name} = {ivon[name]!r}: leave it out, and set GRPOConfig learning_rate")
    if method.optimizer == "ivon":
        check_optimizer_arguments(args, "IVON", ("optim", "adam_"))
        return IVONConfig(lr=args.learning_rate, **ivon)
    if ivon or method.optimizer != "adamw":
        fix = "pass a method with 'ivon', such as threepo.C3PO, or dataclasses.replace(method, optimizer='ivon')"
        raise UserError(f"ThreepoTrainer method: {method.name!r} has the optimizer {method.optimizer!r}; {fix}")
    check_optimizer_arguments(args, "AdamW", ("optim",), also="adamw_torch")
    own = {"betas": (args.adam_beta1, args.adam_beta2), "epsilon": args.adam_epsilon}
    return AdamWConfig(lr=args.learning_rate, weight_decay=args.weight_decay, max_grad_norm=args.max_grad_norm, **own)


def check(method: Method, args: Any, noise: NoiseConfig, has_engine: bool = False) -> None:
    """Raise `UserError` for settings under which a method does not work inside TRL."""
    ivon, draws = method.optimizer == "ivon", len(gradient_draws(method, 0, 0))
    if not draws:
        raise UserError("ThreepoTrainer method.gradient_at = 'evolution': TRL trains by gradients; use another method")
    if not ivon and (not method.draws or noise.unit == "posterior" or not noise.size):
        fix = "pass a method with draws, and noise={'unit': 'rms', 'size': 0.05}, as AdamW learns no posterior"
        raise UserError(f"ThreepoTrainer noise: around AdamW, it needs a size and a use; {fix}")
    off = {
        "use_vllm": "TRL sends vLLM one set of weights a step; pass engine={'kind': 'vllm'} to ThreepoTrainer instead",
        "use_transformers_continuous_batching": "it converts weights in place, which loses the mean; leave it out",
        "enable_jit_checkpoint": "it saves between the gradients of a step and the step; set save_steps low instead",
        "load_best_model_at_end": "it would leave the posterior behind; leave it out",
    }
    if ivon:
        off["max_grad_norm"] = "IVON learns its Hessian from the gradients, so they must not be clipped; set it to 0.0"
        off["weight_decay"] = "in IVON it is the precision of the prior; set ivon={'weight_decay': ...} instead"
    if method.correction.kind != "none":
        off |= dict.fromkeys(("top_k", "min_p", "generation_kwargs"), _FILTERED)
        off |= {name: _FILTERED for name in ("top_p", "repetition_penalty") if getattr(args, name) != 1}
        off["beta"] = "TRL has no place for the correction's weights in its KL; set it to 0.0"
        off["off_policy_mask_threshold"] = "the correction already leaves out rows that are far off; leave it out"
    if has_engine:
        unknown = "an engine of threepo's does not know it; leave it out"
        off |= dict.fromkeys(("min_p", "generation_kwargs"), unknown)
        if args.repetition_penalty != 1:
            off["repetition_penalty"] = unknown
    off = {name: reason for name, reason in off.items() if getattr(args, name, None)}
    if args.mixed_precision == "fp16":  # set by the environment, too
        off["mixed_precision"] = "float16 scales gradients, and draws take them as they are; set bf16=True, or neither"
    accumulated, group = args.gradient_accumulation_steps, method.rollouts_per_prompt
    if args.num_iterations != 1:
        off["num_iterations"] = "draws are of one step; leave it out"
    if args.steps_per_generation != accumulated:
        off["steps_per_generation"] = f"a step generates once; leave it at gradient_accumulation_steps = {accumulated}"
    if args.per_device_train_batch_size * args.steps_per_generation % group:
        whole = f"a process must hold whole groups of num_generations = {group}"
        off["per_device_train_batch_size"] = f"{whole}; set it so that {accumulated} of it are a multiple of {group}"
    if accumulated % draws:
        fix = f"set a multiple of the {draws} draws, and divide per_device_train_batch_size"
        off["gradient_accumulation_steps"] = f"a micro-batch has its gradient at one draw; {fix}"
    if method.correction.kind != "none" and method.correction.normalizer == "kept" and args.loss_type == "bnpo":
        off["loss_type"] = "it divides by all tokens of a micro-batch, also masked ones; use 'dapo'"
    for name, reason in off.items():
        raise UserError(f"GRPOConfig {name} = {getattr(args, name)!r}: {reason}")


def check_made(trainer: Any, own: TrainerSettings) -> None:
    """Raise `UserError` for settings that are known only once GRPOTrainer is made."""
    sharded = trainer.is_fsdp_enabled
    if trainer.is_deepspeed_enabled or (sharded and trainer.accelerator.state.fsdp_plugin.fsdp_version != 2):
        raise UserError("ThreepoTrainer: DeepSpeed and FSDP1 flatten parameters, which draws need; use FSDP2")
    if own.method.correction.kind != "none" and own.engine is None:
        for name in _FILTERS:
            value = getattr(trainer.model.generation_config, name)
            if value and getattr(trainer.generation_config, name) is None:
                raise UserError(f"model.generation_config.{name} = {value!r}: {_FILTERED}")
    frozen = [name for name, p in trainer.model.named_parameters() if not p.requires_grad]
    if own.engine and frozen:
        fix = "engines get their weights from the optimizer; train all weights, or leave engine out"
        raise UserError(f"ThreepoTrainer engine: {frozen[0]} is frozen: {fix}")
    if sharded and (own.noise.unit == "rms" or getattr(own.optimizer, "load_hessian", "")):
        raise UserError("GRPOConfig fsdp: noise.unit = 'rms' and load_hessian need whole weights; use DDP")


def split_by_decay(optimizer: Any, decayed: Collection[str]) -> None:
    """Split each group of AdamW in two: weights that decay, and norms and biases that do not, as in the Trainer."""
    groups = []
    for group in optimizer.param_groups:
        for decays in (True, False):
            named = zip(group["param_names"], group["params"], strict=True)
            part = {name: p for name, p in named if (name in decayed) == decays}
            if part:
                decay = group["weight_decay"] if decays else 0.0
                groups.append(group | {"params": list(part.values()), "param_names": list(part), "weight_decay": decay})
    optimizer.param_groups = groups
