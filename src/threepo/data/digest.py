"""Digests that show whether data have changed."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any

from threepo.types import Problem


def digest(parts: Iterable[str]) -> str:
    """The digest of texts in their order."""
    total = hashlib.blake2b(digest_size=16)
    for part in parts:
        total.update(part.encode() + b"\0")
    return total.hexdigest()


def problems_digest(problems: Sequence[Problem], prompts: Sequence[Any]) -> str:
    """The digest of problems, with everything that a grader sees, and of their prompts as text or as tokens."""
    return digest(
        json.dumps([problem.id, problem.answer, problem.columns, prompt], sort_keys=True, default=str)
        for problem, prompt in zip(problems, prompts, strict=True)
    )
