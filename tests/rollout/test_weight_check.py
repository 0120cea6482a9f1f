"""The weight check: its reference is the trainer's own pass, and what rounding does not explain is an error."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from threepo.errors import UserError
from threepo.models.policy import Policy
from threepo.posterior.ivon import IVON
from threepo.rollout.vllm_replica import fill_with_nan
from threepo.rollout.weight_check import (
    FOLLOWING,
    FOLLOWING_KNOWN_AFTER,
    LENGTH,
    Logprobs,
    WeightCheck,
    expected_logprobs,
    fixed_prompt,
    followers,
)
from threepo.types import Arm, Draw, Purpose


def vocabulary_of(policy: Policy) -> int:
    return int(policy.model.get_input_embeddings().weight.shape[0])


def test_the_expected_logprobs_are_the_trainers_under_the_draw(policy: Policy) -> None:
    optimizer = IVON(policy.model.named_parameters(), ess=1e6)
    draw = Draw(0, 0, 1)
    before = {name: p.clone() for name, p in policy.model.named_parameters()}
    tokens = fixed_prompt(vocabulary_of(policy), 1000)
    found = expected_logprobs(policy.model, dict(optimizer.weights(draw)), tokens, policy.device)
    with optimizer.at(draw), torch.no_grad():
        logits = policy.model(torch.tensor([tokens])).logits[0]
    expected = [logits[i].log_softmax(0)[tokens[i + 1]] for i in range(len(tokens) - 1)]
    assert torch.allclose(torch.as_tensor(found.prompt), torch.stack(expected), atol=1e-6)
    following = logits[-1].log_softmax(0)[list(followers(tokens))]
    assert torch.allclose(torch.as_tensor(found.following), following, atol=1e-6)
    mean = expected_logprobs(policy.model, before, tokens, policy.device)
    assert not torch.allclose(torch.as_tensor(found.prompt), torch.as_tensor(mean.prompt), atol=1e-2)
    assert all(torch.equal(p, before[name]) and p.requires_grad for name, p in policy.model.named_parameters())


def test_the_prompt_fits_and_its_tokens_differ(policy: Policy) -> None:
    vocabulary = vocabulary_of(policy)
    tokens = fixed_prompt(vocabulary, 1000, None)
    assert len(set(tokens)) == LENGTH
    assert max(tokens) < vocabulary
    assert fixed_prompt(vocabulary, 8) == fixed_prompt(vocabulary, 0, 1000, 24, after=17) == tokens[:7]
    assert fixed_prompt(vocabulary, None, length=200)[:LENGTH] == tokens


@given(st.integers(2, 300), st.integers(2, 200))
def test_fewer_tokens_follow_than_a_vocabulary_has(vocabulary: int, length: int) -> None:
    tokens = followers(fixed_prompt(vocabulary, length=length))
    assert 0 < len(tokens) < min(FOLLOWING + 1, vocabulary)


def test_large_differences_are_refused_at_the_first_push() -> None:
    def check(expected: list[float], measured: list[float]) -> None:
        found = WeightCheck(0.02)
        found.expect([None], 3, [Logprobs(torch.tensor(expected), torch.tensor([-3.0]))])
        found.check(0, Logprobs(measured, [-3.0]), "a server")

    check([-1.0, -2.0], [-1.01, -2.01])
    words = r"weights of the mean at step 3 on a server that it was given: .* off by 0\.03 on average and 0\.06 at most"
    with pytest.raises(UserError, match=words):
        check([-1.0, -2.0], [-1.06, -2.0])
    with pytest.raises(UserError, match="off by nan"):
        check([-1.0, -2.0], [-1.0, float("nan")])
    with pytest.raises(UserError, match="training has diverged"):
        check([-1.0, float("nan")], [-1.0, -2.0])


class Pushes:
    """Draws whose log-probs differ by `apart` (root mean square); trainer and engine both round them.

    The log-probs of tokens that follow the prompt are all rounded by the same number.
    """

    def __init__(self, apart: float = 0.05, draws: int = 2) -> None:
        self.random = torch.Generator().manual_seed(0)
        self.apart, self.count, self.step, self.check = apart, draws, 0, WeightCheck(0.1)
        self.mean = -8 + self.normal(1.0)
        self.draws = [self.mean] * draws

    def normal(self, size: float) -> torch.Tensor:
        return size * torch.randn(128 + FOLLOWING, generator=self.random)

    def rounded(self, logprobs: torch.Tensor, rounding: float) -> Logprobs:
        error = self.normal(rounding)
        return Logprobs(logprobs[:128] + error[:128], logprobs[128:] + error[128])

    def push(self, holds: str = "right", rounding: float = 0.01, **draw: Any) -> None:
        """Push draws into an engine that then holds what `holds` says."""
        earlier, self.draws = self.draws, [self.mean + self.normal(self.apart / math.sqrt(2)) for _ in self.draws]
        names = [Draw(0, self.step, index, **draw) for index in range(self.count)]
        self.check.expect(names, self.step, [self.rounded(draw, rounding) for draw in self.draws])
        self.step += 1
        for index, right in enumerate(self.draws):
            held = {"right": right, "swapped": self.draws[index - 1], "old": earlier[index]}
            held["wrong"] = right + self.normal(0.09)
            held["cached"] = torch.cat([right[:128], earlier[index][128:]])
            self.check.check(index, self.rounded(held[holds], rounding))


@pytest.mark.parametrize(
    ("holds", "found"),
    [
        ("swapped", r"they fit Draw\(.*index=1.* at step 4, which are off by 0\.01"),
        ("old", r"they fit weights of the push before, number 0, which"),
        ("wrong", r"0\.(09\d*|1) \(root mean square\), where pushes before were off by 0\.01"),
    ],
)
def test_wrong_weights_are_found_at_once_and_named(holds: str, found: str) -> None:
    """All are within the tolerance."""
    pushes = Pushes()
    for _ in range(4):
        pushes.push()
    with pytest.raises(UserError, match=rf"weights of Draw\(.*index=0.* at step 4 that .*{found}"):
        pushes.push(holds)


def test_a_prefix_cache_of_other_weights_is_found() -> None:
    pushes = Pushes(apart=0.2)
    for _ in range(FOLLOWING_KNOWN_AFTER):
        pushes.push()
    with pytest.raises(UserError, match=r"log-probs after a fixed prompt .* keys and values of other weights"):
        pushes.push("cached")


def test_a_swapped_draw_is_found_at_the_first_push() -> None:
    with pytest.raises(UserError, match=r"they fit Draw\(seed=0, step=0, index=1"):
        Pushes(apart=0.1).push("swapped")


@pytest.mark.parametrize(("apart", "draws"), [*((apart, 2) for apart in (0.0, 0.003, 0.01, 0.03, 0.1)), (0.01, 1)])
def test_right_weights_raise_no_alarm(apart: float, draws: int) -> None:
    """However near the draws are: with one, or none apart, the weights of the push before fit as well."""
    pushes = Pushes(apart, draws)
    for _ in range(400):
        pushes.push()
    for rounding in pushes.check._rounding.values():  # the trainer's and the engine's
        assert math.sqrt(rounding.square) == pytest.approx(0.01 * math.sqrt(2), rel=0.5)


def test_loud_noise_after_quiet_noise_raises_no_alarm_in_a_probe() -> None:
    pushes = Pushes(apart=0.2)
    for rounding in [0.001] * 30 + [0.02] * 3:
        pushes.push(rounding=rounding, purpose=Purpose.PROBE)
    with pytest.raises(UserError, match="they fit"):
        pushes.push("swapped", rounding=0.02, purpose=Purpose.PROBE)


def test_rounding_may_change() -> None:
    """It may grow slowly, differ between arms, and be close to the tolerance from the first push on."""
    pushes = Pushes(apart=0.005)
    for step in range(200):
        pushes.push(rounding=0.01 * 1.01**step)
    pushes = Pushes(apart=0.2)
    for _ in range(20):
        pushes.push(rounding=0.003)
        pushes.push(rounding=0.04, arm=Arm("all", 1.0))
    check = WeightCheck(0.1)
    for step in range(10):
        check.expect([None], step, [Logprobs(torch.full((128,), -8.0), torch.full((16,), -8.0))])
        check.check(0, Logprobs([-8.065] * 128, [-8.065] * 16))


def test_parameters_are_filled_in_place() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    model.register_parameter("count", torch.nn.Parameter(torch.tensor(3), requires_grad=False))
    before = [parameter.data_ptr() for parameter in model.parameters()]
    fill_with_nan(model)
    assert [parameter.data_ptr() for parameter in model.parameters()] == before
    assert all(p.isnan().all() for name, p in model.named_parameters() if name != "count")
    assert model.get_parameter("count") == 3
