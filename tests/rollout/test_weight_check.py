"""The weight check: its reference is the trainer's own pass, and a difference is an error."""

import pytest
import torch

from threepo.errors import UserError
from threepo.models.policy import Policy
from threepo.posterior.ivon import IVON
from threepo.rollout.vllm_replica import all_nan, fill_with_nan
from threepo.rollout.weight_check import LENGTH, check_logprobs, expected_logprobs, fixed_prompt
from threepo.types import Draw


def test_the_expected_logprobs_are_the_trainers_under_the_draw(policy: Policy) -> None:
    optimizer = IVON(policy.model.named_parameters(), ess=1e6)
    draw = Draw(0, 0, 1)
    before = {name: p.clone() for name, p in policy.model.named_parameters()}
    tokens = fixed_prompt(policy, 1000)
    found = expected_logprobs(policy.model, dict(optimizer.weights(draw)), tokens, policy.device)
    with optimizer.at(draw), torch.no_grad():
        logits = policy.model(torch.tensor([tokens])).logits[0]
    expected = [logits[i].log_softmax(0)[tokens[i + 1]] for i in range(len(tokens) - 1)]
    assert torch.allclose(found, torch.stack(expected), atol=1e-6)
    assert not torch.allclose(found, expected_logprobs(policy.model, before, tokens, policy.device), atol=1e-2)
    assert all(torch.equal(p, before[name]) and p.requires_grad for name, p in policy.model.named_parameters())


def test_the_prompt_fits_and_its_tokens_differ(policy: Policy) -> None:
    assert len(set(fixed_prompt(policy, 1000))) == LENGTH
    assert len(fixed_prompt(policy, 7)) == 7
    assert max(fixed_prompt(policy, 1000)) < policy.model.get_input_embeddings().weight.shape[0]


def test_differences_are_refused() -> None:
    expected = torch.tensor([-1.0, -2.0])
    check_logprobs(expected, [-1.01, -2.01], 0.02, "x")
    with pytest.raises(
        UserError, match=r"weights of x that it was given: .* off by 0\.03 on average and 0\.06 at most"
    ):
        check_logprobs(expected, [-1.06, -2.0], 0.02, "x")
    with pytest.raises(UserError, match="off by nan"):
        check_logprobs(expected, [-1.0, float("nan")], 0.02, "x")
    with pytest.raises(UserError, match="training has diverged"):
        check_logprobs(torch.tensor([-1.0, float("nan")]), [-1.0, -2.0], 0.02, "x")


def test_every_number_of_the_rehearsal_is_nan() -> None:
    weights = {"norm": torch.ones(4), "matrix": torch.randn(4, 4).bfloat16(), "count": torch.tensor(3)}
    changed = dict(all_nan(weights))
    assert changed["norm"].isnan().all()
    assert changed["matrix"].isnan().all()
    assert changed["matrix"].shape == (4, 4)
    assert changed["matrix"].dtype == torch.bfloat16
    assert torch.equal(changed["count"], weights["count"])


def test_parameters_are_filled_in_place() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    model.register_parameter("count", torch.nn.Parameter(torch.tensor(3), requires_grad=False))
    before = [parameter.data_ptr() for parameter in model.parameters()]
    fill_with_nan(model)
    assert [parameter.data_ptr() for parameter in model.parameters()] == before
    assert all(p.isnan().all() for name, p in model.named_parameters() if name != "count")
    assert model.get_parameter("count") == 3
