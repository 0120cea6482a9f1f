"""The reference model of `objective.reference_kl`: weights that the policy is kept close to (method.md 2.5).

It begins as the model that the run began with, and becomes the present mean with every reset. A checkpoint holds it
(reference.safetensors, by parameter name) if there are resets or adapters, or if model.path is a run folder, which may
have a newer checkpoint by then; otherwise it is read from model.path again.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from threepo.config import TrainConfig
from threepo.models.policy import Policy
from threepo.posterior.policy_optimizer import Weights
from threepo.posterior.shards import drop_gathered_copies, like_parameter, local
from threepo.ranks.sharding import load_sharded
from threepo.ranks.world import World
from threepo.run_folder import REFERENCE_FILE, RunFolder, model_folder, newest_checkpoint
from threepo.training.checkpoint import Files, read_tensors

_REFERENCE = "reference/"
"""Before the parameter's name in the file, as in a posterior's; files of older checkpoints have names without it."""


class Reference:
    """Earlier weights of a policy's trained parameters, in float32 and sharded as the parameters are."""

    def __init__(
        self, policy: Policy, reset_every: int = 0, weights: Weights | None = None, *, saved: bool = False
    ) -> None:
        """`reset_every` is in steps; 0: never. `weights` are not copied; None: a copy of the model's own.

        `saved`: checkpoints must hold it, since it cannot be read from model.path again.
        """
        self._model, self._reset_every, self._is_saved = policy.model, reset_every, saved
        own = self._own = {name: p for name, p in policy.model.named_parameters() if p.requires_grad}
        given = weights or {name: p.detach().clone() for name, p in own.items()}
        self.weights = {name: like_parameter(given[name].detach().to(p.device), p) for name, p in own.items()}

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

    @torch.no_grad()
    def begin(self, step: int) -> None:
        """Make the model's present weights the reference if a reset is due before training step `step`."""
        if step and self._reset_every and step % self._reset_every == 0:
            for name, p in self._own.items():
                local(self.weights[name]).copy_(local(p.detach()))

    def saved(self) -> Files:
        """Tensors that a checkpoint must hold; none if they can be read from model.path again."""
        named = {_REFERENCE + name: value for name, value in self.weights.items()}
        return {REFERENCE_FILE: named} if self._is_saved else {}


def open_reference(config: TrainConfig, policy: Policy, resumed: RunFolder | None, world: World) -> Reference | None:
    """The reference that the recipe asks for: the policy as the run began, or as the newest checkpoint has it."""
    if not config.objective.reference_kl:
        return None
    every, path = config.objective.reference_reset_every, Path(config.model.path)
    checkpoint = newest_checkpoint(resumed.path) if resumed else None
    file = checkpoint and checkpoint / REFERENCE_FILE
    # A run folder may have another checkpoint, and other adapters, once the run is resumed.
    saved = bool(every) or policy.has_adapters or model_folder(path) != path
    if not file:
        return Reference(policy, every, saved=saved)
    if every or file.is_file():
        read = {name.removeprefix(_REFERENCE): value for name, value in read_tensors(file).items()}
        return Reference(policy, every, read, saved=True)
    first = load_sharded(config.model, config.parallel, world, config.run.seed)
    return Reference(policy, every, dict(first.model.named_parameters()), saved=saved)
