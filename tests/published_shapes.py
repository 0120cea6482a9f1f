"""The shapes of the paper's two models as published: what their config.json says that decides sizes."""

import json
from pathlib import Path

OLMO3_7B = {
    "model_type": "olmo3",
    "architectures": ["Olmo3ForCausalLM"],
    "vocab_size": 100278,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 65536,
    "tie_word_embeddings": False,
}
"""Olmo-3-1025-7B."""
QWEN25_MATH_7B = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
"""Qwen2.5-Math-7B."""


def write(folder: Path, shape: dict[str, object]) -> str:
    """A model directory of this shape without weights."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape))
    (folder / "tokenizer.json").write_text("{}")
    return str(folder)
