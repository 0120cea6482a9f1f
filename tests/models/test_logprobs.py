"""Token log-probs in bounded memory equal the direct computation, in value and gradient."""

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

from factories import packed
from threepo.models import logprobs as module
from threepo.models.logprobs import Scorer, has_linear_head
from threepo.models.policy import Policy


def batch(vocabulary: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Three rows of lengths 9, 6 and 4, padded on the right; completion tokens start at 3."""
    torch.manual_seed(0)
    ids = torch.randint(2, vocabulary, (3, 9))
    attention, mask = torch.zeros(3, 9, dtype=torch.int64), torch.zeros(3, 8, dtype=torch.bool)
    for i, length in enumerate((9, 6, 4)):
        attention[i, :length] = 1
        mask[i, 2 : length - 1] = True
    return ids, attention, mask


def direct(model: torch.nn.Module, ids: torch.Tensor, attention: torch.Tensor, mask: torch.Tensor, temperature: float):
    """The textbook computation, with all logits at once; log-probs and so on where `mask` is true, row by row."""
    logits = model(input_ids=ids, attention_mask=attention).logits[:, :-1] / temperature
    all_logprobs = logits.log_softmax(-1)
    chosen = all_logprobs.gather(2, ids[:, 1:, None]).squeeze(2)
    entropy = -(all_logprobs.exp() * all_logprobs).sum(-1)
    return chosen[mask], entropy[mask]


def gemma() -> torch.nn.Module:
    """A model that shapes its logits after the head (a soft cap)."""
    torch.manual_seed(1)
    config = Gemma2Config(
        vocab_size=60,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        final_logit_softcapping=0.05,
    )
    return Gemma2ForCausalLM(config).eval()


@pytest.mark.parametrize("chunk", [1 << 24, 600])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_equals_the_plain_computation(
    policy: Policy, chunk: int, temperature: float, entropy_gradient: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CPU_CHUNK", chunk)  # 600 elements: two positions a chunk
    ids, attention, mask = batch(len(policy.tokenizer))
    weights = torch.randn(int(mask.sum()))

    def gradients(logprobs: torch.Tensor, entropy: torch.Tensor) -> list[torch.Tensor]:
        policy.model.zero_grad()
        loss = (weights * logprobs).sum() + (0.3 * entropy.sum() if entropy_gradient else 0.0)
        loss.backward()
        return [p.grad.clone() for p in policy.model.parameters()]

    ours = Scorer(policy.model)(packed(ids, mask), temperature, with_entropy_gradient=entropy_gradient)
    expected = direct(policy.model, ids, attention, mask, temperature)
    torch.testing.assert_close(tuple(ours), expected, rtol=1e-5, atol=1e-5)
    if not entropy_gradient:
        assert not ours[1].requires_grad
    for a, b in zip(gradients(*ours), gradients(*expected), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("chunk", "scored"), [(1 << 24, [10]), (600, [2] * 10)])
def test_logits_are_made_in_chunks_and_again_in_the_backward_pass(
    policy: Policy, chunk: int, scored: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten positions and 260 tokens: 600 logits are two positions, so five chunks, each of them made twice."""
    monkeypatch.setattr(module, "CPU_CHUNK", chunk)
    ids, _, mask = batch(len(policy.tokenizer))
    seen: list[int] = []
    head = policy.model.get_output_embeddings()
    with head.register_forward_hook(lambda _, __, logits: seen.append(len(logits))):
        Scorer(policy.model)(packed(ids, mask)).logprobs.sum().backward()
    assert seen == scored


def test_models_that_shape_their_logits_are_found_out_and_right() -> None:
    model = gemma()
    assert not has_linear_head(model)
    ids, attention, mask = batch(60)
    expected, *_ = direct(model, ids, attention, mask, 1.0)
    ours, *_ = Scorer(model, linear_head=False)(packed(ids, mask))
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    wrong, *_ = Scorer(model)(packed(ids, mask))
    assert (wrong - expected).abs().max() > 1e-3, "the probe would be pointless"
