"""Recipes and command-line overrides, read as checked records.

A recipe is a TOML file; `extends` names another one underneath it, `method.preset` a named method, and overrides
(`table.key=value`) lie on top. Nothing heavy is imported, so a mistake is reported at once.
"""

import dataclasses
import difflib
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from threepo.config import WARM_START_SCHEDULE, EvaluationConfig, ModelConfig, SFTConfig, TrainConfig
from threepo.config.optimizers import OPTIMIZERS
from threepo.config.presets import PRESETS
from threepo.config.records import BASES, build, flat, is_own, require, to_dict
from threepo.errors import UserError
from threepo.run_folder import CHECKPOINTS, CONFIG, read_config, refuse_no_run

Table = dict[str, Any]
Overrides = Sequence[str] | Mapping[str, Any]
"""Texts as on the command line, or a table."""
Config = TypeVar("Config", TrainConfig, SFTConfig, EvaluationConfig)

RUNS = Path("runs")
"""Folder of the runs whose recipes name no folder."""
STUDIES = "studies"
"""The folder of the studies, among the recipes and among the runs."""
_BENCHMARKS = "benchmarks"
"""Stands in data.train for problems that nothing reads."""
_READ_BY_EVALUATION = {"run": ("seed", "threads"), "sampling": ("max_new_tokens",)}
_NOT_FOR_EVALUATION = {
    "model.path": "the model is the command's first argument",
    "eval.every": "it belongs to training",
    "data.prompts_per_step": "it belongs to training; eval.problems says how many problems there are",
    "data.max_prompt_tokens": "it belongs to training; a score leaves no problem out",
}
_VLLM = (
    *("servers", "weights_folder", "replicas", "gpus", "tensor_parallel", "gpu_memory_utilization"),
    *("kv_cache_memory_bytes", "sleep", "max_model_len", "timeout_s", "check_tolerance", "adapters"),
)
_CHANGEABLE = (
    *("parallel.", "batching.", "model.gradient_checkpointing", "model.device", "run.threads"),
    *("engine.memory_gib", "engine.max_batch_rows", "environment.max_failed_share", "environment.workers"),
    *("reward.sandbox.url", "reward.sandbox.workers"),
    *(f"engine.vllm.{key}" for key in _VLLM),
)
"""Beginnings of the settings that a resumed run may change: where it runs, in how much memory, and what ends it."""


def what_matters(settings: Mapping[str, Any], table: str = "") -> dict[str, Any]:
    """The settings without those that a resumed run may change."""
    kept = {key: value for key, value in settings.items() if not f"{table}{key}".startswith(_CHANGEABLE)}
    return {k: what_matters(v, f"{table}{k}.") if isinstance(v, Mapping) else v for k, v in kept.items()}


def read_toml(path: Path, below: tuple[Path, ...] = ()) -> Table:
    """The raw tables of a recipe, laid over the recipe that it `extends` (a path relative to it)."""
    path = path.resolve()
    if path in below:
        raise UserError(f"recipe {path}: extends itself, by way of {' -> '.join(p.name for p in (*below, path))}")
    if not path.is_file():
        raise UserError(f"recipe {path}: no such file; `threepo train --list` names the recipes that come with threepo")
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"recipe {path}: not valid TOML: {error}") from error
    base = table.pop("extends", "")
    require(isinstance(base, str), f"recipe {path}: extends", base, "must be the path of another recipe, as text")
    if not base:
        return table
    under = read_toml(path.parent / base, (*below, path))
    warm_start = (under.keys() | table.keys()) & {"demonstrations", "conversations"}
    return lay_over(SFTConfig if warm_start else TrainConfig, under, table)


RATES = ("lr", "step_size")
"""Keys of IVON of which one sets the learning rate."""


def merge(base: Mapping[str, Any], top: Mapping[str, Any]) -> Table:
    """`base` with the values of `top` laid over it, table by table.

    Where `top` names another kind, only the keys that all kinds share stay: AdamW's lr says nothing about IVON's.
    One of `RATES` in `top` takes the other away.
    """
    merged = dict(base)
    for key, value in top.items():
        below = merged.get(key)
        if not isinstance(below, Mapping) or not isinstance(value, Mapping):
            merged[key] = value
            continue
        by = BASES[key]._by if key in BASES else ""
        if by in below and by in value and below[by] != value[by]:
            below = _shared(key, below)
        merged[key] = merge(below, value)
    for one, other in (RATES, RATES[::-1]):
        if top.get(one) and other in base and other not in top:
            del merged[other]
    return merged


