"""The reference model of `objective.reference_kl`: weights that the policy is kept close to (method.md 2.5).

It is the model that the run began with; a resumed run reads it from model.path again.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from threepo.config import TrainConfig
from threepo.models.policy import Policy
from threepo.posterior.policy_optimizer import Weights
from threepo.posterior.shards import drop_gathered_copies, like_parameter, local
from threepo.ranks.sharding import load_sharded
from threepo.ranks.world import World
from threepo.run_folder import RunFolder, checkpoints


class Reference:
    """Earlier weights of a policy's trained parameters, in float32 and sharded as the parameters are."""

    def __init__(self, policy: Policy, weights: Weights | None = None) -> None:
        """`weights` are not copied; None: a copy of the model's own."""
        self._model = policy.model
        own = self._own = {name: p for name, p in policy.model.named_parameters() if p.requires_grad}
        given = weights or {name: p.detach().clone() for name, p in own.items()}
        self.weights = {name: like_parameter(given[name].detach(), p) for name, p in own.items()}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Give the model the reference's weights for the body, and bitwise its own again afterwards.

        The two change places, a parameter at a time, so this takes no memory.
        """
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        drop_gathered_copies(self._model)
        for name, p in self._own.items():
            own, other = local(p.detach()), local(self.weights[name])
            before = own.clone()
            own.copy_(other)
            other.copy_(before)


def open_reference(config: TrainConfig, policy: Policy, resumed: RunFolder | None, world: World) -> Reference | None:
    """The reference that the recipe asks for: the policy as the run began."""
    if not config.objective.reference_kl:
        return None
    if not resumed or not checkpoints(resumed.path):
        return Reference(policy)
    first = load_sharded(config.model, config.parallel, world, config.run.seed)
    return Reference(policy, dict(first.model.named_parameters()))
