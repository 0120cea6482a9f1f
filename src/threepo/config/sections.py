"""Settings of the run, the model, the problems and the engine: tables that recipes of every kind share."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from threepo.config.checks import not_negative, positive, require
from threepo.config.engines import VLLMConfig
from threepo.errors import UserError

MOST_THREADS = 1024
"""More than any one machine runs well; far beyond it the process dies of its threads."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """[run]: how long, where, and how often to look and to save."""

    folder: str = ""
    """Run folder; empty: runs/ followed by the recipe's name."""
    steps: int = 100
    """Training steps: one batch of prompts each in RLVR, one optimizer step each in SFT; 0: by conversations.epochs."""
    seed: int = 0
    """Seed of everything random that has no seed of its own here: noise, sampling, weight initialisation."""
    checkpoint_every: int = 50
    """Steps between checkpoints; 0: only at the end and when the run is interrupted."""
    keep_checkpoints: int = 2
    """Newest checkpoints to keep; older ones are deleted. 0 keeps all."""
    threads: int = 0
    """CPU threads for torch; 0 leaves torch's own choice. A resumed run repeats bitwise with the same number only."""
    tensorboard: bool = False
    """Also write TensorBoard event files into the run folder (needs threepo[tensorboard])."""

    def __post_init__(self) -> None:
        not_negative(self, "run", "steps", "seed", "checkpoint_every", "keep_checkpoints", "threads")
        require(self.seed < 1 << 63, "run.seed", self.seed, "must be below 2**63")
        require(self.threads <= MOST_THREADS, "run.threads", self.threads, f"must be at most {MOST_THREADS}")


