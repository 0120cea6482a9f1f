"""Memory that comes and goes with one micro-batch: activations, and gradients on their way.

A micro-batch is tried in tensors that have shapes and no memory, and the most bytes that exist at one time count.
torch's own `MemTracker` gives the same numbers, but takes ten times as long and refuses models with frozen weights.
"""

import weakref
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from threepo.models.adapters import round_base
from threepo.models.attention import NAME, register_attention
from threepo.models.logprobs import FUSED_CHUNK, Scorer
from threepo.models.policy import Policy, recompute_activations
from threepo.types import MicroBatch


class AllocatedBytes(TorchDispatchMode):
    """Counts the bytes that operations allocate, until they are freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now, self.most = 0, 0
        self._seen: weakref.WeakKeyDictionary[torch.UntypedStorage, None] = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read = {x.untyped_storage() for x in tree_iter((args, kwargs)) if isinstance(x, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for storage in {x.untyped_storage() for x in tree_iter(result) if isinstance(x, torch.Tensor)} - read:
            if storage not in self._seen:
                self._seen[storage] = None
                self._add(storage.nbytes())
                weakref.finalize(storage, self._add, -storage.nbytes())
        return result

    def _add(self, size: int) -> None:
        self.now += size
        self.most = max(self.most, self.now)


def activation_bytes(
    model: Any,
    rows: int,
    length: int,
    dtype: torch.dtype,
    *,
    recomputed: bool,
    sharded: bool = False,
    base_dtype: str = "float32",
    chunk: int = FUSED_CHUNK,
    fused: bool = True,
) -> int:
    """Peak bytes of the temporary tensors of a micro-batch of `rows` rows of `length` tokens.

    `model`, on the meta device, is used up; its parameters that require a gradient are trained. `dtype` is the dtype
    of matrix products, `base_dtype` the setting of [model.lora], `recomputed` says whether gradient checkpointing is
    on, `chunk` how many logits there are at a time, and `fused` whether they are scored as on a GPU. `sharded`: as with
    FSDP2, weights are gathered in `dtype`, and each gradient is cut as soon as it is there; otherwise weights are cast
    by autocast, and gradients are added to an earlier micro-batch's.
    """
    if sharded:
        model.to(dtype)
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
            if sharded:
                p.register_post_accumulate_grad_hook(_drop_gradient)
            else:
                p.grad = torch.zeros_like(p) if p.requires_grad else None
        tokens = torch.zeros(rows * length, dtype=torch.long)
        packed = MicroBatch(tokens, (length,) * rows, torch.arange(rows * length), tokens, tokens)
        capped = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
        policy = Policy(Scorer(model, not capped, packed_rows, chunk, fused), None, dtype)
        allocated = AllocatedBytes()
        with allocated:
            policy.logprobs(packed).logprobs.sum().backward()  # type: ignore[no-untyped-call]
    return allocated.most


def _drop_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None
