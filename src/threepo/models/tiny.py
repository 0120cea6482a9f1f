"""Tiny models for demonstrations, tests and studies on a CPU: randomly initialised byte-level decoders of real Hugging
Face architectures."""

import torch
from tokenizers import AddedToken, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from threepo.config import TinyConfig

END, PAD = "<|endoftext|>", "<|pad|>"
TAGS = ("<think>", "</think>")
"""One token each; they are decoded as text, unlike special tokens."""

TINY_MODELS = {
    "tiny-qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "tiny-llama": (LlamaConfig, LlamaForCausalLM),
}


def make_tokenizer() -> Qwen2Tokenizer:
    """One token per byte, which encodes any text, plus the thinking tags, an end and a padding token."""
    vocabulary = {token: i for i, token in enumerate((END, PAD, *sorted(pre_tokenizers.ByteLevel.alphabet())))}
    tokenizer = Qwen2Tokenizer(
        vocab=vocabulary, merges=[], eos_token=END, unk_token=END, pad_token=PAD, padding_side="left"
    )
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    return tokenizer


def make_model(kind: str, shape: TinyConfig, seed: int) -> torch.nn.Module:
    """A `tiny-qwen2` or `tiny-llama` with weights drawn from `seed`, float32, without touching the global generator."""
    config_class, model_class = TINY_MODELS[kind]
    tokenizer = make_tokenizer()
    config = config_class(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.context,
        tie_word_embeddings=shape.tied,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: torch.nn.Module = model_class(config)
    return model
