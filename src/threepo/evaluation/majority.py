"""maj@k: whether the most frequent of k answers is right, averaged over subsets of K completions (method.md 6)."""

import math
from collections.abc import Sequence
from functools import cache
from itertools import combinations

import numpy as np

from threepo.rewards.equality import number, spelling, split_unit

SUBSETS = 100
"""All subsets of size k are taken if there are at most this many; else this many are drawn by a seed."""
_NO_ANSWER = ""
"""The class of all completions without an answer: they vote together, and always wrongly."""


def normalised(answer: str) -> str:
    r"""A text that is equal for answers of equal spelling, number and unit: 27.0 and 27, 1/2 and \frac{1}{2}."""
    body, unit = split_unit(spelling(answer))
    read = number(body)
    return f"{read.value if read else body.replace(', ', ',')} {unit}".strip()


def majority_at_k(answers: Sequence[str | None], correct: Sequence[bool], k: int, seed: int = 0) -> float:
    """Share of subsets of k of one problem's completions whose most frequent answer is right.

    A tie goes to the answer that occurs first. Of C(K, k) subsets all are taken, or `SUBSETS` drawn by `seed`.
    """
    classes = [_NO_ANSWER if answer is None else normalised(answer) for answer in answers]
    chosen = subsets(len(classes), k, seed)
    votes = np.array([classes.index(name) for name in classes])[chosen]  # [subsets, k]
    counts = (votes[:, :, None] == votes[:, None, :]).sum(axis=2)  # for every vote, how many agree with it
    elected = chosen[np.arange(len(chosen)), counts.argmax(axis=1)]  # argmax takes the first of equals
    right = np.array([name != _NO_ANSWER and good for name, good in zip(classes, correct, strict=True)])
    return float(right[elected].mean())


@cache
def subsets(samples: int, k: int, seed: int) -> np.ndarray:
    """Subsets of size k of the numbers 0 .. samples - 1, each ascending: [subsets, k], for reading only."""
    if math.comb(samples, k) <= SUBSETS:
        return np.array(list(combinations(range(samples), k)))
    generator = np.random.default_rng([seed, samples, k])
    return np.array([np.sort(generator.choice(samples, size=k, replace=False)) for _ in range(SUBSETS)])
