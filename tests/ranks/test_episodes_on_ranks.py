"""Episodes on real torchrun ranks, of which each plays its share: the same episodes as in one process."""

import os
from pathlib import Path

import pytest
from launch import launch

from runs import outcome
from training.test_episode_runs import EPISODES, IVON, talkative_model


@pytest.mark.parametrize("preset", ["c3po", "auto"])
def test_episodes_do_not_depend_on_the_number_of_ranks(
    preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    )
    model = talkative_model(tmp_path / "model")
    rates = IVON if preset == "c3po" else ("optimizer.lr=1e-4", "method.draws=4")
    runs = {}
    for ranks in (0, 2, 3):
        folder = tmp_path / f"on-{ranks}"
        settings = [*EPISODES, f"method.preset={preset}", *rates, f"model.path={model}", f"run.folder={folder}"]
        launch("-m", "threepo", "train", *settings, ranks=ranks)
        runs[ranks] = outcome(folder)
    alone = runs.pop(0)
    for found in runs.values():
        for name, rows in alone["completions"].items():
            other = found["completions"][name]
            assert [(row["tokens"], row["episode"], row["reward"]) for row in other] == [
                (row["tokens"], row["episode"], row["reward"]) for row in rows
            ]
        for row, other in zip(alone["metrics"], found["metrics"], strict=True):
            assert other["episodes/turns_mean"] == row["episodes/turns_mean"] > 1
            assert other["optimizer/grad_norm"] == pytest.approx(row["optimizer/grad_norm"], rel=1e-4)
