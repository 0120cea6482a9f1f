"""What trainings on several ranks share: a reward that can be learned, settings, and how two runs are compared."""

import json
from pathlib import Path

import pytest
import torch
from launch import ended, start
from safetensors.torch import load_file

from runs import RLVR, outcome
from threepo.run_folder import checkpoints

REWARD = """
import os, random, time
def reward(completions, **_):
    return [float(bool(c) and c[0] < 'P') for c in completions]
def by_chance(completions, **_):
    time.sleep(random.lognormvariate(-3.5, 1.5))
    return reward(completions)
def fails_on_one_rank(completions, **_):
    if os.environ.get("RANK") == "1":
        raise ValueError("the verifier is down")
    return reward(completions)
"""
IVON = ("optimizer.lr=1e3", "optimizer.ess=1e6")
COMMON = (
    *RLVR,
    "reward.function=first_character:reward",
    "model.tiny.tied=false",
    "schedule.warmup_share=0",
    "batching.tokens=64",  # several micro-batches a rank, and not as many on each
    "run.steps=3",
)


def assert_same(one: Path, other: Path, tolerance: float) -> None:
    """Completions and everything else agree; weights and posterior, too (tolerance 0: to the bit)."""
    a, b = outcome(one), outcome(other)
    for step in a["completions"]:
        for x, y in zip(a["completions"][step], b["completions"][step], strict=True):
            assert (x["tokens"], x["draw_index"], x["reward"]) == (y["tokens"], y["draw_index"], y["reward"])
    for x, y in zip(a["metrics"], b["metrics"], strict=True):
        assert x.keys() == y.keys()
        for name in x:
            assert x[name] == pytest.approx(y[name], rel=max(tolerance, 1e-6), abs=max(tolerance, 1e-7)), name
    files = [checkpoints(run)[-1][1] for run in (one, other)]
    for file in files[0].glob("*.safetensors"):
        mine, theirs = load_file(file), load_file(files[1] / file.name)
        assert mine.keys() == theirs.keys()
        for name, tensor in mine.items():
            if tolerance:
                torch.testing.assert_close(tensor, theirs[name], rtol=tolerance, atol=tolerance)
            else:
                assert torch.equal(tensor, theirs[name]), f"{file.name}: {name}"
    mine, theirs = (json.loads(run["state"]) for run in (a, b))
    # What schedules remember is measured.
    schedules = pytest.approx(theirs["state"].pop("schedules"), rel=tolerance, abs=0)
    assert (mine["state"].pop("schedules"), mine) == (schedules, theirs)


def train(ranks: int, *settings: str) -> tuple[int, str]:
    """Exit status and last words of `threepo train` on ranks."""
    return ended(start("-m", "threepo", "train", *settings, ranks=ranks))
