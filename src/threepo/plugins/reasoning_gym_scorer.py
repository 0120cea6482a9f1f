"""Scores answers in the workers of reasoning_gym.py: the package is imported before an answer's time begins."""

from collections.abc import Mapping
from typing import Any

import reasoning_gym

_known: dict[str, Any] = {}


def is_right(name: str, settings: Mapping[str, Any], given: str, entry: dict[str, Any]) -> bool:
    """True if the data set's scorer gives an answer to one of its items the full score."""
    key = repr((name, settings))
    if key not in _known:
        _known[key] = reasoning_gym.create_dataset(name, **settings, seed=0, size=1)
    return bool(_known[key].score_answer(given, entry) >= 1.0)