@dataclass(frozen=True, kw_only=True)
class TinyConfig:
    """[model.tiny]: shape of a freshly made tiny model, when model.path names one."""

    hidden_size: int = 128
    """Width; must be divisible by `heads`."""
    intermediate_size: int = 384
    """Inner width of the MLP."""
    layers: int = 4
    """Transformer blocks."""
    heads: int = 4
    """Attention heads."""
    kv_heads: int = 2
    """Key and value heads (grouped-query attention); must divide `heads`."""
    context: int = 512
    """Longest sequence in tokens."""
    tied: bool = True
    """Share the input embedding and the output head."""

    def __post_init__(self) -> None:
        positive(self, "model.tiny", "hidden_size", "intermediate_size", "layers", "heads", "kv_heads", "context")
        require(
            self.hidden_size % (2 * self.heads) == 0,
            "model.tiny.hidden_size",
            self.hidden_size,
            f"must be a multiple of 2 * model.tiny.heads = {2 * self.heads} (rotary positions need an even head size)",
        )
        require(
            self.heads % self.kv_heads == 0,
            "model.tiny.kv_heads",
            self.kv_heads,
            f"must divide model.tiny.heads = {self.heads}",
        )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """[model]: the policy."""

    path: str
    """A Hugging Face model directory or hub id with its tokenizer; `tiny-qwen2` or `tiny-llama` makes a new model."""
    tokenizer: str = ""
    """Another directory or hub id, whose tokenizer and chat template to use instead; they are saved with the model."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the training forward and backward pass (autocast); master weights are float32 always."""
    device: str = "auto"
    """`auto` takes CUDA where there is one; otherwise a torch device such as `cpu` or `cuda:1`."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more compute."""
    tiny: TinyConfig = field(default_factory=TinyConfig)
    """Shape of a `tiny-...` model."""

    def __post_init__(self) -> None:
        require(bool(self.path), "model.path", self.path, "name a model directory, a hub id, tiny-qwen2 or tiny-llama")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """[data]: the problems, and how they are put to the policy."""

    train: str
    """A procedural task (`sorting`, ...), `reasoning-gym:NAME`, a published data set (`gsm8k`, ..., `gsm8k:COPY`), or a
    source of your own: a .jsonl, .json, .csv or .parquet file, a folder of such files, or `org/name` on the Hugging
    Face hub; `org/name:CONFIGURATION:SPLIT` names a configuration and a split. `threepo data list` lists them all.
    `threepo eval` does without where `eval` is set."""
    eval: str = ""
    """The same for held-out problems; empty: the held-out problems of the task in `train`, or the test split of the
    published data set."""
    levels: tuple[int, ...] = ()
    """Difficulty levels of a procedural task, mixed evenly; empty: the task's own default. Nothing else has any."""
    prompts_per_step: int = 32
    """Prompts a step, P."""
    seed: int = 0
    """Seed of the problems' order, apart from all other seeds: equal seeds give equal prompts at equal steps."""
    prompt_column: str = "prompt"
    """Column of your own source that holds the prompt: text, or a list of chat messages."""
    answer_column: str = "answer"
    """Column of your own source that holds the reference answer; only a reward function of your own can do without. It
    reaches such a function as `answer` too, unless another column has that name."""
    tests_column: str = "tests"
    """Column of your own source that holds the tests of a program, for reward.function = 'code'; it reaches reward
    functions as `tests`."""
    prompt_template: str = ""
    """Text put around a plain prompt; `{prompt}` marks its place. Empty: what belongs to the published data set, and
    nothing around prompts of tasks and files."""
    system_prompt: str = ""
    """System message put before a plain prompt; needs a tokenizer with a chat template."""
    chat_template: Literal["auto", "never"] = "auto"
    """`auto`: a plain prompt becomes a user message wherever the tokenizer has a chat template."""
    too_long: Literal["error", "drop"] = "error"
    """Problems of a finite data set whose prompt and longest completion exceed the model's context: `error` refuses
    the data before anything runs; `drop` leaves them out and says how many."""
    max_prompt_tokens: int = 0
    """Problems of a finite data set to train on with longer prompts, in tokens with the chat template, are left out and
    counted; 0: none are. Held-out problems are not limited."""
    broken_rows: Literal["error", "skip"] = "error"
    """Rows of a finite data set that are not as they should be, or lack what the reward needs: `error` refuses the
    data, naming the first; `skip` leaves them out and says how many, naming a few."""

    def __post_init__(self) -> None:
        require(
            bool(self.train), "data.train", self.train, "name the problems; `threepo data list` shows what there is"
        )
        positive(self, "data", "prompts_per_step")
        not_negative(self, "data", "max_prompt_tokens")
        require(
            not self.prompt_template or "{prompt}" in self.prompt_template,
            "data.prompt_template",
            self.prompt_template,
            "must contain {prompt}, where the problem's text goes",
        )
        require(
            not self.system_prompt or self.chat_template == "auto",
            "data.system_prompt",
            self.system_prompt,
            "needs a chat template, and data.chat_template = 'never' uses none; set it to 'auto', or put the text into "
            "data.prompt_template",
        )


