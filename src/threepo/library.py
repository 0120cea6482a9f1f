"""threepo from Python: train with Hugging Face objects and plain functions, and look into runs (docs/python.md).

    start = threepo.fine_tune("Qwen/Qwen2.5-0.5B", chats, folder="runs/start", run={"steps": 100})
    run = threepo.train(start, rows, reward, threepo.C3PO, folder="runs/first", run={"steps": 100})
    run.metrics.plot("step", "reward/mean")

The loop is the command line's. Objects are written into the run folder, from which the run reads them.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from threepo.config import Method, SFTConfig, TrainConfig
from threepo.config.presets import PRESETS
from threepo.config.recipes import Table, can_change, load, load_evaluation, load_resumed, merge, nested
from threepo.config.records import to_dict
from threepo.errors import Interrupted, UserError
from threepo.files import read_json
from threepo.inputs import SavedInputs
from threepo.progress import CALLBACK
from threepo.ranks.launch import join_world
from threepo.run_folder import COMPLETIONS, SUMMARY, by_step, model_folder, read_config, read_metrics, refuse_no_run
from threepo.user_code import FROM_PYTHON, functions_from_python

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from threepo.posterior.gaussian import Posterior

Config = TypeVar("Config", TrainConfig, SFTConfig)


class Run:
    """A run of `threepo.train`, `threepo.fine_tune` or their commands, read from its folder."""

    def __init__(self, folder: str | Path) -> None:
        """`UserError` if the folder holds no run."""
        self.folder = Path(folder).expanduser().absolute()
        refuse_no_run(self.folder)

    def __fspath__(self) -> str:
        return str(self.folder)

    def __repr__(self) -> str:
        return f"threepo.Run({str(self.folder)!r})"

    @property
    def config(self) -> dict[str, Any]:
        """The resolved configuration, by table."""
        refuse_no_run(self.folder)  # it may have moved since
        return read_config(self.folder)

    @property
    def metrics(self) -> "DataFrame":
        """A row per training step, with the columns of docs/metrics.md; step -1 is the evaluation before training."""
        from pandas import DataFrame

        refuse_no_run(self.folder)
        return DataFrame(read_metrics(self.folder))

    @property
    def summary(self) -> dict[str, Any]:
        """The run's result; so far, if it is not finished."""
        from threepo.lab.report import read_run

        file = self.folder / SUMMARY
        return read_json(file) if file.is_file() else read_run(self.folder).summary()

    def completions(self, step: int) -> "DataFrame":
        """Every rollout of a training step, with the columns of docs/metrics.md."""
        from pandas import read_parquet

        steps = by_step(self.folder / COMPLETIONS)
        if step not in steps:
            have = f"from {min(steps)} to {max(steps)}" if steps else "of none"
            raise UserError(f"completions({step}): {self.folder} has those of steps {have}")
        return read_parquet(steps[step])

    def plot(self) -> "Figure":
        """The training curves; `.savefig("curves.png")` writes them."""
        from threepo.lab.curves import curves
        from threepo.lab.report import read_run

        return curves([read_run(self.folder)])

    def policy(self, device: str = "cpu") -> tuple[Any, Any]:
        """The trained model (float32, `PreTrainedModel`, at the posterior's mean) and its tokenizer."""
        from threepo.config import ModelConfig
        from threepo.models.policy import load_policy

        policy = load_policy(ModelConfig(path=str(self.folder), device=device))
        return policy.model, policy.tokenizer

    def posterior(self) -> "Posterior":
        """The posterior over the trained model's weights; `UserError` if the run learned none."""
        from threepo.posterior.gaussian import Posterior

        return Posterior.from_pretrained(model_folder(self.folder))

    def evaluate(self, data: Any = None, reward: Any = None, **settings: Any) -> dict[str, Any]:
        """`threepo.evaluate` of the trained model; data and reward are the run's unless given."""
        return evaluate(self.folder, data, reward, **settings)


