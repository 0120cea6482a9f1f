"""Small models of the decoder families that the package promises to serve."""

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    GPTNeoXConfig,
    LlamaConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from threepo.models.loading import make_tokenizer
from threepo.models.logprobs import Scorer, has_linear_head
from threepo.models.policy import Policy

SHAPE: dict[str, Any] = {
    "vocab_size": len(make_tokenizer()),
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 1,
    "eos_token_id": 0,
    "bos_token_id": None,
}
SLIDING = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
FAMILIES: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SHAPE, num_key_value_heads=4, tie_word_embeddings=True),
    "llama with biases": LlamaConfig(**SHAPE, num_key_value_heads=1, attention_bias=True, mlp_bias=True),
    "qwen2": Qwen2Config(**SHAPE, num_key_value_heads=2, tie_word_embeddings=True),
    "qwen2 sliding": Qwen2Config(**SHAPE, num_key_value_heads=2, use_sliding_window=True, **SLIDING),
    "qwen3": Qwen3Config(**SHAPE, num_key_value_heads=2, head_dim=32, tie_word_embeddings=True),
    "olmo": OlmoConfig(**SHAPE, num_key_value_heads=4),
    "olmo2": Olmo2Config(**SHAPE, num_key_value_heads=4),
    "olmo3": Olmo3Config(**SHAPE, num_key_value_heads=2, **SLIDING),
    "gpt-neox": GPTNeoXConfig(**SHAPE),
    "head width 8": Qwen2Config(**SHAPE | {"num_attention_heads": 8}, num_key_value_heads=2),
}


def policy_of(config: PretrainedConfig) -> Policy:
    """A model of the configuration with random weights that differ in every vector."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, p in model.named_parameters():  # every vector matters, and distributions are not flat
            if p.dim() == 1:
                p.add_(torch.randn_like(p) * 0.3)
            elif "embed" in name:
                p.mul_(5)
    model.eval()
    return Policy(Scorer(model, has_linear_head(model)), make_tokenizer())
