"""N policies as one model: a Hugging Face decoder whose every weight is a stack, one value for each draw.

The decoder's own code runs, so whatever is special about a family (norms of queries and keys, positions, sliding
windows, scaled logits) stays as its authors wrote it. Exchanged are the modules that own weights, whose matrix products
become batched ones, and attention, which goes through the engine's cache (cache.py). Rows are ordered by draw, and each
draw has equally many: row i of a batch of B belongs to draw i // (B / N).

Legend: N draws, B rows of all draws, L positions of each row in a pass, D width.
"""

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface

from threepo.errors import UserError
from threepo.rollout.cache import attend

ATTENTION = "threepo_rows"
"""What the engine's attention is called among those of transformers."""


class Stack:
    """The values of one parameter under all loaded draws; modules that share a parameter share its stack."""

    def __init__(self, shape: torch.Size) -> None:
        self.shape = shape
        self.turned = False
        """Keep [out, in] as [in, out], which makes batched products faster (in bfloat16 by a tenth on a CPU)."""
        self.resize(0, torch.float32, torch.device("cpu"))

    def resize(self, draws: int, dtype: torch.dtype, device: torch.device) -> None:
        """Make room for the values of so many draws; what was there is gone."""
        self.values = torch.empty(0)  # before the new memory is asked for
        shape = self.shape[::-1] if self.turned else self.shape
        values = torch.empty(draws, *shape, dtype=dtype, device=device)
        self.values = values.transpose(-1, -2) if self.turned else values
        """[N, *shape]."""


class StackedLinear(nn.Module):
    """nn.Linear with weights [N, out, in]."""

    def __init__(self, weight: Stack, bias: Stack | None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, ..., in] to [B, ..., out]."""
        weight = self.weight.values.transpose(1, 2)
        rows = x.reshape(len(weight), -1, x.shape[-1])
        if self.bias is None:
            out = torch.bmm(rows, weight)
        else:
            out = torch.baddbmm(self.bias.values.unsqueeze(1), rows, weight)
        return out.view(*x.shape[:-1], out.shape[-1])


class StackedEmbedding(nn.Module):
    """nn.Embedding with weights [N, V, D]."""

    def __init__(self, weight: Stack) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """[B, L] to [B, L, D]."""
        table = self.weight.values
        draws, size = table.shape[:2]
        offsets = torch.arange(draws, device=ids.device).mul_(size).view(draws, 1)
        return F.embedding((ids.view(draws, -1) + offsets).view(ids.shape), table.flatten(0, 1))


class StackedElementwise(nn.Module):
    """A module that multiplies or adds vectors over the last dimension (RMSNorm of any family), with vectors [N, D].

    The module's own code runs on a view with the draws in front, where a vector for each draw broadcasts.
    """

    def __init__(self, inner: nn.Module, vectors: Mapping[str, Stack]) -> None:
        super().__init__()
        self.inner = inner
        self.vectors = dict(vectors)
        for name in vectors:
            delattr(inner, name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Any [B, ..., D]."""
        for name, stack in self.vectors.items():
            draws = len(stack.values)
            setattr(self.inner, name, stack.values.view(draws, *(1,) * (x.dim() - 1), -1))
        out: torch.Tensor = self.inner(x.view(draws, -1, *x.shape[1:]))
        return out.flatten(0, 1)


