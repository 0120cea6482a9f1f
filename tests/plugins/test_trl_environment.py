"""Environments made for TRL, in their processes, with the protocol that TRL 1.16 documents."""

from contextlib import closing
from typing import Any

from threepo.config import EnvironmentConfig
from threepo.environment import Turn
from threepo.rollout.environments import Environments
from threepo.types import Problem


class Counter:
    """As a user of TRL writes it."""

    def __init__(self, step: int = 1) -> None:
        self.width = step

    def reset(self, target: int, **kwargs: Any) -> str:
        self.target, self.count = target, 0
        return f" Count to {target}."

    def increment(self, times: int) -> str:
        """Count on.

        Args:
            times: How often.
        """
        self.count += self.width * times
        return f"now {self.count}"

    def get_reward(self) -> float:
        return float(self.count == self.target)

    def _private(self) -> None: ...


def test_tools_are_its_public_methods_and_get_reward_pays() -> None:
    own = {"factory": f"{Counter.__module__}:Counter", "step": 2}
    settings = EnvironmentConfig(factory="threepo.plugins.trl_environment:TRLEnvironment", settings=own)
    text = Problem("p", "Begin.", columns={"target": 6})
    chat = Problem("q", ({"role": "user", "content": "Begin."},), columns={"target": 6})
    with closing(Environments(settings)) as environments:
        assert [tool["function"]["name"] for tool in environments.tools] == ["increment"]
        environments.begin(2)
        answers = environments.call({0: ("reset", text, 1), 1: ("reset", chat, 1)})
        assert answers[0].value == "Begin. Count to 6."
        assert answers[1].value == [{"role": "user", "content": "Begin. Count to 6."}]
        calls = [("increment", {"times": 2}), ("increment", {"times": 1})]
        assert environments.call({0: ("tools", calls)})[0].value == ["now 4", "now 6"]
        ended = environments.call({0: ("end", "done"), 1: ("end", "")})
        assert ended[0].value == Turn(reward=1.0)
        assert ended[1].value == Turn(reward=0.0)
        assert not environments.steps
