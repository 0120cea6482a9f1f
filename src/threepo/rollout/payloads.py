"""Payloads in shared memory, by which a vLLM replica gets a draw: all weights, adapters, or low-rank noise as adapters.

With adapters, the frozen weights are pushed once, and a draw is an adapter on top of them (`engine.vllm.adapters`), so
that a replica decodes several draws in one batch; the weight check then runs in the trainer's precision, with adapters
in the engine's. Draws of low-rank noise are adapters on top of the mean, which is pushed once a step
(`engine.vllm.draw_rank`).

If the model is sharded, the policy's architecture stands for it: nothing here needs its weights.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from threepo.config import VLLMEngineConfig
from threepo.errors import UserError
from threepo.models.adapters import NAME, is_adapter, peft_name, without_adapter
from threepo.models.policy import Policy
from threepo.posterior.policy_optimizer import WeightSource
from threepo.posterior.shards import is_spread
from threepo.rollout.low_rank import adapter_layout, multiply_out, write_adapters
from threepo.rollout.memory import Layout, layout_of
from threepo.rollout.vllm_replica import LORA_RANKS
from threepo.rollout.weight_check import expected_logprobs
from threepo.types import Draw

Weights = Iterable[tuple[str, torch.Tensor]]
Tensors = Mapping[str, torch.Tensor]


def choose_payload(policy: Policy, settings: VLLMEngineConfig) -> "Payload":
    """The payload for a policy and these settings; `UserError` for settings that contradict the policy."""
    own, dtype = settings.vllm, getattr(torch, settings.dtype)
    if own.draw_rank and (policy.has_adapters or not own.adapters):
        fix = "draws beside the mean need engine.vllm.adapters above 0, and no adapters of the model; set it to 0"
        raise UserError(f"engine.vllm.draw_rank = {own.draw_rank}: {fix}")
    if not own.adapters or not (policy.has_adapters or own.draw_rank):
        return Payload(policy, dtype)
    if any(map(is_spread, policy.model.parameters())):
        fix = "several ranks push draws as all weights; set it to 0"
        raise UserError(f"engine.vllm.adapters = {own.adapters}: {fix}")
    return LowRankPayload(policy, dtype, own.draw_rank) if own.draw_rank else AdapterPayload(policy, dtype)


class Payload:
    """All weights of a draw, a tied tensor under each of its names."""

    adapters: Mapping[str, Any] = {}
    """Peft's configuration of the adapters for vLLM; empty if a draw is all weights."""

    def __init__(self, policy: Policy, dtype: torch.dtype) -> None:
        self._policy = policy
        self._sources = parameter_names(policy.architecture)
        state = policy.architecture.state_dict()
        self.base_layout: Layout = layout_of({name: state[name] for name in self._sources}, dtype)
        """Layout of all weights: those that adapters are added to, if there are any."""
        self.layout = self.base_layout
        """Layout of a draw's tensors."""

    def frozen_base(self) -> Weights | None:
        """The weights that adapters are added to, if they never change."""
        return None

    def step_base(self, posterior: WeightSource) -> Weights | None:
        """The weights that adapters are added to, if every training step changes them."""
        return None

    def write(self, posterior: WeightSource, draw: Draw | None, tensors: Tensors) -> None:
        """Write a draw into tensors of `layout`."""
        self.write_base(self._policy.served(posterior).weights(draw), tensors)

    def write_base(self, weights: Weights, tensors: Tensors) -> None:
        """Write all weights into tensors of `base_layout`; the model's where `weights` has none."""
        state = self._policy.architecture.state_dict()
        written = {self._sources[name]: tensors[name].copy_(value.detach()) for name, value in weights}
        for name, source in self._sources.items():
            tensors[name].copy_(written.get(source, state[name]))

    def logprobs(self, tensors: Tensors, base: Tensors, prompt: tuple[int, ...]) -> torch.Tensor:
        """The trainer's log-probs [T - 1] of a prompt of T tokens under a draw as written, on top of `base`."""
        own = {name: tensors[name] for name, source in self._sources.items() if source == name}
        return expected_logprobs(self._policy.architecture, own, prompt, self._policy.device)


