"""Find, read and resolve recipes: presets are filled in, overrides applied, and everything is checked.

Imports no torch, so that a mistake in a recipe is reported at once.
"""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from threepo.config import EvaluationConfig, TrainConfig
from threepo.config.reader import build, merge, parse_override, read_toml, to_plain
from threepo.errors import UserError
from threepo.methods.presets import PRESETS
from threepo.runs import CHECKPOINTS, CONFIG, read_json

Config = TypeVar("Config")


def recipes_folder() -> Path:
    """Where the shipped recipes lie: inside the installed package, or at the top of a source checkout."""
    installed = Path(str(resources.files("threepo"))) / "recipes"
    return installed if installed.is_dir() else Path(__file__).resolve().parents[3] / "recipes"


def shipped_recipes() -> list[str]:
    """Names of the shipped recipes, as `load` takes them; what begins with _ is only there to be extended."""
    folder = recipes_folder()
    paths = [path for path in folder.rglob("*.toml") if not path.name.startswith("_")]
    return sorted(str(path.relative_to(folder).with_suffix("")) for path in paths)


def find_recipe(name: str) -> Path:
    """A path to a recipe, or the name of a shipped one such as `demo/c3po`, as a path to an existing file."""
    for path in (Path(name), recipes_folder() / f"{name}.toml"):
        if path.is_file():
            return path
    near = difflib.get_close_matches(name, shipped_recipes(), n=1)
    hint = f"did you mean {near[0]}?" if near else f"shipped recipes: {', '.join(shipped_recipes())}"
    raise UserError(f"recipe {name}: no such file and no shipped recipe of that name; {hint}")


def load(record: type[Config], recipe: str, overrides: Sequence[str] = ()) -> Config:
    """Read `recipe` (a path, a shipped name, or "" for none) with overrides as a record of this type."""
    table = read_toml(find_recipe(recipe)) if recipe else {}
    for text in overrides:
        table = merge(table, parse_override(text))
    if record is TrainConfig:
        table = apply_preset(table)
    run = table.setdefault("run", {})
    if recipe and isinstance(run, dict):
        run.setdefault("folder", str(Path("runs") / Path(recipe).with_suffix("").name))
    return build(record, table)


def load_evaluation(model: str, recipe: str, overrides: Sequence[str]) -> EvaluationConfig:
    """Settings for evaluating `model`: those of the recipe, or of the run if `model` is a run folder, then overrides.

    Of a training recipe the tables that an evaluation has are taken, and the others are left.
    """
    table: dict[str, Any] = {}
    if recipe:
        table = read_toml(find_recipe(recipe))
    elif (Path(model) / CONFIG).is_file() and (Path(model) / CHECKPOINTS).is_dir():
        table = read_json(Path(model) / CONFIG)
    known = {f.name for f in fields(EvaluationConfig)}
    table = {name: value for name, value in table.items() if name in known}
    for text in overrides:
        table = merge(table, parse_override(text))
    return build(EvaluationConfig, merge(table, {"model": {"path": model}}))


def apply_preset(table: dict[str, Any]) -> dict[str, Any]:
    """Replace `method.preset` by the axes of that preset, under whatever axes the recipe sets itself."""
    method = table.get("method", {})
    if not isinstance(method, Mapping):
        return table  # build says what is wrong with it
    method = dict(method)
    preset = method.pop("preset", None)
    if preset is not None:
        if preset not in PRESETS:
            raise UserError(f"method.preset = {preset!r}: must be one of {', '.join(PRESETS)}")
        method = merge(to_plain(PRESETS[preset]), method)
    optimizer = table.get("optimizer", {})
    if isinstance(optimizer, Mapping) and "kind" not in optimizer and "optimizer" in method:
        optimizer = {"kind": method["optimizer"], **optimizer}
    return {**table, "method": method, "optimizer": optimizer}
