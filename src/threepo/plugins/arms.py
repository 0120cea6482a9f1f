"""Arms and noise inside another library's trainer (method.md 3.11): what its checkpoints hold."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from threepo.config import ArmsConfig, NoiseConfig
from threepo.config.records import first_difference, to_dict
from threepo.errors import UserError
from threepo.files import read_json, read_json_as, write_json
from threepo.methods.arms import Tally
from threepo.run_folder import POSTERIOR_FILE

_FILE, _NOISE = "arms.json", "noise.json"


def save_tally(tally: Tally, checkpoint: Path) -> None:
    """Write what each arm has earned into a checkpoint's folder."""
    write_json(checkpoint / _FILE, asdict(tally))


def load_tally(checkpoint: Path) -> Tally:
    """The tally that `save_tally` wrote; `UserError` if there is none."""
    fix = "copy the whole checkpoint; one with the weights only has none"
    tally: Tally = read_json_as(checkpoint / _FILE, Tally, fix)
    return tally


def save_noise(checkpoint: Path, noise: NoiseConfig, arms: ArmsConfig) -> None:
    """Write which noise a run has into a checkpoint's folder."""
    write_json(checkpoint / _NOISE, _noise_of(noise, arms))


def refuse_other_noise(checkpoint: Path, noise: NoiseConfig, arms: ArmsConfig) -> None:
    """Raise `UserError` if the checkpoint's run had other noise, whose sizes would be kept, or is another trainer's."""
    if not (checkpoint / POSTERIOR_FILE).is_file():
        fix = "train with it as the model, from its weights alone"
        raise UserError(f"resume_from_checkpoint = {str(checkpoint)!r}: is not of a method with draws or IVON; {fix}")
    before = read_json(checkpoint / _NOISE) if (checkpoint / _NOISE).is_file() else None
    if before and (difference := first_difference(before, _noise_of(noise, arms))):
        fix = "a resumed run keeps its noise: restore it, or train with the checkpoint as the model"
        raise UserError(f"resume_from_checkpoint = {str(checkpoint)!r}: has other noise ({difference}); {fix}")


def _noise_of(noise: NoiseConfig, arms: ArmsConfig) -> dict[str, Any]:
    return {"noise": to_dict(noise), "arms": {"active": arms.active}}
