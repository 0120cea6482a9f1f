"""The weight check: its reference is the trainer's own pass, and what rounding does not explain is an error."""

import math

import pytest
import torch

from threepo.errors import UserError
from threepo.models.policy import Policy
from threepo.posterior.ivon import IVON
from threepo.rollout import weight_check
from threepo.rollout.vllm_replica import all_nan, fill_with_nan
from threepo.rollout.weight_check import (
    LENGTH,
    WeightCheck,
    expected_logprobs,
    fixed_prompt,
    known_ratio,
    unknown_ratio,
)
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


def test_large_differences_are_refused_at_the_first_push() -> None:
    def check(expected: list[float], measured: list[float]) -> None:
        found = WeightCheck(0.02)
        found.expect(["x"], [torch.tensor(expected)])
        found.check(0, measured, "a server")

    check([-1.0, -2.0], [-1.01, -2.01])
    words = r"weights of x on a server that it was given: .* off by 0\.03 on average and 0\.06 at most"
    with pytest.raises(UserError, match=words):
        check([-1.0, -2.0], [-1.06, -2.0])
    with pytest.raises(UserError, match="off by nan"):
        check([-1.0, -2.0], [-1.0, float("nan")])
    with pytest.raises(UserError, match="training has diverged"):
        check([-1.0, float("nan")], [-1.0, -2.0])


class Pushes:
    """Two draws whose log-probs of 128 tokens differ by `apart` (root mean square), with normal rounding of 0.01."""

    def __init__(self, apart: float = 0.05) -> None:
        self.random = torch.Generator().manual_seed(0)
        self.apart, self.check, self.count = apart, WeightCheck(0.1), 0
        self.earlier: list[torch.Tensor] = []
        self.draws: list[torch.Tensor] = []

    def normal(self, size: float) -> torch.Tensor:
        return size * torch.randn(128, generator=self.random)

    def push(self, holds: str = "right", rounding: float = 0.01) -> None:
        """Push two draws into an engine that then holds what `holds` says."""
        mean = -8 + self.normal(0.01)
        self.earlier, self.draws = self.draws, [mean + self.normal(self.apart / math.sqrt(2)) for _ in range(2)]
        self.check.expect([f"draw {i} at step {self.count}" for i in range(2)], self.draws)
        self.count += 1
        for index in range(2):
            held = {
                "right": lambda i: self.draws[i],
                "swapped": lambda i: self.draws[1 - i],
                "old": lambda i: self.earlier[i],
                "wrong": lambda i: self.draws[i] + self.normal(0.04),
            }[holds](index)
            self.check.check(index, (held + self.normal(rounding)).tolist())


@pytest.mark.parametrize(
    ("holds", "fits"),
    [
        ("swapped", "they fit draw 1 at step 3"),
        ("old", "they fit a draw of the push before"),
        ("wrong", "they fit no weights that this run knows"),
    ],
)
def test_wrong_weights_are_found_at_once_and_named(holds: str, fits: str) -> None:
    """All are within the tolerance, and at first only the size of rounding is learnt."""
    pushes = Pushes()
    for _ in range(3):
        pushes.push()
    with pytest.raises(UserError, match=rf"weights of draw 0 at step 3 that .* where rounding has been 0\.01.*{fits}"):
        pushes.push(holds)


def test_evidence_adds_up_over_pushes() -> None:
    """A push of draws that are 0.012 apart gains 128 x 0.012^2 / (2 x 0.02^2) = 23 nats, 0.006 six; 14.9 are needed."""
    taken = {}
    for apart in (0.012, 0.006):
        pushes = Pushes(apart)
        for _ in range(10):
            pushes.push()
        with pytest.raises(UserError, match=r"they fit draw \d"):
            for taken[apart] in range(1, 20):
                pushes.push("swapped")
    assert taken[0.012] == 1
    assert 2 <= taken[0.006] <= 6


def test_right_weights_raise_no_alarm_while_rounding_grows_slowly() -> None:
    pushes = Pushes(apart=0.005)
    for step in range(200):
        pushes.push(rounding=0.01 * 1.01**step)


def test_ratios_are_those_of_densities() -> None:
    """Ratios of densities have the mean 1 under the right weights, on which the rate of false alarms rests."""
    random = torch.Generator().manual_seed(1)
    measured, right, *others = torch.randn(4, 5, generator=random, dtype=torch.float64)

    def density(mean: torch.Tensor, deviation: float) -> float:
        return float(torch.distributions.Normal(mean, deviation).log_prob(measured).sum().exp())

    right_density = density(right, 0.7)
    known = known_ratio(measured - right, [measured - other for other in others], 0.49)
    assert math.exp(known) == pytest.approx(sum(density(x, 0.7) for x in others) / 2 / right_density)
    assert math.exp(unknown_ratio(measured - right, 0.49)) == pytest.approx(density(right, 1.4) / right_density)
    assert known_ratio(measured - right, [], 0.49) == -math.inf


def test_the_rate_of_false_alarms(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 3 % a push and no margin, and draws so near that evidence gathers, some 60 of 2,000 at most are alarms."""
    monkeypatch.setattr(weight_check, "FALSE_ALARMS", 0.03)
    monkeypatch.setattr(weight_check, "MARGIN", 1.0)
    pushes, alarms = Pushes(apart=0.0015), 0
    for _ in range(1000):
        try:
            pushes.push()
        except UserError:
            alarms += 1
            pushes.check._evidence.clear()
    assert 0 < alarms < 80


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