class AdapterPayload(Payload):
    """The adapters of the policy, on top of its frozen weights."""

    def __init__(self, policy: Policy, dtype: torch.dtype) -> None:
        super().__init__(policy, dtype)
        own = policy.model.named_parameters()
        self._adapters = {peft_name(name): (name, p) for name, p in own if is_adapter(name)}
        self.layout = layout_of({name: p for name, (_, p) in self._adapters.items()}, dtype)
        config = policy.model.peft_config[NAME]
        self.adapters = adapter_settings(self.layout, "model.lora.rank", config.r, config.lora_alpha)

    def frozen_base(self) -> Weights:
        own = self._policy.model.named_parameters()
        return ((without_adapter(name), p) for name, p in own if not is_adapter(name))

    def write(self, posterior: WeightSource, draw: Draw | None, tensors: Tensors) -> None:
        for name, value in posterior.weights(draw):
            if is_adapter(name):
                tensors[peft_name(name)].copy_(value)

    def logprobs(self, tensors: Tensors, base: Tensors, prompt: tuple[int, ...]) -> torch.Tensor:
        policy = self._policy
        own = {name: tensors[served].to(p.dtype) for served, (name, p) in self._adapters.items()}
        with torch.autocast(policy.device.type, policy.compute_dtype, enabled=has_bfloat16(policy)):
            return expected_logprobs(policy.model, own, prompt, policy.device)


class LowRankPayload(Payload):
    """Low-rank noise as adapters, on top of the mean."""

    def __init__(self, policy: Policy, dtype: torch.dtype, lora_rank: int) -> None:
        super().__init__(policy, dtype)
        self.layout = adapter_layout(policy.architecture, lora_rank, dtype)
        self.adapters = adapter_settings(self.layout, "engine.vllm.draw_rank", lora_rank, lora_rank)

    def step_base(self, posterior: WeightSource) -> Weights:
        return posterior.weights(None)

    def write(self, posterior: WeightSource, draw: Draw | None, tensors: Tensors) -> None:
        write_adapters(posterior, draw, tensors)

    def logprobs(self, tensors: Tensors, base: Tensors, prompt: tuple[int, ...]) -> torch.Tensor:
        return super().logprobs(multiply_out(base, tensors), base, prompt)


def has_bfloat16(policy: Policy) -> bool:
    """Whether the trainer itself holds weights in bfloat16, as frozen ones may be."""
    return any(p.dtype == torch.bfloat16 for p in policy.model.parameters())


def parameter_names(model: Any) -> dict[str, str]:
    """The parameter's name of every tensor in the state dict, which is another name where it is tied."""
    known = {id(parameter): name for name, parameter in model.named_parameters()}
    return {name: known.get(id(tensor), name) for name, tensor in model.state_dict(keep_vars=True).items()}


def adapter_settings(layout: Layout, setting: str, lora_rank: int, alpha: float) -> dict[str, Any]:
    """Settings of vLLM for adapters; `UserError` for a rank that it does not serve, which `setting` names."""
    if lora_rank > LORA_RANKS[-1]:
        whole = "engine.vllm.adapters = 0" if setting.startswith("model") else f"{setting} = 0"
        fix = f"vLLM serves up to {LORA_RANKS[-1]}; lower it, or push all weights: {whole}"
        raise UserError(f"{setting} = {lora_rank}: {fix}")
    # vLLM leaves other layers alone. With adapters for the head of a Llama, 0.32 fails at the weight check on a CPU.
    layers = sorted({name.split(".")[-3] for name in layout})
    return {"r": lora_rank, "lora_alpha": alpha, "target_modules": layers}
