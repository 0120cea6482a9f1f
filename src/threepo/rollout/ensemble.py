"""N policies as one model: a Hugging Face decoder in which every weight is a stack of values, one for each draw.

The decoder's own code runs, so everything special about a family stays as its authors wrote it. Two things are
replaced: modules that own weights, whose matrix products become batched ones, and attention, which goes through the
engine's cache (cache.py). Rows are ordered by draw. Compiled products (stacked_linear.py) take any number of rows of
each draw; torch's products need equally many.

Legend: N draws, B rows of all draws, L positions of each row in a pass, D width.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface

from threepo.errors import UserError
from threepo.models.adapters import A, B
from threepo.models.attention import lasting_positions
from threepo.models.four_bit import FourBit
from threepo.models.policy import without_weights
from threepo.rollout import stacked_linear
from threepo.rollout.cache import attend

ATTENTION = "threepo_rows"
"""Name under which the engine's attention is registered with transformers."""


class Stack:
    """The values of one parameter under all loaded draws; modules that share a parameter share its stack."""

    def __init__(self, shape: torch.Size, shared: bool = False) -> None:
        """`shared`: all draws have the same values, which are stored once."""
        self.shape, self.shared = shape, shared
        self.is_packed = False
        """True if `Ensemble.pack` brings the values [out, in] into the order of compiled products."""
        self.is_borrowed = False
        """True if the values are the trainer's own, in its memory, and never change."""
        self.four_bit: FourBit | None = None
        """The values, if they are in four bits."""
        self.resize(0, torch.float32, torch.device("cpu"))

    @property
    def numbers(self) -> int:
        """Elements in memory for one draw."""
        return stacked_linear.padded(self.shape[0]) * self.shape[1] if self.is_packed else self.shape.numel()

    def copies(self, draws: int) -> int:
        """The copies of the values that so many draws need."""
        return min(draws, 1) if self.shared else draws

    def resize(self, draws: int, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate memory for the values of so many draws; old values are lost."""
        if self.is_borrowed:
            return
        copies = self.copies(draws)
        self.memory = self.values = torch.empty(0)  # frees the old memory before the new is allocated
        self.memory = torch.empty(copies, self.numbers, dtype=dtype, device=device)
        self.values = self.memory[:, : self.shape.numel()].view(copies, *self.shape)
        """[N, *shape], for writing; packing makes it meaningless."""

    def borrow(self, values: torch.Tensor) -> None:
        """Use the trainer's values for all draws, in its memory."""
        self.is_borrowed = True
        if isinstance(values, FourBit):
            self.four_bit = values
        else:
            self.memory, self.values = values.view(1, -1), values.unsqueeze(0)

    @property
    def packed(self) -> torch.Tensor:
        """[N, out, in], with `out` rounded up to whole panels, for stacked_linear.py."""
        return self.memory.view(len(self.memory), -1, self.shape[1])


class Rows:
    """The number of rows of each draw in a pass, and what follows from it while the loaded weights stay."""

    def __init__(self, counts: Sequence[int], device: torch.device) -> None:
        numbers = torch.tensor(counts)
        self.draws = torch.arange(len(counts)).repeat_interleave(numbers).to(device)
        """[B] the draw of each row."""
        self.starts = F.pad(numbers.cumsum(0), (1, 0))
        """[N + 1] first row of each draw, and B."""
        self._vectors: dict[Stack, torch.Tensor] = {}

    def vectors(self, stack: Stack, dimensions: int) -> torch.Tensor:
        """The vector of each row's draw, [B, 1, ..., D] with so many dimensions; [1, ..., D] for a single draw."""
        if stack not in self._vectors:
            one = len(stack.values) == 1
            self._vectors[stack] = stack.values if one else stack.values.index_select(0, self.draws)
        found = self._vectors[stack]
        return found.view(len(found), *(1,) * (dimensions - 2), -1)


class Pass:
    """The current pass, which all modules of an ensemble share."""

    rows: Rows


class StackedLinear(nn.Module):
    """nn.Linear with weights [N, out, in], or [1, out, in] for all draws, and optionally an adapter."""

    def __init__(self, current: Pass, stacks: Mapping[str, Stack]) -> None:
        super().__init__()
        self.current, self.weight, self.bias = current, stacks["weight"], stacks.get("bias")
        self.low_rank: tuple[Stack, Stack, float] | None = None
        """The adapter: A [N or 1, r, in], B [N, out, r] and the scale s."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, ..., in] to [B, ..., out]."""
        out = self._whole(x)
        if self.low_rank is None:
            return out
        a, b, scale = self.low_rank
        inner = x.reshape(len(a.values), -1, x.shape[-1]) @ a.values.transpose(1, 2)
        draws = len(b.values)
        low = torch.baddbmm(
            out.view(draws, -1, out.shape[-1]),
            inner.view(draws, -1, inner.shape[-1]),
            b.values.transpose(1, 2),
            alpha=scale,
        )
        return low.view(out.shape)

    def _whole(self, x: torch.Tensor) -> torch.Tensor:
        """[B, ..., in] to [B, ..., out], without the adapter."""
        bias = None if self.bias is None else self.bias.values
        if self.weight.four_bit is not None:
            return F.linear(x, self.weight.four_bit.dense().to(x.dtype), None if bias is None else bias[0])
        if self.weight.is_packed:
            x2, rows = x.reshape(-1, x.shape[-1]), self.current.rows
            positions, rest = divmod(len(x2), len(rows.draws))
            assert not rest, f"{len(rows.draws)} rows cannot have equally many of {len(x2)} positions"
            starts = torch.tensor([0, len(rows.draws)]) if len(self.weight.values) == 1 else rows.starts
            starts = starts if positions == 1 else starts * positions
            out = stacked_linear.product(x2, self.weight.packed, bias, self.weight.shape[0], starts)
            return out.view(*x.shape[:-1], out.shape[-1])
        x3 = x.reshape(len(self.weight.values), -1, x.shape[-1])
        weight = self.weight.values.transpose(1, 2)
        out = torch.bmm(x3, weight) if bias is None else torch.baddbmm(bias.unsqueeze(1), x3, weight)
        return out.view(*x.shape[:-1], out.shape[-1])


class StackedEmbedding(nn.Module):
    """nn.Embedding with weights [N, V, D]."""

    def __init__(self, current: Pass, stacks: Mapping[str, Stack]) -> None:
        super().__init__()
        self.current, self.weight = current, stacks["weight"]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """[B, L] to [B, L, D]."""
        table = self.weight.values
        draws = self.current.rows.draws.unsqueeze(1) if len(table) > 1 else torch.zeros_like(ids)
        if self.weight.is_packed:  # tied to the head
            words = stacked_linear.panels(self.weight.packed)
            panel, lane = ids // stacked_linear.LANES, ids % stacked_linear.LANES
            return words[draws, panel, :, lane].view(table.dtype)
        return F.embedding(ids + draws * table.shape[1], table.flatten(0, 1))


class StackedNorm(nn.Module):
    """A module that multiplies or adds vectors over the last dimension: nn.LayerNorm, or RMSNorm of any family.

    The module's own code runs, with the vector of each row's draw, from [N, D], in place of one for all rows.
    """

    def __init__(self, current: Pass, stacks: Mapping[str, Stack], inner: nn.Module) -> None:
        super().__init__()
        self.current, self.stacks, self.inner = current, stacks, inner
        for name in stacks:
            delattr(inner, name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, ..., D] to [B, ..., D]."""
        vectors = {name: self.current.rows.vectors(stack, x.dim()) for name, stack in self.stacks.items()}
        if type(self.inner) is nn.LayerNorm:  # torch's function takes no vectors of several rows
            out = F.layer_norm(x, x.shape[-1:], eps=self.inner.eps) * vectors["weight"]
            return out + vectors["bias"] if "bias" in vectors else out
        for name, vector in vectors.items():
            setattr(self.inner, name, vector)
        return self.inner(x)  # type: ignore[no-any-return]


class Ensemble:
    """A decoder with stacked weights. They get values by `resize`, then writing into `views`, then `pack`."""

    def __init__(
        self,
        model: Any,
        dtype: torch.dtype,
        device: torch.device,
        adapters: Mapping[str, torch.nn.Parameter] = MappingProxyType({}),
        scale: float = 1.0,
    ) -> None:
        """Copy the architecture of a Hugging Face causal LM without its weights.

        `adapters`: A and B by name, and `scale` is their factor s (models/adapters.py). Then all draws share the other
        weights, and also A or B if that is not trained. `UserError` if a module's weights cannot be stacked, or its
        attention cannot be replaced.
        """
        self.dtype, self.device = dtype, device
        self.model = without_weights(model, dtype).eval().requires_grad_(False)
        if not getattr(self.model, "_supports_attention_backend", False):
            raise UserError(
                f"engine.kind = 'local': cannot replace the attention of {type(model).__name__}, which decoding with a "
                f"cache for several policies needs; use engine.kind = 'vllm'"
            )
        AttentionInterface.register(ATTENTION, attend)
        self.model.set_attn_implementation(ATTENTION)
        by_parameter = {p: Stack(p.shape, shared=bool(adapters)) for p in self.model.parameters()}
        self.stacks = {n: by_parameter[p] for n, p in self.model.named_parameters(remove_duplicate=False)}
        """Stacks by parameter name; a tied parameter's stack has each of its names."""
        self._pass = Pass()
        owners = {m: {n: by_parameter[p] for n, p in m.named_parameters(recurse=False)} for m in self.model.modules()}
        replaced = {module: _stacked(module, own, self._pass) for module, own in owners.items() if own}
        matrices = [module.weight for module in replaced.values() if isinstance(module, StackedLinear)]
        for weight in matrices:
            weight.is_packed = stacked_linear.serves(weight.shape[1], dtype, self.device)
        self.ragged = all(weight.is_packed for weight in matrices) and not adapters
        """True if draws may have different numbers of rows in a pass."""
        for name, module in list(self.model.named_modules(remove_duplicate=False)):
            if module in replaced:
                self.model.set_submodule(name, replaced[module])
        self.stacks |= {name: Stack(p.shape, shared=not p.requires_grad) for name, p in adapters.items()}
        for name in adapters:
            layer, _, part = name.partition(f".{A}.")
            if part:
                pair = self.stacks[name], self.stacks[name.replace(f".{A}.", f".{B}.")]
                self.model.get_submodule(layer).low_rank = *pair, scale

    def bytes_for(self, draws: int) -> int:
        """Memory for the weights of so many draws, without those that are borrowed from the trainer."""
        own = (stack for stack in set(self.stacks.values()) if not stack.is_borrowed)
        return sum(stack.copies(draws) * stack.numbers for stack in own) * self.dtype.itemsize

    @property
    def bytes(self) -> int:
        """Memory that the weights of all loaded draws take now."""
        return sum(stack.memory.nbytes for stack in set(self.stacks.values()) if not stack.is_borrowed)

    def model_for(self, rows: Rows) -> Any:
        """The model, for a pass with these rows."""
        self._pass.rows = rows
        return self.model

    def borrow(self, own: Mapping[str, torch.Tensor]) -> None:
        """Use the trainer's frozen weights, by their names here, where dtype and order allow it."""
        for name, value in own.items():
            takes = isinstance(value, FourBit) or value.dtype == self.dtype
            if (stack := self.stacks[name]).shared and not stack.is_packed and takes:
                stack.borrow(value)

    def resize(self, draws: int) -> None:
        """Allocate memory for the weights of `draws` draws, one block for each parameter; old values are lost."""
        for stack in self.stacks.values():
            if len(stack.values) != stack.copies(draws):
                stack.resize(draws, self.dtype, self.device)

    def views(self, index: int) -> dict[str, torch.Tensor]:
        """Tensors to write the weights of one draw into, before `pack`; a tied parameter under each of its names.

        Weights that all draws share come with the first draw.
        """
        own = {name: stack for name, stack in self.stacks.items() if not stack.is_borrowed}
        return {name: stack.values[index] for name, stack in own.items() if index == 0 or not stack.shared}

    def pack(self, index: int) -> None:
        """Finish the weights of one draw after all are written."""
        for stack in set(self.stacks.values()):
            if stack.is_packed and (index == 0 or not stack.shared):
                stacked_linear.pack(stack.packed[index])


def check_positions(config: Any, tokens: int) -> None:
    """Raise `UserError` if the frequencies of a model's positions change in a pass with rows of so many tokens."""
    most, kind = lasting_positions(config)
    if tokens > most:
        raise UserError(
            f"engine.kind = 'local': the model's rope_type = {kind!r} changes frequencies above {most} tokens; "
            f"prompt and max_new_tokens together are {tokens}; lower sampling.max_new_tokens"
        )


def _stacked(module: nn.Module, own: Mapping[str, Stack], current: Pass) -> nn.Module:
    """A module that computes the same with stacked parameters."""
    if type(module) is nn.Linear:
        return StackedLinear(current, own)
    if type(module) is nn.Embedding and module.max_norm is None:
        return StackedEmbedding(current, own)
    is_norm = type(module) is nn.LayerNorm or type(module).__name__.endswith("RMSNorm")
    if is_norm and all(len(stack.shape) == 1 for stack in own.values()):
        return StackedNorm(current, own, module)
    raise UserError(
        f"engine.kind = 'local': cannot stack the weights of a {type(module).__name__}, only of Linear, "
        f"Embedding, LayerNorm and RMSNorm modules; use engine.kind = 'vllm'"
    )
