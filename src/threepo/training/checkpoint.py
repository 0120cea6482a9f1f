"""Checkpoints: a Hugging Face model directory that any tool can load, with what training needs to go on.

    posterior.safetensors    the Hessian (IVON only), by parameter name; see posterior.gaussian
    optimizer.safetensors    the rest of the optimizer's state, as `state key/parameter name`
    train_state.json         the step, counters, and what schedules and alarms remember

A checkpoint appears under its name only when all of it is on disk.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from threepo.errors import UserError
from threepo.files import atomic_folder, read_json
from threepo.models.policy import Policy
from threepo.posterior.gaussian import Posterior
from threepo.posterior.ivon import IVON
from threepo.posterior.policy_optimizer import PolicyOptimizer, named_in_groups
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
    streaks: Mapping[str, int] = field(default_factory=dict)
    """See `alarms.watch`."""
    ess: EssState = field(default_factory=EssState)
    """What the ess schedule remembers."""


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
    quiet = {"correction": saved.pop("quiet_steps", 0)}  # what versions before `streaks` saved
    return TrainState(**{"streaks": quiet, **saved, "ess": EssState(**saved["ess"])})


def restore_optimizer(path: Path, optimizer: PolicyOptimizer, state: TrainState) -> None:
    """Put a checkpoint's optimizer state into a freshly made optimizer of the same kind, bitwise."""
    tensors = _load(path / _OPTIMIZER_FILE)
    if isinstance(optimizer, IVON):
        hessian = Posterior.from_pretrained(path).hessian
        tensors |= {f"hessian/{name}": value for name, value in hessian.items()}
    index = {name: i for i, (name, _, _) in enumerate(named_in_groups(optimizer.param_groups))}
    restored = optimizer.state_dict() | {"state": {}}
    for key, value in tensors.items():
        kind, _, name = key.partition("/")
        if name not in index:
            raise UserError(f"{path / _OPTIMIZER_FILE}: the model has no parameter {name}; it belongs to another model")
        restored["state"].setdefault(index[name], {})[kind] = value
    optimizer.load_state_dict(restored)
    for group in optimizer.param_groups:
        group["skipped_steps"] = state.skipped_steps
        if "step" in group:
            group["step"] = state.optimizer_steps


def load_momentum(path: Path, optimizer: IVON) -> None:
    """Put a checkpoint's posterior and momentum into a new optimizer, with the step count that debiasing needs."""
    if not (path / _OPTIMIZER_FILE).is_file():
        raise UserError(f"{path}: holds no {_OPTIMIZER_FILE}, so no momentum; set optimizer.load_momentum = false")
    restore_optimizer(path, optimizer, replace(load_train_state(path), skipped_steps=0))


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
