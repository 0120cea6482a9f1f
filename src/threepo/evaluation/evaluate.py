"""Evaluation on held-out problems: at the mean of the posterior, or over several draws of it (method.md 6)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from threepo.config import DataConfig, EvalConfig, SamplingConfig
from threepo.evaluation.pass_at_k import StandardErrors, ks_up_to, mean_pass_at_k, standard_errors
from threepo.models.policy import Policy
from threepo.posterior.noise import address_key
from threepo.posterior.policy_optimizer import WeightSource
from threepo.rewards.grading import Grader, graded
from threepo.rollout.engine import RolloutEngine
from threepo.types import Completion, Draw, Problem, Request

FIRST_EVAL_DRAW = 1 << 20
"""Draws made for evaluation are numbered from here, out of the way of those that training makes."""


@dataclass(frozen=True)
class Evaluation:
    """Scores of one policy on one set of problems."""

    problems: int
    samples: int
    """Completions per problem, K."""
    pass_at: dict[int, float]
    """Mean over problems of unbiased pass@k, by k."""
    errors: StandardErrors
    """Of pass@1."""
    no_answer_share: float
    cut_share: float
    """Completions cut at max_new_tokens."""
    completions: tuple[Completion, ...]
    """Graded; problem-major."""

    def metrics(self) -> dict[str, float]:
        """As logged while training."""
        scores = {f"eval/pass_at_{k}": value for k, value in self.pass_at.items()}
        return {
            **scores,
            "eval/se_between": self.errors.between,
            "eval/se_sampling": self.errors.sampling,
            "eval/se_bootstrap": self.errors.bootstrap,
            "eval/no_answer_share": self.no_answer_share,
            "eval/cut_share": self.cut_share,
        }


@dataclass(frozen=True)
class Examination:
    """Problems and how they are put; the same for every policy that is to be compared."""

    problems: Sequence[Problem]
    grader: Grader
    data: DataConfig
    settings: EvalConfig
    sampling: SamplingConfig
    """Of the rollouts; gives max_new_tokens where the evaluation has none of its own."""
    seed: int

    @property
    def max_new_tokens(self) -> int:
        """Of its completions."""
        return self.settings.max_new_tokens or self.sampling.max_new_tokens

    def prepare(self, policy: Policy, engine: RolloutEngine) -> None:
        """`UserError` if what `evaluate` needs cannot fit into the engine."""
        longest = max(map(len, policy.prompt_tokens(self.problems, self.data)))
        engine.prepare(max(self.settings.draws, 1), longest + self.max_new_tokens)

    def evaluate(self, policy: Policy, engine: RolloutEngine, posterior: WeightSource, step: int) -> Evaluation:
        """Generate, grade and score. The engine's weights are replaced; the policy's are not touched.

        The same seed at the same step gives the same completions; comparing policies under one seed is a paired
        comparison. `settings.draws` draws of the posterior share each problem's completions out evenly.
        """
        settings = self.settings
        sampling = replace(
            self.sampling,
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            max_new_tokens=self.max_new_tokens,
        )
        draws: list[Draw | None] = [Draw(self.seed, step, FIRST_EVAL_DRAW + i) for i in range(settings.draws)]
        draws = draws or [None]
        engine.load(posterior, draws, step)
        requests = [
            Request(problem, tokens, draws[i * len(draws) // settings.samples], i)
            for problem in self.problems
            for tokens in [policy.encode_prompt(problem, self.data, sampling.max_new_tokens)]
            for i in range(settings.samples)
        ]
        # An address of its own: training on these very problems must not have sampled the same completions.
        completions = engine.generate(requests, sampling, address_key("threepo-eval", self.seed)[0] >> 1)
        return score(graded(self.grader, completions), settings.samples)


def score(completions: Sequence[Completion], samples: int) -> Evaluation:
    """Scores of graded completions, `samples` of each problem, standing together."""
    verdicts = [c.verdict for c in completions if c.verdict is not None]
    correct = np.array([verdict.correct for verdict in verdicts], dtype=float).reshape(-1, samples)
    right = [int(count) for count in correct.sum(axis=1)]
    return Evaluation(
        problems=len(correct),
        samples=samples,
        pass_at={k: mean_pass_at_k(right, samples, k) for k in ks_up_to(samples)},
        errors=standard_errors(correct),
        no_answer_share=sum(verdict.status == "no_answer" for verdict in verdicts) / len(verdicts),
        cut_share=sum(c.finish_reason == "length" for c in completions) / len(completions),
        completions=tuple(completions),
    )
