"""A policy sharded over ranks by FSDP2, and its weights gathered again, tensor by tensor.

Gradients are plain sums over ranks, as over micro-batches; the optimizer divides once, by the token count of all ranks.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

from threepo.config import ModelConfig, ParallelConfig
from threepo.models.attention import register_attention
from threepo.models.four_bit import FourBit
from threepo.models.loading import pick_device
from threepo.models.logprobs import Scorer
from threepo.models.policy import Policy, blocks, compile_blocks, load_policy, recompute_activations, without_weights
from threepo.posterior.policy_optimizer import Weights, WeightSource
from threepo.posterior.shards import like_parameter, local
from threepo.ranks.agreement import shard_name
from threepo.ranks.world import RankError, RankLost, World, in_one_line, is_lost
from threepo.rollout.bit_sums import MODULUS, Sums, bit_sum
from threepo.rollout.payloads import as_it_stands
from threepo.types import Draw


def load_sharded(
    settings: ModelConfig, parallel: ParallelConfig, world: World, seed: int = 0, adapters: Path | None = None
) -> Policy:
    """Load the policy that `settings` name with its weights sharded over all ranks; alone, as `load_policy` does.

    Only the first rank reads the files, into CPU memory, and broadcasts one tensor after another. So every format that
    from_pretrained reads is read, files are downloaded once, and no other rank holds a whole model.
    """
    parallel.shards(world.size)  # refuse first
    if world.is_alone:
        return load_policy(settings, seed, adapters)
    whole = without = None
    with world.together():
        settings.lora.only_if(False, "is for one process that does not offload; remove it", "base_dtype")
        device = pick_device(settings.device)
        fix = "ranks, and a process that offloads, choose their own; set it to 'auto'"
        settings.check("device", device == torch.device(device.type), fix)
        if world.rank == 0:
            whole = load_policy(
                replace(settings, device="cpu", gradient_checkpointing=False, compile=False), seed, adapters
            )
            rounded = any(isinstance(p, FourBit) for p in whole.model.parameters())
            settings.check("path", not rounded, "has a base in four bits, which is for one process")
            scorer = Scorer(without_weights(whole.model), whole.scorer.linear_head, whole.scorer.packed_rows)
            without = replace(whole, scorer=scorer)
    policy = world.gather(without)[0]
    assert policy is not None
    register_attention()
    architecture = policy.without_weights or deepcopy(policy.model)
    for buffer in architecture.buffers():
        buffer.data = buffer.to(device)
    if settings.gradient_checkpointing:
        recompute_activations(policy.model)
    if settings.compile:
        compile_blocks(policy.model)
    _shard(policy, device, parallel, world)
    weights = dict(whole.model.named_parameters()) if whole else {}
    for name, p in policy.model.named_parameters():
        full = weights[name].detach().to(device) if whole else torch.empty(p.shape, dtype=p.dtype, device=device)
        dist.broadcast(full, src=0)
        local(p.detach()).copy_(local(like_parameter(full, p)))
    return replace(policy, without_weights=architecture)


def _shard(policy: Policy, device: torch.device, parallel: ParallelConfig, world: World) -> None:
    """Shard the policy's parameters over the ranks and allocate them, without values."""
    dimensions = {"replicate": parallel.replicate, "shard": parallel.shards(world.size)}
    if parallel.replicate == 1:
        del dimensions["replicate"]
    mesh = init_device_mesh(device.type, tuple(dimensions.values()), mesh_dim_names=tuple(dimensions))
    # As in the engine, weights of a draw are rounded once; gradients are added up in float32.
    dtype = None if policy.compute_dtype == torch.float32 else policy.compute_dtype
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(dtype, torch.float32)}
    if parallel.offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type != "cpu")
    for module in blocks(policy.model):
        fully_shard(module, **options)
    # The root reshards too: after a pass without gradients, its gathered copies would still be there in the next step.
    fully_shard(policy.scorer, reshard_after_forward=True, **options)
    for module in policy.scorer.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    shards_on = torch.device("cpu") if parallel.offload else device
    policy.scorer._apply(lambda t: torch.empty_like(t, device=shards_on) if t.is_meta else t.to(device))  # type: ignore[no-untyped-call]


ShardSums = dict[tuple[str, str], int]
"""The sum of a rank's elements by the name of their tensor and of the shard, which a replica has too."""


def source_sums(policy: Policy, posterior: Any, draw: Draw | None, dtype: torch.dtype, world: World) -> Sums:
    """The sums of the trainer's own model at this draw, in `dtype`, by tensor; all ranks call.

    Every rank perturbs its shards in place, as for a gradient, and adds up their bits. A model with adapters is
    gathered, so that they can be multiplied out.
    """

    def under_draw() -> ShardSums:
        with posterior.at(draw):
            return shard_sums(as_it_stands(policy), dtype)

    return added_up_shards(under_draw, world)


def shard_sums(weights: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype) -> ShardSums:
    """The sums of this rank's elements in `dtype`."""
    named = ((name, value) for name, value in weights if value.is_floating_point())
    return {(name, shard_name(value)): bit_sum(local(value).to(dtype)) for name, value in named}


def added_up_shards(compute: Callable[[], ShardSums], world: World) -> Sums:
    """The sums of whole tensors, of which each rank computes the parts that it holds; all ranks call."""
    shards = {key: value for share in world.share(compute) for key, value in share.items()}  # replicas count once
    sums: dict[str, int] = defaultdict(int)
    for (name, _), value in shards.items():
        sums[name] = (sums[name] + value) % MODULUS
    return sums


class GatheredWeights:
    """The whole weights of a source that may be sharded; all ranks gather one tensor at a time.

    All ranks read equally many draws, because each takes part in every gathering. A rank that needs fewer reads the
    rest right after its last one, before it turns to its engine: so no rank gathers while another waits for an engine.
    """

    def __init__(
        self, source: WeightSource, draw: Draw | None, own: int, rounds: int, sums: Mapping[Draw | None, Sums]
    ) -> None:
        """This rank needs `own` of `rounds` draws; `draw` is read for the others. `sums`: known `source_sums`."""
        self.sums, self._source, self._draw, self._own, self._rounds = sums, source, draw, own, rounds
        self._begun = 0
        self._unfinished: Iterator[tuple[str, Any]] = iter(())

    def weights(
        self, draw: Draw | None, into: Weights | None = None, *, gather: bool = True
    ) -> Iterator[tuple[str, Any]]:
        """See `WeightSource.weights`."""
        self._begun += 1
        self._unfinished = self._source.weights(draw, into, gather=True)
        yield from iter(self._next, None)  # not from the source, which a consumer that fails would close
        if self._begun == self._own:
            self.finish()

    def finish(self) -> None:
        """Read the rest of an unfinished draw, and the draws that only other ranks need."""
        for _ in iter(self._next, None):
            pass
        while self._begun < self._rounds:
            for _ in self.weights(self._draw):
                pass

    def _next(self) -> tuple[str, Any] | None:
        """The next tensor; `RankError` if this rank fails to make it, because then it cannot go on to gather."""
        try:
            return next(self._unfinished, None)
        except Exception as error:
            self._begun = self._rounds
            if is_lost(error):
                raise RankLost(error) from error
            raise RankError(f"the weights of a draw cannot be made: {in_one_line(error)}") from error
