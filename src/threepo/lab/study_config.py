"""A study: methods x seeds x settings from one TOML file, resolved to runs before the first of them starts.

docs/studies.md says what a study is, and what it assumes.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from threepo.config import EvalConfig, SFTConfig, TrainConfig
from threepo.config.recipes import (
    RUNS,
    STUDIES,
    find_recipe,
    load,
    merge,
    parse_overrides,
    read_toml,
    recipes_folder,
    what_matters,
)
from threepo.config.records import Count, CountOrZero, Settings, build, first_difference, must, require, to_dict
from threepo.errors import UserError
from threepo.evaluation.scores import metric_names

Overrides = tuple[str, ...]
Seeds = Annotated[tuple[CountOrZero, ...], must(lambda seeds: len(set(seeds)) == len(seeds) > 0, "must all differ")]
_NAME = r"[A-Za-z0-9][\w.-]*"
_OWN = ("run.seed", "run.folder", "run.threads")
"""Settings that the study makes itself."""
_POLICY = ("path", "tokenizer", "tiny")
"""Settings of [model] that name the policy; the others say how it is computed."""


class StudyConfig(Settings, table="study"):
    """[study]: the comparison, its seeds, and the number of concurrent runs."""

    folder: Annotated[str, AfterValidator(os.path.expanduser)] = ""
    """Folder of the study; empty: runs/studies/ followed by its name."""
    baseline: str
    """Method that the others are compared with."""
    seeds: Annotated[Seeds, must(lambda seeds: len(seeds) > 1, "name two or more")]
    """Seeds that are reported."""
    metric: str = "eval/pass_at_1"
    """Metric to compare, after the last step."""
    curve: str = "reward/mean"
    """Metric whose curve is compared."""
    smoothing: Count = 10
    """Values in the curve's running mean; half of the curve at most."""
    target: float | str = "baseline"
    """Value for the smoothed curve to reach: a number, or "baseline", its last mean over the baseline's seeds."""
    jobs: CountOrZero = 0
    """Runs at once; 0: one per GPU, or per `threads` cores without a GPU."""
    threads: Annotated[Count, Field(le=1024)] = 1
    """CPU threads of each run, on which results depend."""
    settings: Overrides = ()
    """Overrides for every run of a method."""

    def refuse_unmeasured(self, method: str, evaluations: EvalConfig) -> None:
        """`UserError` if the metric comes from evaluations, and these evaluations of a method do not measure it."""
        if "pass_at" not in self.metric and not self.metric.startswith("eval/"):
            return
        fix = f"methods.{method}: study.metric = {self.metric!r} is measured by evaluations; set it above 0"
        evaluations.check("every", evaluations.every > 0, fix)
        names = metric_names(evaluations.samples)
        fix = f"not measured with eval.samples = {evaluations.samples}; write one of {', '.join(names)}"
        self.check("metric", self.metric in names, fix)


class StartConfig(Settings, table="start"):
    """[start]: a warm start (`threepo sft`) made first: model.path of every run, `{start}` in their settings."""

    recipe: str = ""
    """A path, from the study's folder or from here, or a shipped recipe's name."""
    settings: Overrides = ()
    """Overrides of it."""
    per_seed: bool = False
    """Each seed has a separate warm start."""


class TuningConfig(Settings, table="tuning"):
    """[tuning]: chooses a point of every method's grid, by the metric on seeds that are not reported."""

    seeds: Seeds
    """Seeds of these runs, none of them reported."""
    trials: Count
    """Points of every grid."""
    settings: Overrides = ()
    """More overrides, such as fewer steps."""


class VariantConfig(Settings, table="variants"):
    """[variants.NAME]: a setting in which all methods are compared with one another; without any, there is one."""

    settings: Overrides = ()
    """Overrides for all methods; a method's own override these."""
    start_settings: Overrides = ()
    """Overrides of the warm start; they override the keys of [start]."""


class StudyMethod(Settings, table="methods"):
    """[methods.NAME]: a method, or any other set of settings to compare."""

    recipe: str = ""
    """Recipe, as in [start]; empty: settings alone."""
    settings: Overrides = ()
    """Overrides of it."""
    grid: tuple[Overrides, ...] = ()
    """Points for [tuning], each a list of overrides; empty: not tuned."""