def train(
    model: Any = None,
    data: Any = None,
    reward: Any = None,
    method: Method | str | Mapping[str, Any] | None = None,
    *,
    heldout: Any = None,
    tokenizer: Any = None,
    recipe: str | Path = "",
    folder: str | Path = "",
    resume: str | Path | Run | None = None,
    callbacks: Sequence[Callable[[Mapping[str, Any]], object]] = (),
    **settings: Any,
) -> Run:
    """Train with reinforcement learning from verifiable rewards, as `threepo train` does. Returns the run.

    `model`: a Hugging Face directory, hub id or `Run`; or a transformers model, with its `tokenizer`.
    `data`, and `heldout` to evaluate on: what a recipe can name; a list of dictionaries; or a `datasets.Dataset`.
    `reward`: what a recipe can name, a function that is called as TRL calls reward functions, or a list of these.
    `method`: `threepo.C3PO` or another `Method`, or the name of a preset.
    `settings`: tables of a recipe, `optimizer={"lr": 1.0}`, or dotted keys, `**{"optimizer.lr": 1.0}`; they lie over
    `recipe`, a file or a shipped name.
    `callbacks` get each row of metrics.jsonl when it is written; once one returns True, the state is saved and `train`
    returns.
    `resume`: a run to go on with, with only `callbacks`, `reward`, `run={"steps": ...}` and `parallel={...}` besides.
    """
    name, functions = _reward(reward)
    if resume is not None:
        others = (model, data, method, heldout, tokenizer, recipe or None, folder or None)
        run, config = _to_resume(TrainConfig, resume, settings, others)
        unnamed = [one for one in config.reward.names if one.startswith(f"{FROM_PYTHON}:")]
        if name and not unnamed and [*config.reward.names] != ([name] if isinstance(name, str) else name):
            was = config.reward.function
            raise UserError(f"reward = {name!r}: the run's reward is {was!r}; leave it out, or give that one")
        if len(unnamed) == 1 and callable(reward):  # a lambda may have another name now
            functions = {unnamed[0]: reward}
        with functions_from_python(functions):
            return _run(config, callbacks, resumed=run)
    given, folder = _tables_and_folder(settings, folder)
    inputs = SavedInputs(folder)
    tables = inputs.tables(model, tokenizer, "data", {"train": data, "eval": heldout})
    tables |= {"reward": {"function": name}} if name else {}
    tables |= {"method": _method(method)} if method is not None else {}
    if "kind" in given.get("optimizer", {}) and isinstance(method, Method):
        tables["method"] = {key: value for key, value in tables["method"].items() if key != "optimizer"}
    config = _new_config(TrainConfig, recipe, merge(tables, given), {"data": ("data", "train")})
    with functions_from_python(functions):
        return _run(config, callbacks, inputs)


def fine_tune(
    model: Any = None,
    data: Any = None,
    *,
    heldout: Any = None,
    tokenizer: Any = None,
    recipe: str | Path = "",
    folder: str | Path = "",
    resume: str | Path | Run | None = None,
    callbacks: Sequence[Callable[[Mapping[str, Any]], object]] = (),
    **settings: Any,
) -> Run:
    """Warm start by imitating texts, in which IVON learns a posterior, as `threepo sft` does. Returns the run.

    `data`, and `heldout` to measure the loss on: conversations, given as the problems of `train` are given, with the
    columns of docs/sft.md. All other arguments are as in `train`; `resume` takes only `callbacks`,
    `run={"steps": ...}` and `parallel={...}` besides.
    """
    if resume is not None:
        others = (model, data, heldout, tokenizer, recipe or None, folder or None)
        run, fine_tuning = _to_resume(SFTConfig, resume, settings, others)
        return _run(fine_tuning, callbacks, resumed=run)
    given, folder = _tables_and_folder(settings, folder)
    inputs = SavedInputs(folder)
    tables = merge(inputs.tables(model, tokenizer, "conversations", {"source": data, "eval": heldout}), given)
    needed = {} if "demonstrations" in tables else {"data": ("conversations", "source")}
    return _run(_new_config(SFTConfig, recipe, tables, needed), callbacks, inputs)


def evaluate(
    model: Any,
    data: Any = None,
    reward: Any = None,
    *,
    tokenizer: Any = None,
    recipe: str | Path = "",
    folder: str | Path = "",
    **settings: Any,
) -> dict[str, Any]:
    """Score a model on held-out problems or benchmarks, as `threepo eval` does. Returns its summary.json.

    Arguments are as in `train`; `data` are the problems to evaluate on. Benchmarks: `benchmarks={"names": [...]}`.
    An evaluation in a folder that has one resumes, if reward and settings are the same. A function is the same while
    it, the functions that it names, and the numbers and texts that it reads are; if anything else differs, such as a
    list, take another folder.
    """
    from threepo import api
    from threepo.evaluation.records import default_folder

    inputs = SavedInputs(folder)
    name, functions = _reward(reward)
    tables = inputs.tables(model, tokenizer, "data", {"eval": data})
    tables |= {"reward": {"function": name}} if name else {}
    path = tables.get("model", {}).pop("path", "")
    config = load_evaluation(path, str(recipe), merge(tables, _tables(settings)))
    parallel = config.parallel
    with (
        functions_from_python(functions),
        join_world(parallel.timeout_s, parallel.offload) as world,
        inputs.written(world),
    ):
        output = Path(folder).expanduser() if folder else default_folder(config)
        return api.evaluate(config, output, world=world)


def _new_config(
    record: type[Config], recipe: str | Path, tables: Table, needed: Mapping[str, tuple[str, str]]
) -> Config:
    """The configuration of a new run. `needed`: arguments that only a recipe can replace, with their settings."""
    for argument, (table, key) in {"model": ("model", "path"), **needed}.items():
        if not recipe and not tables.get(table, {}).get(key):
            raise UserError(f"{argument} is missing: give it as an argument, or name a recipe that has it")
    config = load(record, str(recipe), tables)
    if not config.run.folder:
        raise UserError("folder is missing: name the folder of the run, such as folder='runs/first'")
    return config


