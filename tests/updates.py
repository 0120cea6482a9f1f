"""Single updates for tests: made-up rollouts of a tiny policy, and the gradient that an optimizer gets of them."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from threepo.config import Method, ObjectiveConfig, PPOConfig, SamplingConfig
from threepo.methods.method import credit, requests, rollout_draws, training_batch
from threepo.models.packing import flatten
from threepo.models.policy import Policy
from threepo.posterior.ivon import IVON
from threepo.training.reference import Reference
from threepo.training.update import update_policy
from threepo.training.update_record import UpdateRecord
from threepo.types import Completion, CreditedRow, Group, Problem, Verdict

SAMPLING = SamplingConfig()
PLAIN = PPOConfig()
PROMPTS = 3


def rollouts(policy: Policy, method: Method, optimizer: IVON, *, by_trainer: bool = True) -> list[Group]:
    """Made-up completions of three prompts, of uneven lengths, with log-probs of the very weights they belong to.

    The text of a completion depends on its prompt and rollout number only, so methods can be compared on equal rows.
    """
    made = []
    problems = [(Problem(id=f"p{i}", prompt=f"p{i}"), (4 + i, 9, 17 + i)) for i in range(PROMPTS)]
    for request in requests(problems, rollout_draws(method, 0, 0), method.rollouts_per_prompt):
        generator = torch.Generator().manual_seed(100 * int(request.problem.id[1:]) + request.rollout)
        length = int(torch.randint(2, 9, (1,), generator=generator))
        tokens = tuple(torch.randint(5, 200, (length,), generator=generator).tolist())
        correct = bool(torch.rand(1, generator=generator) < 0.4)
        completion = Completion(
            problem=request.problem,
            prompt_tokens=request.prompt_tokens,
            tokens=tokens,
            logprobs=(0.0,) * length,
            text="",
            finish_reason="stop",
            draw=request.draw,
            rollout=request.rollout,
            policy_step=0,
            verdict=Verdict(correct, "right" if correct else "wrong", "x"),
        )
        made.append(completion)
    return credit(method, scored(policy, made, optimizer) if by_trainer else made)


def scored(policy: Policy, completions: Sequence[Completion], optimizer: IVON) -> list[Completion]:
    """The completions with log-probs of the weights of their draws, which are made once for each draw."""
    found = {}
    for draw in {completion.draw for completion in completions}:
        rows = [CreditedRow.of(each, index) for index, each in enumerate(completions) if each.draw == draw]
        with optimizer.at(draw), torch.no_grad():
            logprobs = policy.logprobs(flatten(rows, policy.device))[0].split([row.loss_tokens for row in rows])
        for row, own in zip(rows, logprobs, strict=True):
            found[row.index] = replace(row.completion, logprobs=tuple(own.tolist()))
    return [found[index] for index in range(len(completions))]


def credited(method: Method, groups: Sequence[Group]) -> list[Group]:
    """The groups with the advantages that the method gives their completions."""
    return credit(method, [completion for group in groups for completion in group.completions])


class Spy(IVON):
    """IVON that keeps what it is given: the gradient statistics that the step is made from."""

    def step(self, closure: Callable[[], float] | None = None, *, divisor: float | None = None) -> object:
        """Record the mean gradient, then step."""
        count = divisor or len(self._observed.draws)
        self.mean_grad = {name: self._observed.grad[p].clone() / count for name, p, _ in self.trainable()}
        return super().step(closure, divisor=divisor)


def gradient_of(
    policy: Policy,
    method: Method,
    groups: list[Group] | None = None,
    *,
    objective: ObjectiveConfig = PLAIN,
    sampling: SamplingConfig = SAMPLING,
    token_budget: int = 10_000,
    noise_scale: float = 0.0,
    ess: float = 1e6,
    lr: float = 1.0,
    step: int = 0,
    reference: Reference | None = None,
) -> tuple[UpdateRecord, dict[str, torch.Tensor], IVON]:
    """Run one update; returns its record and the mean gradient that the optimizer was given, in its last step."""
    optimizer = Spy(policy.model.named_parameters(), clip_radius=1e-3, noise_scale=noise_scale, ess=ess, lr=lr)
    before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    groups = groups or rollouts(policy, method, optimizer)
    batch = training_batch(method, sampling, credited(method, groups), 0, step)
    record = update_policy(policy, optimizer, batch, objective, token_budget, reference=reference)
    with torch.no_grad():
        for name, p in policy.model.named_parameters():
            p.copy_(before[name])
    return record, optimizer.mean_grad, optimizer


def solved(group: Group) -> Group:
    """The group with every completion right, so that it has nothing to teach."""
    right = tuple(replace(c, verdict=Verdict(True, "right", "x")) for c in group.completions)
    return replace(group, completions=right)
