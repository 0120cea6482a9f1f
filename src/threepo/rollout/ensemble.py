"""N policies as one model: a Hugging Face decoder whose every weight is a stack, one value for each draw.

The decoder's own code runs, so whatever is special about a family (norms of queries and keys, positions, sliding
windows, scaled logits) stays as its authors wrote it. Exchanged are the modules that own weights, whose matrix products
become batched ones, and attention, which goes through the engine's cache (cache.py). Rows are ordered by draw. The
compiled products (stacked_linear.py) take any number of rows of each draw, torch's take equally many.

Legend: N draws, B rows of all draws, L positions of each row in a pass, D width.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface

from threepo.errors import UserError
from threepo.rollout import stacked_linear
from threepo.rollout.cache import attend

ATTENTION = "threepo_rows"
"""What the engine's attention is called among those of transformers."""


class Stack:
    """The values of one parameter under all loaded draws; modules that share a parameter share its stack."""

    def __init__(self, shape: torch.Size) -> None:
        self.shape = shape
        self.order: Literal["plain", "turned", "packed"] = "plain"
        """How [out, in] lies in memory: "turned" is [in, out], which makes torch's batched products faster (in bfloat16
        by a tenth on a CPU); "packed" is for the compiled ones, once `pack` has been called."""
        self.resize(0, torch.float32, torch.device("cpu"))

    @property
    def numbers(self) -> int:
        """What the memory of one draw holds."""
        if self.order == "packed":
            return stacked_linear.padded(self.shape[0]) * self.shape[1]
        return self.shape.numel()

    def resize(self, draws: int, dtype: torch.dtype, device: torch.device) -> None:
        """Make room for the values of so many draws; what was there is gone."""
        self.memory = self.values = torch.empty(0)  # before the new memory is asked for
        self.memory = torch.empty(draws, self.numbers, dtype=dtype, device=device)
        if self.order == "turned":
            self.values = self.memory.view(draws, *self.shape[::-1]).transpose(-1, -2)
        else:
            self.values = self.memory[:, : self.shape.numel()].view(draws, *self.shape)
        """[N, *shape], to be written into; no longer the values once they are packed."""

    def pack(self, index: int) -> None:
        """Bring what was written for one draw into the order that products read, if there is a special one."""
        if self.order == "packed":
            stacked_linear.pack(self.memory[index].view(-1, self.shape[1]))

    @property
    def packed(self) -> torch.Tensor:
        """[N, out, in] with whole panels of outputs, for stacked_linear.py."""
        return self.memory.view(len(self.memory), -1, self.shape[1])


class Rows:
    """How many rows of each draw a pass has, and what follows from it; as long as no weights are loaded."""

    def __init__(self, counts: Sequence[int], device: torch.device) -> None:
        self.count = sum(counts)
        numbers = torch.tensor(counts)
        self.draws = torch.arange(len(counts)).repeat_interleave(numbers).to(device)
        """[B] the draw of each row."""
        self._starts = F.pad(numbers.cumsum(0), (1, 0))
        self._starts_of: dict[int, torch.Tensor] = {}
        self._vectors: dict[Stack, torch.Tensor] = {}

    def starts(self, positions: int) -> torch.Tensor:
        """[N + 1] where the positions of each draw begin among those of all rows, so many of each."""
        if positions not in self._starts_of:
            self._starts_of[positions] = self._starts * positions
        return self._starts_of[positions]

    def vectors(self, stack: Stack, dimensions: int) -> torch.Tensor:
        """The vector of each row's draw, [B, 1, ..., D] of so many dimensions; of a single draw [1, ..., D]."""
        if stack not in self._vectors:
            one = len(stack.values) == 1
            self._vectors[stack] = stack.values if one else stack.values.index_select(0, self.draws)
        found = self._vectors[stack]
        return found.view(len(found), *(1,) * (dimensions - 2), -1)


@dataclass
class Dealt:
    """The rows of the pass that is made, which all modules of an ensemble look at."""

    rows: Rows | None = None

    def __call__(self) -> Rows:
        assert self.rows is not None, "the rows of the pass have not been set"
        return self.rows


