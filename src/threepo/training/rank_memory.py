"""Memory of one rank of several: what it holds all the time, and what passes through it with a micro-batch.

FSDP2 cuts a model into its layers and the rest (embedding, last norm, head), and gathers each of these for its part of
a pass. The largest of three moments counts; tests/ranks/test_pretended_world.py compares it with what torch allocates.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoModelForCausalLM

from threepo.models.logprobs import CHUNK_ELEMENTS

Bytes = dict[str, float]
"""By what they are for."""
_ROW = 1024
"""Tokens of the rows that are tried: attention of short ones may use another precision."""


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank."""

    held: Bytes
    """All the time while it trains: shards."""
    moments: dict[str, Bytes]
    """On top of that, at the moments that can need most."""

    @property
    def worst(self) -> Bytes:
        """The moment that needs most."""
        return max(self.moments.values(), key=lambda moment: sum(moment.values()))

    @property
    def peak(self) -> float:
        """Most bytes at any time."""
        return sum(self.held.values()) + sum(self.worst.values())


def rank_memory(
    shape: Any, weights: int, tensors: dict[str, int], shards: int, tokens: int, recomputed: bool, dtype: torch.dtype
) -> RankMemory:
    """Memory to train a Hugging Face model of this configuration, cut into `shards`.

    Args:
        shape: the model's configuration.
        weights: their number.
        tensors: what is held of every weight, as a number of float32 tensors by label.
        shards: among how many ranks a copy of the weights is cut.
        tokens: those of a micro-batch.
        recomputed: with gradient checkpointing.
        dtype: of the pass; below float32, autocast keeps a copy in it of all weights that it has used.
    """
    text = shape.get_text_config()
    embedding = text.vocab_size * text.hidden_size
    root = embedding * (1 if text.tie_word_embeddings else 2) + text.hidden_size
    layers = text.num_hidden_layers
    layer = (weights - root) / layers
    stream = 4.0 * text.hidden_size * tokens  # the residual stream, float32
    saved = saved_bytes_per_token(shape, dtype) * tokens / layers
    casts = dtype.itemsize * (weights - root) if dtype != torch.float32 else 0.0
    kept = {
        "activations kept for the backward pass": layers * (stream if recomputed else saved) + 3 * stream,
        "logits of a chunk": 6.0 * 4 * CHUNK_ELEMENTS,
    }
    copies = f"copies of weights in {str(dtype).removeprefix('torch.')}, by autocast"
    gathered = "gathered weights: embedding, head and two layers"
    return RankMemory(
        {f"{label}, {count} of float32" if count > 1 else label: 4.0 * weights * count / shards for label, count in tensors.items()},
        {
            "forward, last layer": {gathered: 4 * root + 8 * layer, copies: casts} | kept,
            "backward, last layer": {
                gathered: 4 * root + 8 * layer,
                "gradients of the head and two layers before they are cut": 4.0 * embedding + 8 * layer,
                copies: 0.0 if recomputed else casts,
                "activations of a layer, computed again": saved if recomputed else 0.0,
            }
            | kept,
            "backward, embedding": {
                "gathered weights: embedding and head": 4.0 * root,
                "their gradients, whole and before they are cut": 8.0 * root,
            },
        },
    )


def saved_bytes_per_token(shape: Any, dtype: torch.dtype) -> float:
    """What a forward pass without gradient checkpointing keeps for the backward pass, in all layers.

    Counted with torch's own records for one row and for two, in tensors without memory.
    """
    with FakeTensorMode():
        model = AutoModelForCausalLM.from_config(shape)
        one, two = (_saved(model.base_model, rows, dtype) for rows in (1, 2))
    return (two - one) / _ROW


def _saved(model: Any, rows: int, dtype: torch.dtype) -> int:
    held: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        held[storage._cdata] = storage
        return tensor

    ids = torch.zeros(rows, _ROW, dtype=torch.long)
    autocast = torch.autocast("cpu", dtype, enabled=dtype != torch.float32)
    with autocast, saved_tensors_hooks(pack, lambda tensor: tensor):
        model(input_ids=ids, use_cache=False)
    return sum(storage.nbytes() for storage in held.values())
