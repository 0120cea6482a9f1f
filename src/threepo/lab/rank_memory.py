"""Memory of training on a rank: what it holds all the time, and what passes through it with a micro-batch.

Of one process, a micro-batch is tried in tensors that have shapes and no memory, and the most that they would take at
a time counts. Of several ranks it is computed: FSDP2 cuts a model into its layers and the rest (embedding, last norm,
head), and gathers each of these for its part of a pass. The largest of three moments counts;
tests/ranks/test_pretended_world.py compares it with what torch allocates.
"""

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import AutoModelForCausalLM

from threepo.models.adapters import round_base
from threepo.models.attention import NAME, register_attention
from threepo.models.logprobs import CHUNK_ELEMENTS
from threepo.models.policy import Policy, Scorer, recompute_activations
from threepo.types import MicroBatch

Bytes = dict[str, float]
"""By what they are for."""
_ROW = 1024
"""Tokens of the rows that are tried: attention of short ones may use another precision."""


class Allocated(TorchDispatchMode):
    """Counts the bytes that operations allocate, until they are freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now, self.most = 0, 0
        self._seen: weakref.WeakKeyDictionary[torch.UntypedStorage, None] = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.untyped_storage() for x in tree_iter((args, kwargs)) if isinstance(x, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for storage in {x.untyped_storage() for x in tree_iter(result) if isinstance(x, torch.Tensor)} - given:
            if storage not in self._seen:
                self._seen[storage] = None
                self._add(storage.nbytes())
                weakref.finalize(storage, self._add, -storage.nbytes())
        return result

    def _add(self, size: int) -> None:
        self.now += size
        self.most = max(self.most, self.now)


def passing(
    model: Any, rows: int, length: int, dtype: torch.dtype, recomputed: bool, base_dtype: str = "float32"
) -> int:
    """Most bytes at a time of what comes and goes with a micro-batch in one process: activations, gradients.

    Args:
        model: a Hugging Face model on the meta device, which is used up; what requires a gradient is trained.
        rows: of the micro-batch.
        length: tokens of each row, which all count in the loss.
        dtype: of products, by autocast.
        recomputed: whether gradient checkpointing is on.
        base_dtype: that of [model.lora].
    """
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu").tie_weights()
        round_base(model, base_dtype, torch.device("cpu"))
        packed_rows = model.config._attn_implementation in ("sdpa", NAME) and model._supports_attention_backend
        if packed_rows:
            register_attention()
            model.set_attn_implementation(NAME)
        if recomputed:
            recompute_activations(model)
        for p in model.parameters():
            p.grad = torch.zeros_like(p) if p.requires_grad else None  # of an earlier micro-batch
        tokens = torch.zeros(rows * length, dtype=torch.long)
        packed = MicroBatch(tokens, (length,) * rows, torch.arange(rows * length), tokens, tokens)
        capped = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
        policy = Policy(Scorer(model, not capped, packed_rows), None, dtype)
        allocated = Allocated()
        with allocated:
            policy.logprobs(packed).logprobs.sum().backward()  # type: ignore[no-untyped-call]
    return allocated.most


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
    shape: Any, weights: int, tensors: dict[str, int], shards: int, tokens: int, dtype: torch.dtype
) -> dict[bool, RankMemory]:
    """Memory to train a Hugging Face model of this configuration, cut into `shards`, by gradient checkpointing.

    Args:
        shape: the model's configuration.
        weights: their number.
        tensors: how many float32 tensors of the size of the weights are held, by label.
        shards: among how many ranks a copy of the weights is cut.
        tokens: those of a micro-batch.
        dtype: of gathered weights, activations, and gradients before they are cut; those travel in float32.
    """
    text, size = shape.get_text_config(), dtype.itemsize
    embedding = text.vocab_size * text.hidden_size
    root = embedding * (1 if text.tie_word_embeddings else 2) + text.hidden_size
    layers = text.num_hidden_layers
    layer = (weights - root) / layers
    saved, widest = (per_token * tokens for per_token in saved_per_token(shape, dtype, recomputed=False))
    inputs, _ = (per_token * tokens for per_token in saved_per_token(shape, dtype, recomputed=True))
    held = {label: 4.0 * weights * count / shards for label, count in tensors.items()}
    gathered = {"gathered weights: embedding, head and two layers": size * (root + 2.0 * layer)}
    cut = {"gradients of embedding and head, not yet cut, and their sums": (size + 4 + 4 / shards) * root}
    last = size * text.hidden_size * tokens  # the tokens that the head reads
    found = {}
    for recomputed in (True, False):
        kept = {
            "activations kept for the backward pass": (inputs if recomputed else saved) + last,
            "logits of a chunk": 4.0 * 4 * CHUNK_ELEMENTS,
        }
        backward = {
            "gradients of the head and a layer, not yet cut": size * embedding + 4 * layer,
            "activations of a layer, computed again": saved / layers if recomputed else 0.0,
            "gradients of activations": 2 * widest,
        }
        moments = {"forward pass": gathered | kept, "backward pass": gathered | kept | backward}
        found[recomputed] = RankMemory(held, moments | {"backward pass of the embedding": cut})
    return found


def saved_per_token(shape: Any, dtype: torch.dtype, recomputed: bool) -> tuple[float, float]:
    """Bytes a token that a forward pass saves for the backward pass, in all and of the widest tensor.

    Counted for one row and for two, in tensors without memory, with what torch records for the backward pass; with
    gradient checkpointing, of the layers these are their inputs.
    """
    with FakeTensorMode():
        model = AutoModelForCausalLM.from_config(shape, dtype=dtype)
        if recomputed:
            recompute_activations(model)
        one, two = (_saved(model.base_model, rows, dtype) for rows in (1, 2))
    weights = {p.numel() * dtype.itemsize for p in model.parameters()}
    widest = max(size for size in two if size not in weights)
    return (sum(two) - sum(one)) / _ROW, widest / (2 * _ROW)


def _saved(model: Any, rows: int, dtype: torch.dtype) -> list[int]:
    """Sizes in bytes of what a pass saves."""
    held: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        held[storage._cdata] = storage
        return tensor

    ids = torch.zeros(rows, _ROW, dtype=torch.long)
    autocast = torch.autocast("cpu", dtype, enabled=dtype != torch.float32)
    with autocast, saved_tensors_hooks(pack, lambda tensor: tensor):
        model(input_ids=ids, use_cache=False)
    return [storage.nbytes() for storage in held.values()]
