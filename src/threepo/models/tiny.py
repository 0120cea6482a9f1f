"""Tiny models made on the spot, for demonstrations, tests and studies on a CPU: a character-level decoder of a real
Hugging Face architecture, randomly initialised."""

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from threepo.config import TinyConfig

SPECIAL = ("<pad>", "<eos>", "<unk>")
TAGS = ("<think>", "</think>")
"""One token each, and plain text to the decoder."""

TINY_MODELS = {
    "tiny-qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "tiny-llama": (LlamaConfig, LlamaForCausalLM),
}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable ASCII character and newline, plus the thinking tags and <pad>, <eos>, <unk>."""
    characters = ["\n", *(chr(code) for code in range(32, 127))]
    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *TAGS, *characters))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.add_tokens(list(TAGS))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def make_model(kind: str, shape: TinyConfig, seed: int) -> torch.nn.Module:
    """A `tiny-qwen2` or `tiny-llama` with weights drawn from `seed`, float32, without touching the global generator."""
    config_class, model_class = TINY_MODELS[kind]
    config = config_class(
        vocab_size=len(make_tokenizer()),
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.context,
        tie_word_embeddings=shape.tied,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: torch.nn.Module = model_class(config)
    return model
