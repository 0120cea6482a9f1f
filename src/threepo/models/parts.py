"""The names by which files and other programs know the weights of a model, where transformers has others in memory.

transformers holds the experts of a layer in one tensor, and files have them one by one; some models have other names.
As the experts lie one after another in memory, files can name parts of a tensor, and nobody has to cut or copy it.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers.core_model_loading import revert_weight_conversion

Parts = Mapping[str, Sequence[tuple[str, Sequence[int]]]]
"""Names and shapes of the parts of a tensor, which lie in it one after another, by its name in memory."""


class _Uncopied(torch.Tensor):
    """A tensor whose parts show where they lie in it, as they are never copied."""

    def contiguous(self, *_: Any, **__: Any) -> "_Uncopied":
        return self


def parts_in_files(model: Any, tensors: Mapping[str, torch.Tensor]) -> Parts:
    """The parts in which transformers saves tensors of a model, without those that it saves as they are.

    Tensors whose parts are not all their elements in their order are left out as well.
    """
    wholes = {name: torch.empty(tensor.shape, device="meta") for name, tensor in tensors.items()}
    owners, found = {id(whole): name for name, whole in wholes.items()}, defaultdict(list)
    uncopied = {name: whole.as_subclass(_Uncopied) for name, whole in wholes.items()}
    for name, part in revert_weight_conversion(model, uncopied).items():
        if part.is_contiguous() and (owner := owners.get(id(part._base))):
            found[owner].append((part.storage_offset(), name, part.shape))
    parts = {name: [(part, shape) for _, part, shape in sorted(own)] for name, own in found.items()}
    return {
        name: own
        for name, own in parts.items()
        if own != [(name, tensors[name].shape)] and sum(math.prod(shape) for _, shape in own) == tensors[name].numel()
    }


def cut(weights: Iterable[tuple[str, torch.Tensor]], parts: Parts) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and value of the parts of each tensor."""
    for name, value in weights:
        own = parts.get(name, [(name, value.shape)])
        values = torch.split(value.reshape(-1), [math.prod(shape) for _, shape in own])
        yield from ((part, flat.view(shape)) for (part, shape), flat in zip(own, values, strict=True))