class StackedLayerNorm(nn.Module):
    """nn.LayerNorm over the last dimension, with vectors [N, D]."""

    def __init__(self, inner: nn.LayerNorm, weight: Stack, bias: Stack | None) -> None:
        super().__init__()
        self.eps, self.weight, self.bias = inner.eps, weight, bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Any [B, ..., D]."""
        shape = (len(self.weight.values), *(1,) * (x.dim() - 1), x.shape[-1])
        out = F.layer_norm(x, x.shape[-1:], eps=self.eps).view(shape[0], -1, *x.shape[1:])
        out = out * self.weight.values.view(shape)
        if self.bias is not None:
            out = out + self.bias.values.view(shape)
        return out.flatten(0, 1)


class Ensemble:
    """A decoder with stacked weights; it has none until `resize` and the filling of `views`."""

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        """Take the architecture of a Hugging Face causal LM, and nothing of its weights.

        `UserError` if it has a module whose weights cannot be stacked, or no exchangeable attention.
        """
        self.dtype = dtype
        self.device = next(model.parameters()).device
        empty = {id(p): nn.Parameter(p.detach().to("meta", dtype), requires_grad=False) for p in model.parameters()}
        self.model = copy.deepcopy(model, empty).eval()
        _use_our_attention(self.model)
        by_parameter = {p: Stack(p.shape) for p in self.model.parameters()}
        self.stacks = {name: by_parameter[p] for name, p in self.model.named_parameters()}
        """By the name that a parameter has, of several the first."""
        self.by_any_name = {n: by_parameter[p] for n, p in self.model.named_parameters(remove_duplicate=False)}
        """A tied parameter's stack by each of its names."""
        owners = [module for module in self.model.modules() if _owns_weights(module)]
        replaced = {module: _stacked(module, by_parameter) for module in owners}
        looked_up = {id(module.weight) for module in replaced.values() if isinstance(module, StackedEmbedding)}
        for module in replaced.values():
            if isinstance(module, StackedLinear):
                module.weight.turned = id(module.weight) not in looked_up
        for parent in list(self.model.modules()):
            for name, child in parent.named_children():
                if child in replaced:
                    setattr(parent, name, replaced[child])

    @property
    def parameters(self) -> int:
        """Weights of one draw."""
        return sum(stack.shape.numel() for stack in self.stacks.values())

    @property
    def bytes(self) -> int:
        """Memory that the weights of all draws take now."""
        return sum(stack.values.nbytes for stack in self.stacks.values())

    def resize(self, draws: int) -> None:
        """Make room for `draws` weights of every parameter, in one allocation each; what was there is gone."""
        for stack in self.stacks.values():
            if len(stack.values) != draws:
                stack.resize(draws, self.dtype, self.device)

    def views(self, index: int) -> dict[str, torch.Tensor]:
        """The weights of one draw, to be written into; a tied parameter's by each of its names."""
        return {name: stack.values[index] for name, stack in self.by_any_name.items()}


def _use_our_attention(model: Any) -> None:
    if not getattr(model, "_supports_attention_backend", False):
        raise UserError(
            f"engine.kind = 'local': the attention of {type(model).__name__} cannot be exchanged, which decoding "
            f"with a cache for several policies needs; use engine.kind = 'vllm'"
        )
    AttentionInterface.register(ATTENTION, attend)
    model.set_attn_implementation(ATTENTION)


def check_positions(config: Any, tokens: int) -> None:
    """`UserError` if the frequencies of a model's positions change where a pass has rows of so many tokens.

    A row would depend on those beside it, and what is in the cache would have other frequencies than what comes.
    """
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    for part in (rope, *(of_kind for of_kind in rope.values() if isinstance(of_kind, dict))):
        kind = part.get("rope_type", "default")
        if kind == "longrope":
            most = part["original_max_position_embeddings"]
        elif "dynamic" in kind:
            most = text.max_position_embeddings
        else:
            continue
        if tokens > most:
            raise UserError(
                f"engine.kind = 'local': the model's rope_type = {kind!r} has other frequencies for rows above "
                f"{most} tokens; prompt and max_new_tokens together are {tokens}; lower sampling.max_new_tokens"
            )


def _owns_weights(module: nn.Module) -> bool:
    return any(True for _ in module.parameters(recurse=False))


def _stacked(module: nn.Module, stacks: Mapping[nn.Parameter, Stack]) -> nn.Module:
    own = {name: stacks[p] for name, p in module.named_parameters(recurse=False)}
    if type(module) is nn.Linear:
        return StackedLinear(own["weight"], own.get("bias"))
    if type(module) is nn.Embedding and module.max_norm is None:
        return StackedEmbedding(own["weight"])
    if type(module) is nn.LayerNorm and len(own["weight"].shape) == 1:
        return StackedLayerNorm(module, own["weight"], own.get("bias"))
    if type(module).__name__.endswith("RMSNorm") and _all_vectors(own.values()):
        return StackedElementwise(module, own)
    raise UserError(
        f"engine.kind = 'local': the weights of a {type(module).__name__} cannot be stacked, only those of Linear, "
        f"Embedding, LayerNorm and RMSNorm modules; use engine.kind = 'vllm'"
    )


def _all_vectors(stacks: Iterable[Stack]) -> bool:
    return all(len(stack.shape) == 1 for stack in stacks)
