"""Find, read and resolve recipes: presets are filled in, overrides applied, and everything is checked.

Imports no torch, so that a mistake in a recipe is reported at once.
"""

import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from threepo.config import ConversationConfig, EvaluationConfig, IVONConfig, ModelConfig, SFTConfig, TrainConfig
from threepo.config.checks import shown
from threepo.config.reader import build, merge, parse_overrides, read_toml, to_plain
from threepo.data.conversations import resolved_conversations
from threepo.data.rows import absolute
from threepo.data.source import resolved
from threepo.errors import UserError
from threepo.evaluation.benchmarks import MAX_NEW_TOKENS, choices
from threepo.methods.presets import PRESETS
from threepo.runs import CHECKPOINTS, CONFIG, read_json

Config = TypeVar("Config", TrainConfig, SFTConfig, EvaluationConfig)

RUNS = Path("runs")
"""Where the runs of recipes go that name no folder."""
_EVALUATION_READS = {"run": ("seed", "threads"), "sampling": ("max_new_tokens",)}
"""Of these tables an evaluation reads a few keys; of the others all but the next."""
_EVALUATION_IGNORES = {
    ("model", "path"): "the model is the command's first argument",
    ("eval", "every"): "it belongs to training",
    ("data", "prompts_per_step"): "it belongs to training; eval.problems says how many problems there are",
    ("data", "max_prompt_tokens"): "it belongs to training; a score leaves no problem out",
}


_HOW_PROMPTS_ARE_PUT = ("system_prompt", "chat_template", "too_long")
"""Keys of [data] that benchmarks leave a say."""


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
    if (Path(name) / CONFIG).is_file():
        raise UserError(f"recipe {name}: is a run folder; continue the run with --resume {name}")
    if Path(f"{name}.toml").is_file():
        raise UserError(f"recipe {name}: no such file; did you mean {name}.toml?")
    near = difflib.get_close_matches(name, shipped_recipes(), n=1)
    hint = f"did you mean {near[0]}?" if near else f"shipped recipes: {', '.join(shipped_recipes())}"
    raise UserError(f"recipe {name}: no such file and no shipped recipe of that name; {hint}")


def load(record: type[Config], recipe: str, overrides: Sequence[str] = ()) -> Config:
    """Read `recipe` (a path, a shipped name, or "" for none) with overrides as a record of this type."""
    path = find_recipe(recipe) if recipe else None
    table = read_toml(path) if path else {}
    _refuse_other_command(record, recipe, table)
    table = merge(table, parse_overrides(overrides))
    if record is TrainConfig:
        table = apply_preset(table)
    run = table.setdefault("run", {})
    if path and isinstance(run, dict):
        run.setdefault("folder", str(RUNS / _name_of(path)))
    return resolve_paths(build(record, table))


def _refuse_other_command(record: type[Config], recipe: str, table: Mapping[str, Any]) -> None:
    """Raise `UserError` for a recipe of the other one of the two commands that train."""
    if record is TrainConfig and table.keys() & {"demonstrations", "conversations"}:
        raise UserError(f"recipe {recipe}: is a warm start; `threepo sft` takes it, with these arguments")
    if record is SFTConfig and "data" in table:
        raise UserError(f"recipe {recipe}: is reinforcement learning; `threepo train` takes it, with these arguments")


def model_to_come(model: ModelConfig) -> ModelConfig:
    """The model itself; or if a run of a shipped recipe is still to leave it, the one that this run begins with."""
    place = Path(model.path)
    name = str(place.relative_to(RUNS)) if place.is_relative_to(RUNS) else ""
    if place.exists() or name not in shipped_recipes():
        return model
    return model_to_come(build(ModelConfig, read_toml(find_recipe(name))["model"], "model"))


def _name_of(recipe: Path) -> Path:
    """A shipped recipe's name, or that of a file."""
    shipped, path = recipes_folder().resolve(), recipe.resolve()
    return (path.relative_to(shipped) if path.is_relative_to(shipped) else Path(path.name)).with_suffix("")


def resolve_paths(config: Config) -> Config:
    """The same configuration with `~` and relative paths spelt out, so that it means the same in any directory."""
    path, tokenizer = (name and absolute(name) for name in (config.model.path, config.model.tokenizer))
    config = replace(config, model=replace(config.model, path=path, tokenizer=tokenizer))
    config = replace(config, run=replace(config.run, folder=os.path.expanduser(config.run.folder)))
    if not isinstance(config, SFTConfig):
        data = replace(config.data, train=resolved(config.data.train), eval=resolved(config.data.eval))
        config = replace(config, data=data)
    elif config.conversations:
        conversations = _resolve_conversations(config.conversations)
        config = replace(config, conversations=conversations)  # type: ignore[call-arg]  # mypy tries all records
    if not isinstance(config, EvaluationConfig) and isinstance(config.optimizer, IVONConfig):
        hessian = config.optimizer.load_hessian
        optimizer = replace(config.optimizer, load_hessian=_absolute(hessian) if hessian else "")
        config = replace(config, optimizer=optimizer)
    return config


