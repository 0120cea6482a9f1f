"""Payloads in shared memory, by which a vLLM replica gets a draw: all weights, or adapters.

With adapters, the frozen weights are pushed once, and a draw is an adapter on top of them (`engine.vllm.adapters`); the
weight check then runs in the trainer's precision, with adapters in the engine's. If the model is sharded, the policy's
architecture stands for it.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from threepo.config.engine import VLLMEngineConfig
from threepo.models.adapters import NAME, adapter_scale, is_adapter, peft_name, without_adapter
from threepo.models.parts import parts_in_files
from threepo.models.policy import Policy
from threepo.posterior.gaussian import FixedWeights
from threepo.posterior.policy_optimizer import WeightSource, model_name
from threepo.posterior.shards import is_spread
from threepo.rollout.bit_sums import Sums, bit_sums
from threepo.rollout.memory import layout_of
from threepo.rollout.weight_check import Logprobs, expected_logprobs
from threepo.types import Draw

Tensors = Mapping[str, torch.Tensor]


def choose_payload(policy: Policy, settings: VLLMEngineConfig) -> "Payload":
    """The payload for a policy and these settings. Several ranks, which shard adapters, push draws as all weights.

    `UserError` for a dtype that vLLM's adapters do not have.
    """
    slots, dtype = settings.vllm.adapters, getattr(torch, settings.dtype)
    if not slots or not policy.has_adapters or any(map(is_spread, policy.model.parameters())):
        return Payload(policy, dtype)
    if policy.device.type == "cuda":
        fix = f"vLLM has no adapters in float32 on a GPU; set 'bfloat16', or engine.vllm.adapters = 0 (now {slots})"
        settings.check("dtype", dtype != torch.float32, fix)
    return AdapterPayload(policy, dtype)


class Payload:
    """All weights of a draw, a tied tensor under each of its names."""

    adapters: Mapping[str, Any] = {}
    """Peft's configuration of the adapters for vLLM; empty if a draw is all weights."""

    def __init__(self, policy: Policy, dtype: torch.dtype) -> None:
        self._policy, self._dtype = policy, dtype
        self._sources = parameter_names(policy.architecture)
        state = policy.architecture.state_dict()
        self.base_layout = layout_of({name: state[name] for name in self._sources}, dtype)
        """Layout of all weights: those that adapters are added to, if there are any."""
        self.layout = self.base_layout
        """Layout of a draw's tensors."""
        self.parts = parts_in_files(policy.architecture, state)
        """The parts by which vLLM knows the weights."""

    def write(self, posterior: WeightSource, draw: Draw | None, tensors: Tensors) -> None:
        """Write a draw into tensors of `layout`."""
        self._write_all(self._policy.served(posterior).weights(draw), tensors)

    def _write_all(self, weights: Iterable[tuple[str, torch.Tensor]], tensors: Tensors) -> None:
        """Write all weights into tensors of `base_layout`; the model's where `weights` has none."""
        state = self._policy.architecture.state_dict()
        written = {self._sources[name]: _copy(tensors[name], value.detach()) for name, value in weights}
        for name, source in self._sources.items():
            tensors[name].copy_(written.get(source, state[name]))

    def logprobs(self, tensors: Tensors, prompt: tuple[int, ...]) -> Logprobs:
        """The trainer's log-probs for a prompt under a draw as written."""
        own = {name: tensors[name] for name, source in self._sources.items() if source == name}
        return expected_logprobs(self._policy.architecture, own, prompt, self._policy.device)

    def sums(self, tensors: Tensors) -> Sums:
        """The sums of a draw's tensors as written."""
        device = self._policy.device
        return bit_sums(((name, value.to(device)) for name, value in tensors.items()), self._dtype)

    def source_sums(self, posterior: Any, draw: Draw | None) -> Sums:
        """The sums of the trainer's own model, perturbed in place as for a gradient at this draw."""
        with posterior.at(draw):
            return bit_sums(as_it_stands(self._policy), self._dtype)


def _copy(into: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Copy and round; on a GPU the value is rounded there, as a copy that also rounds would round on the CPU."""
    return into.copy_(value if value.device == into.device else value.to(into.dtype))


class AdapterPayload(Payload):
    """The adapters of the policy, on top of its frozen weights."""

    def __init__(self, policy: Policy, dtype: torch.dtype) -> None:
        super().__init__(policy, dtype)
        own, config = policy.model.named_parameters(), policy.model.peft_config[NAME]
        self._adapters = {peft_name(name): (name, p) for name, p in own if is_adapter(name)}
        self.layout = layout_of({name: p for name, (_, p) in self._adapters.items()}, dtype)
        # vLLM leaves other layers alone. With adapters for a Llama's head, 0.32 fails at the weight check on a CPU.
        layers = sorted({name.split(".")[-3] for name in self.layout})
        self._scale = adapter_scale(policy.model)
        self.adapters = {"r": config.r, "lora_alpha": config.lora_alpha, "target_modules": layers}

    def write_base(self, tensors: Tensors) -> None:
        """Write the frozen weights into tensors of `base_layout`."""
        own = self._policy.model.named_parameters()
        self._write_all(((without_adapter(name), p) for name, p in own if not is_adapter(name)), tensors)

    def write(self, posterior: WeightSource, draw: Draw | None, tensors: Tensors) -> None:
        for name, value in posterior.weights(draw):
            if is_adapter(name):
                _copy(tensors[peft_name(name)], value)

    def logprobs(self, tensors: Tensors, prompt: tuple[int, ...]) -> Logprobs:
        policy = self._policy
        own = {name: tensors[served].to(p.dtype) for served, (name, p) in self._adapters.items()}
        with torch.autocast(policy.device.type, policy.compute_dtype, enabled=has_bfloat16(policy)):
            return expected_logprobs(policy.model, own, prompt, policy.device)

    def sums(self, tensors: Tensors) -> Sums:
        return bit_sums(map(self._scaled, tensors.items()), self._dtype)

    def source_sums(self, posterior: Any, draw: Draw | None) -> Sums:
        with posterior.at(draw):
            own = ((served, p.detach().to(self._dtype)) for served, (_, p) in self._adapters.items())
            return bit_sums(map(self._scaled, own), self._dtype)

    def _scaled(self, adapter: tuple[str, torch.Tensor]) -> tuple[str, torch.Tensor]:
        """An adapter as vLLM holds it, which multiplies B by alpha / rank in the dtype of the engine."""
        name, value = adapter
        return name, value * self._scale if ".lora_B." in name else value


def as_it_stands(policy: Policy) -> Iterator[tuple[str, torch.Tensor]]:
    """Name in `policy.architecture` and value of every weight that the policy's model holds now, sharded as it is.

    Adapters are multiplied out; if they are sharded, all ranks gather them together.
    """
    names = parameter_names(policy.architecture)
    for name, value in policy.served(FixedWeights(policy.model)).weights(None, gather=policy.has_adapters):
        yield names[model_name(name)], value


def has_bfloat16(policy: Policy) -> bool:
    """True if the trainer itself holds weights in bfloat16, as frozen ones may be."""
    return any(p.dtype == torch.bfloat16 for p in policy.model.parameters())


def parameter_names(model: Any) -> dict[str, str]:
    """The parameter's name of every tensor in the state dict, which is another name where it is tied."""
    known = {id(parameter): name for name, parameter in model.named_parameters()}
    return {name: known.get(id(tensor), name) for name, tensor in model.state_dict(keep_vars=True).items()}