class StackedLinear(nn.Module):
    """nn.Linear with weights [N, out, in]."""

    def __init__(self, dealt: Dealt, weight: Stack, bias: Stack | None) -> None:
        super().__init__()
        self.dealt, self.weight, self.bias = dealt, weight, bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, ..., in] to [B, ..., out]."""
        bias = None if self.bias is None else self.bias.values
        if self.weight.order == "packed":
            x2, rows = x.reshape(-1, x.shape[-1]), self.dealt()
            positions, more = divmod(len(x2), rows.count)
            if more:
                raise RuntimeError(f"expected equally many positions of {rows.count} rows, got {len(x2)} in all")
            starts = rows.starts(positions)
            out = stacked_linear.product(x2, self.weight.packed, bias, self.weight.shape[0], starts)
            return out.view(*x.shape[:-1], out.shape[-1])
        x3 = x.reshape(len(self.weight.values), -1, x.shape[-1])
        weight = self.weight.values.transpose(1, 2)
        out = torch.bmm(x3, weight) if bias is None else torch.baddbmm(bias.unsqueeze(1), x3, weight)
        return out.view(*x.shape[:-1], out.shape[-1])


class StackedEmbedding(nn.Module):
    """nn.Embedding with weights [N, V, D]."""

    def __init__(self, dealt: Dealt, weight: Stack) -> None:
        super().__init__()
        self.dealt, self.weight = dealt, weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """[B, L] to [B, L, D]."""
        table, draws = self.weight.values, self.dealt().draws.unsqueeze(1)
        if self.weight.order == "packed":  # it is the head, too
            words = stacked_linear.panels(self.weight.packed)
            panel, place = ids // stacked_linear.LANES, ids % stacked_linear.LANES
            return words[draws, panel, :, place].view(table.dtype)
        return F.embedding(ids + draws * table.shape[1], table.flatten(0, 1))


class StackedElementwise(nn.Module):
    """A module that multiplies or adds vectors over the last dimension (RMSNorm of any family), with vectors [N, D].

    The module's own code runs, with a vector for each row in place of one for all.
    """

    def __init__(self, dealt: Dealt, inner: nn.Module, vectors: Mapping[str, Stack]) -> None:
        super().__init__()
        self.dealt, self.inner, self.vectors = dealt, inner, dict(vectors)
        for name in vectors:
            delattr(inner, name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Any [B, ..., D]."""
        for name, stack in self.vectors.items():
            setattr(self.inner, name, self.dealt().vectors(stack, x.dim()))
        out: torch.Tensor = self.inner(x)
        return out


class StackedLayerNorm(nn.Module):
    """nn.LayerNorm over the last dimension, with vectors [N, D]."""

    def __init__(self, dealt: Dealt, inner: nn.LayerNorm, weight: Stack, bias: Stack | None) -> None:
        super().__init__()
        self.dealt, self.eps, self.weight, self.bias = dealt, inner.eps, weight, bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Any [B, ..., D]."""
        out = F.layer_norm(x, x.shape[-1:], eps=self.eps) * self.dealt().vectors(self.weight, x.dim())
        return out if self.bias is None else out + self.dealt().vectors(self.bias, x.dim())


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
        self._dealt = Dealt()
        replaced = {module: _stacked(module, by_parameter, self._dealt) for module in owners}
        looked_up = {id(module.weight) for module in replaced.values() if isinstance(module, StackedEmbedding)}
        for module in replaced.values():
            if isinstance(module, StackedLinear):
                if stacked_linear.serves(module.weight.shape[1], dtype, self.device):
                    module.weight.order = "packed"
                elif id(module.weight) not in looked_up:
                    module.weight.order = "turned"
        linear = [module for module in replaced.values() if isinstance(module, StackedLinear)]
        self.ragged = all(module.weight.order == "packed" for module in linear)
        """Whether draws may have different numbers of rows in a pass."""
        for parent in list(self.model.modules()):
            for name, child in parent.named_children():
                if child in replaced:
                    setattr(parent, name, replaced[child])

    @property
    def numbers(self) -> int:
        """What the memory of one draw holds: its weights, and padding to whole panels."""
        return sum(stack.numbers for stack in self.stacks.values())

    @property
    def bytes(self) -> int:
        """Memory that the weights of all draws take now."""
        return sum(stack.memory.nbytes for stack in self.stacks.values())

    def deal(self, rows: Rows) -> Any:
        """The model, for a pass with these rows."""
        self._dealt.rows = rows
        return self.model

    def resize(self, draws: int) -> None:
        """Make room for `draws` weights of every parameter, in one allocation each; what was there is gone."""
        for stack in self.stacks.values():
            if len(stack.values) != draws:
                stack.resize(draws, self.dtype, self.device)

    def views(self, index: int) -> dict[str, torch.Tensor]:
        """Where the weights of one draw are to be written, before `pack`; a tied parameter's by each of its names."""
        return {name: stack.values[index] for name, stack in self.by_any_name.items()}

    def pack(self, index: int) -> None:
        """Bring the weights of one draw, all written, into the order in which they are used."""
        for stack in self.stacks.values():
            stack.pack(index)


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


def _stacked(module: nn.Module, stacks: Mapping[nn.Parameter, Stack], dealt: Dealt) -> nn.Module:
    own = {name: stacks[p] for name, p in module.named_parameters(recurse=False)}
    if type(module) is nn.Linear:
        return StackedLinear(dealt, own["weight"], own.get("bias"))
    if type(module) is nn.Embedding and module.max_norm is None:
        return StackedEmbedding(dealt, own["weight"])
    if type(module) is nn.LayerNorm and len(own["weight"].shape) == 1:
        return StackedLayerNorm(dealt, module, own["weight"], own.get("bias"))
    if type(module).__name__.endswith("RMSNorm") and _all_vectors(own.values()):
        return StackedElementwise(dealt, module, own)
    raise UserError(
        f"engine.kind = 'local': the weights of a {type(module).__name__} cannot be stacked, only those of Linear, "
        f"Embedding, LayerNorm and RMSNorm modules; use engine.kind = 'vllm'"
    )


def _all_vectors(stacks: Iterable[Stack]) -> bool:
    return all(len(stack.shape) == 1 for stack in stacks)
