"""Checkpoints: a Hugging Face model directory that any tool can load, with what training needs to go on.

    posterior.safetensors    the noise, and IVON's Hessian by parameter name; see posterior.gaussian
    optimizer.safetensors    the rest of the optimizer's state, as `state key/parameter name`
    reference.safetensors    the reference model, if it changes (training/reference.py)
    train_state.json         the step, what schedules and alarms remember, and the optimizer's own counts: steps, by
                             which IVON debiases (AdamW's are in its state), and skipped steps
    rollouts.json            rollouts that were made ahead, if there are any (training/overlap.py)
    files.json               sizes of the files of tensors and digests of all others, which resuming compares

A checkpoint appears under its name only when all of it is on disk.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from threepo.config.records import must
from threepo.errors import UserError
from threepo.files import read_json_as, write_json
from threepo.methods.arms import Tally
from threepo.models.parts import parts_in_files
from threepo.models.policy import Policy
from threepo.posterior.gaussian import Posterior, index_weights, saved_groups
from threepo.posterior.ivon import IVON
from threepo.posterior.policy_optimizer import PolicyOptimizer, Weights, named_in_groups
from threepo.posterior.shards import like_parameter
from threepo.ranks.files import save_tensors, shared_folder
from threepo.ranks.world import ALONE, World
from threepo.run_folder import ADAPTERS, CONTENTS, OPTIMIZER_FILE, POSTERIOR_FILE, STATE_FILE
from threepo.training.schedules import ScheduleState

_OLDER = "delete the checkpoint to resume from an older one"

Files = Mapping[str, Weights]
"""Tensors by file and by name."""


@dataclass(frozen=True)
class TrainState:
    """Position of training. Random addresses follow from the step; so does the data position, except with `drawn`."""

    step: int = 0
    """Training steps done."""
    streaks: Mapping[str, int] = field(default_factory=dict)
    """See `alarms.watch`."""
    schedules: ScheduleState = field(default_factory=ScheduleState)
    drawn: int = 0
    """Problems that dynamic sampling has taken from their source; 0 without it."""
    tally: Tally = field(default_factory=Tally)
    """Earnings of the arms of [arms]; empty without it."""


@dataclass(frozen=True)
class _SavedState:
    """The contents of train_state.json."""

    state: TrainState
    optimizer_steps: int
    skipped_steps: int
    optimizer_numbers: Mapping[str, float | int | None] = field(default_factory=dict)
    """State of a user's optimizer that is no tensor, as `state key/parameter name`."""


def save_checkpoint(
    path: Path,
    policy: Policy,
    optimizer: PolicyOptimizer,
    state: TrainState,
    world: World = ALONE,
    more: Files = MappingProxyType({}),
    write_more: Callable[[Path], None] | None = None,
) -> None:
    """Write the checkpoint folder `path`, atomically. The format does not depend on the number of ranks.

    `more`: other files of tensors that it has to hold. `write_more`: writes other files into a folder, on one rank.
    """
    names = [name for name, _, _ in named_in_groups(optimizer.param_groups)]
    kept = {
        f"{key}/{names[index]}": value
        for index, entry in optimizer.state_dict()["state"].items()
        for key, value in entry.items()
        if key != "hessian"  # belongs to the posterior, which has a file of its own
    }
    tensors = {name: value.detach() for name, value in kept.items() if isinstance(value, torch.Tensor)}
    numbers = {name: value for name, value in kept.items() if name not in tensors}
    posterior = Posterior.of(optimizer, gather=False)
    # Without a learned posterior, a run's noise is only the unit of its arms' sizes.
    posterior = replace(posterior, has_arms=state.tally != Tally() and not posterior.hessian)
    with shared_folder(path, world) as folder:
        weights = policy.saved_tensors()
        parts = {} if policy.has_adapters else parts_in_files(policy.model, weights)
        save_tensors(folder / policy.weights_file, weights, world, {"format": "pt"}, parts=parts)
        if not posterior.is_point:
            save_tensors(folder / POSTERIOR_FILE, posterior.tensors(), world, posterior.metadata())
        for file, found in {OPTIMIZER_FILE: tensors, **more}.items():
            save_tensors(folder / file, found, world)

        def save_the_rest() -> None:
            policy.save_all_but_weights(folder)
            first = optimizer.param_groups[0]
            saved_state = _SavedState(state, first.get("step", 0), first["skipped_steps"], numbers)
            write_json(folder / STATE_FILE, asdict(saved_state))
            if write_more:
                write_more(folder)
            index_weights(folder)
            saved = (file for file in sorted(folder.rglob("*")) if file.is_file())
            contents = {file.relative_to(folder).as_posix(): _content(file) for file in saved}
            contents.pop(ADAPTERS, None)  # people edit its base
            write_json(folder / CONTENTS, contents)

        world.on_first(save_the_rest)


def _content(file: Path) -> str:
    """The size of a file of tensors, or the digest of any other file."""
    if file.suffix == ".safetensors":
        return f"{file.stat().st_size} bytes"
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _saved_state(path: Path) -> _SavedState:
    saved: _SavedState = read_json_as(path / STATE_FILE, _SavedState, _OLDER)
    return saved


def load_train_state(path: Path) -> TrainState:
    """The train state of a checkpoint; `UserError` if any of its files has changed since it was saved."""
    listed = Annotated[dict[str, str], must(lambda found: STATE_FILE in found, f"must have {STATE_FILE}")]
    for name, then in read_json_as(path / CONTENTS, listed, _OLDER).items():
        if not (path / name).is_file() or _content(path / name) != then:
            raise UserError(f"{path / name}: is not the file that was saved; restore it, or {_OLDER}")
    return _saved_state(path).state


def read_tensors(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file of a checkpoint; `UserError` if it cannot be read."""
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file}: cannot be read ({error}); {_OLDER}") from error


def restore_optimizer(path: Path, optimizer: PolicyOptimizer) -> None:
    """Put a checkpoint's optimizer state into a freshly made optimizer of the same kind, bitwise."""
    counts = _saved_state(path)
    saved = {**counts.optimizer_numbers, **read_tensors(path / OPTIMIZER_FILE)}
    if isinstance(optimizer, IVON):
        hessian = Posterior.from_pretrained(path).hessian
        saved |= {f"hessian/{name}": value for name, value in hessian.items()}
    known = {name: (i, p) for i, (name, p, _) in enumerate(named_in_groups(optimizer.param_groups))}
    restored = optimizer.state_dict() | {"state": {}}
    for key, value in saved.items():
        kind, _, name = key.partition("/")
        if name not in known:
            raise UserError(f"{path}: the model has no parameter {name or key}; it belongs to another model")
        index, p = known[name]
        if isinstance(value, torch.Tensor) and value.shape == p.shape:
            value = like_parameter(value, p)
        restored["state"].setdefault(index, {})[kind] = value
    optimizer.load_state_dict(restored)
    for group in optimizer.param_groups:
        group["skipped_steps"] = counts.skipped_steps
        if "step" in group:
            group["step"] = counts.optimizer_steps
    # The ess of the last step, for an evaluation that still has to be made before the next step; none without noise.
    ess = {name: group.ess for group in saved_groups(path) for name in group.parameters}
    for name, _, group in named_in_groups(optimizer.param_groups):
        group["ess"] = ess.get(name, group["ess"])
