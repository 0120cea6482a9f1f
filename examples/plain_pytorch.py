"""IVON in a PyTorch training loop: gradient accumulation, several draws per step, saving and loading.

python examples/plain_pytorch.py        # takes seconds on a CPU
"""

import tempfile
from pathlib import Path

import torch
from torch.nn.functional import mse_loss

import threepo

DRAWS, MICRO_BATCHES = 2, 4


def make() -> tuple[torch.nn.Module, threepo.IVON]:
    """A small network and its optimizer."""
    model = torch.nn.Sequential(torch.nn.Linear(1, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    return model, threepo.IVON(model.named_parameters(), lr=0.3, ess=1e4, hess_init=0.1, clip_radius=1.0)


def train(model: torch.nn.Module, optimizer: threepo.IVON, x: torch.Tensor, y: torch.Tensor, steps: int) -> None:
    """Each step averages over `DRAWS` draws of the weights. Each draw gets all micro-batches."""
    for _ in range(steps):
        for _ in range(DRAWS):
            draw = optimizer.next_draw()
            with optimizer.perturbed(draw):
                for part_x, part_y in zip(x.chunk(MICRO_BATCHES), y.chunk(MICRO_BATCHES), strict=True):
                    (mse_loss(model(part_x), part_y) / MICRO_BATCHES).backward()  # gradients add up
            optimizer.observe(draw)
        optimizer.step()


torch.manual_seed(0)
x = torch.linspace(-3, 3, 256)[torch.randperm(256), None]
y = torch.sin(x) + 0.1 * torch.randn_like(x)

model, optimizer = make()
before = mse_loss(model(x), y).item()
train(model, optimizer, x, y, steps=150)

file = Path(tempfile.mkdtemp()) / "checkpoint.pt"
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
train(model, optimizer, x, y, steps=150)

resumed, resumed_optimizer = make()
checkpoint = torch.load(file)
resumed.load_state_dict(checkpoint["model"])
resumed_optimizer.load_state_dict(checkpoint["optimizer"])
train(resumed, resumed_optimizer, x, y, steps=150)
same = all(torch.equal(a, b) for a, b in zip(model.parameters(), resumed.parameters(), strict=True))

predictions = []
posterior = threepo.Posterior.of(optimizer)
with torch.no_grad():
    after = mse_loss(model(x), y).item()
    for i in range(8):
        with optimizer.perturbed(posterior.address(i)):
            predictions.append(model(torch.tensor([[0.0], [6.0]])))
    near, far = torch.stack(predictions).std(0).flatten().tolist()
print(f"loss before {before:.3f}, after {after:.3f}; resumed run is the same: {same}")
print(f"standard deviation of 8 draws' predictions: {near:.3f} inside the data, {far:.3f} outside")
