"""The program of test_sharding.py, run on each rank: IVON steps on a model that is whole, sharded or replicated.

    sharded_program.py OUT.pt --layout plain|fsdp|hsdp|ddp --steps 0:6 [--load DIR] [--save DIR] [--checks NAME...]

Every rank sees the same batch, so the mean over ranks is each rank's own gradient, and any layout computes the same
bits. Rank 0 writes the whole mean, Hessian and momentum by name, the weights of a draw, and the last step's metrics.
`--checks` are run after that by the same ranks, since ranks take long to start: functions of sharded_state.py.
"""

import argparse
import faulthandler
import importlib
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from threepo import IVON, Posterior
from threepo.types import Draw


def start() -> None:
    """Join the other ranks. What hangs is said: a collective gives up, and a rank that is stuck prints where."""
    faulthandler.dump_traceback_later(120, exit=True)
    dist.init_process_group("gloo", timeout=timedelta(seconds=100))


def leave() -> NoReturn:
    """All together: a rank that closes its connections early may close them on another's last collective.

    Without the interpreter's own end: device meshes keep their gloo groups alive, and a thread of such a group that
    lets go of a tensor while Python ends brings the process down ("terminate called without an active exception").
    """
    dist.barrier()
    dist.destroy_process_group()
    sys.stderr.flush()
    os._exit(0)


def make_model() -> nn.Module:
    """Sizes that no number of ranks divides, more than one noise block, and a bias of a single element."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 301), nn.Tanh(), nn.LayerNorm(301), nn.Linear(301, 5), nn.Linear(5, 1))


def lay_out(model: nn.Module, layout: str) -> nn.Module:
    """The model, distributed over the ranks in this layout."""
    if layout == "ddp":
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    if layout in ("fsdp", "hsdp"):
        world = dist.get_world_size()
        shape, names = ((world,), ("shard",)) if layout == "fsdp" else ((2, world // 2), ("replicate", "shard"))
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        for layer in model:
            if list(layer.parameters()):
                fully_shard(layer, mesh=mesh, reshard_after_forward=False)  # leaves gathered copies behind
        fully_shard(model, mesh=mesh)
    return model


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor, on every rank."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def clean(name: str) -> str:
    return name.removeprefix("module.")


def train(model: nn.Module, optimizer: IVON, steps: range) -> None:
    """Two draws in every odd step, one in the others; a forward pass without gradient before each."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(16, 7, generator=generator), torch.randn(16, 1, generator=generator)
        with torch.no_grad():
            model(x)
        for index in range(1 + step % 2):
            draw = Draw(3, step, index)
            with optimizer.perturbed(draw):
                nn.functional.mse_loss(model(x), y).backward()
            optimizer.observe(draw)
        optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--layout", required=True)
    parser.add_argument("--steps", default="0:6")
    parser.add_argument("--load")
    parser.add_argument("--save")
    parser.add_argument("--checks", nargs="*", default=())
    options = parser.parse_args()
    if "RANK" in os.environ:
        start()
    model = lay_out(make_model(), options.layout)
    named = [(clean(name), p) for name, p in model.named_parameters()]
    optimizer = IVON(
        model.named_parameters(),
        lr=0.5,
        ess=1e4,
        hess_init=0.1,
        betas=(0.9, 0.95),
        clip_radius=0.5,
        seed=3,
        model=model,
    )
    state: dict[str, Any] = {}
    if options.load:
        state["model"], state["optimizer"] = get_state_dict(model, optimizer)
        dcp.load(state, checkpoint_id=options.load)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    train(model, optimizer, range(*map(int, options.steps.split(":"))))
    if options.save:
        state["model"], state["optimizer"] = get_state_dict(model, optimizer)
        dcp.save(state, checkpoint_id=options.save)
    result = {f"mean/{name}": whole(p) for name, p in named}
    for key in ("hessian", "momentum"):
        result |= {f"{key}/{name}": whole(optimizer.state[p][key]) for name, p in named}
    result |= {f"draw/{name}": whole(value) for name, value in optimizer.weights(Draw(9, 9, 9))}
    before = [whole(p) for _, p in named]
    with optimizer.perturbed(Draw(9, 9, 9)):
        result |= {f"perturbed/{name}": whole(p) for name, p in named}
    assert all(torch.equal(old, whole(p)) for old, (_, p) in zip(before, named, strict=True))
    posterior = Posterior.of(optimizer)  # gathers the shards
    result |= {f"posterior/{name}": hessian.clone() for name, hessian in posterior.hessian.items()}
    for state in optimizer.state.values():
        state["hessian"] = torch.zeros_like(state["hessian"])
    posterior.load_into(optimizer)
    result |= {f"reloaded/{name}": whole(optimizer.state[p]["hessian"]) for name, p in named}
    result["metrics"] = optimizer.step_metrics()
    result["step"] = optimizer.param_groups[0]["step"]
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save(result, options.out)
    for check in options.checks:
        getattr(importlib.import_module("sharded_state"), check)()
    if dist.is_initialized():
        leave()


if __name__ == "__main__":
    main()
