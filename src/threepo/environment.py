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
    """The parts of a class that `environment.factory` names. It needs `step`, `tools` or `end`, not all."""

    tools: Sequence[Callable[..., object] | Mapping[str, Any]] = ()
    """Functions that the policy can call, with type hints and a docstring that describes each argument; or JSON schemas
    of tools that `call_tools` answers."""

    def reset(self, problem: Problem) -> Observation | None:
        """Begin the episode of a problem. Returns what the policy reads first; None: the problem's own prompt."""

    def step(self, reply: str) -> Turn:
        """Answer a reply of the policy that calls no tool. Without this method, such a reply ends the episode."""
        raise NotImplementedError

    def call_tools(self, calls: Sequence[tuple[str, Any]], reply: str) -> Turn:
        """Answer a reply that calls tools by name and arguments, where `tools` are JSON schemas.

        The observation has a message of the role `tool` for each call.
        """
        raise NotImplementedError

    def end(self, reply: str) -> Turn | None:
        """Hear that the episode is over, at whatever limit or by itself; may pay a last reward.

        `reply` is the last reply if no other method has got it, because it was cut or there is no `step`; else "".
        An environment that has failed is not asked.
        """