class StudyTables(Settings, table=""):
    """`threepo study`: the tables of a study."""

    study: StudyConfig
    methods: Mapping[str, StudyMethod]
    start: StartConfig | None = None
    tuning: TuningConfig | None = None
    variants: Mapping[str, VariantConfig] = field(default_factory=dict)

    def __post_init__(self) -> None:
        study, tuning = self.study, self.tuning
        for name in (*self.methods, *self.variants):
            require(bool(re.fullmatch(_NAME, name)), "a name", name, "names a folder, too: use letters, digits, . _ -")
        study.check("baseline", study.baseline in self.methods, f"must be one of {', '.join(self.methods)}")
        numeric = not isinstance(study.target, str)
        study.check("target", numeric or study.target == "baseline", "must be a number, or 'baseline'")
        for name, method in self.methods.items():
            fix = "there is no [tuning]; write what you have chosen into settings"
            require(tuning is not None or not method.grid, f"methods.{name}.grid", method.grid, fix)
            budget, points = (tuning.trials if tuning else 0), len(set(method.grid))
            fix = f"has {points} different points; tuning.trials = {budget} is the budget of every method"
            require(points == len(method.grid) in (0, budget), f"methods.{name}.grid", method.grid, fix)
        if tuning:
            both = sorted(set(tuning.seeds) & set(study.seeds))
            tuning.check("seeds", not both, f"{both} are reported, so nothing may be chosen on them; take other seeds")
            tuning.check("trials", any(method.grid for method in self.methods.values()), "no method has a grid")
        for name, variant in self.variants.items():
            own, fix = variant.start_settings, "there is no [start] to change; write the table [start]"
            require(self.start is not None or not own, f"variants.{name}.start_settings", own, fix)


