"""IVON on a sharded model (FSDP2): all ranks use the same draw, and a checkpoint can be loaded by any number of ranks.

torchrun --nproc-per-node 2 examples/fsdp2.py        # takes seconds on a CPU; with GPUs it uses one per rank
"""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss

import threepo


def make(device: torch.device) -> tuple[torch.nn.Module, threepo.IVON]:
    """A small sharded network and its optimizer, which must be made after the model is sharded, like any optimizer."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(1, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)).to(device)
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    # IVON needs `model` to discard gathered copies of the weights when it changes them.
    return model, threepo.IVON(model.named_parameters(), lr=0.1, ess=1e5, hess_init=1.0, clip_radius=0.1, model=model)


def train(model: torch.nn.Module, optimizer: threepo.IVON, steps: int, device: torch.device) -> float:
    """Each rank has its own data, and FSDP averages the gradients. A draw is an address, so no noise is sent."""
    x = torch.linspace(-3, 3, 256, device=device)[dist.get_rank() :: dist.get_world_size(), None]
    for _ in range(steps):
        draw = optimizer.next_draw()
        with optimizer.perturbed(draw):
            mse_loss(model(x), x.sin()).backward()
        optimizer.observe(draw)
        optimizer.step()
    with torch.no_grad():
        return mse_loss(model(x), x.sin()).item()


def main() -> None:
    """Train, save and train further; then load the checkpoint into a new model and train that for as many steps."""
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu")
    model, optimizer = make(device)
    before = train(model, optimizer, 0, device)
    train(model, optimizer, 150, device)

    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)  # all ranks write into the same folder
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder[0])
    after = train(model, optimizer, 150, device)

    resumed, resumed_optimizer = make(device)
    weights, state = get_state_dict(resumed, resumed_optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder[0])
    set_state_dict(resumed, resumed_optimizer, model_state_dict=weights, optim_state_dict=state)
    again = train(resumed, resumed_optimizer, 150, device)
    if dist.get_rank() == 0:
        print(f"loss before {before:.3f}, after {after:.3f}; the same after loading: {again == after}")
    dist.barrier()  # otherwise a rank could close its connections while another is in its last collective


dist.init_process_group()
try:
    main()
finally:
    dist.destroy_process_group()  # else threads that still hold tensors can abort Python's exit
