"""Environments of episodes: what a user writes, so that a policy acts for several turns (docs/episodes.md).

    class Guess:
        def reset(self, problem):
            self.secret = int(problem.answer)

        def step(self, reply):
            if reply.strip() == str(self.secret):
                return Turn(reward=1.0, done=True)
            return Turn("higher" if int(reply) < self.secret else "lower")

An object lives for one episode, in a process of its own.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from threepo.types import Problem

Observation = str | Sequence[Mapping[str, Any]]
"""The text of a user message, or chat messages. Without a chat template the policy reads the text as it is."""


@dataclass(frozen=True)
class Turn:
    """An environment's answer to a reply of the policy.

    Examples:
        >>> threepo.Turn("lower").done
        False
    """

    observation: Observation = ""
    """Read by the policy before its next reply."""
    reward: float = 0.0
    """Reward of the reply; an episode earns the sum over its replies."""
    done: bool = False
    """True if the episode ends here; then nobody reads the observation."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers for the log, as `environment/NAME`; an episode counts with its last value."""


class Environment(Protocol):
    """The parts of a class that `environment.factory` names; it needs `step` or `tools`, and may lack the rest."""

    tools: Sequence[Callable[..., object]] = ()
    """Functions that the policy can call, with type hints and a docstring that describes each argument."""

    def reset(self, problem: Problem) -> Observation | None:
        """Begin the episode of a problem. Returns what the policy reads first; None: the problem's own prompt."""

    def step(self, reply: str) -> Turn:
        """Answer a reply of the policy that calls no tool. Without this method, such a reply ends the episode."""
        raise NotImplementedError
