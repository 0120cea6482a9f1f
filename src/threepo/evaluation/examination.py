"""A policy on a set of problems: at the mean of its posterior, or over several draws of it (method.md 6)."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from threepo.config import DataConfig, EvalConfig, EvaluationConfig, RewardConfig, SamplingConfig, TrainConfig
from threepo.data.finite import FiniteProblems
from threepo.data.source import ProblemSet, ProblemSource
from threepo.errors import UserError
from threepo.evaluation.scores import score
from threepo.models.policy import Policy
from threepo.posterior.noise import address_key
from threepo.posterior.policy_optimizer import WeightSource
from threepo.rewards.grading import Grader, attach_verdicts, lack, load_grader, refuse_ignored
from threepo.rollout.engines import RolloutEngine
from threepo.run_folder import completion_row
from threepo.types import Completion, Draw, Problem, Purpose, Request


@dataclass(frozen=True)
class Examination:
    """Problems as prompts of a policy, and how its completions are sampled and graded."""

    problem_set: ProblemSet
    problems: Sequence[Problem]
    """Those of the set that are evaluated."""
    prompts: Sequence[tuple[int, ...]]
    """Tokens of each problem's prompt."""
    grader: Grader
    settings: EvalConfig
    sampling: SamplingConfig
    """With the evaluation's own decoding."""
    seed: int
    numbers: Sequence[int]
    """The numbers of the draws to evaluate; none: the mean."""

    def prepare(self, engine: RolloutEngine) -> None:
        """`UserError` if the evaluation cannot fit into the engine."""
        engine.prepare(max(len(self.numbers), 1), max(map(len, self.prompts)) + self.sampling.max_new_tokens)

    def draws(self, step: int) -> list[Draw | None]:
        """The weights to evaluate at `step`: the mean, or draws of the posterior."""
        return [Draw(self.seed, step, i, Purpose.EVALUATION) for i in self.numbers] or [None]

    def parts(self) -> list[slice]:
        """The parts of the problems that are saved together, a function of the settings alone."""
        size, count = max(1, self.settings.part_size // self.settings.samples), len(self.problems)
        return [slice(i, min(i + size, count)) for i in range(0, count, size)]

    def complete(self, engine: RolloutEngine, step: int, part: slice = slice(None)) -> list[Completion]:
        """Graded completions of a part of the problems, problem-major, by the weights of `draws`, which must be loaded.

        The same seed at the same step gives the same completions, so comparing policies under one seed is a paired
        comparison. The draws share each problem's completions evenly.
        """
        draws, samples = self.draws(step), self.settings.samples
        requests = [
            Request(problem, tokens, draws[i * len(draws) // samples], i)
            for problem, tokens in zip(self.problems[part], self.prompts[part], strict=True)
            for i in range(samples)
        ]
        # A seed of its own: training on the same problems must not sample the same completions.
        completions = engine.generate(requests, self.sampling, address_key("threepo-eval", self.seed)[0] >> 1)
        return attach_verdicts(self.grader, completions)

    def metrics(self, engine: RolloutEngine, posterior: WeightSource, step: int) -> dict[str, float]:
        """Scores of all problems, as logged while training. The engine's weights are replaced."""
        engine.load(posterior, self.draws(step), step)
        rows = [completion_row(step, completion) for completion in self.complete(engine, step)]
        return score(rows, self.settings.samples, votes=False).metrics()


def with_grader(source: ProblemSet, reward: RewardConfig, data: DataConfig) -> tuple[ProblemSet, Grader]:
    """The source with the grader that [reward] names; to it, a problem that lacks what it needs is a broken row."""
    refuse_ignored(reward, source.verifier)
    problems, finite = source.problems, isinstance(source.problems, FiniteProblems)
    if data.broken_rows == "skip" and isinstance(problems, FiniteProblems):
        problems = problems.without(lambda problem: lack(reward, source.verifier, problem))
    grader = load_grader(reward, source.verifier, problems.known(), rows=finite)
    return replace(source, problems=problems), grader


def examine(
    problem_set: ProblemSet, grader: Grader, policy: Policy, config: TrainConfig | EvaluationConfig
) -> Examination:
    """The first `eval.problems` problems of the set as prompts of the policy; `UserError` if one is too long."""
    settings, data = config.eval, config.data
    decoding = {name: getattr(settings, name) for name in ("temperature", "top_p", "top_k")}
    longest = settings.max_new_tokens or config.sampling.max_new_tokens
    sampling = replace(config.sampling, max_new_tokens=longest, **decoding)
    unlimited = replace(data, max_prompt_tokens=0)  # a limit for training; a score leaves no problem out for it
    fitted, _ = fit_context(problem_set.problems, policy, unlimited, longest)
    problems = fitted.first(settings.problems)
    prompts = [policy.encode_prompt(problem, data, longest) for problem in problems]
    numbers = range(settings.best_draws or settings.draws)
    return Examination(problem_set, problems, prompts, grader, settings, sampling, config.run.seed, numbers)


def fit_context(
    source: ProblemSource, policy: Policy, data: DataConfig, max_new_tokens: int
) -> tuple[ProblemSource, int]:
    """The problems that fit into the model's context, and the tokens of the longest prompt that is known.

    Problems longer than `data.max_prompt_tokens` are left out; those that exceed the context are left out or a
    `UserError` (`data.too_long`). An endless source is returned as it is: its problems are checked once generated.
    """
    lengths = [len(tokens) for tokens in policy.prompt_tokens(source.known(), data)]
    if not isinstance(source, FiniteProblems):
        return source, max(lengths)
    kept = []
    for problem, length in zip(source.problems, lengths, strict=True):
        if data.max_prompt_tokens and length > data.max_prompt_tokens:
            continue
        if data.too_long == "error":
            policy.check_length(problem, length, max_new_tokens)
        if policy.fits(length, max_new_tokens):
            kept.append((problem, length))
    limit = f"the model's context of {policy.context} with max_new_tokens = {max_new_tokens}"
    if data.max_prompt_tokens:
        limit = f"data.max_prompt_tokens = {data.max_prompt_tokens} or {limit}"
    if not kept:
        raise UserError(f"{source.source}: no prompt fits into {limit}; raise it")
    if dropped := len(lengths) - len(kept):
        left_out = f"left out {dropped} of {len(lengths)} problems, too long for {limit}"
        print(f"threepo: {source.source}: {left_out}", file=sys.stderr)
    fitted = replace(source, problems=tuple(problem for problem, _ in kept), too_long=dropped)
    return fitted, max(length for _, length in kept)
