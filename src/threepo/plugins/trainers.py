"""Parts that the plug-ins for TRL, verl and the Trainer share: a check of the release, and files of checkpoints."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from threepo.config import ArmsConfig, NoiseConfig
from threepo.config.records import first_difference, to_dict
from threepo.errors import UserError
from threepo.files import read_json, read_json_as, write_json
from threepo.methods.arms import Tally

_TALLY, _NOISE = "arms.json", "noise.json"
LOGGED = ("posterior/sigma_to_rms", "posterior/clipped_share", "optimizer/skipped_steps")
"""Metrics of IVON that plug-ins add to the log of their library."""


def check_release(package: str, release: str) -> None:
    """Raise `UserError` unless a package is of this release: a plug-in overrides private methods, which others rename.

    The overriding methods would then never run, and training would go on without draws.
    """
    installed = version(package)
    if not f"{installed}.".startswith(f"{release}."):
        fix = f"threepo's plug-in overrides methods of {release}; pip install '{package}=={release}.*'"
        raise UserError(f"{package} {installed} is installed: {fix}")


@contextmanager
def passed_settings_kept(optimizer: Any, passed: Collection[str]) -> Iterator[None]:
    """Keep an optimizer's passed settings when the body loads a checkpoint, except `hess_init`, the start of a run."""
    own = {name: value for name, value in optimizer.param_groups[0].items() if name in passed and name != "hess_init"}
    yield
    for group in optimizer.param_groups:
        group.update(own)


def save_tally(tally: Tally, checkpoint: Path) -> None:
    """Write what each arm has earned into a checkpoint's folder."""
    write_json(checkpoint / _TALLY, asdict(tally))


def load_tally(checkpoint: Path) -> Tally:
    """The tally that `save_tally` wrote; `UserError` if there is none."""
    fix = "copy the whole checkpoint; one with the weights only has none"
    tally: Tally = read_json_as(checkpoint / _TALLY, Tally, fix)
    return tally


def save_noise(checkpoint: Path, noise: NoiseConfig, arms: ArmsConfig) -> None:
    """Write which noise a run has into a checkpoint's folder."""
    write_json(checkpoint / _NOISE, _noise_of(noise, arms))


def refuse_other_noise(checkpoint: Path, noise: NoiseConfig, arms: ArmsConfig) -> None:
    """Raise `UserError` if the checkpoint's run had other noise, whose sizes would be kept, or is another trainer's."""
    where, file = f"resume_from_checkpoint = {str(checkpoint)!r}", checkpoint / _NOISE
    if not file.is_file():
        fix = "train with it as the model, from its weights alone"
        raise UserError(f"{where}: is not of a method with draws or IVON; {fix}")
    if difference := first_difference(read_json(file), _noise_of(noise, arms)):
        fix = "a resumed run keeps its noise: restore it, or train with the checkpoint as the model"
        raise UserError(f"{where}: has other noise ({difference}); {fix}")


def _noise_of(noise: NoiseConfig, arms: ArmsConfig) -> dict[str, Any]:
    return {"noise": to_dict(noise), "arms": {"active": arms.active}}