def _absolute_copy(benchmark: str) -> str:
    """NAME=COPY with an absolute path."""
    name, equals, copy = benchmark.strip().partition("=")
    return f"{name}={absolute(copy)}" if equals else name


def _resolve_conversations(settings: ConversationConfig) -> ConversationConfig:
    return replace(
        settings,
        source=resolved_conversations(settings.source),
        eval=resolved_conversations(settings.eval),
        chat_template=settings.chat_template and _absolute(settings.chat_template),
        cache=settings.cache and _absolute(settings.cache),
    )


def _absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))


def load_evaluation(
    model: str, recipe: str, overrides: Sequence[str], benchmarks: Mapping[str, Any] | None = None
) -> EvaluationConfig:
    """Settings for evaluating `model`: those of the recipe, or of the run if `model` is a run folder, then overrides.

    Of a training recipe the tables that an evaluation has are taken, and the others are left; where benchmarks are
    named, which are evaluated like the paper's whatever the training was, no more than how to run the model.
    `benchmarks` are overrides of that table.
    """
    table: dict[str, Any] = {}
    if recipe:
        table = read_toml(find_recipe(recipe))
    elif (Path(model) / CONFIG).is_file() and (Path(model) / CHECKPOINTS).is_dir():
        table = merge(read_json(Path(model) / CONFIG), {"model": {"tokenizer": ""}})  # the checkpoint has its own
    known = {f.name for f in fields(EvaluationConfig)}
    table = {name: value for name, value in table.items() if name in known}
    given = merge(parse_overrides(overrides), {"benchmarks": benchmarks} if benchmarks else {})
    _refuse_unread(given)
    asked = merge(merge(table, given), {"model": {"path": model}})
    chosen = asked.get("benchmarks", {})
    if isinstance(chosen, Mapping) and chosen.get("names"):
        if "benchmarks" not in table:
            asked = merge({name: asked[name] for name in ("model", "engine") if name in asked}, given)
            asked = merge(asked, {"model": {"path": model}})
        asked = _as_in_the_paper(asked)
    data = asked.get("data", {})
    if isinstance(data, Mapping) and not data.get("train"):
        if not data.get("eval"):
            missing = "benchmarks.names" if chosen else "data.eval"
            raise UserError(f"{missing} is missing: name --benchmarks, held-out problems, or a task in data.train")
        asked["data"] = {**data, "train": data["eval"]}
    config = resolve_paths(build(EvaluationConfig, asked))
    choices(config.benchmarks)  # unknown names are refused before anything is loaded
    names, folder = tuple(map(_absolute_copy, config.benchmarks.names)), config.benchmarks.folder
    files = replace(config.benchmarks, names=names, folder=_absolute(folder) if folder else "")
    return replace(config, benchmarks=files)


def _as_in_the_paper(table: dict[str, Any]) -> dict[str, Any]:
    """An evaluation on benchmarks: [data] says only how prompts are put, and completions may be long."""
    data, evaluation, sampling = (table.get(name, {}) for name in ("data", "eval", "sampling"))
    if not all(isinstance(keys, Mapping) for keys in (data, evaluation, sampling)):
        return table  # build says what is wrong with it
    unread = [f"data.{key}" for key in data if key not in _HOW_PROMPTS_ARE_PUT]
    unread += ["eval.problems"] if "problems" in evaluation else []
    if unread:
        raise UserError(f"{unread[0]}: is not read with benchmarks, which bring their own; see [benchmarks]")
    if "max_new_tokens" not in {*evaluation, *sampling}:
        evaluation = {**evaluation, "max_new_tokens": MAX_NEW_TOKENS}
    return {**table, "data": {**data, "train": "benchmarks"}, "eval": evaluation}


def _refuse_unread(given: Mapping[str, Any]) -> None:
    """Raise `UserError` for an override that an evaluation would not read: silence would look like obedience."""
    for table, keys in given.items():
        for key, value in keys.items() if isinstance(keys, Mapping) else ():
            reason = _EVALUATION_IGNORES.get((table, key), "")
            if key not in _EVALUATION_READS.get(table, (key,)):
                reason = f"of [{table}] it reads {' and '.join(_EVALUATION_READS[table])} only"
            if reason:
                raise UserError(f"{table}.{key} = {shown(value)}: `threepo eval` does not read it; {reason}")


def apply_preset(table: dict[str, Any]) -> dict[str, Any]:
    """Replace `method.preset` by the axes of that preset, under whatever axes the recipe sets itself."""
    method = table.get("method", {})
    if not isinstance(method, Mapping):
        return table  # build says what is wrong with it
    method = dict(method)
    preset = method.pop("preset", None)
    if preset is not None:
        if not isinstance(preset, str) or preset not in PRESETS:
            raise UserError(f"method.preset = {shown(preset)}: must be one of {', '.join(PRESETS)}")
        method = merge(to_plain(PRESETS[preset]), method)
    optimizer = table.get("optimizer", {})
    if isinstance(optimizer, Mapping) and "kind" not in optimizer and "optimizer" in method:
        optimizer = {"kind": method["optimizer"], **optimizer}
    return {**table, "method": method, "optimizer": optimizer}
