"""Attention for the training passes of a CPU in bfloat16.

torch's fused CPU attention is slow in bfloat16 for sequences of some hundred tokens, above all backward: at 70 tokens
it takes two and a half times as long as in float32 (docs/performance.md). So under autocast, attention alone stays in
float32, which is more exact too. Entered into transformers' registry of attention functions under a name of its own;
outside autocast, and so in rollout engines, it is transformers' "sdpa" unchanged.
"""

from typing import Any

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

NAME = "threepo_sdpa"
LONGEST = 512
"""Tokens up to which float32 is the faster one."""


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **settings: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' `sdpa_attention_forward`: [R, L, H, D] from query [R, H, L, D], key and value [R, Hkv, L, D]."""
    if not torch.is_autocast_enabled("cpu") or key.shape[2] > LONGEST:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **settings)  # type: ignore[no-any-return]
    with torch.autocast("cpu", enabled=False):
        query, key, value = query.float(), key.float(), value.float()
        return sdpa_attention_forward(module, query, key, value, attention_mask, **settings)  # type: ignore[no-any-return]


def keep_attention_in_float32(model: Any) -> None:
    """Have a model that uses `sdpa` compute short attention in float32 under autocast; others stay as they are."""
    if model.config._attn_implementation != "sdpa":
        return
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)
