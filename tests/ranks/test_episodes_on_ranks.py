"""Episodes on several ranks, of which each plays its share: the same episodes as in one process."""

import os
from pathlib import Path

import pytest
from launch import launch

from runs import outcome
from training.test_episode_runs import EPISODES, IVON, talkative_model


@pytest.fixture(autouse=True)
def _worlds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the environments are."""
    tests = str(Path(__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")]))


@pytest.mark.parametrize(("preset", "ranks"), [("c3po", 3), ("auto", 2)])
def test_episodes_do_not_depend_on_the_number_of_ranks(preset: str, ranks: int, tmp_path: Path) -> None:
    model = talkative_model(tmp_path / "model")
    rates = IVON if preset == "c3po" else ("optimizer.lr=1e-4", "method.draws=4")
    runs = []
    for count in (0, ranks):
        folder = tmp_path / f"on-{count}"
        settings = [*EPISODES, f"method.preset={preset}", *rates, f"model.path={model}", f"run.folder={folder}"]
        settings += ["environment.factory=worlds:Ends", f"overlap.lag={int(preset == 'c3po')}"]
        launch("-m", "threepo", "train", *settings, ranks=count)
        runs.append(outcome(folder))
    alone, found = runs
    for name, rows in alone["completions"].items():
        other = found["completions"][name]
        assert [(row["tokens"], row["episode"], row["reward"]) for row in other] == [
            (row["tokens"], row["episode"], row["reward"]) for row in rows
        ]
    for row, other in zip(alone["metrics"], found["metrics"], strict=True):
        assert other["episodes/turns_mean"] == row["episodes/turns_mean"] > 1
        assert other["optimizer/grad_norm"] == pytest.approx(row["optimizer/grad_norm"], rel=1e-4)


@pytest.mark.parametrize("share", [0.5, 0.3])
def test_failures_are_counted_over_all_ranks(share: float, tmp_path: Path) -> None:
    """On one rank of two all episodes fail that have a second turn, which are less than half of the step's."""
    folder = tmp_path / "run"
    settings = [*EPISODES, "method.preset=c3po", *IVON, f"model.path={talkative_model(tmp_path / 'model')}"]
    settings += ["environment.factory=worlds:FailsOnOneRank", f"environment.max_failed_share={share}"]
    command = "-m", "threepo", "train", *settings, f"run.folder={folder}"
    if share == 0.3:
        with pytest.raises(AssertionError, match=r"max_failed_share = 0.3: \d+ of 16 episodes have failed"):
            launch(*command, ranks=2)
    else:
        launch(*command, ranks=2)
        assert all(0.3 < row["episodes/failed_share"] < 0.5 for row in outcome(folder)["metrics"])
