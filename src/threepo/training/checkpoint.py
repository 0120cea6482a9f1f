"""Checkpoints: a Hugging Face model directory that any tool can load, and beside it what training needs to go on.

    posterior.safetensors    the Hessian (IVON only), by parameter name; see posterior.gaussian
    optimizer.safetensors    the rest of the optimizer's state, as `state key/parameter name`
    train_state.json         the step, and the optimizer's counters

A checkpoint appears under its name only when all of it is on disk.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from threepo.errors import UserError
from threepo.files import atomic_folder, read_json
from threepo.models.policy import Policy
from threepo.posterior.gaussian import Posterior
from threepo.posterior.ivon import IVON
from threepo.posterior.parameter_state import missed_steps
from threepo.posterior.policy_optimizer import PolicyOptimizer, named_in_groups
from threepo.run_folder import RunFolder
from threepo.training.ess import EssState

_OPTIMIZER_FILE = "optimizer.safetensors"
_STATE_FILE = "train_state.json"


@dataclass(frozen=True)
class TrainState:
    """Where training stands. The data position and every random address follow from the step."""

    step: int = 0
    """Training steps done."""
    optimizer_steps: int = 0
    """Steps taken by IVON, which debiases by them, those of a loaded momentum included; AdamW keeps its own count."""
    skipped_steps: int = 0
    """Updates skipped because a gradient was not finite, or nothing was left of the batch."""
    quiet_steps: int = 0
    """Training steps in a row in which the correction changed nothing."""
    ess: EssState = field(default_factory=EssState)
    """What the ess schedule goes by."""


def checkpoint(folder: RunFolder, policy: Policy, optimizer: PolicyOptimizer, state: TrainState, keep: int) -> None:
    """Save a run's state, and delete checkpoints older than the newest `keep`."""
    path = folder.checkpoint_path(state.step)
    if not path.exists():
        save_checkpoint(path, policy, optimizer, state)
    folder.prune_checkpoints(keep)


def save_checkpoint(path: Path, policy: Policy, optimizer: PolicyOptimizer, state: TrainState) -> None:
    """Write the checkpoint folder `path`, atomically."""
    with atomic_folder(path) as folder:
        policy.save(folder)
        if isinstance(optimizer, IVON):
            Posterior.of(optimizer).save(folder)
        save_file(_optimizer_tensors(optimizer), folder / _OPTIMIZER_FILE)
        (folder / _STATE_FILE).write_text(json.dumps(asdict(state), indent=2) + "\n", encoding="utf-8")


def load_train_state(path: Path) -> TrainState:
    """The train state of a checkpoint."""
    saved = read_json(path / _STATE_FILE)
    return TrainState(**{**saved, "ess": EssState(**saved["ess"])})


def restore_optimizer(path: Path, optimizer: PolicyOptimizer, state: TrainState) -> None:
    """Put a checkpoint's optimizer state into a freshly made optimizer of the same kind, bitwise."""
    if isinstance(optimizer, IVON):
        Posterior.from_pretrained(path).load_into(optimizer)
        load_momentum(path, optimizer)
    else:
        torch_state: dict[str, Any] = optimizer.state_dict()
        order = {name: index for index, (name, _, _) in enumerate(named_in_groups(optimizer.param_groups))}
        torch_state["state"] = {}
        for key, value in _load(path / _OPTIMIZER_FILE).items():
            kind, _, name = key.partition("/")
            torch_state["state"].setdefault(order[name], {})[kind] = value
        optimizer.load_state_dict(torch_state)
    for group in optimizer.param_groups:
        group["skipped_steps"] = state.skipped_steps


def load_momentum(path: Path, optimizer: IVON) -> None:
    """Put a checkpoint's momentum into an optimizer, with the count of updates that debiasing it needs."""
    file = path / _OPTIMIZER_FILE
    if not file.is_file():
        raise UserError(f"{path}: holds no {_OPTIMIZER_FILE}, so no momentum; set optimizer.load_momentum = false")
    tensors = _load(file)
    for group in optimizer.param_groups:
        group["step"] = load_train_state(path).optimizer_steps
    for name, p, _ in optimizer.trainable():
        keys = ("momentum", "missed_steps", "first_step")
        saved = {key: tensors[f"{key}/{name}"] for key in keys if f"{key}/{name}" in tensors}
        optimizer.state[p]["momentum"].copy_(saved["momentum"])
        optimizer.state[p]["missed_steps"] = missed_steps(saved)


def _load(file: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{file}: cannot be read ({error}); delete the checkpoint to resume from an older one"
        ) from error


def _optimizer_tensors(optimizer: PolicyOptimizer) -> dict[str, torch.Tensor]:
    names = [name for name, _, _ in named_in_groups(optimizer.param_groups)]
    return {
        f"{key}/{names[index]}": value.detach().cpu().contiguous()
        for index, entry in optimizer.state_dict()["state"].items()
        for key, value in entry.items()
        if key != "hessian"  # that is the posterior's, and has a file of its own
    }