def _shared(table: str, settings: Mapping[str, Any]) -> Table:
    """The settings of a table that all of its kinds have."""
    names = {f.name for f in dataclasses.fields(BASES[table])}
    return {name: value for name, value in settings.items() if name in names}


def parse_overrides(texts: Sequence[str]) -> Table:
    """All overrides as one table, in any order; later overrides win. A value that is not valid TOML is text."""
    pairs = []
    for text in texts:
        name, equals, value = text.partition("=")
        keys = name.strip().split(".")
        if not equals or len(keys) < 2 or not all(keys):
            raise UserError(f"override {text!r}: write section.key=value, for example run.steps=200")
        try:
            given = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            given = value.strip()
        pairs.append((name.strip(), given))
    return nested(pairs)


def nested(pairs: Iterable[tuple[str, Any]]) -> Table:
    """Values by dotted keys as one table, in any order; later ones win."""
    table: Table = {}
    for name, value in pairs:
        here = table
        *tables, key = name.split(".")
        for part in tables:
            if not isinstance(here.get(part), dict):
                here[part] = {}
            here = here[part]
        here[key] = value
    return table


def _table(overrides: Overrides) -> Table:
    return dict(overrides) if isinstance(overrides, Mapping) else parse_overrides(overrides)


@cache
def recipes_folder() -> Path:
    """Folder of the shipped recipes: inside the installed package, or at the top of a source checkout."""
    installed = Path(str(resources.files("threepo"))) / "recipes"
    return installed if installed.is_dir() else Path(__file__).resolve().parents[3] / "recipes"


def shipped_recipes() -> list[str]:
    """Names of the shipped recipes, as `load` takes them; a name that begins with _ is only there to be extended."""
    folder = recipes_folder()
    paths = [path.relative_to(folder) for path in folder.rglob("*.toml") if not path.name.startswith("_")]
    return sorted(str(path.with_suffix("")) for path in paths if path.parts[0] != STUDIES)


def find_recipe(name: str) -> Path:
    """The file of a recipe, given as a path or as the name of a shipped one such as `demo/c3po`."""
    for path in (Path(name), recipes_folder() / f"{name}.toml"):
        if path.is_file():
            return path
    if (Path(name) / CONFIG).is_file():
        raise UserError(f"recipe {name}: is a run folder; continue the run with --resume {name}")
    files = map(str, Path(name).parent.glob("*.toml"))
    near = difflib.get_close_matches(str(Path(name)), [*files, *shipped_recipes()], 1)
    hint = f"did you mean {near[0]}?" if near else f"shipped recipes: {', '.join(shipped_recipes())}"
    raise UserError(f"recipe {name}: no such file and no shipped recipe of that name; {hint}")


def load(record: type[Config], recipe: str, overrides: Overrides = ()) -> Config:
    """Read `recipe` (a path, a shipped name, or "" for none) with overrides as a record of this type."""
    path = find_recipe(recipe) if recipe else None
    table = read_toml(path) if path else {}
    if record is TrainConfig and table.keys() & {"demonstrations", "conversations"}:
        raise UserError(f"recipe {recipe}: is a warm start; `threepo sft` takes it, with these arguments")
    if record is SFTConfig and "data" in table:
        raise UserError(f"recipe {recipe}: is reinforcement learning; `threepo train` takes it, with these arguments")
    # Tables that must be there lie underneath, so that an error names the key that is missing in them.
    table = lay_over(record, {"model": {}, **table}, _table(overrides))
    if isinstance(given := table.get("optimizer"), Mapping) and all(given.get(name) for name in RATES):
        fix = f"optimizer.step_size = {given['step_size']} sets the learning rate, too; remove one of the two"
        require(False, "optimizer.lr", given["lr"], fix)
    if record is TrainConfig:
        table = with_preset({"data": {}, **table})
    if record is SFTConfig:
        table = merge({"schedule": WARM_START_SCHEDULE}, table)
    if path:
        shipped, file = recipes_folder().resolve(), path.resolve()
        name = file.relative_to(shipped) if file.is_relative_to(shipped) else Path(file.name)
        table = merge({"run": {"folder": str(RUNS / name.with_suffix(""))}}, table)
    return build(record, table)


