"""Draws of low-rank noise as adapters: an engine gets the mean once, and a draw is some MB (docs/adapters.md).

W + sigma U V^T / sqrt(r) is W beside an adapter with B = sigma U / sqrt(r) and A = V^T.
"""

from collections.abc import Mapping
from typing import Any

import torch

from threepo.errors import UserError
from threepo.models.adapters import inner_layers
from threepo.posterior.shards import device_of
from threepo.rollout.memory import Layout
from threepo.types import Draw


def adapter_layout(model: Any, rank: int, dtype: torch.dtype) -> Layout:
    """Layout of a draw's adapters by peft's names."""
    found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for name, layer in inner_layers(model).items():
        found[_called(name, "A")] = (rank, layer.in_features), dtype
        found[_called(name, "B")] = (layer.out_features, rank), dtype
    return found


def write_adapters(source: Any, draw: Draw | None, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write what a draw of `source` adds to the mean (None: nothing) into tensors of the layout.

    `UserError` if that is no adapter of this rank beside a linear layer.
    """
    for tensor in tensors.values():
        tensor.zero_()
    for entry in source.noisy() if draw else ():
        assert draw
        scalars = entry.scalars
        if not scalars.fixed_root:
            raise UserError(
                "engine.vllm.draw_rank: a learned sigma is no adapter; set optimizer.noise_shape='isotropic'"
            )
        name = entry.name.removesuffix(".weight")
        a, b = (tensors.get(_called(name, side)) for side in "AB")
        factors = entry.noise(draw).factors(scalars.noise_scale / scalars.fixed_root, device_of(entry.p))
        if a is None or b is None or factors is None or factors[1].shape[0] != a.shape[0]:
            raise UserError(
                f"engine.vllm.draw_rank: the noise of {entry.name} is no adapter of this rank beside a linear layer; "
                f'set noise.rank to the same, and noise.where = {{all = 0, "*_proj.weight" = 1}} or other layers'
            )
        b.copy_(factors[0])
        a.copy_(factors[1])


def merged(means: Mapping[str, torch.Tensor], adapters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights that adapters are beside, with them multiplied out."""
    found = dict(means)
    for name, a in adapters.items():
        if name.endswith(".lora_A.weight"):
            weight = name.removeprefix(_PREFIX).removesuffix(".lora_A.weight") + ".weight"
            product = adapters[name.replace("lora_A", "lora_B")].float() @ a.float()
            found[weight] = (found[weight].float() + product).to(found[weight].dtype)
    return found


_PREFIX = "base_model.model."


def _called(layer: str, side: str) -> str:
    return f"{_PREFIX}{layer}.lora_{side}.weight"
