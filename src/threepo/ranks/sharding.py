"""A policy spread over ranks by FSDP2, and its weights gathered again, tensor by tensor.

Gradients are plain sums over ranks, like those over micro-batches; the optimizer divides once, by the count of all.
"""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from threepo.models.policy import Policy
from threepo.posterior.policy_optimizer import Weights, WeightSource
from threepo.ranks.group import Ranks
from threepo.types import Draw


def sharded(policy: Policy, ranks: Ranks) -> Policy:
    """The policy with its weights spread over all ranks, which hold the same weights before; alone, as it is."""
    if ranks.size == 1:
        return policy
    empty = _without_weights(policy.model)
    mesh = init_device_mesh(policy.device.type, (ranks.size,), mesh_dim_names=("shard",))
    blocks = set(getattr(policy.model, "_no_split_modules", None) or ())
    for module in policy.model.modules():
        if type(module).__name__ in blocks:
            fully_shard(module, mesh=mesh)
    # Also the root gives its copies up after a forward pass: one without gradient would leave them to the next step.
    fully_shard(policy.scorer, mesh=mesh, reshard_after_forward=True)
    for module in policy.scorer.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return replace(policy, without_weights=empty)


def _without_weights(model: Any) -> Any:
    """A copy of the model's architecture with parameters on the meta device."""
    empty = {id(p): nn.Parameter(p.detach().to("meta"), requires_grad=p.requires_grad) for p in model.parameters()}
    return deepcopy(model, empty)


class Gathered:
    """The whole weights of a source that may be sharded; all ranks gather a tensor at a time.

    Every rank reads as many draws, each its own. After the last of its own it reads those that it lacks, before it
    turns to its engine: nobody gathers while another waits for an engine.
    """

    def __init__(self, source: WeightSource, draw: Draw | None, own: int, rounds: int) -> None:
        """A rank reads `own` of `rounds` draws; `draw`: any of those that are read."""
        self._source, self._draw, self._own, self._rounds = source, draw, own, rounds
        self._begun = 0
        self._unfinished: Iterator[tuple[str, Any]] = iter(())

    def weights(
        self, draw: Draw | None, into: Weights | None = None, *, gather: bool = True
    ) -> Iterator[tuple[str, Any]]:
        """See `WeightSource.weights`."""
        self._begun += 1
        self._unfinished = self._source.weights(draw, into, gather=True)
        # Not `yield from`, which would close the source together with a consumer that fails.
        for item in self._unfinished:  # noqa: UP028
            yield item
        if self._begun == self._own:
            self.finish()

    def finish(self) -> None:
        """Read the rest of an unfinished draw, and those that this rank lacks."""
        for _ in self._unfinished:
            pass
        while self._begun < self._rounds:
            self._begun += 1
            for _ in self._source.weights(self._draw, gather=True):
                pass