def lay_over(record: type[Any], table: Table, top: Table) -> Table:
    """Merge overrides over a recipe for a record. A table whose kind they change keeps only what both kinds have."""
    before, after = _kinds(record, table), _kinds(record, merge(table, top))
    below = dict(table)
    for name, kind in before.items():
        if kind != after[name] and isinstance(table.get(name), Mapping):
            below[name] = _shared(name, table[name])
    return merge(below, top)


def _kinds(record: type[Any], table: Table) -> dict[str, Any]:
    """The kind of each table that has one: what the table says, else the method's preset, else the default."""
    said = {name: value for name, value in table.items() if isinstance(value, Mapping)}
    method = said.get("method", {}) if record is TrainConfig else {}
    preset = PRESETS.get(str(method.get("preset")))
    implied = dict(preset.tables) if preset else {}
    optimizer = preset.method.optimizer if preset else method.get("optimizer", "")
    implied["optimizer"] = {"kind": optimizer} if optimizer else {}
    kinds = {}
    for each in dataclasses.fields(record):
        if each.name in BASES and each.default_factory is not dataclasses.MISSING:
            by = BASES[each.name]._by
            settings = {**implied.get(each.name, {}), **said.get(each.name, {})}
            kinds[each.name] = settings.get(by, getattr(each.default_factory(), by))
    return kinds


def with_preset(table: Table) -> Table:
    """The tables with `method.preset` replaced by what it stands for, under what the recipe sets itself."""
    method, optimizer = table.get("method", {}), table.get("optimizer", {})
    if not isinstance(method, Mapping) or not isinstance(optimizer, Mapping):
        return table  # `build` says what is wrong with it
    method = dict(method)
    if name := method.pop("preset", None):
        if not (isinstance(name, str) and name in PRESETS):
            near = difflib.get_close_matches(str(name).lower(), PRESETS, 1)
            fix = f"did you mean {near[0]}?" if near else f"must be one of {', '.join(PRESETS)}"
            require(False, "method.preset", name, fix)
        preset = PRESETS[name]
        kind, own = optimizer.get("kind"), preset.method.optimizer
        fix = f"method.preset = {name!r} is trained by {own}; set optimizer.kind = {own!r}, or choose axes of [method]"
        for key, said in (("optimizer.kind", kind), ("method.optimizer", method.get("optimizer"))):
            require(said in (None, own) or not _trains(said), key, said, fix)
        method = merge(to_dict(preset.method), method)
        table = merge(preset.tables, table)
    kind = optimizer.get("kind", method.get("optimizer", "adamw"))
    same = {"optimizer": kind} if _trains(kind) else {}
    return {**table, "method": {**same, **method}, "optimizer": {"kind": kind, **table.get("optimizer", {})}}


def _trains(kind: Any) -> bool:
    """True if optimizer.kind can be this; if not, `build` says so."""
    return is_own(kind) or kind in list(OPTIMIZERS)


def model_to_come(model: ModelConfig) -> ModelConfig:
    """The model; if a run of a shipped recipe has yet to make it, the model that this run starts from."""
    path = Path(model.path)
    name = str(path.relative_to(RUNS)) if path.is_relative_to(RUNS) else ""
    if path.exists() or name not in shipped_recipes():
        return model
    return model_to_come(build(ModelConfig, read_toml(find_recipe(name))["model"], "model"))


def can_change(changes: Mapping[str, Any]) -> bool:
    """True if a resumed run may get other values of all these settings: its length, and where it runs."""
    return all(name in ("run.steps", "model.path") or name.startswith(_CHANGEABLE) for name, _ in flat(changes))


def load_resumed(record: type[Config], run: Path, changes: Mapping[str, Any] | None = None) -> Config:
    """The recorded configuration of a run to continue, with `changes`, which `can_change` allows."""
    refuse_no_run(run)
    config, trains = read_config(run), record is TrainConfig
    if ("conversations" if trains else "method") in config:
        made_by = "`threepo sft`, or `threepo.fine_tune`" if trains else "`threepo train`, or `threepo.train`"
        raise UserError(f"run folder {run}: is a run of {made_by}; resume it with that")
    try:
        recorded = build(record, config)
    except UserError as error:
        fix = "restore it from a copy, or use the threepo, and the code of yours, that made it"
        raise UserError(f"{run / CONFIG}: {error}; {fix}") from error
    changes = changes or {}
    if "path" in changes.get("model", {}) and not config["model"].get("lora", {}).get("rank"):
        raise UserError("--resume with model.path is for adapters whose model has moved; this run has its own weights")
    if changes.get("run", {}).get("steps") and config.get("conversations"):
        config = merge(config, {"conversations": {"epochs": 0}})  # which gave the length until now
    return build(record, merge(config, changes)) if changes else recorded


