"""Contents of shared memory for a draw: all of its weights, the adapters of a model, or low-rank noise.

With adapters, the frozen weights are pushed once, and each draw is an adapter beside them (`engine.vllm.adapters`): the
draws of a replica are decoded in one batch. The probe then runs in the trainer's precision, with adapters in the
engine's. So are draws of low-rank noise beside the mean, which is pushed once a step (`engine.vllm.draw_rank`).

Where the model is sharded, the policy's architecture stands for it: nothing here needs its weights.
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
from threepo.rollout.low_rank import adapter_layout, merged, write_adapters
from threepo.rollout.memory import Layout, layout_of
from threepo.rollout.probe import expected_logprobs
from threepo.rollout.vllm_server import RANKS
from threepo.types import Draw

Weights = Iterable[tuple[str, torch.Tensor]]
Tensors = Mapping[str, torch.Tensor]


def contents_of(policy: Policy, settings: VLLMEngineConfig) -> "Contents":
    """Chooses what the engine gets for a draw; `UserError` if it cannot take that."""
    own, dtype = settings.vllm, getattr(torch, settings.dtype)
    beside = policy.has_adapters or own.draw_rank > 0
    if own.draw_rank and (policy.has_adapters or not own.adapters):
        fix = "draws beside the mean need engine.vllm.adapters above 0, and no adapters of the model; set it to 0"
        raise UserError(f"engine.vllm.draw_rank = {own.draw_rank}: {fix}")
    if not (beside and own.adapters):
        return Contents(policy, dtype)
    if any(map(is_spread, policy.model.parameters())):
        fix = "several ranks push draws as all weights; set it to 0"
        raise UserError(f"engine.vllm.adapters = {own.adapters}: {fix}")
    return LowRankDraws(policy, dtype, own.draw_rank) if own.draw_rank else Adapters(policy, dtype)


class Contents:
    """All weights, a tied tensor under each of its names."""

    adapters: Mapping[str, Any] = {}
    """What vLLM has to know of adapters, if it gets those for a draw."""

    def __init__(self, policy: Policy, dtype: torch.dtype) -> None:
        self._policy = policy
        self._sources = parameter_names(policy.architecture)
        state = policy.architecture.state_dict()
        self.whole = layout_of({name: state[name] for name in self._sources}, dtype)
        self.layout: Layout = self.whole
        """Of what is written for a draw."""

    def frozen(self) -> Weights | None:
        """Weights beside which the draws stand, if they never change."""
        return None

    def mean(self, posterior: WeightSource) -> Weights | None:
        """Weights beside which the draws stand, if they change from step to step."""
        return None

    def write(self, posterior: WeightSource, draw: Draw | None, tensors: Tensors) -> None:
        """Write what stands for a draw; `tensors` are of `layout`."""
        self.write_whole(self._policy.served(posterior).weights(draw), tensors)

    def write_whole(self, weights: Weights, tensors: Tensors) -> None:
        """Write all weights; the model's where `weights` has none. `tensors` are of `whole`."""
        state = self._policy.architecture.state_dict()
        written = {self._sources[name]: tensors[name].copy_(value.detach()) for name, value in weights}
        for name, source in self._sources.items():
            tensors[name].copy_(written.get(source, state[name]))

    def logprobs(self, tensors: Tensors, beside: Tensors, probe: tuple[int, ...]) -> torch.Tensor:
        """`expected_logprobs` of the trainer's model with what was written for a draw, and for what it is beside."""
        own = {name: tensors[name] for name, source in self._sources.items() if source == name}
        return expected_logprobs(self._policy.architecture, own, probe, self._policy.device)


class Adapters(Contents):
    """The adapters of the policy, beside its frozen weights."""

    def __init__(self, policy: Policy, dtype: torch.dtype) -> None:
        super().__init__(policy, dtype)
        own = policy.model.named_parameters()
        self._own = {peft_name(name): (name, p) for name, p in own if is_adapter(name)}
        self._autocast = rounded(policy)
        self.layout = layout_of({name: p for name, (_, p) in self._own.items()}, dtype)
        config = policy.model.peft_config[NAME]
        self.adapters = adapter_settings(self.layout, "model.lora.rank", config.r, config.lora_alpha)

    def frozen(self) -> Weights:
        own = self._policy.model.named_parameters()
        return ((without_adapter(name), p) for name, p in own if not is_adapter(name))

    def write(self, posterior: WeightSource, draw: Draw | None, tensors: Tensors) -> None:
        for name, value in posterior.weights(draw):
            if is_adapter(name):
                tensors[peft_name(name)].copy_(value)

    def logprobs(self, tensors: Tensors, beside: Tensors, probe: tuple[int, ...]) -> torch.Tensor:
        policy, own = self._policy, {name: tensors[called].to(p.dtype) for called, (name, p) in self._own.items()}
        with torch.autocast(policy.device.type, policy.compute_dtype, enabled=self._autocast):
            return expected_logprobs(policy.model, own, probe, policy.device)


class LowRankDraws(Contents):
    """Low-rank noise as adapters, beside the mean."""

    def __init__(self, policy: Policy, dtype: torch.dtype, rank: int) -> None:
        super().__init__(policy, dtype)
        self.layout = adapter_layout(policy.architecture, rank, dtype)
        self.adapters = adapter_settings(self.layout, "engine.vllm.draw_rank", rank, rank)

    def mean(self, posterior: WeightSource) -> Weights:
        return posterior.weights(None)

    def write(self, posterior: WeightSource, draw: Draw | None, tensors: Tensors) -> None:
        write_adapters(posterior, draw, tensors)

    def logprobs(self, tensors: Tensors, beside: Tensors, probe: tuple[int, ...]) -> torch.Tensor:
        return super().logprobs(merged(beside, tensors), beside, probe)


def rounded(policy: Policy) -> bool:
    """Whether the trainer itself holds frozen weights in bfloat16."""
    return any(p.dtype == torch.bfloat16 for p in policy.model.parameters())


def parameter_names(model: Any) -> dict[str, str]:
    """For every tensor of the state dict: the name of its parameter, which is another one where it is tied."""
    known = {id(parameter): name for name, parameter in model.named_parameters()}
    return {name: known.get(id(tensor), name) for name, tensor in model.state_dict(keep_vars=True).items()}


def adapter_settings(layout: Layout, setting: str, rank: int, alpha: float) -> dict[str, Any]:
    """Settings of vLLM for adapters; `UserError` for a rank that it does not serve, which `setting` names."""
    if rank > RANKS[-1]:
        whole = "engine.vllm.adapters = 0" if setting.startswith("model") else f"{setting} = 0"
        raise UserError(f"{setting} = {rank}: vLLM serves up to {RANKS[-1]}; lower it, or push all weights: {whole}")
    # vLLM leaves other layers alone. With adapters for the head of a Llama, 0.32 fails at the probe on a CPU.
    layers = sorted({name.split(".")[-3] for name in layout})
    return {"r": rank, "lora_alpha": alpha, "target_modules": layers}
