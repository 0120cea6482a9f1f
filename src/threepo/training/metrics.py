"""The numbers of one training step, by the names that docs/metrics.md explains (a test holds the two together).

And warnings about runs that go on without learning: what was seen for several steps in a row, and what to do about it.
Each warning comes once per run. The counts are part of the train state, so a resumed run warns as if never stopped.
"""

import math
import re
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from threepo.config import Method, TrainConfig
from threepo.errors import ThreepoWarning
from threepo.methods.corrections import effective_sample_share
from threepo.methods.method import flat_groups
from threepo.ranks.group import ALONE, Ranks
from threepo.training.rollouts import Rollouts
from threepo.training.update import UpdateRecord
from threepo.types import Completion, Group, Verdict

Metrics = dict[str, float]


@dataclass
class Clock:
    """Wall-clock seconds of the parts of a step."""

    times: dict[str, float] = field(default_factory=dict)
    _last: float = field(default_factory=time.perf_counter)

    def lap(self, name: str) -> None:
        """Add the time since the last lap to that of `name`."""
        now = time.perf_counter()
        self.times[name], self._last = self.times.get(name, 0.0) + now - self._last, now


def rollout_metrics(method: Method, groups: Sequence[Group]) -> Metrics:
    """Rewards, lengths, and how many prompts give no gradient, of these groups."""
    completions = [completion for group in groups for completion in group.completions]
    verdicts = [completion.verdict for completion in completions if completion.verdict]
    flat = [flat_groups(method, group) for group in groups]
    # A prompt gives no gradient when all advantages are 0 in each of its advantage groups.
    silent = [all(own) for own in flat]
    solved = [all(c.verdict and c.verdict.correct for c in group.completions) for group in groups]
    lengths = torch.tensor([len(c.tokens) for c in completions], dtype=torch.float64)
    details = sorted({verdict.detail for verdict in verdicts if verdict.detail})
    layouts = [verdict.format_ok for verdict in verdicts if verdict.format_ok is not None]
    return {
        **{
            f"reward/{re.sub(r'[^a-z0-9]+', '_', detail.lower())}_share": _mean([v.detail == detail for v in verdicts])
            for detail in details
        },
        **({"reward/format_ok_share": _mean(layouts)} if layouts else {}),
        **{f"reward/function/{name}": _mean(paid) for name, paid in _by_function(verdicts).items()},
        "reward/mean": _mean([v.reward for v in verdicts]),
        "reward/correct_share": _mean([v.correct for v in verdicts]),
        "reward/no_answer_share": _mean([v.status == "no_answer" for v in verdicts]),
        "reward/error_share": _mean([v.status == "error" for v in verdicts]),
        "groups/zero_advantage_share": _mean(silent),
        "groups/all_right_share": _mean([a and b for a, b in zip(silent, solved, strict=True)]),
        "groups/flat_share": _mean([one for own in flat for one in own]),
        "completions/length_mean": float(lengths.mean()),
        "completions/length_max": float(lengths.max()),
        "completions/cut_share": _mean([c.finish_reason == "length" for c in completions]),
    }


def _by_function(verdicts: Sequence[Verdict]) -> dict[str, list[float]]:
    """Rewards that each of several reward functions has paid, where it could judge."""
    found: dict[str, list[float]] = {}
    for name, reward in (part for verdict in verdicts for part in verdict.parts if not math.isnan(part[1])):
        found.setdefault(name.replace(":", "."), []).append(reward)
    return found


Embed = Callable[[Sequence[Completion]], torch.Tensor]
"""Completions as vectors [G, width]."""


def similarity(groups: Sequence[Group], embed: Embed, ranks: Ranks = ALONE) -> float:
    """Similarity of the completions of a prompt: mean cosine of their vectors over pairs, then over prompts."""

    def of_groups(mine: list[int]) -> list[float]:
        return [mean_cosine(embed(groups[i].completions)) for i in mine]

    return _mean(ranks.deal([i % ranks.size for i in range(len(groups))], of_groups))


