"""Sums over the bits of weights, by which a trainer and an engine compare what each holds, tensor by tensor.

A sum does not depend on the order of the elements, and zeros add nothing to it. So an engine may transpose, permute or
pad a tensor, and a tensor that it fuses of several has the sum of their sums.
"""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any

import torch

from threepo.errors import ThreepoWarning
from threepo.posterior import native

Sums = Mapping[str, int]
"""Sum modulo 2^64 by the name of a tensor; names of a fused tensor's parts are joined by `JOINED`."""
JOINED, MODULUS = " + ", 1 << 64
_PATTERNS = {2: torch.int16, 4: torch.int32}
"""Integers with as many bytes as a floating-point number."""
_TOGETHER, _ROWS = 1 << 20, 256
"""Elements that are worked on at a time, and rows of the unit matrix that are multiplied at a time."""


@torch.no_grad()
def bit_sum(tensor: torch.Tensor) -> int:
    """Add up scattered bits of all elements of a floating-point tensor of 16 or 32 bits, modulo 2^64."""
    flat = tensor.detach().reshape(-1)
    if native.takes(flat):
        return native.bit_sum(flat) % MODULUS
    sums = []
    for part in torch.split(flat, _TOGETHER if flat.device.type == "cpu" else 64 * _TOGETHER):
        pattern = _PATTERNS[part.element_size()]
        bits = part.view(pattern).to(torch.int32, copy=True)
        bits[bits == torch.iinfo(pattern).min] = 0  # a zero has no sign, as in products
        bits ^= bits >> 16  # scatter the bits (Wellons' hash prospector)
        bits *= 0x7FEB352D
        bits ^= bits >> 15
        bits *= 0x846CA68B - (1 << 32)
        bits ^= bits >> 16
        sums.append(bits.sum(dtype=torch.int64))
    return int(torch.stack(sums).sum()) % MODULUS if sums else 0


def bit_sums(weights: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype) -> dict[str, int]:
    """The sum of every floating-point tensor as it is in `dtype`."""
    return {name: bit_sum(value.to(dtype)) for name, value in weights if value.is_floating_point()}


@torch.no_grad()
def sums_in_engine(model: torch.nn.Module, dtype: torch.dtype) -> dict[str, int]:
    """The sums of a vLLM model's parameters as they are in `dtype`, by the names that transformers gives them.

    The CPU build of vLLM computes with packed copies. These are read through its own product with the unit matrix, in
    which every sum has one term that is not zero, so that the result is the weights to the bit.
    """
    fused, found = getattr(model, "packed_modules_mapping", None) or {}, {}
    for path, module in model.named_modules():
        for kind, parameter in module.named_parameters(recurse=False):
            if not parameter.is_floating_point():
                continue
            *above, last = path.split(".")
            name = JOINED.join(".".join([*above, part, kind]) for part in fused.get(last, [last]))
            packed = kind == "weight" and hasattr(module, "cpu_linear")
            found[name] = _packed_sum(module) if packed else bit_sum(parameter.to(dtype))
    return found


def added_up(parts: Sequence[Sums]) -> dict[str, int]:
    """The sums of what several workers hold together."""
    return {name: sum(part[name] for part in parts) % MODULUS for name in parts[0]}


def _packed_sum(layer: Any) -> int:
    """The sum of the weights [out, in] that a linear layer of vLLM computes with."""
    like = layer.weight
    names = ("input_size_per_partition", "input_size", "embedding_dim")
    width = next(getattr(layer, name) for name in names if hasattr(layer, name))
    total = 0
    for first in range(0, width, _ROWS):
        unit = torch.zeros(min(_ROWS, width - first), width, dtype=like.dtype, device=like.device)
        unit.diagonal(first).fill_(1)
        total += bit_sum(layer.quant_method.apply(layer, unit))
    return total % MODULUS


class SumCheck:
    """Tells which tensors of an engine are not the trainer's to the bit, in whatever order.

    A tensor that differs at the first comparison, or whose name the trainer does not know, is taken for one that the
    engine holds in a form of its own. It is named in a warning, and not compared again.

    Args:
        workers: processes among which the engine spreads its tensors. Some are whole in several of these, and count
            as often; vLLM does not tell which, so each part of a tensor may count as often as any divisor says.
    """

    def __init__(self, workers: int = 1) -> None:
        self._times = [times for times in range(1, workers + 1) if workers % times == 0]
        self._left_out: set[str] | None = None

    def differing(self, expected: Sums, held: Sums) -> list[str]:
        """Names of the engine's tensors that differ."""
        if not held:
            return []
        known = [name for name in held if set(name.split(JOINED)) <= expected.keys()]
        found = [name for name in known if held[name] not in self._allowed(expected, name.split(JOINED))]
        if self._left_out is None:
            unknown = {name for name in held.keys() - set(known) if held[name]}  # others are slots that hold zeros
            self._left_out = unknown | set(found)
            if self._left_out:
                some = ", ".join(name for name in held if name in self._left_out)
                warnings.warn(
                    f"engine.kind = 'vllm': {len(self._left_out)} of {len(held)} tensors are not compared to the bit, "
                    f"as vLLM may hold them in another form: {some[:300]}",
                    ThreepoWarning,
                    stacklevel=2,
                )
        return [name for name in found if name not in self._left_out]

    def _allowed(self, expected: Sums, parts: Sequence[str]) -> set[int]:
        """The sums that a tensor of these parts may have."""
        several = ([times * expected[part] for times in self._times] for part in parts)
        return {sum(found) % MODULUS for found in product(*several)}
