"""Credit rules: how the rewards of completions that compete with each other become advantages (method.md 2.1, 2.2).

`CREDIT_RULES` of config/method.py names the rules. Legend: G completions of a group, along the last dimension.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from threepo.config import Advantage
from threepo.config.method import CREDIT_RULES
from threepo.errors import UserError
from threepo.user_code import find_named


@dataclass(frozen=True)
class Rule:
    """A credit rule."""

    advantages: Callable[[torch.Tensor, Advantage], torch.Tensor]
    """Computes advantages [..., G] from rewards [..., G]; groups of equal rewards need no care."""
    takes: Callable[[torch.Tensor], torch.Tensor] = torch.isfinite
    """Tells which rewards [..., G] the rule is defined for: bool."""
    needs: str = "finite rewards"
    """The same in words, for an error."""


def _centred(rewards: torch.Tensor) -> torch.Tensor:
    return rewards - rewards.mean(dim=-1, keepdim=True)


def _grpo(rewards: torch.Tensor, settings: Advantage) -> torch.Tensor:
    """(r - mean) / (std + epsilon) (arXiv 2402.03300)."""
    return _centred(rewards) / (rewards.std(dim=-1, correction=settings.ddof, keepdim=True) + settings.epsilon)


def _dr_grpo(rewards: torch.Tensor, settings: Advantage) -> torch.Tensor:
    """r - mean (arXiv 2503.20783)."""
    return _centred(rewards)


def _rloo(rewards: torch.Tensor, settings: Advantage) -> torch.Tensor:
    """r - mean of the other rewards, which is G / (G - 1) (r - mean) (arXiv 2402.14740)."""
    size = rewards.shape[-1]
    return _centred(rewards) * (size / max(size - 1, 1))


def _maxrl(rewards: torch.Tensor, settings: Advantage) -> torch.Tensor:
    """(r - mean) / (mean + epsilon) (arXiv 2602.02710)."""
    return _centred(rewards) / (rewards.mean(dim=-1, keepdim=True) + settings.epsilon)


def _pass_at_k(rewards: torch.Tensor, settings: Advantage) -> torch.Tensor:
    """The mean advantage of a completion over all subsets of k that hold it, each paid 1 if any of it is right.

    R = 1 - C(wrong, k) / C(G, k) is the mean over subsets, and R (1 - R) their variance (arXiv 2508.10751).
    """
    size, k = rewards.shape[-1], settings.k
    if size < k:  # after failures of environments, too few episodes are left for a subset
        return torch.zeros_like(rewards)
    right = rewards.sum(dim=-1, keepdim=True).long()
    # By the number of right completions: the share of subsets that hold none of them, among all subsets and among the
    # subsets with one given wrong completion.
    wrong = range(size, -1, -1)
    shares = [
        [math.comb(n, k) / math.comb(size, k) for n in wrong],
        [math.comb(max(n - 1, 0), k - 1) / math.comb(size - 1, k - 1) for n in wrong],
    ]
    of_all, with_this = torch.tensor(shares, dtype=rewards.dtype, device=rewards.device)[:, right].unbind()
    gain = torch.where(rewards > 0, of_all, of_all - with_this)
    return gain / ((of_all * (1 - of_all)).sqrt() + settings.epsilon)


GRPO = Rule(_grpo)
DR_GRPO = Rule(_dr_grpo)
RLOO = Rule(_rloo)
MAXRL = Rule(_maxrl, lambda rewards: rewards.isfinite() & (rewards >= 0), "finite rewards of 0 or more")
PASS_AT_K = Rule(_pass_at_k, lambda rewards: (rewards == 0) | (rewards == 1), "rewards of 0 and 1")

ROUNDING = 1e-12
"""Rewards that differ by less, relative to the largest, are equal: 0.1 + 0.2 is no better than 0.3."""


def group_advantages(rewards: torch.Tensor, settings: Advantage) -> torch.Tensor:
    """Advantages [..., G] of groups with these rewards, of the same dtype; exactly 0 for rewards equal up to ROUNDING.

    `UserError` for a reward that the rule is not defined for.
    """
    found = find_named(CREDIT_RULES, settings.rule, "method.advantage.rule")
    rule = found if isinstance(found, Rule) else Rule(found)
    if not (taken := rule.takes(rewards)).all():
        raise UserError(
            f"method.advantage.rule = {settings.rule!r}: needs {rule.needs}, and a completion has earned "
            f"{rewards[~taken][0].item():g}; choose another rule, or change reward.function"
        )
    low, high = rewards.aminmax(dim=-1, keepdim=True)
    equal = high - low <= ROUNDING * torch.maximum(high.abs(), low.abs())
    advantages = rule.advantages(rewards, settings).masked_fill(equal, 0.0)
    if advantages.shape != rewards.shape or not advantages.isfinite().all():
        got = f"{list(advantages.shape)} for rewards {list(rewards.shape)}, or numbers that are not finite"
        raise UserError(f"method.advantage.rule = {settings.rule!r}: returned {got}; return a finite number for each")
    return advantages


def unlikely_first(
    rewards: torch.Tensor, right: torch.Tensor, logprobs: torch.Tensor, settings: Advantage
) -> torch.Tensor:
    """Rewards [..., G], lowered for right completions that are likely: r (1 - unlikeliness (G - place) / G).

    The place is the number of completions of the group that are more probable, 0 for the most probable one (arXiv
    2506.02355). `right` is bool, `logprobs` the log-probs of whole completions; both [..., G].
    """
    place = (logprobs.unsqueeze(-2) > logprobs.unsqueeze(-1)).sum(dim=-1)
    size = rewards.shape[-1]
    behind = (size - place).to(rewards.dtype) / size
    return torch.where(right, rewards * (1 - settings.unlikeliness * behind), rewards)
