"""Games of gem-llm as episodes."""

import json
from contextlib import closing
from pathlib import Path

import pyarrow.parquet
import pytest

pytest.importorskip("gem")

from runs import RLVR
from threepo.cli import main
from threepo.config import DataConfig, EnvironmentConfig
from threepo.data.source import open_source
from threepo.environment import Turn
from threepo.errors import UserError
from threepo.rollout.environments import Environments
from threepo.run_folder import read_metrics

NUMBER = "gem:game:GuessTheNumber-v0-easy(max_number=9)"
FACTORY = "threepo.plugins.gem:Game"


def test_problems_have_seeds_of_their_own() -> None:
    train, heldout = (open_source(NUMBER, split, DataConfig(train=NUMBER)) for split in ("train", "heldout"))
    problems = [*train.problems.first(50), *heldout.problems.first(50)]
    assert len({problem.columns["seed"] for problem in problems}) == 100
    assert train.verifier == "environment"
    assert train.problems.first(50) == open_source(NUMBER, "train", DataConfig(train=NUMBER)).problems.first(50)
    with pytest.raises(UserError, match=r"data: gem:game:Chess: ValueError: .*not found"):
        open_source("gem:game:Chess", "train", DataConfig(train="gem:game:Chess"))


def test_a_game_is_played_by_its_rules() -> None:
    problem = open_source(NUMBER, "train", DataConfig(train=NUMBER)).problems.first(1)[0]
    with closing(Environments(EnvironmentConfig(factory=FACTORY))) as environments:

        def first(replies: list[str]) -> list[Turn]:
            environments.begin(1)
            rules = environments.call({0: ("reset", problem, 1)})[0].value
            assert "between 1 and 9" in rules
            assert rules.endswith("Enter your next guess.")
            return [environments.call({0: ("step", reply)})[0].value for reply in replies]

        (wrong,) = first(["I do not know"])
        assert wrong.done
        turns = [first([rf"\boxed{{{guess}}}"])[0] for guess in range(1, 10)]
        (right,) = (turn for turn in turns if turn.done)
        assert right.reward == 1
        secret = turns.index(right) + 1
        for guess, turn in enumerate(turns, start=1):
            assert ("higher" in str(turn.observation)) == (guess < secret)


def test_a_run_of_games(tmp_path: Path) -> None:
    settings = [setting for setting in RLVR if not setting.startswith("data.")]
    settings += [f"data.train={NUMBER}", "data.prompts_per_step=2", f"environment.factory={FACTORY}", "run.steps=2"]
    settings += ["model.tiny.context=1024", "sampling.max_new_tokens=200", f"run.folder={tmp_path / 'run'}"]
    assert main(["train", *settings]) == 0
    assert len(read_metrics(tmp_path / "run")) == 2
    table = pyarrow.parquet.read_table(tmp_path / "run" / "completions" / "step-000000.parquet").to_pylist()
    for row in table:
        episode = json.loads(row["episode"])
        assert episode["status"] in ("done", "tokens")
        assert row["reward"] == episode["reward"] == (0.0 if episode["status"] == "tokens" else pytest.approx(-0.1))
