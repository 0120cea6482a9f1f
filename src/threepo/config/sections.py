"""Settings of the run, the model, sampling, the engine, rewards and evaluation."""

import os
from dataclasses import field
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from threepo.config.records import Count, CountOrZero, NotNegative, Positive, PositiveShare, must, require, settings
from threepo.config.sources import LocalPath

VLLM_TEMPERATURES = (0.01, 2.0)
"""vLLM raises a lower temperature to the first and refuses one above the second (sampling_params.py of 0.32)."""


@settings("run")
class RunConfig:
    """[run]: how long, where, and how often to evaluate and save."""

    folder: Annotated[str, AfterValidator(os.path.expanduser)] = ""
    """Run folder; empty: runs/ followed by the recipe's name."""
    steps: CountOrZero = 100
    """Training steps: a batch of prompts each in RLVR, an optimizer step each in SFT. 0: see conversations.epochs."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of everything random that has no seed of its own: noise, sampling, weight initialisation."""
    checkpoint_every: CountOrZero = 50
    """Steps between checkpoints; 0: only at the end and when the run is interrupted."""
    keep_checkpoints: CountOrZero = 2
    """Number of newest checkpoints to keep; older ones are deleted. 0 keeps all."""
    threads: CountOrZero = 0
    """CPU threads for torch; 0 leaves torch's own choice. A resumed run repeats bitwise only with the same number."""
    tensorboard: bool = False
    """Also write TensorBoard event files into the run folder (needs threepo[tensorboard])."""


@settings("model.tiny")
class TinyConfig:
    """[model.tiny]: shape of a new tiny model, when model.path names one."""

    hidden_size: Count = 128
    """Width; must be divisible by `heads`."""
    intermediate_size: Count = 384
    """Inner width of the MLP."""
    layers: Count = 4
    """Transformer blocks."""
    heads: Count = 4
    """Attention heads."""
    kv_heads: Count = 2
    """Key and value heads (grouped-query attention); must divide `heads`."""
    context: Count = 512
    """Longest sequence in tokens."""
    tied: bool = True
    """Share the input embedding and the output head."""

    def __post_init__(self) -> None:
        fix = f"must be a multiple of 2 * model.tiny.heads = {2 * self.heads} (rotary positions need an even head size)"
        require(self.hidden_size % (2 * self.heads) == 0, "model.tiny.hidden_size", self.hidden_size, fix)
        fix = f"must divide model.tiny.heads = {self.heads}"
        require(self.heads % self.kv_heads == 0, "model.tiny.kv_heads", self.kv_heads, fix)


@settings("model")
class ModelConfig:
    """[model]: the policy."""

    path: Annotated[LocalPath, must(bool, "name a model directory, a hub id, tiny-qwen2 or tiny-llama")]
    """A Hugging Face model directory or hub id with its tokenizer; `tiny-qwen2` or `tiny-llama` makes a new model."""
    tokenizer: LocalPath = ""
    """Another directory or hub id whose tokenizer and chat template to use instead; they are saved with the model."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the training forward and backward pass (autocast); master weights are always float32."""
    device: str = "auto"
    """A torch device such as `cpu` or `cuda:1`; `auto`: CUDA if there is one, else the CPU."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more compute."""
    tiny: TinyConfig = field(default_factory=TinyConfig)


@settings("sampling")
class SamplingConfig:
    """[sampling]: how rollouts are decoded."""

    temperature: NotNegative = 1.0
    """Divides the logits, in the engine and in the trainer's log-probs alike; 0 decodes greedily."""
    top_p: PositiveShare = 1.0
    """Keep the smallest set of most probable tokens whose probability reaches this; 1 keeps all."""
    top_k: CountOrZero = 0
    """Keep this many most probable tokens; 0 keeps all."""
    max_new_tokens: Count = 512
    """Longest completion in tokens; a longer one is cut and its finish reason is `length`."""


@settings("engine.vllm")
class VLLMConfig:
    """[engine.vllm]: the vLLM engine (docs/engines.md)."""

    replicas: Count = 1
    """Number of processes with a vLLM engine, each on its own GPU if there are GPUs. They share the draws of a step and
    decode at the same time; a replica with several draws decodes one after another."""
    gpus: tuple[CountOrZero, ...] = ()
    """The GPU of each replica, numbered as in torch; empty: 0, 1, 2, ..."""
    gpu_memory_utilization: PositiveShare = 0.9
    """Share of a GPU's memory for its replica; lower it on the GPU that trains."""
    kv_cache_memory_bytes: CountOrZero = 0
    """Bytes of a replica's key-value cache. 0: what gpu_memory_utilization leaves on a GPU; 1 GiB on a CPU, where every
    replica would take that share of the machine's memory."""
    max_model_len: CountOrZero = 0
    """Longest prompt and completion together, in tokens; 0: the model's context."""
    enforce_eager: bool = False
    """Run without CUDA graphs and compilation: starts faster, decodes slower."""
    timeout_s: Annotated[float, Field(ge=5)] = 1200.0
    """Seconds without a report after which a replica counts as stuck and the run ends. A replica reports after every
    decoding step and every push of weights, at most once per second, but not while it starts and compiles."""
    probe_tolerance: NotNegative = 0.0
    """Largest mean difference in log-prob (nats) of the probe after a push of weights; 0: 0.001 in float32, 0.1 in
    bfloat16."""

    def __post_init__(self) -> None:
        fix = f"must name a GPU for each of engine.vllm.replicas = {self.replicas}, or be empty"
        require(len(self.gpus) in (0, self.replicas), "engine.vllm.gpus", self.gpus, fix)


