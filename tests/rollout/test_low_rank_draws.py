"""Draws of low-rank noise as adapters: what they add to the mean, and what is no adapter."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from rollout.low_rank import LINEAR, low_rank
from threepo.config import ModelConfig, NoiseConfig
from threepo.errors import UserError
from threepo.models.policy import Policy, load_policy
from threepo.rollout.low_rank import adapter_layout, multiply_out, write_adapters
from threepo.types import Draw


@pytest.fixture(scope="module")
def policy() -> Policy:
    return load_policy(ModelConfig(path="tiny-qwen2"))


def tensors(policy: Policy) -> dict[str, torch.Tensor]:
    layout = adapter_layout(policy.model, LINEAR.rank, torch.float32)
    return {name: torch.full(shape, torch.nan) for name, (shape, _) in layout.items()}


@pytest.mark.parametrize("draw", [None, Draw(1, 2, 3), Draw(1, 2, 3, sign=-1)])
def test_adapters_beside_the_mean_are_the_draw(policy: Policy, draw: Draw | None) -> None:
    source, written = low_rank(policy), tensors(policy)
    write_adapters(source, draw, written)
    found = multiply_out({name: p.detach() for name, p in policy.model.named_parameters()}, written)
    for name, value in source.weights(draw):
        torch.testing.assert_close(found[name], value.detach(), rtol=0, atol=1e-6)
        assert torch.equal(found[name], value) == (draw is None or "_proj.weight" not in name)


@pytest.mark.parametrize(
    ("noise", "settings", "message"),
    [
        (replace(LINEAR, rank=1), {}, "q_proj.weight is no adapter of this rank"),
        (replace(LINEAR, rank=0), {}, "q_proj.weight is no adapter of this rank"),
        (NoiseConfig(rank=2), {}, "embed_tokens.weight is no adapter"),
        (replace(LINEAR, where={"attention": 1.0}), {}, "q_proj.bias is no adapter"),
        (LINEAR, {"noise_shape": "learned"}, "a learned sigma is no adapter; set optimizer.noise_shape"),
    ],
)
def test_draws_that_are_no_adapters_are_refused(
    policy: Policy, noise: NoiseConfig, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        write_adapters(low_rank(policy, noise, **settings), Draw(0, 0, 0), tensors(policy))
