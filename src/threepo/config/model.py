"""[model], [model.tiny], [model.lora]: the policy."""

from dataclasses import field
from typing import Annotated, Literal

from threepo.config.records import Count, CountOrZero, NotNegative, Positive, Settings, must
from threepo.config.sources import LocalPath


class TinyConfig(Settings, table="model.tiny"):
    """[model.tiny]: shape of a new tiny model, when model.path names one."""

    hidden_size: Count = 128
    """Width; a multiple of 2 * `heads`."""
    intermediate_size: Count = 384
    """Inner width of the MLP."""
    layers: Count = 4
    """Transformer blocks."""
    heads: Count = 4
    """Attention heads."""
    kv_heads: Count = 2
    """Key and value heads; must divide `heads`."""
    context: Count = 512
    """Longest sequence in tokens."""
    tied: bool = True
    """Share the input embedding and the output head."""
    deviation: Positive = 0.02
    """Standard deviation of the initial weights."""

    def __post_init__(self) -> None:
        fix = f"must be a multiple of 2 * model.tiny.heads = {2 * self.heads} (rotary positions need an even head size)"
        self.check("hidden_size", self.hidden_size % (2 * self.heads) == 0, fix)
        self.check("kv_heads", self.heads % self.kv_heads == 0, f"must divide model.tiny.heads = {self.heads}")


class LoRAConfig(Settings, table="model.lora"):
    """[model.lora]: train low-rank adapters of linear layers, W + s B A, instead of all weights (docs/adapters.md)."""

    rank: CountOrZero = 0
    """Rank of B A (docs/adapters.md); 0: all weights are trained."""
    alpha: NotNegative = 0.0
    """s = alpha / rank; 0: s = 1."""
    targets: Annotated[tuple[str, ...], must(bool, "name one or more")] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )
    """Linear layers with an adapter, by the last part of their names."""
    init: Literal["unit", "usual"] = "unit"
    """`unit`: A is random and frozen, and noise on B has the same sigma on W. `usual`: A is trained, as in peft, and
    noisy too."""
    base_dtype: Literal["float32", "bfloat16", "nf4"] = "float32"
    """Precision of the frozen linear layers. `nf4`: QLoRA's four bits, for all but the head."""

    @property
    def scale(self) -> float:
        """s."""
        return self.alpha / self.rank if self.alpha else 1.0


class ModelConfig(Settings, table="model"):
    """[model]: the policy."""

    path: Annotated[LocalPath, must(bool, "name a model directory, a hub id, tiny-qwen2 or tiny-llama")]
    """A Hugging Face model directory or hub id; `tiny-qwen2` or `tiny-llama` makes a new model with random weights,
    a token for each byte, the end token `<|endoftext|>` and no chat template."""
    tokenizer: LocalPath = ""
    """Another directory or hub id for the tokenizer and chat template."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the training pass; master weights are always float32."""
    device: str = "auto"
    """A torch device such as `cuda:1`; `auto`: CUDA, or else the CPU."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more compute."""
    compile: bool = False
    """Compile the training pass; not yet measured on a GPU."""
    tiny: TinyConfig = field(default_factory=TinyConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)

    def __post_init__(self) -> None:
        self.lora.only_if(self.lora.rank > 0, "without adapters nothing reads it; set model.lora.rank, or remove it")
        fits = self.lora.base_dtype != "bfloat16" or self.compute_dtype == "bfloat16"
        self.lora.check("base_dtype", fits, "needs model.compute_dtype = 'bfloat16'; set that too, or remove it")
