"""[sampling], [engine], [engine.vllm]: how rollouts are decoded, and by what."""

import os
import re
from dataclasses import field, fields
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from threepo.config.records import Count, CountOrZero, Kinds, NotNegative, PositiveShare, Seconds, Settings, must


class SamplingConfig(Settings, table="sampling"):
    """[sampling]: how rollouts are decoded, and which of them make a batch."""

    temperature: NotNegative = 1.0
    """Divides the logits, also in the trainer's log-probs; 0 decodes greedily."""
    raised_temperature: NotNegative = 0.0
    """Temperature once the policy's entropy has fallen (Polaris: 1.4; method.md 3.7); 0: never raised."""
    raise_below: PositiveShare = 0.85
    """Entropy has fallen when it is below this share of the first step's."""
    top_p: PositiveShare = 1.0
    """Nucleus sampling: keep the fewest tokens that together reach this probability; 1: all."""
    top_k: CountOrZero = 0
    """Most probable tokens to keep; 0: all."""
    max_new_tokens: Count = 512
    """Longest completion in tokens."""
    dynamic_rounds: CountOrZero = 0
    """Most rounds of dynamic sampling in a step (method.md 3.8; DAPO: 10); 0: off."""
    prompts_per_round: CountOrZero = 0
    """Prompts of such a round (DAPO: 3 times data.prompts_per_step); 0: as many as are missing."""

    def __post_init__(self) -> None:
        fix = "is read only with a raised temperature; set sampling.raised_temperature, or remove it"
        self.only_if(self.raised_temperature > 0, fix, "raise_below")
        fix = "one round replaces nothing; set 2 or more, or set sampling.prompts_per_round to generate more at once"
        self.check("dynamic_rounds", self.dynamic_rounds != 1 or self.prompts_per_round > 0, fix)
        fix = "is read by dynamic sampling only; set sampling.dynamic_rounds = 10, or remove it"
        self.only_if(self.dynamic_rounds > 0, fix, "prompts_per_round")


_WITH_SERVERS = ("servers", "weights_folder", "full_push_every", "timeout_s", "check_tolerance")
"""Settings of [engine.vllm] that servers read; the rest is about replicas."""


class VLLMConfig(Settings, table="engine.vllm"):
    """[engine.vllm]: the vLLM engine (docs/engines.md)."""

    servers: tuple[Annotated[str, must(re.compile(r"http://[^/:]+:\d+").fullmatch, "write http://HOST:PORT")], ...] = ()
    """vLLM servers that share the draws of a step; empty: replicas are started."""
    weights_folder: Annotated[str, AfterValidator(os.path.expanduser)] = ""
    """Folder for mean and Hessian, at the same path for all servers: on a shared disk, or in /dev/shm if all are on
    this machine."""
    full_push_every: Count = 1
    """With servers: every n-th push has all weights, the others only changes; above 1, all are rounded
    (docs/engines.md#changes)."""
    replicas: Count = 1
    """vLLM processes, each on separate GPUs, that share the draws."""
    gpus: tuple[CountOrZero, ...] = ()
    """GPUs of each replica in turn, numbered as in torch; empty: from 0 on."""
    tensor_parallel: Count = 1
    """GPUs of a replica; on several ranks, neighbouring ranks that share one."""
    gpu_memory_utilization: PositiveShare = 0.9
    """Share of a GPU's memory for its replica; lower it on the GPU that trains."""
    kv_cache_memory_bytes: CountOrZero = 0
    """Bytes of a replica's key-value cache; 0: what gpu_memory_utilization leaves, or 1 GiB on a CPU."""
    sleep: bool = False
    """Between rollouts, replicas give memory back to the GPU that trains; each rollout then begins with a push."""
    max_model_len: CountOrZero = 0
    """Longest prompt and completion together, in tokens; 0: the model's context."""
    enforce_eager: bool = False
    """Run without CUDA graphs and compilation: starts faster, decodes slower."""
    timeout_s: Annotated[Seconds, Field(ge=5)] = 1200.0
    """Seconds after which a silent replica, or a server's unfinished completion or change of weights, ends the run."""
    check_tolerance: NotNegative = 0.0
    """Largest mean log-prob difference (nats) of the weight check; 0: 0.001 in float32, 0.1 in bfloat16."""

    adapters: CountOrZero = 8
    """Most draws of [model.lora] in one batch of a replica; 0: each draw is pushed as all weights."""

    def __post_init__(self) -> None:
        count = self.replicas * self.tensor_parallel
        fix = f"must name {count} GPUs, engine.vllm.replicas times engine.vllm.tensor_parallel, or be empty"
        self.check("gpus", len(self.gpus) in (0, count), fix)
        fix = "must be named exactly if engine.vllm.servers are"
        self.check("weights_folder", bool(self.weights_folder) == bool(self.servers), fix)
        fix = "is for servers; name them in engine.vllm.servers, or remove it"
        self.only_if(bool(self.servers), fix, "full_push_every")
        fix = "is an option of replicas, and with engine.vllm.servers there are none; remove one of the two"
        self.only_if(not self.servers, fix, *(f.name for f in fields(self) if f.name not in _WITH_SERVERS))


class EngineConfig(Settings, table="engine", by="kind"):
    """[engine]: the keys that all engines share. `code` makes the engine from a policy and these settings."""

    kind: str
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the engine's weights and arithmetic."""
    max_batch_rows: Count = 512
    """Most rows decoded together, over all draws; with vLLM, per replica."""

    @property
    def processes(self) -> VLLMConfig:
        """Engines in processes of their own; the local engine is like a single one, without adapters."""
        return VLLMConfig(adapters=0)


class LocalEngineConfig(EngineConfig):
    """The PyTorch engine in the process that trains."""

    kind: Literal["local"] = "local"
    memory_gib: NotNegative = 0.0
    """GiB for weights, key-value cache and logits; 0: nine tenths of what is free. If not all rows fit at once, a run
    repeats bitwise only with a number here."""

    code = "threepo.rollout.local:LocalEngine"


class VLLMEngineConfig(EngineConfig):
    """vLLM in separate processes, or on servers."""

    kind: Literal["vllm"] = "vllm"
    vllm: VLLMConfig = field(default_factory=VLLMConfig)

    code = "threepo.rollout.vllm:VLLMEngine"

    def __post_init__(self) -> None:
        rounded = self.vllm.full_push_every == 1 or self.dtype != "float32"
        fix = (
            "needs engine.dtype = 'bfloat16', since in float32 all weights change at every step; set it, or remove this"
        )
        self.vllm.check("full_push_every", rounded, fix)

    @property
    def processes(self) -> VLLMConfig:
        return self.vllm


AnyEngine = Annotated[LocalEngineConfig | VLLMEngineConfig, Kinds(EngineConfig)]
