"""The program of test_training.py, run on each rank: several runs in turn, since ranks take long to start.

training_program.py COMMANDS.json [what rank 1 cannot do]: a list of the arguments of commands; each must succeed.
"""

import faulthandler
import json
import os
import sys
from contextlib import nullcontext
from functools import partialmethod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from threepo.cli import main
from threepo.models.policy import Policy
from threepo.posterior.perturbation import NoisyParameter
from threepo.ranks import sharding
from threepo.ranks.launch import join_world
from threepo.rollout.local import LocalEngine


class InOrder:
    """A reduce-scatter that sums in the order of ranks, whatever the number of them."""

    def allocate(self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for FSDP2's buffers."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: object, op: object, async_op: bool = False
    ) -> None:
        """Every rank sends each other its piece, then adds."""
        got = torch.empty_like(input_tensor)
        dist.all_to_all_single(got, input_tensor, group=group)
        parts = got.view(dist.get_world_size(group), -1)  # type: ignore[arg-type]
        output_tensor.copy_(parts[0])
        for part in parts[1:]:
            output_tensor.add_(part)


def loaded_in_order(*arguments: Any) -> Policy:
    """`sharding.load_sharded`, with gradients that are summed in the order of ranks."""
    result = LOADED(*arguments)
    for module in result.scorer.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(InOrder())  # type: ignore[arg-type]
    return result


LOADED = sharding.load_sharded


def fail_after(calls: int, owner: type, method: str) -> None:
    """Let a method raise once it was called so often."""
    real, left = getattr(owner, method), iter(range(calls))

    def failing(*arguments: Any, **more: Any) -> Any:
        if next(left, None) is None:
            raise MemoryError("no memory left")
        return real(*arguments, **more)

    setattr(owner, method, failing)


FAILING = {
    "pass": (0, Policy, "logprobs"),
    "draw": (0, NoisyParameter, "under"),
    "evaluation": (3, LocalEngine, "generate"),
}
"""The engine generates for an evaluation, for two steps, and then for another evaluation."""


if __name__ == "__main__":
    faulthandler.dump_traceback_later(150, exit=True)
    if sys.argv[2:] and os.environ["RANK"] == "1":
        fail_after(*FAILING[sys.argv[2]])
    # The C++ compiler would take minutes; graphs and guards are the same.
    torch.nn.Module.compile = partialmethod(torch.nn.Module.compile, backend="aot_eager")  # type: ignore[method-assign, assignment]
    with join_world(100.0) as world, patch("threepo.training.run.load_sharded", loaded_in_order):
        for command in json.loads(Path(sys.argv[1]).read_text()):
            with patch("threepo.commands.join_world", lambda *_: nullcontext(world)):  # ranks meet once in a process
                status = main(command)
            if status:
                os._exit(status)
    sys.stderr.flush()
    os._exit(0)
