"""Every loss, mask, penalty and credit rule in a policy update: it changes the gradient, to what it should be."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from factories import row
from runs import train_config
from threepo import api
from threepo.config import Advantage, Correction, Method, ObjectiveConfig, PPOConfig
from threepo.config.method import C3PO, C3PO_REPLAY, CREDIT_RULES, GRPO, M3PO
from threepo.config.objective import CISPOConfig, ClipCovConfig, GSPOConfig, KLCovConfig
from threepo.methods.method import training_batch
from threepo.models.logprobs import TokenLogprobs
from threepo.models.policy import Policy
from threepo.posterior.ivon import IVON
from threepo.run_folder import read_metrics
from threepo.training.reference import Reference
from threepo.training.scoring import choose_tokens
from threepo.training.update import update_policy
from threepo.types import Batch, Completion, Group
from updates import SAMPLING, credited, gradient_of, rollouts, solved

SEVERAL: dict[str, Any] = {"mini_batches": 3}
GSPO: dict[str, Any] = {"aggregation": "sequence", **SEVERAL, "clip_low": 0.05, "clip_high": 0.05}
OBJECTIVES = {
    "gspo": GSPOConfig(**GSPO),
    "cispo": CISPOConfig(**SEVERAL, clip_low=0.2, clip_high=0.2),
    "kl_cov": KLCovConfig(**SEVERAL, kl_cov_share=0.2),
    "clip_cov": ClipCovConfig(clip_cov_share=0.1, clip_cov_bounds=(0.1, 50)),
    "entropy mask": PPOConfig(entropy_mask_share=0.2),
    "reference": PPOConfig(reference_kl=0.5),
    "constant": PPOConfig(aggregation="constant"),
}
WITHOUT = {
    "gspo": PPOConfig(**GSPO),
    "cispo": PPOConfig(**SEVERAL),
    "kl_cov": replace(OBJECTIVES["kl_cov"], kl_cov_coefficient=1e-9),
}
Grads = dict[str, torch.Tensor]


@pytest.fixture
def policy(policy: Policy) -> Policy:
    """A policy with peaked distributions: random weights give nearly uniform ones."""
    with torch.no_grad():
        for p in policy.model.parameters():
            p.mul_(3)
    return policy


def another(policy: Policy) -> Reference:
    """A reference that differs from the policy."""
    reference = Reference(policy)
    for i, weights in enumerate(reference.weights.values()):
        weights += 0.01 * torch.randn(weights.shape, generator=torch.Generator().manual_seed(i))
    return reference


def gradient(policy: Policy, method: Method, objective: ObjectiveConfig, **settings: Any) -> tuple[Any, Grads]:
    """The gradient, with steps large enough for ratios to move if there are several."""
    reference = another(policy) if objective.reference_kl else None
    noise = 1.0 if method.draws else 0.0
    settings = {"lr": 3e3, "noise_scale": noise, "ess": 1e7, "reference": reference} | settings
    record, grads, _ = gradient_of(policy, method, objective=objective, **settings)
    return record, grads


def distance(a: Grads, b: Grads) -> float:
    """Relative to the first."""
    difference = sum(float((a[name] - b[name]).square().sum()) for name in a)
    return float((difference / sum(float(grad.square().sum()) for grad in a.values())) ** 0.5)


@pytest.mark.parametrize("name", WITHOUT)
def test_it_changes_the_gradient(policy: Policy, name: str) -> None:
    _, with_it = gradient(policy, C3PO, OBJECTIVES[name])
    _, without = gradient(policy, C3PO, WITHOUT[name])
    assert distance(with_it, without) > 0.1


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_gradient_does_not_depend_on_the_micro_batches(policy: Policy, name: str) -> None:
    """Nor do the choices of tokens, which are made over all of them; by turns with one part, and one for each draw."""
    method = (C3PO, M3PO)[list(OBJECTIVES).index(name) % 2]
    record, grads = gradient(policy, method, OBJECTIVES[name])
    again, others = gradient(policy, method, OBJECTIVES[name], token_budget=40)
    assert again.normalizer == pytest.approx(record.normalizer, rel=1e-9)
    for key in ("chosen_share", "reference_kl"):
        assert again.policy.get(key, 0) == pytest.approx(record.policy.get(key, 0), rel=1e-4)
    assert distance(others, grads) < 1e-3


@pytest.mark.parametrize("rule", [rule for rule in CREDIT_RULES if rule != "grpo"])
def test_every_credit_rule_changes_the_gradient(policy: Policy, rule: str) -> None:
    _, other, _ = gradient_of(policy, replace(GRPO, advantage=Advantage(rule=rule)))
    _, grpo, _ = gradient_of(policy, GRPO)
    assert distance(other, grpo) > 0.05


def test_unlikeliness_teaches_where_all_are_right(policy: Policy) -> None:
    groups = list(map(solved, rollouts(policy, GRPO, IVON(policy.model.named_parameters(), clip_radius=1e-3))))
    _, nothing, _ = gradient_of(policy, GRPO, groups)
    _, something, _ = gradient_of(policy, replace(GRPO, advantage=Advantage(unlikeliness=0.25)), groups)
    assert not any(grad.any() for grad in nothing.values())
    assert all(grad.any() for grad in something.values())


# Gradients by hand


def scored(policy: Policy, completion: Completion) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs, with gradient, and entropies of a completion's tokens."""
    ids = torch.tensor([[*completion.prompt_tokens, *completion.tokens]])
    distribution = policy.model(ids).logits[0, len(completion.prompt_tokens) - 1 : -1].log_softmax(-1)
    logprobs = distribution.gather(1, torch.tensor(completion.tokens).unsqueeze(1)).squeeze(1)
    return logprobs, -(distribution.exp() * distribution).sum(-1).detach()


