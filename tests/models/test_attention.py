"""Attention over packed rows; and under autocast on a CPU, short attention is computed in float32, and only there."""

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from transformers import Lfm2Config, NemotronConfig, PhimoeConfig

from factories import packed
from families import FAMILIES, policy_of
from families import SHAPE as FAMILY_SHAPE
from threepo.config import ModelConfig, TinyConfig
from threepo.models import attention
from threepo.models.logprobs import Scorer
from threepo.models.policy import Policy, load_policy
from threepo.types import MicroBatch

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
    logprobs, *_ = half.logprobs(packed(torch.randint(2, 200, (2, 20)), torch.ones(2, 19).bool()))
    logprobs.sum().backward()
    assert dtypes == [expected] * SHAPE.layers


def test_outside_autocast_it_is_sdpa_in_the_models_own_dtype(half: Policy, dtypes: list[torch.dtype]) -> None:
    """A rollout engine in bfloat16 must not convert its cached keys at every token."""
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
    assert not attention.takes_packed_rows(policy.model)
    assert policy.model.config._attn_implementation == "eager"


# Packed rows

LENGTHS = [2, 3, 4, 9, 9, 20, 33]


def rows_of(lengths: Sequence[int]) -> MicroBatch:
    """Rows of so many tokens, of which the loss counts some, and the last."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(2, 100, (len(lengths), max(lengths)), generator=generator)
    mask = torch.rand(len(lengths), max(lengths) - 1, generator=generator) < 0.7
    for row, length in enumerate(lengths):
        mask[row, length - 1 :] = False
        mask[row, length - 2] = True
    return packed(ids, mask)


def scored(
    model: Any, rows: MicroBatch, *, packed_rows: bool
) -> tuple[tuple[torch.Tensor, torch.Tensor], list[torch.Tensor]]:
    """Log-probs and entropies, and the gradients of a weighted sum of the log-probs."""
    model.zero_grad()
    result = Scorer(model, packed_rows=packed_rows)(rows, 0.8)
    (result[0] * torch.linspace(-1, 1, len(result[0]))).sum().backward()
    return result, [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize(
    ("family", "small"),
    [*((family, 0) for family in FAMILIES), *((family, attention.SMALL_TILE) for family in ("llama", "qwen2 sliding"))],
)
def test_packed_rows_are_scored_as_padded_ones(family: str, small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "SMALL_TILE", small)
    model = policy_of(FAMILIES[family]).model
    expected, gradients = scored(model, rows_of(LENGTHS), packed_rows=False)
    assert attention.takes_packed_rows(model)
    found, ours = scored(model, rows_of(LENGTHS), packed_rows=True)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-5)
    for a, b in zip(ours, gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("family", ["llama with biases", "qwen2 sliding"])
def test_heads_with_keys_of_their_own_are_those_that_share(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU in float32."""
    model = policy_of(FAMILIES[family]).model
    expected, gradients = scored(model, rows_of(LENGTHS), packed_rows=False)
    assert attention.takes_packed_rows(model)
    asked = []
    monkeypatch.setattr(attention, "repeats_heads", lambda q, k: asked.append(1) or q.shape[1] > k.shape[1])
    found, ours = scored(model, rows_of(LENGTHS), packed_rows=True)
    assert asked
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-5)
    for a, b in zip(ours, gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def one_row_at_a_time(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor,
    starts_of_keys: torch.Tensor,
    longest: int,
    longest_of_keys: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> torch.Tensor:
    """What torch's documentation says of its attention for rows of any lengths: [T, H, D], (before, after) a token."""
    assert query.dtype == key.dtype == value.dtype
    assert starts is starts_of_keys
    assert longest == longest_of_keys == max(starts.diff())
    assert window_size[1] == 0
    outputs = []
    for begin, end in pairwise(starts.tolist()):
        q, k, v = (x[begin:end].transpose(0, 1) for x in (query, key, value))
        before = torch.arange(end - begin)[:, None] - torch.arange(end - begin)
        seen = (before >= 0) & (before <= (window_size[0] if window_size[0] >= 0 else end))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=enable_gqa)
        outputs.append(out.transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.parametrize("family", ["llama with biases", "qwen2 sliding", "qwen3"])
def test_rows_of_any_length_need_no_tiles(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU in 16 bits, whose kernel is torch's own (tests/gpu/test_runs.py)."""
    model = policy_of(FAMILIES[family]).model
    expected, gradients = scored(model, rows_of(LENGTHS), packed_rows=False)
    monkeypatch.setattr(attention, "for_any_lengths", attention.under_autocast)
    monkeypatch.setattr(attention, "varlen_attn", one_row_at_a_time)
    monkeypatch.delattr(attention.Tile, "spread")
    assert attention.takes_packed_rows(model)
    found, ours = scored(model, rows_of(LENGTHS), packed_rows=True)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-5)
    for a, b in zip(ours, gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_they_are_attended_in_the_dtype_of_autocast(half: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries and keys come in float32, which positions have, and values in bfloat16."""
    seen: list[torch.dtype] = []

    def attend(query: torch.Tensor, *others: Any, **settings: Any) -> torch.Tensor:
        seen.append(query.dtype)
        return one_row_at_a_time(query, *others, **settings)

    expected = half.logprobs(rows_of(LENGTHS)).logprobs
    monkeypatch.setattr(attention, "for_any_lengths", attention.under_autocast)
    monkeypatch.setattr(attention, "varlen_attn", attend)
    torch.testing.assert_close(half.logprobs(rows_of(LENGTHS)).logprobs, expected, rtol=0, atol=0.05)
    assert seen == [torch.bfloat16] * SHAPE.layers


def test_a_token_sees_all_of_a_cache_where_heads_have_keys_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers passes no mask for a single token."""
    model = policy_of(FAMILIES["qwen2"]).model
    assert attention.takes_packed_rows(model)
    read, token = torch.arange(5, 12)[None], torch.tensor([[12]])

    def logits() -> torch.Tensor:
        with torch.no_grad():
            cache = model(input_ids=read, use_cache=True).past_key_values
            return model(input_ids=token, past_key_values=cache).logits  # type: ignore[no-any-return]

    expected = logits()
    monkeypatch.setattr(attention, "repeats_heads", lambda q, k: q.shape[1] > k.shape[1])
    torch.testing.assert_close(logits(), expected, rtol=1e-4, atol=1e-5)


@given(st.lists(st.integers(1, 900), min_size=1, max_size=60))
def test_tiles_have_every_row_once_and_little_padding(lengths: list[int]) -> None:
    rows = attention.PackedRows(sorted(lengths), torch.device("cpu"))
    assert sum(tile.rows for tile in rows.tiles) == len(lengths)
    assert [tile.begin for tile in rows.tiles] == [0, *(tile.end for tile in rows.tiles[:-1])]
    assert rows.tiles[-1].end == sum(lengths)
    for tile in rows.tiles:
        padded, real = tile.rows * tile.longest, tile.end - tile.begin
        assert padded <= max(attention.SMALL_TILE, (1 + attention.TILE_PADDING) * real)
        assert (tile.slots is None) == (padded == real)


@pytest.mark.parametrize("packed_rows", [True, False])
def test_a_pass_reads_no_token_after_the_last_prediction(packed_rows: bool) -> None:
    policy = load_policy(ModelConfig(path="tiny-qwen2", tiny=SHAPE))
    seen: list[int] = []
    policy.model.base_model.register_forward_pre_hook(
        lambda _, __, settings: seen.append(settings["input_ids"].numel()), with_kwargs=True
    )
    policy.scorer.packed_rows = packed_rows
    policy.logprobs(rows_of(LENGTHS))
    assert seen == [sum(LENGTHS) - len(LENGTHS) if packed_rows else len(LENGTHS) * (max(LENGTHS) - 1)]


def test_packed_rows_with_recomputed_activations() -> None:
    """The layers run again in the backward pass, where they must find the same rows."""
    reference = load_policy(ModelConfig(path="tiny-qwen2", tiny=SHAPE), seed=1)
    again = load_policy(ModelConfig(path="tiny-qwen2", tiny=SHAPE, gradient_checkpointing=True), seed=1)
    (expected, *_), gradients = scored(reference.model, rows_of(LENGTHS), packed_rows=True)
    (found, *_), ours = scored(again.model, rows_of(LENGTHS), packed_rows=True)
    assert torch.equal(found, expected)
    assert all(torch.equal(a, b) for a, b in zip(ours, gradients, strict=True))


def test_models_whose_tokens_meet_outside_attention_are_found_out() -> None:
    """Short convolutions over time would run from one row into the next."""
    config = Lfm2Config(**FAMILY_SHAPE, num_key_value_heads=2, layer_types=["conv", "full_attention", "conv"])
    policy = policy_of(config)
    with torch.no_grad():
        for p in policy.model.parameters():
            p.mul_(4)  # what runs over should be more than noise
    assert not attention.takes_packed_rows(policy.model)
    padded, joined = (Scorer(policy.model, packed_rows=kind)(rows_of(LENGTHS))[0] for kind in (False, True))
    assert (padded - joined).abs().max() > 1e-3, "the probe would be pointless"


def test_models_whose_windows_are_in_their_masks_alone_are_found_out() -> None:
    """Packed rows have no mask; past the window, tokens would attend to tokens outside it."""
    config = PhimoeConfig(**FAMILY_SHAPE, num_key_value_heads=2, sliding_window=8, num_local_experts=2)
    policy = policy_of(config)
    assert not attention.takes_packed_rows(policy.model)
    assert policy.model.config.sliding_window == 8, "as it was before the trial"
    padded, joined = (Scorer(policy.model, packed_rows=kind)(rows_of(LENGTHS))[0] for kind in (False, True))
    assert (padded - joined).abs().max() > 1e-3, "the probe would be pointless"


def test_models_that_fail_on_packed_rows_are_run_on_padded_ones() -> None:
    """Nemotron slices the mask that it is handed, and adds it."""
    policy = policy_of(NemotronConfig(**FAMILY_SHAPE, num_key_value_heads=2))
    expected, *_ = Scorer(policy.model)(rows_of(LENGTHS))
    assert not attention.takes_packed_rows(policy.model)
    assert torch.equal(Scorer(policy.model)(rows_of(LENGTHS))[0], expected)
