"""The program of test_pretended_world.py: a micro-batch of a big model on rank 0 of a simulated world.

    pretended_program.py OUT.json CONFIG.json RANKS ROWS ROW_LENGTH LOSS_TOKENS RECOMPUTED

Tensors have shapes and no memory (FakeTensorMode), collectives do nothing (the process group "fake"), and torch's
FSDPMemTracker counts what would be held. The model is cut by ranks/sharding.py, and has IVON's state. Only IVON's
kernels are left out: they need memory to read, and take none.
"""

import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM

from threepo.config import ParallelConfig
from threepo.models.attention import NAME, register_attention
from threepo.models.logprobs import FUSED_CHUNK, Scorer
from threepo.models.policy import Policy, recompute_activations
from threepo.posterior.ivon import IVON
from threepo.ranks import sharding
from threepo.ranks.world import World
from threepo.types import Draw, MicroBatch


def real_mesh(*arguments: Any, **options: Any) -> Any:
    """`init_device_mesh`, which reads the ranks' numbers out of a tensor."""
    with unset_fake_temporarily():
        return init_device_mesh(*arguments, **options)


def micro_batch(rows: int, length: int) -> MicroBatch:
    """Rows of one length, of which all tokens count in the loss."""
    tokens = torch.zeros(rows * length, dtype=torch.long)
    return MicroBatch(tokens, (length,) * rows, torch.arange(rows * length), tokens, tokens)


def bytes_by_kind(tracker: FSDPMemTracker, which: str = "current") -> dict[str, int]:
    """Bytes held now, or at the peak."""
    (found,) = tracker.get_tracker_snapshot(which).values()
    return {getattr(kind, "value", kind): size for kind, size in found.items()}


def measure(model: Any, recomputed: bool, world: World, packed: MicroBatch) -> dict[str, dict[str, int]]:
    """Bytes that rank 0 holds before, under a draw, and at the peak."""
    model.set_attn_implementation(NAME)
    if recomputed:
        recompute_activations(model)
    policy = Policy(Scorer(model, True, True, FUSED_CHUNK, fused=True), None, torch.bfloat16)
    with patch.object(sharding, "init_device_mesh", real_mesh):
        sharding._shard(policy, torch.device("cpu"), ParallelConfig(), world)
    optimizer = IVON(policy.model.named_parameters(), model=policy.model)
    for p in policy.model.parameters():
        p.grad = torch.zeros_like(p)  # of an earlier micro-batch
    found = {}
    tracker = FSDPMemTracker(policy.scorer, optimizer)
    with tracker, patch("threepo.posterior.kernels.run", lambda operations: [None for _ in operations]):
        found["before"] = bytes_by_kind(tracker)
        with optimizer.perturbed(Draw(0, 0, 0)):
            found["perturbed"] = bytes_by_kind(tracker)
            policy.logprobs(packed).logprobs.sum().backward()  # type: ignore[no-untyped-call]
    found["peak"] = bytes_by_kind(tracker, "peak")
    return found


def main() -> None:
    """Measures with gradient checkpointing, or (RECOMPUTED is 0) without."""
    out, config, *numbers = sys.argv[1:]
    ranks, *rows, recomputed = map(int, numbers)
    shape = AutoConfig.for_model(**json.loads(Path(config).read_text()))
    register_attention()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape).eval()
    with FakeTensorMode(allow_non_fake_inputs=True):
        found = measure(model, bool(recomputed), World(0, ranks), micro_batch(*rows))
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
