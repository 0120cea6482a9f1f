"""Games of gem-llm as episodes."""

import json
import random
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

pytest.importorskip("gem")

from examples.guess_the_number.guess_the_number import NAME, SETTINGS, Win, chat

from runs import RLVR
from threepo.cli import main
from threepo.config import DataConfig, EnvironmentConfig, SFTConfig, TrainConfig
from threepo.config.recipes import load
from threepo.data.source import open_source
from threepo.environment import Turn
from threepo.errors import UserError
from threepo.plugins.gem import Game
from threepo.rollout.environments import Environments
from threepo.run_folder import read_metrics
from threepo.types import Problem

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


MOVES = {
    "Crosswords-v0-easy": "0 0 a",
    "FifteenPuzzle-v0-easy": "left",
    "Game2048-v0-easy": "left",
    "GuessTheNumber-v0-easy": "3",
    "Mastermind-v0-easy": "1 2",
    "Minesweeper-v0-easy": "reveal 0 0",
    "Sokoban-v0-easy": "up",
    "Sudoku-v0-easy": "1 3 1",
    "TowerofHanoi-v0-easy": "A C",
}
"""Games that can be played without a network; Hangman, Wordle and WordSearch download a list of words."""


def test_games_play_alike_again() -> None:
    with closing(Environments(EnvironmentConfig(factory=FACTORY))) as environments:
        for game, move in MOVES.items():
            source = f"gem:game:{game}"
            problem = open_source(source, "train", DataConfig(train=source)).problems.first(1)[0]
            environments.begin(2)
            calls: list[tuple[Any, ...]] = [
                ("reset", problem, 1),
                ("step", rf"\boxed{{{move}}}"),
                ("step", "I give up"),
            ]
            told = [environments.call({0: call, 1: call}) for call in calls]
            assert not any(answer.failure for answers in told for answer in answers.values()), game
            assert all(answers[0].value == answers[1].value for answers in told), game
            assert not told[1][0].value.done, game
            assert told[2][0].value.done, "a reply without a move ends a game"


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


@pytest.mark.parametrize("heeds", [True, False])
def test_players_of_the_example_heed_hints_or_none(heeds: bool) -> None:
    heeded = []
    for seed in range(40):
        said = chat(random.Random(seed), heeds)
        assert [message["role"] for message in said] == ["user", "assistant"] * (len(said) // 2)
        guesses = [int(message["content"][len(r"\boxed{") : -1]) for message in said[1::2]]
        assert all(1 <= guess <= 5 for guess in guesses)
        assert len(guesses) <= 3
        pairs = zip(guesses, guesses[1:], said[2::2], strict=False)
        for before, after, hint in pairs:
            if "already" not in hint["content"]:
                heeded.append(after > before if "higher than" in hint["content"] else after < before)
    assert all(heeded) if heeds else sum(heeded) < 0.8 * len(heeded)


def test_the_recipes_of_the_example_fit_together() -> None:
    folder = Path("examples/guess_the_number")
    assert load(SFTConfig, str(folder / "warm_start.toml")).run.folder == "runs/guess_start"
    training = load(TrainConfig, str(folder / "grpo.toml"))
    assert training.model.path == "runs/guess_start"
    source = open_source(training.data.train, "train", training.data)
    (problem,) = source.problems.first(1)
    assert problem.columns["game"] == NAME
    assert problem.columns["settings"] == SETTINGS


def test_the_example_pays_for_the_number_alone() -> None:
    earned = [played_by(Win(), [1, 3, 5], seed) for seed in range(30)]
    near = [played_by(Game(), [1, 3, 5], seed) for seed in range(30)]
    assert {round(reward, 2) for reward in near} == {0.25, 0.75, 1.0}, "gem pays for a last guess that is near"
    assert earned == [float(reward == 1) for reward in near]


def played_by(game: Game, guesses: Sequence[int], seed: int) -> float:
    """The sum of the rewards of these guesses."""
    game.reset(Problem("game", "", columns={"game": NAME, "settings": SETTINGS, "seed": seed}))
    total = 0.0
    for guess in guesses:
        turn = game.step(f"\\boxed{{{guess}}}")
        total += turn.reward
        if turn.done:
            break
    return total