def load_evaluation(
    model: str, recipe: str, overrides: Overrides, benchmarks: Mapping[str, Any] | None = None
) -> EvaluationConfig:
    """Settings for evaluating `model`: the recipe's, or the run's if `model` is a run folder, and overrides on top.

    Training leaves an evaluation all tables that it knows but [noise]; benchmarks take only [model] and [engine].
    """
    table: Table = {}
    if recipe:
        table = read_toml(find_recipe(recipe))
    elif ((run := Path(model).expanduser()) / CONFIG).is_file() and (run / CHECKPOINTS).is_dir():
        table = merge(read_config(run), {"model": {"tokenizer": ""}})  # the checkpoint has its own
    given = merge(_table(overrides), {"benchmarks": benchmarks} if benchmarks else {})
    _refuse_unread(given)
    read = {f.name for f in dataclasses.fields(EvaluationConfig)}
    if table.keys() & {"optimizer", "method"}:
        read.remove("noise")  # with which a training begins; a checkpoint has its own, as training left it
    if given.get("benchmarks", {}).get("names") and "benchmarks" not in table:
        read = {"model", "engine", "parallel"}
    table = {name: value for name, value in table.items() if name in read}
    table = lay_over(EvaluationConfig, merge(table, {"model": {"path": model}}), given)
    if not all(isinstance(value, Mapping) for value in table.values()):
        return build(EvaluationConfig, {"data": {"train": _BENCHMARKS}, **table})  # which says so
    if table.get("benchmarks", {}).get("names"):
        table = _as_in_the_paper(table)
    return build(EvaluationConfig, {**table, "data": _problems(table, given.get("data", {}))})


def _problems(table: Table, given: Mapping[str, Any]) -> Table:
    """[data] of an evaluation. Problems that `given` names as data.train replace the run's, also the held-out ones."""
    data, chooses = table.get("data", {}), table.get("eval", {}).get("best_draws")
    if chooses and data.get("train", _BENCHMARKS) == _BENCHMARKS:
        raise UserError("data.train is missing: eval.best_draws are chosen on training problems; name some")
    if "train" in given and not chooses:
        data = {k: v for k, v in data.items() if k in given or k not in ("eval", "max_prompt_tokens")}
    if not data.get("train"):
        missing = "benchmarks.names" if table.get("benchmarks") else "data.eval"
        if not data.get("eval"):
            raise UserError(f"{missing} is missing: name held-out problems, benchmarks, or a task in data.train")
        data = {**data, "train": data["eval"]}
    return dict(data)


def _as_in_the_paper(table: Table) -> Table:
    """An evaluation on benchmarks: [data] only says how prompts are made, and completions may be long."""
    data, evaluation = table.get("data", {}), table.get("eval", {})
    read = {"system_prompt", "chat_template", "too_long", "broken_rows"}
    if evaluation.get("best_draws"):  # they are chosen on problems of data.train
        read |= {"train", "levels", "seed", "prompt_column", "answer_column", "tests_column", "prompt_template"}
    unread = [f"data.{key}" for key in data if key not in read]
    unread += ["eval.problems"] if "problems" in evaluation else []
    if unread:
        raise UserError(f"{unread[0]}: is not read with benchmarks, which bring their own; see [benchmarks]")
    if "max_new_tokens" not in {*evaluation, *table.get("sampling", {})}:
        evaluation = {**evaluation, "max_new_tokens": 3072}  # as in the released code
    return {**table, "data": {"train": _BENCHMARKS, **data}, "eval": evaluation}


def _refuse_unread(given: Mapping[str, Any]) -> None:
    """`UserError` for an override that an evaluation would ignore."""
    for name, value in flat(given):
        table, _, key = name.partition(".")
        read = _READ_BY_EVALUATION.get(table, (key,))
        require(key in read, name, value, f"`threepo eval` reads only {' and '.join(read)} of [{table}]")
        reason = _NOT_FOR_EVALUATION.get(name, "")
        require(not reason, name, value, f"`threepo eval` does not read it; {reason}")
