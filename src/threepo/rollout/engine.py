"""What generates rollouts, seen from the loop: load weights, then complete requests."""

from collections.abc import Sequence
from typing import Protocol

from threepo.config import SamplingConfig
from threepo.posterior.policy_optimizer import WeightSource
from threepo.types import Completion, Draw, Request


class RolloutEngine(Protocol):
    """Holds weights of its own, and stamps every completion with the step and the draw that made it."""

    def prepare(self, draws: int, tokens: int) -> None:
        """`UserError` if so many policies, with a row of so many tokens for each, cannot fit into memory."""

    def load(self, posterior: WeightSource, draws: Sequence[Draw | None], step: int) -> None:
        """Take the weights of these draws (None: the mean) as of training step `step`; earlier ones are gone."""

    def generate(self, requests: Sequence[Request], sampling: SamplingConfig, seed: int) -> list[Completion]:
        """Complete the requests, in their order. Each must name a draw that is loaded.

        A row's random numbers are a function of (seed, step, problem, rollout), so its completion does not depend on
        the rows beside it.
        """

    def close(self) -> None:
        """Free what the engine holds beyond this process; it cannot be used afterwards."""