def by_hand(
    policy: Policy, groups: list[Group], weights: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
) -> Grads:
    """The gradient of the mean over all tokens of weight * log-prob.

    `weights`: [K], detached, of the advantages, log-probs and entropies of all tokens.
    """
    values = training_batch(GRPO, SAMPLING, credited(GRPO, groups), 0, 0).parts[None]
    found = [scored(policy, row.completion) for row in values]
    logprobs, entropy = map(torch.cat, zip(*found, strict=True))
    a = torch.cat([torch.full_like(own, row.advantage) for (own, _), row in zip(found, values, strict=True)]).detach()
    mean = (weights(a, logprobs.detach(), entropy) * logprobs).mean()
    parameters = dict(policy.model.named_parameters())
    return dict(zip(parameters, torch.autograd.grad(mean, list(parameters.values())), strict=True))


@pytest.fixture
def groups(policy: Policy) -> list[Group]:
    return rollouts(policy, GRPO, IVON(policy.model.named_parameters(), clip_radius=1e-3))


def test_the_mask_leaves_the_gradient_of_the_tokens_of_the_highest_entropy(policy: Policy, groups: list[Group]) -> None:
    """The divisor is the number of all tokens."""

    def weights(a: torch.Tensor, _: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        order = (1000 * entropy).round().argsort(descending=True, stable=True)  # first tokens of a prompt are equal
        return torch.zeros_like(a).index_copy(0, order[: int(0.3 * len(a))], -a[order[: int(0.3 * len(a))]])

    record, grads, _ = gradient_of(policy, GRPO, groups, objective=PPOConfig(entropy_mask_share=0.3))
    assert record.normalizer == record.tokens
    assert distance(grads, by_hand(policy, groups, weights)) < 1e-4


def test_clip_cov_takes_the_gradient_of_tokens_of_a_large_covariance(policy: Policy, groups: list[Group]) -> None:
    """All of those above 0.5, on-policy too."""

    def weights(a: torch.Tensor, logprobs: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        covariance = (a - a.mean()) * (logprobs - logprobs.mean())
        assert 5 < int((covariance > 0.5).sum()) < len(a) / 2
        return -a * (covariance <= 0.5)

    objective = ClipCovConfig(clip_cov_share=1, clip_cov_bounds=(0.5, 1e6))
    _, grads, _ = gradient_of(policy, GRPO, groups, objective=objective)
    assert distance(grads, by_hand(policy, groups, weights)) < 1e-4


def test_the_penalty_draws_towards_the_reference(policy: Policy, groups: list[Group]) -> None:
    """Without advantages, only c (exp(d) - d - 1) has a gradient, c (1 - exp(d)); d = log reference - log policy."""
    groups, reference = list(map(solved, groups)), another(policy)
    with reference.in_place(), torch.no_grad():
        of_reference = torch.cat([scored(policy, c)[0] for group in groups for c in group.completions])
    expected = by_hand(policy, groups, lambda a, logprobs, _: 0.5 * (1 - (of_reference - logprobs).exp()))
    objective = PPOConfig(reference_kl=0.5)
    record, grads, _ = gradient_of(policy, GRPO, groups, objective=objective, reference=reference)
    assert distance(grads, expected) < 1e-4
    assert record.policy["reference_kl"] / record.tokens > 1e-4


def test_a_constant_divisor_is_completions_times_the_longest(policy: Policy, groups: list[Group]) -> None:
    record, grads, _ = gradient_of(policy, GRPO, groups, objective=PPOConfig(aggregation="constant"))
    assert record.normalizer == 48 * SAMPLING.max_new_tokens
    by_token, others, _ = gradient_of(policy, GRPO, groups)
    share = by_token.normalizer / record.normalizer
    assert distance(grads, {name: share * grad for name, grad in others.items()}) < 1e-5


# Choices of tokens


def test_kl_cov_holds_tokens_of_rows_without_an_advantage(policy: Policy, groups: list[Group]) -> None:
    """Every mini-batch has two prompts, and one is all right: only the penalty reads its rows."""
    groups, found = [*groups[:1], *map(solved, groups[1:]), renamed(groups[1])], []
    two: dict[str, Any] = {"mini_batches": 2}
    for objective in (PPOConfig(**two), KLCovConfig(kl_cov_share=1.0, **two)):
        passed = []

        def count(_: object, __: object, settings: dict[str, Any], passed: list[int] = passed) -> None:
            passed.extend([sum(tile.rows for tile in settings["rows"].tiles)] * torch.is_grad_enabled())

        hook = policy.model.base_model.register_forward_pre_hook(count, with_kwargs=True)
        _, grads, _ = gradient_of(policy, GRPO, groups, objective=objective, lr=3e3, noise_scale=0.0)
        hook.remove()
        assert all(grad.any() for grad in grads.values())
        found.append(sum(passed))
    assert found == [2 * 16, 4 * 16]


def renamed(group: Group) -> Group:
    """The same group for another prompt."""
    problem = replace(group.problem, id="another")
    return replace(group, completions=tuple(replace(c, problem=problem) for c in group.completions))


def test_kl_cov_chooses_no_token_of_a_mini_batch_without_signal(policy: Policy, groups: list[Group]) -> None:
    """The last one: every covariance is 0. It is counted, and its gradient is 0."""
    objective = KLCovConfig(kl_cov_share=1.0, **SEVERAL)
    some = [*groups[:2], solved(groups[2])]
    record, grads, _ = gradient_of(policy, GRPO, some, objective=objective, lr=3e3, noise_scale=0.0)
    assert record.chose == [True, True, False]
    assert record.metrics()["policy/no_choice_share"] == pytest.approx(1 / 3)
    assert record.policy["chosen_share"] == sum(len(c.tokens) for group in some[:2] for c in group.completions)
    assert not any(grad.any() for grad in grads.values())


@pytest.mark.parametrize("name", ["clip_cov", "entropy mask"])
def test_tokens_are_chosen_among_those_of_all_draws(policy: Policy, name: str) -> None:
    """Without noise, replay chooses the same rows as GRPO, though they are in four parts."""
    _, replay = gradient(policy, C3PO_REPLAY, OBJECTIVES[name], noise_scale=0.0)
    _, grpo = gradient(policy, GRPO, OBJECTIVES[name])
    assert distance(replay, grpo) < 1e-4


def test_what_a_correction_masks_is_never_chosen(policy: Policy) -> None:
    objective = KLCovConfig(kl_cov_share=1.0, **SEVERAL)
    record, _ = gradient(policy, C3PO, objective, ess=1e8)
    assert all(record.chose)
    kept = sum(row.kept_tokens for row in record.rows)
    assert 0 < kept < record.tokens
    assert record.policy["chosen_share"] == kept


def test_a_random_choice_depends_on_its_address_alone(policy: Policy, groups: list[Group]) -> None:
    """It ignores the state of any generator: the same step repeats it, the next step changes it."""
    found = []
    for step in (0, 0, 1):
        torch.rand(7)
        found.append(gradient_of(policy, GRPO, groups, objective=OBJECTIVES["clip_cov"], step=step)[1])
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert distance(found[2], found[0]) > 1e-3


def test_a_random_choice_differs_by_seed_step_and_row() -> None:
    """Of two rows whose tokens all have the covariance 0.5, half of the tokens are chosen."""
    rows = (row(0, 1.0, tokens=range(40)), row(1, -1.0, tokens=range(40)))
    scores = {(None, i): TokenLogprobs(torch.full((40,), -1.0 - i), torch.zeros(40)) for i in range(2)}
    found = []
    for seed, step in ((0, 0), (0, 1), (1, 0)):
        batch = Batch({None: rows}, "step", Correction(), 1.0, 40, seed, step)
        objective = ClipCovConfig(clip_cov_share=0.5, clip_cov_bounds=(0.1, 1.0))
        chosen = choose_tokens(batch.parts, scores, batch, objective)["chosen"]
        found += [tuple(chosen[None, i].tolist()) for i in range(2)]
    assert len(set(found)) == 6
    assert {sum(pair[0]) + sum(pair[1]) for pair in zip(found[::2], found[1::2], strict=True)} == {40}


@pytest.mark.parametrize(("name", "method"), [("gspo", M3PO), ("kl_cov", C3PO)])
def test_old_logprobs_are_those_of_the_draw_whose_gradient_is_taken(policy: Policy, method: Method, name: str) -> None:
    """A mean that stays where it is leaves every ratio to the old policy at one, however loud the noise."""
    optimizer = IVON(
        policy.model.named_parameters(), clip_radius=1e-3, ess=1e4, betas=(0.9, 1 - 1e-9)
    )  # the Hessian stays too
    optimizer.param_groups[0]["lr"] = 0.0
    batch = training_batch(method, SAMPLING, credited(method, rollouts(policy, method, optimizer)), 0, 0)
    record = update_policy(policy, optimizer, batch, OBJECTIVES[name])
    assert record.policy["ratio_mean"] / record.tokens == pytest.approx(1, abs=1e-5)


# The reference


def test_the_reference_and_the_policy_change_places_bitwise(policy: Policy) -> None:
    """They also swap back if the body fails."""
    reference = another(policy)
    own, other = (
        {n: p.detach().clone() for n, p in some}
        for some in (policy.model.named_parameters(), reference.weights.items())
    )
    with pytest.raises(ZeroDivisionError), reference.in_place():
        assert all(torch.equal(p, other[name]) for name, p in policy.model.named_parameters())
        raise ZeroDivisionError
    assert all(torch.equal(p, own[name]) for name, p in policy.model.named_parameters())
    assert all(torch.equal(weights, other[name]) for name, weights in reference.weights.items())


def test_the_reference_is_reset_before_every_so_many_steps(policy: Policy) -> None:
    reference = Reference(policy, reset_every=2)
    kept = []
    for step in range(5):
        reference.begin(step)
        kept.append(next(iter(reference.weights.values())).clone())
        with torch.no_grad():
            next(policy.model.parameters()).add_(1.0)
    moved = [float((now - kept[0]).mean()) for now in kept]
    assert moved == pytest.approx([0, 0, 2, 2, 4])


def test_the_loop_resets_the_reference(tmp_path: Path) -> None:
    """Every second step begins at the reference, where the KL is 0 at any temperature; the others do not."""
    settings = ["run.steps=5", "optimizer.lr=1e-2", "schedule.warmup_share=0", "objective.entropy_coefficient=0.1"]
    settings.append("sampling.max_new_tokens=4")
    settings += ["objective.reference_kl=0.1", "objective.reference_reset_every=2", "sampling.temperature=0.7"]
    api.train(train_config(tmp_path / "run", *settings))
    kl = [row["policy/reference_kl"] for row in read_metrics(tmp_path / "run") if row["step"] >= 0]
    assert [value < 1e-8 for value in kl] == [True, False, True, False, True]