@settings("engine")
class EngineConfig:
    """[engine]: what generates the rollouts."""

    kind: Literal["local", "vllm"] = "local"
    """`local`: the PyTorch engine in this process. `vllm`: vLLM in processes of its own (needs threepo[vllm])."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the engine's weights and arithmetic."""
    max_batch_rows: Count = 512
    """Largest number of rows decoded together, over all draws; further rows wait. With vLLM: per replica."""
    memory_gib: NotNegative = 0.0
    """GiB of memory that the local engine may use for the weights of all draws, the key-value cache and the logits; it
    decodes fewer rows at a time to stay within it. 0: the memory that is free then. If not all rows fit, a run repeats
    bitwise only with a number here, because the batch size changes the last bits of log-probs."""
    vllm: VLLMConfig = field(default_factory=VLLMConfig)

    def __post_init__(self) -> None:
        fix = "does not read [engine.vllm]; set engine.kind = 'vllm', or remove that table"
        require(self.kind == "vllm" or self.vllm == VLLMConfig(), "engine.kind", self.kind, fix)
        fix = (
            "engine.kind = 'vllm' does not read it; set gpu_memory_utilization or kv_cache_memory_bytes of engine.vllm"
        )
        require(self.kind != "vllm" or not self.memory_gib, "engine.memory_gib", self.memory_gib, fix)

    def check_temperature(self, value: float, name: str) -> None:
        """`UserError` for a temperature that vLLM would change or refuse."""
        low, high = VLLM_TEMPERATURES
        fix = f"engine.kind = 'vllm' decodes at 0, or from {low} to {high}; set one of these, or engine.kind = 'local'"
        require(self.kind != "vllm" or value == 0 or low <= value <= high, name, value, fix)


@settings("reward.sandbox")
class SandboxConfig:
    """[reward.sandbox]: where programs run whose reward is passing tests (docs/rewards.md)."""

    backend: Literal["bubblewrap", "sandbox_fusion", "unconfined"] = "bubblewrap"
    """`bubblewrap`: on this machine, confined by Linux namespaces and limits. `sandbox_fusion`: a SandboxFusion server
    at `url`. `unconfined`: ordinary processes with your rights; a program of the policy can then do what you can."""
    url: str = ""
    """Address of the SandboxFusion server, such as http://localhost:8080."""
    timeout_s: Positive = 10.0
    """Processor seconds that a program may take per test; the limit in wall-clock time is three times as long, because
    the machine may be busy. On a server: wall-clock seconds."""
    memory_mib: Count = 1024
    """Address space of a program in MiB; shared libraries and thread stacks count."""
    workers: CountOrZero = 0
    """Number of programs that run at the same time; 0: one per processor core, or 32 on a server."""

    def __post_init__(self) -> None:
        server = self.backend == "sandbox_fusion"
        fix = "set the server's address" if server else "only reward.sandbox.backend = 'sandbox_fusion' reads it"
        require(bool(self.url) == server, "reward.sandbox.url", self.url, fix)


@settings("reward")
class RewardConfig:
    """[reward]: what a completion earns."""

    function: str = "task"
    """`task`: the verifier that belongs to the problems; `exact`: the answer must equal the reference; `math`: it must
    be mathematically equal to it; `code`: the program must pass the problem's tests; or your own `module:function`. It
    is called like a reward function of TRL, f(prompts=..., completions=..., completion_ids=..., <columns>=...), with
    the arguments that it accepts, and returns a number for each completion."""
    correct_from: float = 1.0
    """A completion counts as correct if your own function returns at least this."""
    scoring: Literal["binary", "format_penalty", "passed_share"] = "binary"
    """`binary`: 1 if correct, else 0. `format_penalty` (mathematics): 1 less if the completion is not laid out as
    <think>...</think> \\boxed{...}, as in the paper's code. `passed_share` (code): the share of tests passed."""
    timeout_s: Positive = 10.0
    """Seconds that the mathematics verifier may take for one completion; a longer one is an error."""
    memory_mib: Count = 1024
    """MiB of memory for each process of the mathematics verifier."""
    workers: CountOrZero = 0
    """Processes of the mathematics verifier; 0: one per processor core."""
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)


@settings("eval")
class EvalConfig:
    """[eval]: evaluation on held-out problems, at the mean weights unless `draws` is set (method.md 6)."""

    every: CountOrZero = 0
    """Training steps between evaluations; 0: none while training (`threepo eval` evaluates afterwards)."""
    problems: Count = 256
    """Number of held-out problems; all of them if there are fewer."""
    samples: Count = 8
    """Completions per problem, K; pass@k is reported for k from 1 to K, and for 1, 2, 4, ..., K while training."""
    temperature: NotNegative = 0.6
    """As in [sampling]."""
    top_p: PositiveShare = 0.95
    """As in [sampling]."""
    top_k: CountOrZero = 50
    """As in [sampling]."""
    max_new_tokens: CountOrZero = 0
    """As in [sampling]; 0: the same as in training."""
    draws: CountOrZero = 0
    """0: evaluate the mean weights. S: S draws of the posterior, with K/S completions from each (method.md 6)."""
    part_size: Count = 256
    """`threepo eval`: number of completions that are generated, graded and saved together; a problem is never split. An
    interruption loses one part at most; large parts keep a large engine busier."""

    def __post_init__(self) -> None:
        fix = f"must divide eval.samples = {self.samples} evenly"
        require(not self.draws or self.samples % self.draws == 0, "eval.draws", self.draws, fix)