@dataclass(frozen=True)
class StudyRun:
    """One run of a study. Its log, which the process that trains has locked, lies next to its folder."""

    name: str
    """Folder of the run, relative to the study's folder."""
    folder: Path
    kind: str
    """The command that makes it: `train` or `sft`; the demonstration's probe is one, too."""
    recipe: str
    settings: Overrides
    seed: int = 0
    start: "StudyRun | None" = None
    """The warm start that has to be finished before."""

    @property
    def log(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.log")

    @property
    def command(self) -> list[str]:
        """Arguments after `threepo` that begin the run."""
        return [self.kind, *([self.recipe] if self.recipe else []), *self.settings]

    def config(self) -> Any:
        """The resolved configuration."""
        record: Any = TrainConfig if self.kind == "train" else SFTConfig
        return load(record, self.recipe, self.settings)


@dataclass(frozen=True)
class Cell:
    """A method in a variant."""

    variant: str
    """Empty: the study has no variants."""
    method: str

    @property
    def name(self) -> str:
        return f"{self.variant}/{self.method}".lstrip("/")


@dataclass(frozen=True)
class Study:
    """A study with all that its file says, and the runs that follow from it."""

    name: str
    file: Path
    tables: StudyTables

    @property
    def folder(self) -> Path:
        return Path(self.tables.study.folder or RUNS / STUDIES / self.name).absolute()

    @property
    def variants(self) -> Mapping[str, VariantConfig]:
        """The settings in which methods are compared, by name; a study without any has one without a name."""
        return self.tables.variants or {"": VariantConfig()}

    @cached_property
    def cells(self) -> list[Cell]:
        """Every method in every variant."""
        return [Cell(variant, method) for variant in self.variants for method in self.tables.methods]

    def starts(self) -> list[StudyRun]:
        """The warm starts, each once."""
        seeds = (*self.tables.study.seeds, *(self.tables.tuning.seeds if self.tables.tuning else ()))
        starts = [self._start(variant, seed) for seed in seeds for variant in self.variants]
        return list({start.name: start for start in starts if start}.values())

    def tuned(self) -> list[Cell]:
        """The cells whose grids are tried."""
        return [cell for cell in self.cells if self.tables.methods[cell.method].grid]

    def tuning(self, cell: Cell) -> list[list[StudyRun]]:
        """The runs among which a cell's point is chosen, by point."""
        tuning = self.tables.tuning
        assert tuning is not None
        more, grid = tuning.settings, self.tables.methods[cell.method].grid
        return [
            [self._run(cell, (*point, *more), seed, f"tuning/{cell.name}/point-{index}") for seed in tuning.seeds]
            for index, point in enumerate(grid)
        ]

    def reported(self, cell: Cell, point: Overrides) -> list[StudyRun]:
        """The runs of a cell that are reported, by seed."""
        return [self._run(cell, point, seed, f"runs/{cell.name}") for seed in self.tables.study.seeds]

    def _start(self, variant: str, seed: int) -> StudyRun | None:
        """The warm start of a variant's runs with this seed."""
        start = self.tables.start
        if not start:
            return None
        own = self.variants[variant].start_settings
        name, settings = f"start/{variant}" if own else "start", (*start.settings, *own)
        recipe = self._recipe(start.recipe)
        _refuse_own(name, settings)
        if start.per_seed:
            name, settings = f"{name}/seed-{seed}", _with_seed(SFTConfig, recipe, settings, seed)
        return StudyRun(name, self.folder / name, "sft", recipe, (*settings, *self._placement(name)), seed)

    def _run(self, cell: Cell, point: Overrides, seed: int, place: str) -> StudyRun:
        """A run of a cell at a point of its grid, in the folder PLACE/seed-SEED of the study."""
        method, start = self.tables.methods[cell.method], self._start(cell.variant, seed)
        name, recipe = f"{place}/seed-{seed}", self._recipe(method.recipe)
        settings = (*self.tables.study.settings, *self.variants[cell.variant].settings, *method.settings, *point)
        _refuse_own(f"methods.{cell.method}", settings, "model.path" if start else "")
        if start:
            settings = (*settings, "model.path={start}")
            settings = tuple(each.replace("{start}", str(start.folder)) for each in settings)
        settings = (*_with_seed(TrainConfig, recipe, settings, seed), *self._placement(name))
        return StudyRun(name, self.folder / name, "train", recipe, settings, seed, start)

    def _placement(self, name: str) -> Overrides:
        return f"run.threads={self.tables.study.threads}", f"run.folder={self.folder / name}"

    def _recipe(self, name: str) -> str:
        """A recipe's file, looked for in the folder of the study first; "" for none."""
        if not name:
            return ""
        neighbour = self.file.parent / name
        return str((neighbour if neighbour.is_file() else find_recipe(name)).absolute())

    def check(self) -> None:
        """`UserError` for anything that can be refused before the first run starts."""
        for start in self.starts():
            start.config()
        for variant in self.variants:
            self._refuse_unlike_methods(variant)

    def _refuse_unlike_methods(self, variant: str) -> None:
        """`UserError` if methods differ in more than how they train, or do not measure what is compared."""
        study, shared = self.tables.study, None
        for method in dict.fromkeys([study.baseline, *self.tables.methods]):
            cell = Cell(variant, method)
            for runs in self.tuning(cell) if cell in self.tuned() else ():
                study.refuse_unmeasured(method, runs[0].config().eval)  # other seeds differ in nothing that is compared
            for point in self.tables.methods[method].grid or ((),):
                config = self._run(cell, point, study.seeds[0], f"runs/{cell.name}").config()
                study.refuse_unmeasured(method, config.eval)
                enough = 2 * study.smoothing <= config.run.steps or study.curve.startswith("eval/")
                study.check("smoothing", enough, f"must be half of run.steps = {config.run.steps} at most")
                shared = shared or _shared_settings(config)
                if difference := first_difference(shared, _shared_settings(config)):
                    fix = "methods are compared on the same model, problems and reward, examined in the same way"
                    raise UserError(f"methods.{method} differs from {study.baseline}: {difference}; {fix}")


def _shared_settings(config: Any) -> dict[str, Any]:
    """The settings of a run that must be equal for all methods."""
    settings = to_dict(config)
    longest = config.eval.max_new_tokens or config.sampling.max_new_tokens
    return {
        "data": settings["data"],
        "reward": settings["reward"],
        "environment": what_matters({"environment": settings["environment"]})["environment"],
        "model": {key: settings["model"][key] for key in _POLICY},
        "eval": settings["eval"] | {"every": 0, "max_new_tokens": longest},
    }


def _refuse_own(where: str, settings: Overrides, besides: str = "") -> None:
    """`UserError` for settings that the study makes itself."""
    for text in settings:
        key = text.partition("=")[0].strip()
        require(key not in (*_OWN, besides), f"{where}: {key}", text, "is set by the study itself; leave it out")


def _with_seed(record: Any, recipe: str, settings: Overrides, seed: int) -> Overrides:
    """The settings with everything random moved on by `seed`; 0 leaves the order of data that the recipe has."""
    config: Any = load(record, recipe, settings)
    table = next(key for key in ("data", "demonstrations", "conversations") if getattr(config, key, None))
    return (*settings, f"run.seed={seed}", f"{table}.seed={getattr(config, table).seed + seed}")


def load_study(name: str, overrides: Sequence[str] = ()) -> Study:
    """Read a study: a TOML file, or the name of a shipped one; overrides are settings such as study.jobs=2."""
    shipped = sorted(path.stem for path in (recipes_folder() / STUDIES).glob("*.toml"))
    file = Path(name) if Path(name).is_file() else recipes_folder() / STUDIES / f"{name}.toml"
    if not file.is_file():
        raise UserError(f"study {name}: no such file and no shipped study of that name; shipped: {', '.join(shipped)}")
    table = merge(read_toml(file), parse_overrides(overrides))
    fix = "is for recipes; a study has a table [methods.NAME] for each method"
    require("method" not in table, "[method]", "...", fix)
    study = Study(file.stem, file.absolute(), build(StudyTables, table))
    study.check()
    return study
