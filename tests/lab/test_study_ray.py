"""A study whose runs are Ray tasks, on a cluster of this machine alone (make test-verl: that environment has Ray)."""

import json
import os
from pathlib import Path

import pytest

from runs import RLVR

ray = pytest.importorskip("ray")
from threepo.lab.study import outcome, reported_runs, run_study  # noqa: E402
from threepo.lab.study_config import load_study  # noqa: E402

STUDY = """
[study]
folder = "study"
ray = "local"
baseline = "grpo"
seeds = [0, 1]
smoothing = 2
settings = SETTINGS
[methods.grpo]
[methods.broken]
[excluded]
"runs/broken/seed-1" = "one is enough"
"""
REWARD = """
import sys

def fails(completions, **columns):
    if "/runs/broken/" in " ".join(sys.argv):
        raise RuntimeError("the verifier is down")
    return [0.0 for _ in completions]
"""


def test_runs_are_tasks_and_their_failures_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    source = Path(__file__).resolve().parents[2] / "src"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(source), os.environ.get("PYTHONPATH", "")]))
    settings = [text for text in RLVR if text != "run.threads=1"]
    settings += ["eval.every=2", "run.steps=4", "reward.function=rewards_of_ray_study:fails"]
    Path("tiny.toml").write_text(STUDY.replace("SETTINGS", json.dumps(settings)))
    Path("rewards_of_ray_study.py").write_text(REWARD)
    study = load_study("tiny.toml")
    try:
        run_study(study)
    finally:
        ray.shutdown()
    states = {run.name: outcome(study, run) for run in reported_runs(study)}
    assert {name: found.state for name, found in states.items()} == {
        "runs/grpo/seed-0": "finished",
        "runs/grpo/seed-1": "finished",
        "runs/broken/seed-0": "failed",
        "runs/broken/seed-1": "excluded",
    }
    assert "status 2: threepo: reward.function" in states["runs/broken/seed-0"].reason
