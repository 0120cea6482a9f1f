"""Environments of episodes: what a user writes, so that a policy acts for several turns (docs/episodes.md).

    class Guess:
        def reset(self, problem):
            self.secret = int(problem.answer)

        def step(self, reply):
            if reply.strip() == str(self.secret):
                return Turn(reward=1.0, done=True)
            return Turn("higher" if int(reply) < self.secret else "lower")

An object lives for one episode, in a process of its own. Its class has `step`, `tools` or `end`, and may have `reset`.
Where `tools` are JSON schemas, `call_tools(calls, reply)` gets names and arguments, and the observation of its `Turn`
has a message of the role `tool` for each call. After an episode that has not failed, `end(reply)` may return a `Turn`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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
