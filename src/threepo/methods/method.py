"""The lattice of methods: which draws generate which rows, their advantages, where gradients are taken.

These are functions of a `config.Method`; nothing here, or anywhere, branches on a method's name. docs/method.md has
the lattice with its equations.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from threepo.config import Advantage, Correction, Method, SamplingConfig
from threepo.methods.credit import group_advantages, unlikely_first
from threepo.types import Arm, Batch, Completion, CreditedRow, Draw, Group, Problem, Request


def rollout_draws(method: Method, seed: int, step: int, arms: Sequence[Arm | None] = ()) -> list[Draw | None]:
    """Draws that generate this step's rollouts; None is the mean.

    `arms`: if arms are chosen, the arm of each draw, or of each antithetic pair; None: the mean weights generate.
    """
    if not method.draws:
        return [None]
    paired = 2 if method.antithetic else 1
    draws: list[Draw | None] = [
        Draw(seed, step, index // paired, sign=-1 if index % paired else 1) for index in range(method.draws)
    ]
    if not arms:
        return draws
    own = [arm for arm in arms for _ in range(paired)]
    return [replace(draw, arm=arm) if draw and arm else None for draw, arm in zip(draws, own, strict=True)]


def gradient_draws(method: Method, seed: int, step: int, arms: Sequence[Arm | None] = ()) -> list[Draw | None]:
    """Draws at which this step's gradients are taken; [None] is the mean. `arms`: see `rollout_draws`.

    Fresh draws have addresses that no generator of this step has. With one generator, the first of
    them is that generator, so that C3PO with one draw is B3PO (paper section 5.3).
    """
    if method.gradient_at == "evolution":
        return []
    if method.gradient_at != "fresh":
        return rollout_draws(method, seed, step, arms) if method.gradient_at == "generator" else [None]
    first = 0 if method.draws == 1 else method.draws
    return [Draw(seed, step, first + index) for index in range(method.gradient_draws)]


def requests(
    problems: Iterable[tuple[Problem, tuple[int, ...]]], draws: Sequence[Draw | None], count: int, first: int = 0
) -> list[Request]:
    """Requests for `count` completions of each problem, problem by problem, of which every draw writes an even share.

    `problems` pairs each problem with its prompt's tokens. Numbers of completions run on over the draws, from `first`.
    """
    writers = [draw for draw in draws for _ in range(count // len(draws))]
    return [
        Request(problem, tokens, draw, number)
        for problem, tokens in problems
        for number, draw in enumerate(writers, start=first)
    ]


def credit(method: Method, completions: Sequence[Completion]) -> list[Group]:
    """Groups of graded completions by prompt, in order of first appearance, with advantages computed in float64.

    Under `advantages = "draw"` the completions of one draw compete: they stand together, draws in order. `UserError`
    for rewards that the rule is not defined for.
    """
    by_prompt: dict[str, list[Completion]] = {}
    for completion in completions:
        by_prompt.setdefault(completion.problem.id, []).append(completion)
    prompts = [tuple(sorted(rows, key=lambda row: row.rollout)) for rows in by_prompt.values()]
    assert len({len(rows) for rows in prompts}) == 1, "every prompt has the same number of completions"
    verdicts = [row.verdict for rows in prompts for row in rows if row.verdict]
    assert len(verdicts) == len(completions), "only graded completions have rewards"

    def shaped(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64).view(len(prompts), -1, method.group_size)

    rewards = shaped([verdict.reward for verdict in verdicts])
    right = shaped([verdict.correct for verdict in verdicts]).bool()
    logprobs = shaped([math.fsum(row.logprobs) for rows in prompts for row in rows])
    failed = shaped([row.failed for rows in prompts for row in rows]).bool()
    advantages = _compare(rewards, right, logprobs, method.advantage)
    for prompt, group in failed.any(dim=-1).nonzero().tolist():
        # Failed episodes get 0, and the others compete without them.
        judged = prompt, group, ~failed[prompt, group]
        advantages[prompt, group] = 0.0
        if len(rewards[judged]) > 1:
            advantages[judged] = _compare(rewards[judged], right[judged], logprobs[judged], method.advantage)
    by_row = advantages.flatten(1).tolist()
    return [Group(rows, tuple(values)) for rows, values in zip(prompts, by_row, strict=True)]


def _compare(rewards: torch.Tensor, right: torch.Tensor, logprobs: torch.Tensor, rule: Advantage) -> torch.Tensor:
    """Advantages [..., G] of completions that compete with each other; all arguments are [..., G]."""
    if rule.unlikeliness:
        rewards = unlikely_first(rewards, right, logprobs, rule)
    return group_advantages(rewards, rule)


def flat_groups(method: Method, group: Group) -> list[bool]:
    """Tells of each advantage group of the prompt whether all its advantages are 0."""
    size = method.group_size
    return [not any(group.advantages[i : i + size]) for i in range(0, len(group.advantages), size)]


def fitness(method: Method, groups: Sequence[Group]) -> dict[Draw, float]:
    """Fitness of each draw of the step, if any has a reward: its mean reward, standardised by [method.advantage]."""
    rewards: dict[Draw, list[float]] = {}
    for completion in (completion for group in groups for completion in group.completions):
        assert completion.draw, "only draws have a fitness"
        assert completion.verdict, "only graded completions have rewards"
        own = rewards.setdefault(completion.draw, [])
        own += [] if completion.failed else [completion.verdict.reward]
    every = [reward for values in rewards.values() for reward in values]  # for a draw whose episodes all failed
    if not every:
        return {}
    means = [math.fsum(values) / len(values) for values in (own or every for own in rewards.values())]
    standardised = group_advantages(torch.tensor(means, dtype=torch.float64), method.advantage)
    return dict(zip(rewards, standardised.tolist(), strict=True))


def training_batch(
    method: Method,
    sampling: SamplingConfig,
    groups: Sequence[Group],
    seed: int,
    step: int,
    fresh: bool = True,
    mixed: bool = False,
) -> Batch:
    """The batch of the groups: its rows under each draw at whose weights their gradient is taken (method.md 3).

    `sampling`: how the rollouts were decoded. `fresh`: true if the current weights have written them. `mixed`: true if
    the draws may have different numbers of groups, so that parts that count alike would favour some.
    """
    parts = _parts(method, groups, seed, step)
    # A single part's own count is the step's; "step" makes M3PO with one draw B3PO to the last bit. Fresh draws hold
    # all rows each, and count alike however many of them a correction masks.
    alike = "part" if method.gradient_at == "fresh" else method.normalize
    normalize = "step" if len(parts) == 1 or (mixed and method.gradient_at == "generator") else alike
    correction: Correction | None = method.correction
    if fresh and method.gradient_at == "fresh" and method.draws == method.gradient_draws == 1:
        correction = Correction()  # the "fresh" draw is the generator, so every row is on-policy
    if rollouts_are_filtered(method, sampling):
        correction = None
    compares = method.log_evolution and parts
    return Batch(
        parts=parts,
        normalize=normalize,
        correction=correction,
        # The engine reports log-probs of greedy rollouts at temperature 1, without top-p and top-k (method.md 3.5).
        temperature=1.0 if method.greedy else sampling.temperature,
        max_new_tokens=sampling.max_new_tokens,
        seed=seed,
        step=step,
        cumulative=method.cumulative,
        fitness=fitness(method, groups) if method.gradient_at == "evolution" or compares else {},
    )


def _parts(method: Method, groups: Sequence[Group], seed: int, step: int) -> dict[Draw | None, tuple[CreditedRow, ...]]:
    """The rows of the groups by the draw at whose weights their gradient is taken, without failed episodes."""
    pairs = [pair for group in groups for pair in zip(group.completions, group.advantages, strict=True)]
    rows = [
        CreditedRow.of(completion, index, advantage)
        for index, (completion, advantage) in enumerate(pairs)
        if not completion.failed
    ]
    if method.gradient_at == "generator":  # the gradient of a row is taken at its own draw only
        draws = dict.fromkeys(completion.draw for completion, _ in pairs)
        parts = {draw: tuple(row for row in rows if row.completion.draw == draw) for draw in draws}
    else:
        parts = {draw: tuple(rows) for draw in gradient_draws(method, seed, step)}
    return {draw: part for draw, part in parts.items() if part}  # all episodes of a draw, or of all, may have failed


def rollouts_are_filtered(method: Method, sampling: SamplingConfig) -> bool:
    """True if top-p or top-k changes the rollouts' log-probs, so that they cannot be compared with the trainer's."""
    return not method.greedy and (sampling.top_p < 1 or sampling.top_k > 0)


def split_batch(batch: Batch, pieces: int) -> list[Batch]:
    """The batch as `pieces` mini-batches, or one per prompt if there are fewer; rows of a prompt stay together."""
    rows = (row for part in batch.parts.values() for row in sorted(part, key=lambda row: row.index))
    prompts = list(dict.fromkeys(row.completion.problem.id for row in rows))
    pieces = min(pieces, len(prompts))
    piece_of = {prompt: position * pieces // len(prompts) for position, prompt in enumerate(prompts)}

    def cut(part: Sequence[CreditedRow], piece: int) -> tuple[CreditedRow, ...]:
        return tuple(row for row in part if piece_of[row.completion.problem.id] == piece)

    cuts = [{draw: cut(part, piece) for draw, part in batch.parts.items()} for piece in range(pieces)]
    return [replace(batch, parts={draw: part for draw, part in parts.items() if part}) for parts in cuts]
