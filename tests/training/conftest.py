"""A run that has something to learn."""

from pathlib import Path

import pytest

LOWER_HALF = "def reward(completions, **_):\n    return [float(bool(c) and c[0] < 'P') for c in completions]\n"
"""Paid for the first character only: a random policy earns about a third of it, and can learn it in a few steps."""


@pytest.fixture
def learnable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Settings of a run that has something to learn: the task's own reward is 0 throughout for a random policy."""
    monkeypatch.chdir(tmp_path)
    Path("first_character.py").write_text(LOWER_HALF)
    return [
        "reward.function=first_character:reward",
        "model.tiny.tied=false",  # with tied embeddings a random model repeats itself, and greedy draws are all alike
        "schedule.warmup_share=0",
        "sampling.max_new_tokens=4",
    ]
