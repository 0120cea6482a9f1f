"""Questions to a policy: at the mean of its posterior, or over several draws of it (method.md 6)."""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from threepo.config import DataConfig, EvaluationConfig, RewardConfig, SamplingConfig, TrainConfig
from threepo.data.finite import FiniteProblems
from threepo.data.source import ProblemSet, ProblemSource
from threepo.errors import UserError
from threepo.evaluation.scores import score
from threepo.methods.method import requests
from threepo.models.policy import Policy
from threepo.models.prompts import note_dates
from threepo.posterior.noise import address_key
from threepo.posterior.policy_optimizer import WeightSource
from threepo.rewards.grading import Grader, attach_verdicts, load_grader, refuse_ignored, what_lacks
from threepo.rollout.engines import RolloutEngine
from threepo.run_folder import completion_row
from threepo.types import Completion, Draw, Problem, Purpose

_SEEDS = {Purpose.EVALUATION: "threepo-eval", Purpose.PROBE: "threepo-probe"}
"""Training on the same problems must not sample the same completions, so seeds have names."""


@dataclass(frozen=True)
class Questions:
    """Problems as a policy reads them, and how its answers are sampled and graded."""

    problems: Sequence[Problem]
    prompts: Sequence[tuple[int, ...]]
    """Tokens of each problem's prompt."""
    grader: Grader
    sampling: SamplingConfig
    seed: int
    """The run's seed."""
    purpose: Purpose
    """The use of draws and completions, part of their random addresses."""

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and completion together."""
        return max(map(len, self.prompts)) + self.sampling.max_new_tokens

    def select(self, indices: Sequence[int]) -> Self:
        """The questions at these indices."""
        return replace(self, problems=[self.problems[i] for i in indices], prompts=[self.prompts[i] for i in indices])

    def draws(self, step: int, numbers: Sequence[int]) -> list[Draw | None]:
        """The draws of these numbers at `step`; the mean if there are none."""
        return [Draw(self.seed, step, number, self.purpose) for number in numbers] or [None]

    def ask(self, engine: RolloutEngine, draws: Sequence[Draw | None], count: int, first: int = 0) -> list[Completion]:
        """`count` graded completions of every problem, shared evenly by the draws, in the order problem, draw.

        The engine must hold the draws. The same seed and step give the same completions, so a comparison of policies
        under one seed is paired. `first` is the number of a problem's first completion, for asking in several calls.
        """
        asked = requests(zip(self.problems, self.prompts, strict=True), draws, count, first)
        seed = address_key(_SEEDS[self.purpose], self.seed)[0] >> 1
        return attach_verdicts(self.grader, engine.generate(asked, self.sampling, seed))


@dataclass(frozen=True)
class Examination(Questions):
    """Questions of an evaluation, at the mean of the posterior or over several draws of it."""

    problem_set: ProblemSet
    """The set that the problems come from."""
    samples: int
    """Completions of each problem, which the draws share evenly."""
    numbers: Sequence[int]
    """The numbers of the draws; empty: the mean."""

    @property
    def label(self) -> str:
        """The name of the set."""
        return self.problem_set.label

    def prepare(self, engine: RolloutEngine) -> None:
        """Raise `UserError` if the evaluation does not fit into the engine."""
        engine.prepare(max(len(self.numbers), 1), self.longest)

    def load(self, engine: RolloutEngine, posterior: WeightSource, step: int) -> None:
        """Replace the engine's weights by the weights to evaluate at `step`."""
        engine.load(posterior, self.draws(step, self.numbers), step)

    def complete(self, engine: RolloutEngine, step: int) -> list[Completion]:
        """All graded completions, problem by problem; `load` comes before."""
        return self.ask(engine, self.draws(step, self.numbers), self.samples)

    def measure(
        self, engine: RolloutEngine, posterior: WeightSource, step: int
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Scores as logged while training, and each problem's share of right answers. Replaces the engine's weights."""
        self.load(engine, posterior, step)
        rows = [completion_row(step, completion) for completion in self.complete(engine, step)]
        right = dict.fromkeys((row["problem_id"] for row in rows), 0.0)
        for row in rows:
            right[row["problem_id"]] += row["correct"] / self.samples
        return score(rows, self.samples).metrics(), right


def with_grader(
    source: ProblemSet, reward: RewardConfig, data: DataConfig, besides: Sequence[ProblemSet] = ()
) -> tuple[ProblemSet, Grader]:
    """The source and the grader that [reward] names; a problem that the grader cannot grade is a broken row.

    `besides`: other sources whose graders read [reward]. `UserError` for settings of it that none would read.
    """
    refuse_ignored(reward, [one.verifier for one in (source, *besides)])
    problems = source.problems
    if isinstance(problems, FiniteProblems) and data.broken_rows == "skip":
        problems = problems.without(what_lacks(reward, source.verifier))
    grader = load_grader(reward, source.verifier, problems.known(), rows=isinstance(problems, FiniteProblems))
    return replace(source, problems=problems), grader


def examine(
    problem_set: ProblemSet, grader: Grader, policy: Policy, config: TrainConfig | EvaluationConfig
) -> Examination:
    """The first `eval.problems` problems of the set as questions; `UserError` if a prompt is too long."""
    settings = config.eval
    sampling = replace(
        config.sampling,
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        max_new_tokens=settings.max_new_tokens or config.sampling.max_new_tokens,
    )
    unlimited = replace(config.data, max_prompt_tokens=0)  # a limit for training; scores count long prompts too
    problems, prompts = fitting_prompts(problem_set, policy, unlimited, sampling.max_new_tokens, settings.problems)
    return Examination(
        problems,
        prompts,
        grader,
        sampling,
        config.run.seed,
        Purpose.EVALUATION,
        problem_set,
        settings.samples,
        range(settings.best_draws or settings.draws),
    )


def fitting_prompts(
    problem_set: ProblemSet, policy: Policy, data: DataConfig, max_new_tokens: int, count: int
) -> tuple[Sequence[Problem], list[tuple[int, ...]]]:
    """The first `count` problems that fit into the context, and the tokens of their prompts."""
    source = problem_set.problems
    if isinstance(source, FiniteProblems) and data.too_long == "error" and not data.max_prompt_tokens:
        source = replace(source, problems=tuple(source.first(count)))  # none is left out, and the others are not asked
    fitting, _ = fit_context(source, policy, data, max_new_tokens)
    problems = fitting.first(count)
    return problems, [policy.encode_prompt(problem, data, max_new_tokens) for problem in problems]


def fit_context(
    source: ProblemSource, policy: Policy, data: DataConfig, max_new_tokens: int
) -> tuple[ProblemSource, int]:
    """The problems that fit into the model's context, and the tokens of the longest known prompt.

    Problems longer than `data.max_prompt_tokens` are left out; problems that exceed the context are left out or a
    `UserError` (`data.too_long`). An endless source is returned as it is: its problems are checked when generated.
    """
    note_dates(policy.tokenizer, data)
    lengths = [len(tokens) for tokens in policy.prompt_tokens(source.known(), data)]
    if not isinstance(source, FiniteProblems):
        return source, max(lengths)
    most = data.max_prompt_tokens or math.inf
    short = [(p, length) for p, length in zip(source.problems, lengths, strict=True) if length <= most]
    if data.too_long == "error":
        for problem, length in short:
            policy.check_length(problem, length, max_new_tokens)
    kept = [(p, length) for p, length in short if length + max_new_tokens <= policy.context]
    limit = f"the model's context of {policy.context} with max_new_tokens = {max_new_tokens}"
    if data.max_prompt_tokens:
        limit = f"data.max_prompt_tokens = {data.max_prompt_tokens} or {limit}"
    if not kept:
        raise UserError(f"{source.source}: no prompt fits into {limit}; raise it")
    if dropped := len(lengths) - len(kept):
        said = f"left out {dropped} of {len(lengths)} problems, too long for {limit}"
        print(f"threepo: {source.source}: {said}", file=sys.stderr)
    problems, kept_lengths = zip(*kept, strict=True)
    return replace(source, problems=problems, too_long=dropped), max(kept_lengths)
