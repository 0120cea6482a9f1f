"""Games of gem-llm, with `data.train = "gem:game:NAME"` and `environment.factory = "threepo.plugins.gem:Game"`.

A problem is a game with a seed; its rewards are gem's. Settings of a game go in parentheses, as `(max_turns=5)`.
"""

from dataclasses import dataclass
from typing import Any

from threepo.config import DataConfig
from threepo.config.sources import split_settings
from threepo.data.source import InstalledSource, ProblemSet
from threepo.data.task import Endless, Split, hashed_seed
from threepo.environment import Turn
from threepo.errors import UserError
from threepo.types import Problem


class Game:
    """The game of a problem, in its own process."""

    def __init__(self) -> None:
        import gem  # here, so that the process from which the others are forked has it, which takes seconds

        self._gem = gem

    def reset(self, problem: Problem) -> str:
        """Begin with the problem's seed; returns the rules and the first state."""
        columns = problem.columns
        self._game: Any = self._gem.make(columns["game"], **columns["settings"])
        rules, more = self._game.reset(seed=columns["seed"])
        return _joined(rules, more)

    def step(self, reply: str) -> Turn:
        """Gem's answer: the state after the move, and its reward."""
        state, reward, ended, cut, more = self._game.step(reply)
        return Turn(_joined(state, more), float(reward), bool(ended or cut))


@dataclass(frozen=True)
class Games(Endless):
    """Endless games of a name; training and held-out ones have different seeds."""

    game: str
    settings: dict[str, Any]
    split: Split
    seed: int

    def problem(self, index: int) -> Problem:
        """Game number `index`; its prompt comes from the game itself."""
        name = f"gem/{self.game}/{self.split}/{self.seed}/{index}"
        columns = {"game": self.game, "settings": self.settings, "seed": hashed_seed(name)}
        return Problem(name, "game", columns=columns)


def _open(source: str, split: Split, settings: DataConfig) -> ProblemSet:
    try:
        import gem
    except ImportError as error:
        raise UserError(f"data: {source}: needs gem-llm; in a clone, pip install '.[gem]'") from error
    kind, _, spec = source.removeprefix("gem:").partition(":")
    name, arguments = split_settings(f"{kind}:{spec}")
    game = f"{kind}:{name}"
    try:
        gem.make(game, **arguments)
    except Exception as error:  # it is a game's code, and may raise anything
        raise UserError(f"data: {source}: {type(error).__name__}: {error}; gem.print_envs() lists the games") from error
    return ProblemSet(Games(game, arguments, split, settings.seed), "environment", source)


def _joined(text: str, more: dict[str, Any]) -> str:
    return "\n".join(filter(None, (str(text).strip(), str(more.get("suffix", "")).strip())))


SOURCE = InstalledSource(_open, endless=True)
"""The source that the entry point `gem` of the group `threepo.sources` names."""
