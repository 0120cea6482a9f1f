"""The numbers of one training step, by the names that docs/metrics.md explains (a test holds the two together)."""

import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from threepo.config import Method, OverlapConfig
from threepo.methods.method import flat_groups
from threepo.training.rollouts import Rollouts
from threepo.types import Episode, Group, Verdict

Metrics = dict[str, float]


@dataclass
class Clock:
    """Stopwatch for the parts of a step, in wall-clock seconds."""

    times: dict[str, float] = field(default_factory=dict)
    _last: float = field(default_factory=time.perf_counter)

    def lap(self, name: str) -> None:
        """Add the time since the last lap to the time of `name`."""
        now = time.perf_counter()
        self.times[name], self._last = self.times.get(name, 0.0) + now - self._last, now


def rollout_metrics(method: Method, groups: Sequence[Group]) -> Metrics:
    """Metrics of completions: rewards, lengths, and how many prompts give no gradient."""
    completions = [completion for group in groups for completion in group.completions]
    verdicts = [completion.verdict for completion in completions if completion.verdict]
    solved = [all(c.verdict and c.verdict.correct for c in group.completions) for group in groups]
    lengths = torch.tensor([len(c.logprobs) for c in completions], dtype=torch.float64)  # without observations
    metrics = {}
    outcomes = [verdict.detail.partition(":")[0].lower() for verdict in verdicts]  # what follows may quote an answer
    for outcome in sorted({*outcomes} - {""}):
        name = re.sub(r"[^a-z0-9]+", "_", outcome)
        metrics[f"reward/{name}_share"] = mean([each == outcome for each in outcomes])
    layouts = [verdict.format_ok for verdict in verdicts if verdict.format_ok is not None]
    if layouts:
        metrics["reward/format_ok_share"] = mean(layouts)
    for name, rewards in _by_function(verdicts).items():
        metrics[f"reward/function/{name}"] = mean(rewards)
    metrics |= episode_metrics([completion.episode for completion in completions if completion.episode])
    return metrics | {
        "reward/mean": mean([v.reward for v in verdicts]),
        "reward/correct_share": mean([v.correct for v in verdicts]),
        "reward/no_answer_share": mean([v.status == "no_answer" for v in verdicts]),
        "reward/error_share": mean([v.status == "error" for v in verdicts]),
        "groups/zero_advantage_share": mean([group.is_flat for group in groups]),
        "groups/all_right_share": mean(solved),
        "groups/flat_share": mean([flat for group in groups for flat in flat_groups(method, group)]),
        "completions/length_mean": float(lengths.mean()),
        "completions/length_max": float(lengths.max()),
        "completions/cut_share": mean([c.finish_reason == "length" for c in completions]),
    }


def _by_function(verdicts: Sequence[Verdict]) -> dict[str, list[float]]:
    """Rewards by reward function, where there are several, without completions that a function could not judge."""
    found: dict[str, list[float]] = {}
    for name, reward in (part for verdict in verdicts for part in verdict.parts if not math.isnan(part[1])):
        found.setdefault(name.replace(":", "."), []).append(reward)
    return found


def episode_metrics(episodes: Sequence[Episode]) -> Metrics:
    """Metrics of episodes and their environments; empty where every prompt has a single answer."""
    if not episodes:
        return {}
    numbers: dict[str, list[float]] = {}
    for name, value in (entry for episode in episodes for entry in episode.metrics.items()):
        numbers.setdefault(name, []).append(value)
    return {
        "episodes/turns_mean": mean([len(episode.own) for episode in episodes]),
        "episodes/done_share": mean([episode.status == "done" for episode in episodes]),
        "episodes/cut_share": mean([episode.status in ("turns", "tokens") for episode in episodes]),
        "episodes/failed_share": mean([episode.status == "failed" for episode in episodes]),
        **{f"environment/{name}": mean(values) for name, values in sorted(numbers.items())},
    }


def dynamic_metrics(rollouts: Rollouts) -> Metrics:
    """Metrics of dynamic sampling: its cost, and the groups that are still missing; empty without it."""
    if not rollouts.rounds:
        return {}
    return {
        "sampling/rounds": rollouts.rounds,
        "groups/generated": len(rollouts.generated),
        "groups/discarded_share": len(rollouts.discarded) / len(rollouts.generated),
        "groups/missing": rollouts.missing,
        "completions/discarded_tokens": sum(len(c.logprobs) for group in rollouts.discarded for c in group.completions),
    }


def overlap_metrics(settings: OverlapConfig, rollouts: Rollouts, step: int) -> Metrics:
    """The mean age, in steps, of the weights that wrote what this step learns from; empty without overlap."""
    if not settings.lag:
        return {}
    age = mean([step - completion.policy_step for group in rollouts.groups for completion in group.completions])
    return {"overlap/age": age} | ({"overlap/dropped": len(rollouts.discarded)} if settings.stream else {})


def step_flops(weights: float, read: float, decoded: float, trained: float, frozen: bool = False) -> float:
    """Floating-point operations of one RLVR step, counted from its tokens as in the paper.

    Per weight and token, two forward and six forward and backward. Prompt tokens are `read` once for each draw, and
    tokens are `trained` on once for each draw at which their gradient is taken. `frozen`: no gradients of the weights
    are made, which saves two operations of six, and adapters count nothing.
    """
    forward, passes = 2 * weights, 2 if frozen else 3
    return forward * read + forward * decoded + passes * forward * trained


def flops(method: Method, weights: int, rollouts: Rollouts, frozen: bool) -> float:
    """Floating-point operations of a step (`step_flops`)."""
    read = sum(len(group.completions[0].prompt_tokens) for group in rollouts.generated) * max(method.draws, 1)
    decoded = sum(len(c.logprobs) for c in rollouts.completions)
    trained = sum(len(c.prompt_tokens) + len(c.tokens) for group in rollouts.groups for c in group.completions)
    return step_flops(weights, read, decoded, trained * method.passes, frozen)


def time_metrics(clock: Clock, rollouts: Rollouts) -> Metrics:
    """Metrics of time: seconds of the parts of a step, and tokens per second; and bytes pushed."""
    tokens = sum(len(c.logprobs) for c in rollouts.completions)
    step = clock.times["time/wait"] + clock.times["time/update"]
    speed = tokens / rollouts.costs["time/rollout"]
    return {**rollouts.costs, **clock.times, "time/step": step, "time/tokens_per_second": speed}


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean of at least one value."""
    return sum(values) / len(values)
