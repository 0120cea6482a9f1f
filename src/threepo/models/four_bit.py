"""Weights in four bits: NF4 of QLoRA (arXiv 2305.14314), by bitsandbytes, for the frozen base of adapters.

A tensor that computes as the numbers that its four bits stand for, so all that reads weights (engines, digests, merges)
gets those. Linear layers make them anew for each product, forward and backward, and keep none.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map_only

from threepo.errors import import_extra

_library = partial(import_extra, "bitsandbytes.functional", "four-bit", "model.lora.base_dtype = 'nf4'")
BLOCK = 64
"""Numbers that share a scale, which is float32."""
BYTES = 0.5 + 4 / BLOCK
"""Bytes of a number, with its share of the scale."""


class FourBit(torch.Tensor):
    """A frozen matrix in NF4, of the dtype of `state`; it cannot be written."""

    codes: torch.Tensor
    state: Any

    @staticmethod
    def __new__(cls, codes: torch.Tensor, state: Any, shape: torch.Size) -> "FourBit":
        """Make a parameter from the two results of bitsandbytes' `quantize_4bit` for the flat numbers."""
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=state.dtype, device=codes.device)
        made.codes, made.state = codes, state
        return made

    def dense(self) -> torch.Tensor:
        """The dense weights that the four bits stand for."""
        return _library().dequantize_4bit(self.codes, self.state).view(self.shape)  # type: ignore[no-any-return]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear and isinstance(args[1], FourBit):
            return _Product.apply(*args, **(kwargs or {}))  # type: ignore[no-untyped-call]
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return FourBit(args[0].codes, args[0].state, args[0].shape)
        assert not (func._schema.is_mutable and isinstance(args[0], FourBit)), f"{func}: a write would be lost"
        return func(*tree_map_only(FourBit, FourBit.dense, args), **tree_map_only(FourBit, FourBit.dense, kwargs or {}))


class _Product(torch.autograd.Function):
    """x W^T + b with the bits that a linear layer of the same numbers has, under autocast too."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: FourBit, bias: torch.Tensor | None = None) -> torch.Tensor:
        ctx.weight, ctx.dtype = weight, x.dtype
        return F.linear(x, weight.dense(), bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return (grad @ ctx.weight.dense().to(grad.dtype)).to(ctx.dtype), None, None


def readable(p: torch.Tensor) -> torch.Tensor:
    """Returns weights that transformers had packed in four bits (`BitsAndBytesConfig`) as `FourBit`, others as is."""
    state = getattr(p, "quant_state", None)
    return p if state is None else FourBit(p.data, state, state.shape)


def four_bit(weight: torch.Tensor) -> FourBit:
    """A matrix rounded to NF4, with a scale for every 64 of its numbers."""
    # Flat: on CPUs with AVX-512, bitsandbytes 0.50 takes wrong scales for rows of 16 k numbers that end inside a block.
    codes, state = _library().quantize_4bit(weight.detach().flatten(), blocksize=BLOCK, quant_type="nf4")
    return FourBit(codes, state, weight.shape)
