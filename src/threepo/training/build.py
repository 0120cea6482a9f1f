"""From a checked recipe to the parts of a run."""

import sys
from dataclasses import dataclass, replace

from threepo.config import (
    DataConfig,
    EvalConfig,
    RewardConfig,
    SamplingConfig,
)
from threepo.data.finite import FiniteProblems
from threepo.data.source import OpenedSource, ProblemSource
from threepo.errors import UserError
from threepo.evaluation.evaluate import Examination
from threepo.models.policy import Policy
from threepo.rewards.grading import Grader, lack, load_grader


@dataclass(frozen=True)
class GradedProblems:
    """Problems, and the grader of their completions."""

    problems: ProblemSource
    grader: Grader


def with_grader(source: OpenedSource, reward: RewardConfig, data: DataConfig) -> GradedProblems:
    """Problems with the grader that the recipe names; what it lacks of one makes that one broken.

    `data.broken_rows` says whether `UserError` is raised for those, or they are left out.
    """
    problems, finite = source.problems, isinstance(source.problems, FiniteProblems)
    if data.broken_rows == "skip" and isinstance(problems, FiniteProblems):
        problems = problems.without(lambda problem: lack(reward, source.verifier, problem))
    return GradedProblems(problems, load_grader(reward, source.verifier, problems.known(), rows=finite))


@dataclass(frozen=True)
class FittingProblems:
    """Problems that fit into a model's context, as far as they are known beforehand."""

    problems: ProblemSource
    longest: int
    """Tokens of the longest of their known prompts."""


def fitting(source: ProblemSource, policy: Policy, data: DataConfig, max_new_tokens: int) -> FittingProblems:
    """The problems of a finite source that fit into the model's context and keep to `data.max_prompt_tokens`.

    Of those that do not fit, `data.too_long` says whether they are refused or left out. Endless sources come back as
    they are: their problems are checked as they come.
    """
    lengths = [len(tokens) for tokens in policy.prompt_tokens(source.known(), data)]
    if not isinstance(source, FiniteProblems):
        return FittingProblems(source, max(lengths))
    kept = []
    for problem, length in zip(source.problems, lengths, strict=True):
        if data.max_prompt_tokens and length > data.max_prompt_tokens:
            continue
        if data.too_long == "error":
            policy.check_length(problem, length, max_new_tokens)
        if policy.fits(length, max_new_tokens):
            kept.append((problem, length))
    dropped = len(lengths) - len(kept)
    limit = f"the model's context of {policy.context} with max_new_tokens = {max_new_tokens}"
    if data.max_prompt_tokens:
        limit = f"data.max_prompt_tokens = {data.max_prompt_tokens} or {limit}"
    if not kept:
        raise UserError(f"{source.source}: no prompt fits into {limit}; change that")
    if dropped:
        print(
            f"threepo: {source.source}: left out {dropped} of {len(lengths)} problems, too long for {limit}",
            file=sys.stderr,
        )
    left = replace(source, problems=tuple(problem for problem, _ in kept), too_long=dropped)
    return FittingProblems(left, max(length for _, length in kept))


def build_examination(
    heldout: GradedProblems, policy: Policy, data: DataConfig, settings: EvalConfig, sampling: SamplingConfig, seed: int
) -> Examination:
    """The held-out problems as every policy will be asked them; `UserError` if one cannot be put to the model."""
    longest = settings.max_new_tokens or sampling.max_new_tokens
    unlimited = replace(data, max_prompt_tokens=0)  # that is for training; no score leaves problems out for it
    source = fitting(heldout.problems, policy, unlimited, longest).problems
    problems = source.first(settings.problems)
    if not isinstance(source, FiniteProblems):
        for problem, tokens in zip(problems, policy.prompt_tokens(problems, data), strict=True):
            policy.check_length(problem, len(tokens), longest)
    return Examination(problems, heldout.grader, data, settings, sampling, seed)
