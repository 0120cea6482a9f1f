"""Small models of the decoder families that the package promises to serve."""

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Exaone4Config,
    Glm4Config,
    GPTNeoXConfig,
    GraniteConfig,
    GraniteMoeConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
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
    "mistral": MistralConfig(**SHAPE, num_key_value_heads=2, sliding_window=8),
    "phi3": Phi3Config(**SHAPE, num_key_value_heads=2),
    "glm4": Glm4Config(**SHAPE, num_key_value_heads=2, head_dim=16),
    "smollm3": SmolLM3Config(**SHAPE, num_key_value_heads=2, no_rope_layers=[1, 0, 1]),
    "granite": GraniteConfig(**SHAPE, num_key_value_heads=2, embedding_multiplier=2.0, logits_scaling=3.0),
    "exaone4": Exaone4Config(**SHAPE, num_key_value_heads=2, **SLIDING),
}
EXPERTS = SHAPE | {"num_key_value_heads": 2, "num_experts_per_tok": 2}
MIXTURES: dict[str, PretrainedConfig] = {
    "mixtral": MixtralConfig(**EXPERTS, num_local_experts=4),
    "qwen3-moe": Qwen3MoeConfig(**EXPERTS, num_experts=4, moe_intermediate_size=32),
    "granite-moe": GraniteMoeConfig(**EXPERTS, num_local_experts=4),
}
"""Mixtures of experts, which the local engine does not take."""


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
