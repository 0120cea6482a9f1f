"""Checkpoints: a Hugging Face model directory that any tool can load, with what training needs to go on.

    posterior.safetensors    the noise, and IVON's Hessian by parameter name; see posterior.gaussian
    optimizer.safetensors    the rest of the optimizer's state, as `state key/parameter name`
    reference.safetensors    the reference model, if it changes (training/reference.py)
    train_state.json         the step, what schedules and alarms remember, and the optimizer's own counts: steps, by
                             which IVON debiases (AdamW's are in its state), and skipped steps

A checkpoint appears under its name only when all of it is on disk.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from threepo.errors import UserError
from threepo.files import read_json, write_json
from threepo.models.policy import Policy
from threepo.posterior.gaussian import FILE_NAME as POSTERIOR_FILE
from threepo.posterior.gaussian import Posterior, saved_groups
from threepo.posterior.ivon import IVON
from threepo.posterior.layout import like_parameter
from threepo.posterior.policy_optimizer import PolicyOptimizer, Weights, named_in_groups
from threepo.ranks.files import save_sharded, shared_folder
from threepo.ranks.group import ALONE, Ranks
from threepo.training.schedules import ScheduleState

OPTIMIZER_FILE = "optimizer.safetensors"
_STATE_FILE = "train_state.json"

Files = Mapping[str, Weights]
"""Tensors by their names, by the file that holds them."""


@dataclass(frozen=True)
class TrainState:
    """Where training stands. Random addresses follow from the step; so does the data position, except with `drawn`."""

    step: int = 0
    """Training steps done."""
    streaks: Mapping[str, int] = field(default_factory=dict)
    """See `metrics.watch`."""
    schedules: ScheduleState = field(default_factory=ScheduleState)
    drawn: int = 0
    """Problems that dynamic sampling has taken from their source; 0 without it."""


def save_checkpoint(
    path: Path,
    policy: Policy,
    optimizer: PolicyOptimizer,
    state: TrainState,
    ranks: Ranks = ALONE,
    more: Files = MappingProxyType({}),
) -> None:
    """Write the checkpoint folder `path`, atomically. The format does not depend on the number of ranks.

    `more`: what else it has to hold.
    """
    names = [name for name, _, _ in named_in_groups(optimizer.param_groups)]
    tensors = {
        f"{key}/{names[index]}": value.detach()
        for index, entry in optimizer.state_dict()["state"].items()
        for key, value in entry.items()
        if key != "hessian"  # that is the posterior's, and has a file of its own
    }
    files = {OPTIMIZER_FILE: tensors, **more}
    posterior = Posterior.of(optimizer, gather=False)
    with shared_folder(path, ranks) as folder:
        if ranks.size > 1:
            save_sharded(folder / policy.weights_file, policy.saved_tensors(), ranks, {"format": "pt"})
            if not posterior.is_point:
                save_sharded(folder / POSTERIOR_FILE, posterior.hessian, ranks, posterior.metadata())
            for file, found in files.items():
                save_sharded(folder / file, found, ranks)
        else:
            policy.save(folder)
            if not posterior.is_point:
                posterior.save(folder)
            for file, found in files.items():
                save_file({name: value.cpu().contiguous() for name, value in found.items()}, folder / file)
        with ranks.together():
            if ranks.first:
                first = optimizer.param_groups[0]
                counts = {"optimizer_steps": first.get("step", 0), "skipped_steps": first["skipped_steps"]}
                write_json(folder / _STATE_FILE, {"step": state.step} | counts | asdict(state))
                if ranks.size > 1:
                    policy.save_all_but_weights(folder)


def load_train_state(path: Path) -> TrainState:
    """The train state of a checkpoint."""
    saved = read_json(path / _STATE_FILE)
    quiet = {"correction": saved.get("quiet_steps", 0)}  # what older versions saved
    if "schedules" not in saved:  # they saved what ess_schedule remembers, and nothing of other schedules
        saved["schedules"] = {"ess_factor" if name == "factor" else name: x for name, x in saved["ess"].items()}
    schedules = ScheduleState(**saved["schedules"])
    return TrainState(saved["step"], saved.get("streaks", quiet), schedules, saved.get("drawn", 0))


def restore_optimizer(path: Path, optimizer: PolicyOptimizer) -> None:
    """Put a checkpoint's optimizer state into a freshly made optimizer of the same kind, bitwise."""
    file = path / OPTIMIZER_FILE
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        fix = "delete the checkpoint to resume from an older one"
        raise UserError(f"{file}: cannot be read ({error}); {fix}") from error
    if isinstance(optimizer, IVON):
        hessian = Posterior.from_pretrained(path).hessian
        tensors |= {f"hessian/{name}": value for name, value in hessian.items()}
    index = {name: i for i, (name, _, _) in enumerate(named_in_groups(optimizer.param_groups))}
    parameters = {name: p for name, p, _ in named_in_groups(optimizer.param_groups)}
    restored = optimizer.state_dict() | {"state": {}}
    for key, value in tensors.items():
        kind, _, name = key.partition("/")
        if name not in index:
            raise UserError(f"{file}: the model has no parameter {name}; it belongs to another model")
        mine = like_parameter(value, parameters[name]) if value.shape == parameters[name].shape else value
        restored["state"].setdefault(index[name], {})[kind] = mine
    optimizer.load_state_dict(restored)
    counts = read_json(path / _STATE_FILE)
    for group in optimizer.param_groups:
        group["skipped_steps"] = counts["skipped_steps"]
        if "step" in group:
            group["step"] = counts["optimizer_steps"]
    # That of the last step, for an evaluation that is made up before the next; none without noise.
    ess = {name: saved.ess for saved in saved_groups(path) for name in saved.parameters}
    for name, _, group in named_in_groups(optimizer.param_groups):
        group["ess"] = ess.get(name, group["ess"])