def _to_resume(
    record: type[Config], resume: str | Path | Run, settings: Mapping[str, Any], others: Iterable[Any]
) -> tuple[Run, Config]:
    """The run to continue, and its configuration; `UserError` for what only a new run takes."""
    run = resume if isinstance(resume, Run) else Run(resume)
    changes = _tables(settings)
    if any(other is not None for other in others) or not can_change(changes):
        raise UserError(
            "resume takes callbacks, run={'steps': ...}, settings of the machine such as parallel={...} and, in "
            "`threepo.train`, reward; all else is "
            "the run's own (to change it, start a new run from its checkpoint: give the Run as the model)"
        )
    return run, load_resumed(record, run.folder, changes)


def _run(config: Config, callbacks: Any, inputs: SavedInputs | None = None, resumed: Run | None = None) -> Run:
    """Train until the run ends, or a callback ends it."""
    from threepo import api

    if not isinstance(callbacks, Sequence) or not all(map(callable, callbacks)):
        raise UserError(f"callbacks = {callbacks!r}: must be a list of functions; write callbacks=[function]")
    try:
        with join_world(config.parallel.timeout_s, config.parallel.offload) as world:
            api.train(config, resumed.folder if resumed else None, world, callbacks, inputs)
    except Interrupted as stop:
        if stop.signal_number != CALLBACK:
            raise
    return resumed or Run(config.run.folder)


def _tables_and_folder(settings: Mapping[str, Any], folder: str | Path) -> tuple[dict[str, Any], str | Path]:
    """The settings of a new run as tables, and its folder, which the argument or the settings may name."""
    tables = _tables(settings)
    folder = folder or tables.get("run", {}).get("folder", "")
    return merge(tables, {"run": {"folder": str(folder)}}) if folder else tables, folder


def _tables(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as tables, given as tables and as dotted keys, which win; your own functions and classes by name."""
    for name, value in settings.items():
        if "." not in name and not isinstance(value, Mapping):
            fix = "is no argument, nor a table of settings such as run={'steps': 100} (docs/configuration.md)"
            raise UserError(f"{name} = {value!r}: {fix}")
    tables = {name: value for name, value in settings.items() if "." not in name}
    tables = merge(tables, nested((name, value) for name, value in settings.items() if "." in name))
    return {name: _named(name, value) for name, value in tables.items()}


def _named(setting: str, value: Any) -> Any:
    """A setting, with the name of each function or class by which other processes, and a resumed run, import it."""
    if isinstance(value, Mapping):
        return {key: _named(f"{setting}.{key}", each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_named(setting, each) for each in value]
    if not callable(value):
        return value
    module, name = getattr(value, "__module__", "__main__"), getattr(value, "__qualname__", "")
    if module == "__main__" or not name:
        fix = "is not in a module, and other processes import it from one; move it into a file of its own"
        raise UserError(f"{setting} = {name or value!r}: {fix}")
    return f"{module}:{name}"


def _method(method: Method | str | Mapping[str, Any]) -> Mapping[str, Any]:
    """The table [method]; a method that is a preset brings what else belongs to it."""
    if isinstance(method, Method):
        known = method.name in PRESETS and PRESETS[method.name].method == method
        return to_dict(method) | {"preset": method.name if known else ""}
    if not isinstance(method, str | Mapping):
        raise UserError(f"method = {method!r}: must be a Method such as threepo.C3PO, or the name of a preset")
    return {"preset": method} if isinstance(method, str) else method


def _reward(reward: Any) -> tuple[str | list[str], dict[str, Callable[..., Any]]]:
    """The name of a reward, or of each in a list; with the functions that no name can import."""
    if reward is None:
        return "", {}
    several = isinstance(reward, list | tuple)
    names: list[str] = []
    functions: dict[str, Callable[..., Any]] = {}
    for one in reward if several else [reward]:
        name = first = _reward_name(one)
        if name.startswith(FROM_PYTHON) and not isinstance(one, str):
            numbers = count(2)
            while functions.get(name, one) is not one:  # another lambda
                name = f"{first}-{next(numbers)}"
            functions[name] = one
        names.append(name)
    return names if several else names[0], functions


def _reward_name(reward: Any) -> str:
    """The name of a reward as a recipe has it, or one that begins with `FROM_PYTHON`."""
    if isinstance(reward, str):
        return reward
    if not callable(reward):
        raise UserError(f"reward = {reward!r}: must be a name, 'module:function', or a function")
    module, name = getattr(reward, "__module__", ""), getattr(reward, "__qualname__", type(reward).__name__)
    can_import = module != "__main__" and getattr(sys.modules.get(module), name, None) is reward
    return f"{module if can_import else FROM_PYTHON}:{name}"
