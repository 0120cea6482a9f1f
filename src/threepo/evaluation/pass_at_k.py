"""Unbiased pass@k, and three standard errors of it (method.md 6)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from threepo.errors import UserError

BOOTSTRAP_SAMPLES = 2000


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that at least one of k completions is right, estimated without bias from c right ones among n.

    1 - C(n-c, k) / C(n, k) (Chen et al., 2021), in the product form that does not overflow. Needs 0 <= c <= n and
    1 <= k <= n; `UserError` otherwise.
    """
    if not 0 <= c <= n or not 1 <= k <= n:
        raise UserError(f"pass_at_k(n={n}, c={c}, k={k}): needs 0 <= c <= n and 1 <= k <= n")
    if n - c < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))


@dataclass(frozen=True)
class StandardErrors:
    """Of a mean pass@1 over P problems with K completions each."""

    between: float
    """Over problems as a sample of all problems: sd of the problems' scores (ddof 1) / sqrt(P). Includes the sampling
    noise of the completions."""
    sampling: float
    """For the same problems, of sampling K completions again: sqrt(mean_p[p (1 - p) / (K - 1)] / P)."""
    bootstrap: float
    """Standard deviation under resampling of problems and then of completions within them. It counts sampling noise
    twice, because the resampled scores include it already: too large, by up to a third for small K."""


def standard_errors(correct: np.ndarray, seed: int = 0) -> StandardErrors:
    """The three standard errors for a [P, K] matrix of right (1) and wrong (0). With P or K = 1 some are NaN."""
    problems, samples = correct.shape
    scores = correct.mean(axis=1)
    between = float(scores.std(ddof=1) / math.sqrt(problems)) if problems > 1 else math.nan
    within = float(np.mean(scores * (1 - scores))) / (samples - 1) if samples > 1 else math.nan
    generator = np.random.default_rng(seed)
    means = np.empty(BOOTSTRAP_SAMPLES)
    for i in range(BOOTSTRAP_SAMPLES):
        chosen = scores[generator.integers(problems, size=problems)]
        means[i] = generator.binomial(samples, chosen).mean() / samples
    return StandardErrors(between, math.sqrt(within / problems), float(means.std(ddof=1)))


def ks_up_to(samples: int) -> list[int]:
    """The k that are reported for K samples: 1, 2, 4, ..., and K itself."""
    powers = [2**i for i in range(samples.bit_length()) if 2**i <= samples]
    return sorted({*powers, samples})


def mean_pass_at_k(correct: Sequence[int], samples: int, k: int) -> float:
    """Mean pass@k over problems, given how many of each problem's completions are right."""
    return sum(pass_at_k(samples, c, k) for c in correct) / len(correct)


def average_error(errors: Sequence[float]) -> float:
    """Standard error of the unweighted mean of n independent scores with these standard errors: sqrt(sum e^2) / n."""
    return math.sqrt(math.fsum(error**2 for error in errors)) / len(errors)
