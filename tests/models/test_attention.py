"""Under autocast on a CPU, short attention is computed in float32, and only there."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from threepo.config import ModelConfig, TinyConfig
from threepo.models import attention
from threepo.models.policy import Policy, load_policy

SHAPE = TinyConfig(hidden_size=32, intermediate_size=64, layers=2, heads=2, kv_heads=1, context=128)


@pytest.fixture
def half() -> Policy:
    """The suite's tiny policy, to be computed in bfloat16."""
    return load_policy(ModelConfig(path="tiny-qwen2", tiny=SHAPE, compute_dtype="bfloat16"), seed=7)


@pytest.fixture
def dtypes(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """The dtypes that torch's attention is called with."""
    seen: list[torch.dtype] = []
    inner = F.scaled_dot_product_attention

    def spy(query: torch.Tensor, *args: object, **settings: object) -> torch.Tensor:
        autocast = torch.is_autocast_enabled("cpu")
        seen.append(torch.get_autocast_dtype("cpu") if autocast else query.dtype)
        return inner(query, *args, **settings)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    return seen


@pytest.mark.parametrize(("longest", "expected"), [(512, torch.float32), (8, torch.bfloat16)])
def test_short_attention_is_in_float32_under_autocast(
    half: Policy,
    dtypes: list[torch.dtype],
    monkeypatch: pytest.MonkeyPatch,
    longest: int,
    expected: torch.dtype,
) -> None:
    monkeypatch.setattr(attention, "LONGEST", longest)
    half.logprobs(torch.randint(2, 200, (2, 20)), torch.ones(2, 19).bool()).logprobs.sum().backward()
    assert dtypes == [expected] * SHAPE.layers


def test_outside_autocast_it_is_sdpa_in_the_models_own_dtype(half: Policy, dtypes: list[torch.dtype]) -> None:
    """As in a rollout engine in bfloat16, whose cached keys must not be converted at every token."""
    ids, mask = torch.randint(2, 200, (2, 20)), torch.ones(2, 20, dtype=torch.int64)
    mask[0, :5] = 0
    model = half.model.to(torch.bfloat16)
    ours = model(input_ids=ids, attention_mask=mask).logits
    model.set_attn_implementation("sdpa")
    assert torch.equal(ours, model(input_ids=ids, attention_mask=mask).logits)
    assert dtypes == [torch.bfloat16] * (2 * SHAPE.layers)


def test_a_saved_model_does_not_tell(half: Policy, tmp_path: Path) -> None:
    """Whoever loads it elsewhere has no such attention function."""
    half.save(tmp_path)
    assert attention.NAME not in (tmp_path / "config.json").read_text()
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "qwen2"


def test_models_with_attention_of_another_kind_keep_it() -> None:
    policy = load_policy(ModelConfig(path="tiny-qwen2", tiny=SHAPE))
    policy.model.set_attn_implementation("eager")
    attention.keep_attention_in_float32(policy.model)
    assert policy.model.config._attn_implementation == "eager"