def token_counts(completions: Sequence[Completion]) -> torch.Tensor:
    """Counts of each token in each completion."""
    index = {token: i for i, token in enumerate(sorted({token for c in completions for token in c.tokens}))}
    return torch.stack([torch.tensor([index[t] for t in c.tokens]).bincount(minlength=len(index)) for c in completions])


def mean_cosine(vectors: torch.Tensor) -> float:
    """Over the pairs of at least two vectors [G, width]."""
    units, count = torch.nn.functional.normalize(vectors.double(), dim=1), len(vectors)
    cosines = units @ units.T
    return float((cosines.sum() - cosines.trace()) / (count * (count - 1)))


def dynamic_metrics(rollouts: Rollouts) -> Metrics:
    """Metrics of dynamic sampling: its cost, and what it did not reach; empty without it."""
    if not rollouts.rounds:
        return {}
    return {
        "sampling/rounds": rollouts.rounds,
        "groups/generated": len(rollouts.generated),
        "groups/discarded_share": len(rollouts.discarded) / len(rollouts.generated),
        "groups/missing": rollouts.missing,
        "completions/discarded_tokens": sum(len(c.tokens) for group in rollouts.discarded for c in group.completions),
    }


def time_metrics(clock: Clock, groups: Sequence[Group]) -> Metrics:
    """Seconds of the parts of a step, and what follows from them."""
    parts, tokens = clock.times, sum(len(c.tokens) for group in groups for c in group.completions)
    step = sum(parts[name] for name in ("time/rollout", "time/reward", "time/update"))
    return parts | {"time/step": step, "time/tokens_per_second": tokens / parts["time/rollout"]}


