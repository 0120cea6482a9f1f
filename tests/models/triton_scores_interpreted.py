"""The fused scores of tokens are float64's, in value and gradient: in Triton's interpreter, or on a GPU.

tests/posterior/test_triton.py runs this with TRITON_INTERPRET=1, `make test-gpu` without.
"""

import math
import os

import pytest
import torch

from factories import packed
from models.test_logprobs import batch
from threepo.models import fused_scores, triton_scores
from threepo.models.fused_scores import token_scores
from threepo.models.logprobs import Scorer
from threepo.models.policy import Policy

# NumPy says that nothing times infinity is nothing.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


@pytest.mark.parametrize("vocabulary", [2, 97, triton_scores.BLOCK, 2 * triton_scores.BLOCK + 5])
@pytest.mark.parametrize(("temperature", "size"), [(1.0, 8.0), (0.6, 0.1)])
def test_float64(vocabulary: int, temperature: float, size: float) -> None:
    torch.manual_seed(vocabulary)
    logits = size * torch.randn(5, vocabulary)
    logits[0, 0] = 60.0 * temperature  # a token that is all but certain
    targets = torch.randint(vocabulary, (5,))
    to_logprobs, to_entropy = torch.randn(2, 5).unbind()
    ours = logits.to(DEVICE).requires_grad_()
    found = token_scores(ours, targets.to(DEVICE), temperature)[:2]
    exact = logits.double().requires_grad_()
    p = (exact / temperature).log_softmax(-1)
    logprobs, entropy = p.gather(1, targets.unsqueeze(1)).squeeze(1), -(p.exp() * p).sum(-1)
    for one, other in zip(found, (logprobs, entropy), strict=True):
        torch.testing.assert_close(one.double().cpu(), other, rtol=2e-6, atol=2e-6)
    loss = (to_logprobs.to(DEVICE) * found[0] + to_entropy.to(DEVICE) * found[1]).sum()
    (gradient,) = torch.autograd.grad(loss, ours)
    (expected,) = torch.autograd.grad((to_logprobs * logprobs + to_entropy * entropy).sum(), exact)
    torch.testing.assert_close(gradient.double().cpu(), expected, rtol=1e-5, atol=2e-6)


def test_a_token_that_cannot_be() -> None:
    """A logit of -inf changes nothing for the others, and has no gradient."""
    torch.manual_seed(0)
    logits, targets = torch.randn(2, 9), torch.tensor([3, 4])
    barred = torch.cat([logits, torch.full((2, 1), -math.inf)], dim=1)
    found = []
    for given in (logits, barred):
        given = given.to(DEVICE).requires_grad_()
        logprobs, entropy, *_ = token_scores(given, targets.to(DEVICE), 1.0)
        (logprobs + entropy).sum().backward()
        assert given.grad is not None
        found.append((logprobs.detach(), entropy.detach(), given.grad[:, :9]))
    assert not given.grad[:, 9].any()
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_not_hidden(value: float) -> None:
    logits = torch.randn(2, 9)
    logits[0, 5] = value
    ours = logits.to(DEVICE).requires_grad_()
    token_scores(ours, torch.tensor([3, 4], device=DEVICE), 1.0)[0].sum().backward()
    assert ours.grad is not None
    assert ours.grad[0].isnan().all()
    assert ours.grad[1].isfinite().all()


@pytest.mark.parametrize(("chunk", "entropy_gradient"), [(1 << 24, False), (600, True)])
def test_a_scorer_gives_the_same_either_way(
    policy: Policy, chunk: int, entropy_gradient: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_scores, "serves", lambda device: False)
    ids, _, mask = batch(len(policy.tokenizer))
    model = policy.model.to(DEVICE)
    found = []
    for fused in (False, True):
        model.zero_grad()
        micro = packed(ids.to(DEVICE), mask)
        scores = Scorer(model, chunk=chunk, fused=fused)(micro, 0.7, with_entropy_gradient=entropy_gradient)
        assert scores.entropy.requires_grad is entropy_gradient
        loss = (scores.logprobs * torch.arange(len(scores.logprobs), device=DEVICE)).sum()
        (loss + (scores.entropy.square().sum() if entropy_gradient else 0.0)).backward()
        found.append((*(x.detach() for x in scores), *(p.grad.clone() for p in model.parameters())))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_targets_need_not_be_side_by_side() -> None:
    logits, targets = torch.randn(3, 9, device=DEVICE), torch.tensor([1, 0, 2, 0, 3, 0], device=DEVICE)[::2]
    torch.testing.assert_close(token_scores(logits, targets, 1.0), token_scores(logits, targets.contiguous(), 1.0))


def test_bfloat16_and_a_log_prob_alone() -> None:
    torch.manual_seed(0)
    logits = (4 * torch.randn(3, 1000)).bfloat16().to(DEVICE).requires_grad_()
    targets = torch.randint(1000, (3,), device=DEVICE)
    token_scores(logits, targets, 0.7)[0].sum().backward()
    exact = logits.detach().double().requires_grad_()
    (exact / 0.7).log_softmax(-1).gather(1, targets.unsqueeze(1)).sum().backward()
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16
    torch.testing.assert_close(logits.grad, exact.grad.bfloat16(), rtol=2**-7, atol=1e-6)


def test_a_gradient_by_finite_differences_of_the_entropy() -> None:
    """Worked another way than by the formula that the kernel and torch share."""
    torch.manual_seed(1)
    logits, targets = torch.randn(1, 40, dtype=torch.float64), torch.zeros(1, dtype=torch.long)
    ours = logits.float().to(DEVICE).requires_grad_()
    token_scores(ours, targets.to(DEVICE), 1.0)[1].sum().backward()

    def entropy(x: torch.Tensor) -> float:
        p = x.softmax(-1)
        return float(-(p * p.log()).sum())

    step = 1e-5 * torch.eye(40, dtype=torch.float64)
    expected = [(entropy(logits[0] + row) - entropy(logits[0] - row)) / 2e-5 for row in step]
    assert ours.grad is not None
    torch.testing.assert_close(ours.grad[0].cpu().double(), torch.tensor(expected).double(), rtol=1e-4, atol=1e-6)
