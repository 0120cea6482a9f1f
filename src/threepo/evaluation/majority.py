"""maj@k: whether the most frequent of k answers is right, averaged over subsets of K completions (method.md 6)."""

import math
from collections.abc import Sequence
from functools import cache
from itertools import combinations

import numpy as np

from threepo.rewards.equality import number, spelling, split_unit

SUBSETS = 100
"""Where there are more subsets of size k than this, so many are drawn by a seed; else all of them are taken."""
_NO_ANSWER = ""
"""The class of all completions without an answer: they vote together, and always wrongly."""


def normalised(answer: str) -> str:
    r"""A text that is the same for answers of the same spelling, number and unit: 27.0 and 27, 1/2 and \frac{1}{2}."""
    body, unit = split_unit(spelling(answer))
    read = number(body)
    return f"{read.value if read else body.replace(', ', ',')} {unit}".strip()


def majority_at_k(answers: Sequence[str | None], correct: Sequence[bool], k: int, seed: int = 0) -> float:
    """Share of subsets of k of one problem's completions whose most frequent answer is right.

    A tie goes to the answer that occurs first. Of C(K, k) subsets all are taken, or `SUBSETS` drawn by `seed`.
    """
    classes = [_NO_ANSWER if answer is None else normalised(answer) for answer in answers]
    numbers = {name: place for place, name in enumerate(dict.fromkeys(classes))}
    places = subsets(len(classes), k, seed)
    votes = np.array([numbers[name] for name in classes])[places]  # [subsets, k]
    counts = (votes[:, :, None] == votes[:, None, :]).sum(axis=2)  # for every vote, how many agree with it
    elected = places[np.arange(len(places)), counts.argmax(axis=1)]  # argmax takes the first of equals
    right = np.array([name != _NO_ANSWER and good for name, good in zip(classes, correct, strict=True)])
    return float(right[elected].mean())


@cache
def subsets(samples: int, k: int, seed: int) -> np.ndarray:
    """Subsets of size k of the places 0 .. samples - 1, each ascending: [subsets, k], for reading only."""
    if math.comb(samples, k) <= SUBSETS:
        return np.array(list(combinations(range(samples), k)))
    generator = np.random.default_rng([seed, samples, k])
    return np.array([np.sort(generator.choice(samples, size=k, replace=False)) for _ in range(SUBSETS)])
