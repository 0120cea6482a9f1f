"""Draws of low-rank noise as adapters: a replica gets the mean once a step, and a draw is some MB (docs/adapters.md).

W + sigma U V^T / sqrt(r) is W with an adapter of B = sigma U / sqrt(r) and A = V^T.
"""

from collections.abc import Mapping
from typing import Any

import torch

from threepo.errors import UserError
from threepo.models.adapters import inner_layers
from threepo.posterior.shards import device_of
from threepo.rollout.memory import Layout
from threepo.types import Draw


def adapter_layout(model: Any, lora_rank: int, dtype: torch.dtype) -> Layout:
    """Layout of a draw's adapters, A [r, in] and B [out, r] of every linear layer, by peft's names."""
    layout: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for name, layer in inner_layers(model).items():
        layout[_adapter_name(name, "A")] = (lora_rank, layer.in_features), dtype
        layout[_adapter_name(name, "B")] = (layer.out_features, lora_rank), dtype
    return layout


def write_adapters(source: Any, draw: Draw | None, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write what a draw of `source` adds to the mean (None: nothing) into tensors of the layout.

    `UserError` if that is no adapter of this rank for a linear layer.
    """
    for tensor in tensors.values():
        tensor.zero_()
    if draw is None:
        return
    for entry in source.noisy():
        scalars = entry.scalars
        if not scalars.fixed_root:
            raise UserError(
                "engine.vllm.draw_rank: a learned sigma is no adapter; set optimizer.noise_shape='isotropic'"
            )
        name = entry.name.removesuffix(".weight")
        a, b = (tensors.get(_adapter_name(name, side)) for side in "AB")
        factors = entry.noise(draw).factors(scalars.noise_scale / scalars.fixed_root, device_of(entry.p))
        if a is None or b is None or factors is None or factors[1].shape[0] != a.shape[0]:
            raise UserError(
                f"engine.vllm.draw_rank: the noise of {entry.name} is no adapter of this rank beside a linear layer; "
                f'set noise.rank to the same, and noise.where = {{all = 0, "*_proj.weight" = 1}} or other layers'
            )
        b.copy_(factors[0])
        a.copy_(factors[1])


def multiply_out(base: Mapping[str, torch.Tensor], adapters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The base weights plus the products B A of their adapters."""
    weights = dict(base)
    for name, a in adapters.items():
        if name.endswith(".lora_A.weight"):
            weight = name.removeprefix(_PREFIX).removesuffix(".lora_A.weight") + ".weight"
            product = adapters[name.replace("lora_A", "lora_B")].float() @ a.float()
            weights[weight] = (weights[weight].float() + product).to(weights[weight].dtype)
    return weights


_PREFIX = "base_model.model."


def _adapter_name(layer: str, side: str) -> str:
    return f"{_PREFIX}{layer}.lora_{side}.weight"