@dataclass(frozen=True, kw_only=True)
class DemonstrationConfig:
    """[demonstrations]: worked texts of procedural tasks for supervised fine-tuning."""

    tasks: tuple[str, ...]
    """Procedural tasks, mixed evenly."""
    levels: tuple[int, ...] = ()
    """Difficulty levels; empty: each task's own default."""
    behaviours: Mapping[str, float] = field(default_factory=lambda: {"worked": 1.0})
    """How the texts go about a problem, with their shares: `worked`, `direct`, ... (each task lists its own)."""
    batch_size: int = 64
    """Demonstrations per optimizer step."""
    seed: int = 0
    """Seed of the demonstrations' order."""

    def __post_init__(self) -> None:
        require(bool(self.tasks), "demonstrations.tasks", self.tasks, 'name at least one task, such as ["sorting"]')
        positive(self, "demonstrations", "batch_size")
        shares = self.behaviours.values()
        require(
            bool(shares) and all(0 <= share < math.inf for share in shares) and sum(shares) > 0,
            "demonstrations.behaviours",
            dict(self.behaviours),
            "give at least one behaviour a share above 0, and none below",
        )


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """[sampling]: how rollouts are decoded."""

    temperature: float = 1.0
    """Divides the logits, in the engine and in the trainer's log-probs alike; 0 decodes greedily."""
    top_p: float = 1.0
    """Keep the smallest set of most probable tokens whose probability reaches this; 1 keeps all."""
    top_k: int = 0
    """Keep this many most probable tokens; 0 keeps all."""
    max_new_tokens: int = 512
    """Longest completion in tokens; a longer one is cut and its finish reason is `length`."""

    def __post_init__(self) -> None:
        check_sampling(self, "sampling")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """[engine]: what generates the rollouts."""

    kind: Literal["local", "vllm"] = "local"
    """`local`: the PyTorch engine in this process. `vllm`: vLLM in processes of its own (needs threepo[vllm])."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the engine's weights and arithmetic."""
    max_batch_rows: int = 512
    """Most rows decoded together, over all draws; others wait for their places. In vLLM: of each replica."""
    memory_gib: float = 0.0
    """Memory in GiB for the weights of all draws, the key-value cache and the logits of the local engine, which decodes
    fewer rows at a time where it must; 0: what is free then. A run whose rows do not all fit repeats bitwise only with
    a number here, since a batch's size changes the last bits of its log-probs."""
    vllm: VLLMConfig = field(default_factory=VLLMConfig)
    """The vLLM engine."""

    def __post_init__(self) -> None:
        positive(self, "engine", "max_batch_rows")
        not_negative(self, "engine", "memory_gib")
        if self.kind != "vllm" and self.vllm != VLLMConfig():
            raise UserError(
                f"engine.kind = {self.kind!r}: does not read [engine.vllm]; set engine.kind = 'vllm', or leave that out"
            )
        if self.kind == "vllm" and self.memory_gib:
            raise UserError(
                f"engine.memory_gib = {self.memory_gib:g}: engine.kind = 'vllm' does not read it; set "
                f"engine.vllm.gpu_memory_utilization or engine.vllm.kv_cache_memory_bytes"
            )


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """[eval]: evaluation on held-out problems, at the mean weights unless draws says otherwise (method.md 6)."""

    every: int = 0
    """Training steps between evaluations; 0: none while training (a demo or `threepo eval` evaluates afterwards)."""
    problems: int = 256
    """Held-out problems; a file with fewer gives all it has."""
    samples: int = 8
    """Completions of each problem, K; pass@k is reported for k from 1 to K, while training for 1, 2, 4, ... and K."""
    temperature: float = 0.6
    """As in [sampling]."""
    top_p: float = 0.95
    """As in [sampling]."""
    top_k: int = 50
    """As in [sampling]."""
    max_new_tokens: int = 0
    """As in [sampling]; 0: the same as in training."""
    draws: int = 0
    """0: at the mean. S: over S draws of the posterior, K/S completions from each (method.md 6)."""
    part_size: int = 256
    """`threepo eval`: completions, of whole problems, that are generated, graded and saved together. What is saved
    survives an interruption; large parts keep a large engine busier."""

    def __post_init__(self) -> None:
        positive(self, "eval", "problems", "samples", "part_size")
        not_negative(self, "eval", "every", "max_new_tokens", "draws")
        check_sampling(self, "eval")
        if self.draws and self.samples % self.draws:
            raise UserError(f"eval.draws = {self.draws}: must divide eval.samples = {self.samples} evenly")


def check_sampling(record: SamplingConfig | EvalConfig, table: str) -> None:
    """Refuse decoding settings outside their ranges, naming the table they stand in."""
    not_negative(record, table, "temperature", "top_k")
    require(0 < record.top_p <= 1, f"{table}.top_p", record.top_p, "must be above 0 and at most 1")
    if isinstance(record, SamplingConfig):
        positive(record, table, "max_new_tokens")