def update_metrics(record: UpdateRecord) -> Metrics:
    """The loss, and the ratios of the gradient's policy to the old one and to the rollouts' generators."""
    if not record.rows:
        return {}
    metrics = {"policy/loss": _mean(record.minimised) if record.minimised else 0.0} | record.compared
    metrics |= {f"policy/{name}": total / record.tokens for name, total in record.policy.items()}
    if record.chose:
        metrics["policy/no_choice_share"] = 1 - _mean(record.chose)
    certainties = [row.self_certainty for row in record.rows]
    metrics |= {
        "policy/self_certainty": _mean(certainties),
        "policy/self_certainty_min": min(certainties),
        "policy/self_certainty_max": max(certainties),
    }
    if record.correction is None:
        return metrics
    rows = record.rows
    rho = torch.tensor([row.rho for row in rows], dtype=torch.float64)
    metrics |= {
        "correction/kl": record.kl / record.tokens,
        "correction/kept_share": _mean([row.kept_tokens > 0 for row in rows]),
        "correction/kept_token_share": sum(row.kept_tokens for row in rows) / record.tokens,
        "correction/untouched_share": _mean([row.untouched for row in rows]),
        "correction/effective_sample_share": effective_sample_share(torch.tensor([row.weight for row in rows])),
    }
    for name, q in (("min", 0.0), ("p05", 0.05), ("p50", 0.5), ("p95", 0.95), ("max", 1.0)):
        metrics[f"correction/rho_{name}"] = float(rho.quantile(q))
    # By quarters of the rows by length, short to long: does the correction favour short answers?
    ordered = sorted(rows, key=lambda row: row.tokens)
    cuts = [len(ordered) * i // 4 for i in range(5)]
    for i, (first, end) in enumerate(pairwise(cuts), start=1):
        if first < end:
            metrics[f"correction/kept_share_length_q{i}"] = _mean([row.kept_tokens > 0 for row in ordered[first:end]])
    return metrics


def _mean(values: list[float] | list[bool]) -> float:
    return sum(values) / len(values)


FAILED_STEPS = 5
"""Steps in a row in which the verifier always failed, or every completion was cut, before there is a warning."""
CONSTANT_STEPS = 20
"""The same for rewards that are all equal, which hard problems can cause for a few steps."""

_FAILED = (
    "the verifier has failed on every completion{1}, so no reward means anything: reward.function = {0!r} returns None,"
    " raises an error or exceeds its time; try it on rows of completions/ in the run folder"
)
_CONSTANT = (
    "all completions of a step have earned the same reward (now {:g}), so every advantage is 0: the problems are too "
    "hard or too easy for this policy, or reward.function cannot tell completions apart; change the problems, the "
    "policy or the reward"
)
_ENDLESS = (
    "and so since the run began, every completion was cut at sampling.max_new_tokens = {}: if an answer needs fewer "
    "tokens, the model never generates its end token; check that its tokenizer's eos_token and chat template are those "
    "that it was trained with, or raise sampling.max_new_tokens"
)
_CUT = (
    "every completion was cut at sampling.max_new_tokens = {} and graded unfinished: raise sampling.max_new_tokens, or "
    "see in completions/ of the run folder whether the policy repeats itself"
)
_NOT_FULL = (
    "sampling.dynamic_rounds = {} rounds have not found enough prompts whose completions earn different rewards, and "
    "prompts without a learning signal have filled the batch: the problems are too hard or too easy for this policy; "
    "change them, or raise sampling.dynamic_rounds or sampling.prompts_per_round"
)
_UNCHOSEN = (
    "objective.loss = {!r} has chosen no token, so it does nothing: advantages are all 0, or no covariance "
    "is within objective.clip_cov_bounds (clip_cov); change the problems or the bounds, or set objective.loss = 'ppo'"
)
_UNCHANGED = (
    "the {} correction has masked or truncated nothing: the draws may be too close together to matter (lower "
    "optimizer.ess), or the log-probs of the rollouts are wrong"
)


def watch(
    config: TrainConfig, streaks: Mapping[str, int], step: int, rollouts: Rollouts, record: UpdateRecord
) -> dict[str, int]:
    """Warn if training step `step` made a streak long enough. Returns all streaks after it, by alarm.

    A streak is the number of steps in a row in which something happened. It stays as it is in a step that says nothing
    about it, and after its warning.
    """
    completions = [completion for group in rollouts.generated for completion in group.completions]
    verdicts = [completion.verdict for completion in completions if completion.verdict]
    failed = all(verdict.status == "error" for verdict in verdicts)
    constant = len({verdict.reward for verdict in verdicts}) == 1
    cut = all(completion.finish_reason == "length" for completion in completions)
    reason = next((f" ({verdict.detail})" for verdict in verdicts if verdict.detail), "")
    endless = step + 1 == FAILED_STEPS  # no completion of the run has ended
    correction = record.correction
    alarms = [
        ("verifier", failed, FAILED_STEPS, _FAILED.format(", ".join(config.reward.names), reason)),
        ("reward", None if failed else constant, CONSTANT_STEPS, _CONSTANT.format(verdicts[0].reward)),
        ("length", cut, FAILED_STEPS, (_ENDLESS if endless else _CUT).format(config.sampling.max_new_tokens)),
    ]
    if rounds := config.sampling.dynamic_rounds:
        alarms.append(("dynamic", rollouts.missing > 0, FAILED_STEPS, _NOT_FULL.format(rounds)))
    if record.chose:
        alarms.append(("choice", not any(record.chose), CONSTANT_STEPS, _UNCHOSEN.format(config.objective.loss)))
    if correction:
        unchanged = (correction.kind != "none" and all(r.untouched for r in record.rows)) if record.rows else None
        alarms.append(("correction", unchanged, correction.warn_after, _UNCHANGED.format(correction.kind)))
    after = dict(streaks)
    for name, happened, limit, message in alarms:
        before = streaks.get(name, 0)
        if before < limit and happened is not None:
            after[name] = before + 1 if happened else 0
            if after[name] == limit:
                warnings.warn(f"for {limit} steps in a row, {message}", ThreepoWarning, stacklevel=2)
    return after
