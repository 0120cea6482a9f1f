"""Arms inside another library's trainer (method.md 3.11): what is refused there, and the tally in its checkpoints."""

from dataclasses import asdict
from pathlib import Path

from threepo.config import ArmsConfig, Method, NoiseConfig, OptimizerConfig
from threepo.config.arms import check_arms
from threepo.files import read_json_as, write_json
from threepo.methods.arms import Tally

_FILE = "arms.json"


def check_arms_inside(
    library: str, arms: ArmsConfig, method: Method, noise: NoiseConfig, optimizer: OptimizerConfig
) -> None:
    """Raise `UserError` for arms that make no sense, or that need what the library does not know."""
    check_arms(arms, method, noise, optimizer)
    fix = f"{library}'s rewards do not say which answers are right; set another"
    arms.check("pay", arms.pay != "rescue", fix)


def save_tally(tally: Tally, checkpoint: Path) -> None:
    """Write what each arm has earned into a checkpoint's folder."""
    write_json(checkpoint / _FILE, asdict(tally))


def load_tally(checkpoint: Path) -> Tally:
    """The tally that `save_tally` wrote; `UserError` if there is none."""
    fix = "copy the whole checkpoint; one with the weights only has none"
    tally: Tally = read_json_as(checkpoint / _FILE, Tally, fix)
    return tally
