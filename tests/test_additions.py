"""Everything that can be added is added to a copy of the package and used, by the files that CONTRIBUTING.md names."""

import importlib
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import threepo
from programs import run_program
from runs import RLVR, TINY, outcome, resume
from threepo import api
from threepo.config import TrainConfig
from threepo.config.recipes import load
from threepo.config.records import build, to_dict
from threepo.errors import UserError
from threepo.run_folder import checkpoints, model_folder, read_metrics

SOURCE = Path(threepo.__file__).parent
PAGE = Path(__file__).parents[1] / "CONTRIBUTING.md"
OWN = {
    "posterior/sign_sgd.py": """
from threepo.posterior.point_optimizers import PointSGD


class SignSGD(PointSGD):
    def step(self, closure=None, *, divisor=None):
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            p.grad.sign_()
        return super().step(closure, divisor=divisor)
""",
    "rollout/counting.py": """
from threepo.rollout.local import LocalEngine


class CountingEngine(LocalEngine):
    generated = 0

    def generate(self, requests, sampling, seed):
        CountingEngine.generated += len(requests)
        return super().generate(requests, sampling, seed)
""",
    "rewards/brevity.py": """
from threepo.types import Verdict


def grade(completions):
    return [Verdict(correct=(n := len(c.text)) % 2 == 0, status="right", answer=c.text, reward=-float(n)) for c in
            completions]
""",
    "objectives/squared.py": """
from threepo.objectives.token_losses import TokenLoss

SQUARED = TokenLoss(lambda inputs, settings: -settings.strength * inputs.advantages * inputs.ratio().square())
""",
    "methods/sign_credit.py": """
from threepo.methods.credit import Rule

SIGN = Rule(lambda rewards, settings: (rewards - rewards.mean(dim=-1, keepdim=True)).sign())
""",
    "plugins/csv_tracker.py": """
import csv


class CSV:
    id = ""

    def __init__(self, folder, config, known, first_step):
        self._path = folder / "metrics.csv"

    def log(self, step, metrics):
        with open(self._path, "a", newline="") as file:
            csv.writer(file).writerow([step, len(metrics)])

    def finish(self, summary):
        pass
""",
}
"""Files of their own, which the additions to tables below name."""


def before(anchor: str, text: str) -> tuple[str, str]:
    """The edit that puts a text before another, which stands once in the file."""
    return anchor, text + anchor


def after(anchor: str, text: str) -> tuple[str, str]:
    """The edit that puts a text after another, which stands once in the file."""
    return anchor, anchor + text


ADDITIONS: dict[str, dict[str, list[tuple[str, str]]]] = {
    "an optimizer": {
        "posterior/sign_sgd.py": [],
        "training/optimizers.py": [
            before(
                "\n\ndef build_optimizer(",
                """

def build_sign(settings, model, groups, seed):
    from threepo.posterior.sign_sgd import SignSGD

    return SignSGD(groups, seed=seed, model=model, lr=settings.lr)
""",
            )
        ],
        "config/optimizers.py": [
            before(
                "AnyOptimizer = ",
                '''class SignConfig(OptimizerConfig):
    """The sign of the gradient."""

    kind: Literal["sign"] = "sign"
    lr: Positive = 1e-4
    """Learning rate."""

    code = "threepo.training.optimizers:build_sign"


''',
            ),
            after("AnyOptimizer = Annotated[", "SignConfig | "),
        ],
    },
    "an engine": {
        "rollout/counting.py": [],
        "config/engine.py": [
            before(
                "AnyEngine = ",
                '''class CountingEngineConfig(LocalEngineConfig):
    """The local engine, which counts."""

    kind: Literal["counting"] = "counting"
    code = "threepo.rollout.counting:CountingEngine"


''',
            ),
            after("AnyEngine = Annotated[", "CountingEngineConfig | "),
        ],
    },
    "a grader": {
        "rewards/brevity.py": [],
        "rewards/grading.py": [
            before("from threepo.rewards.code import", "from threepo.rewards import brevity\n"),
            after("\nGRADERS = {", '"brevity": GraderKind(lambda *_: brevity.grade), '),
        ],
    },
    "a task": {
        "data/tasks.py": [
            before(
                "TASKS: dict[str, Task]",
                """class Doubling(Task):
    name, default_levels, min_level = "doubling", (2,), 1

    def generate(self, rng, level):
        word = "".join(rng.choices("abcdef", k=level + 3))
        return word, word + word

    def work(self, prompt):
        return f"{prompt} and {prompt}"


""",
            ),
            before("Forks(),", "Doubling(), "),
        ],
    },
    "a policy loss": {
        "objectives/squared.py": [],
        "config/objective.py": [
            before(
                "AnyObjective = ",
                '''class SquaredConfig(ObjectiveConfig):
    """The squared ratio."""

    loss: Literal["squared"] = "squared"
    strength: Positive = 1.0
    """Factor."""

    code = "threepo.objectives.squared:SQUARED"


''',
            ),
            after("AnyObjective = Annotated[", "SquaredConfig | "),
        ],
    },
    "a credit rule": {
        "methods/sign_credit.py": [],
        "config/method.py": [
            after("\nCREDIT_RULES = {", '"sign": Named("threepo.methods.sign_credit:SIGN", "the sign"), ')
        ],
    },
    "a noise structure": {
        "posterior/noise_structures.py": [
            before(
                "\nSTRUCTURES: ",
                """
class RowNoise(StructuredNoise):
    def _numbers(self, start, stop, device):
        rows = torch.cat([z for _, z in normal_chunks(self.key, 0, self.rows, device)])
        yield 0, rows.repeat_interleave(self.columns)[start:stop].clone()

""",
            ),
            after("STRUCTURES: dict[str, type[StructuredNoise]] = {", '"by_row": RowNoise, '),
        ],
        "config/method.py": [
            after("NOISE_STRUCTURES = (", '"by_row", '),
            before(
                "    rank: Annotated[int, must(", '    by_row: CountOrZero = 0\n    """1: a row has one number."""\n'
            ),
        ],
    },
    "an ess schedule": {
        "config/schedules.py": [
            before(
                "AnyEssSchedule = ",
                '''class HalvingEss(EssScheduleConfig):
    """ess is halved in each step."""

    kind: Literal["halving"] = "halving"

    def factor(self, now: Moment) -> float:
        return 0.5 ** (now.progress * 2)


''',
            ),
            after("AnyEssSchedule = Annotated[\n    ", "HalvingEss\n    | "),
        ],
    },
    "a tracker": {
        "plugins/csv_tracker.py": [],
        "config/__init__.py": [
            after("\nTRACKERS = {", '"table": Named("threepo.plugins.csv_tracker:CSV", "a table"), ')
        ],
    },
    "a study statistic": {
        "lab/study_summary.py": [
            after(
                "STATISTICS: Mapping[str, Callable[[Result, Result], float | None]] = {",
                '"time": lambda run, base: run.seconds - base.seconds, ',
            )
        ],
    },
}
"""The files that each addition touches, with their edits; a new file has none."""
ENVIRONMENT = """
from threepo.data.finite import FiniteProblems
from threepo.data.source import InstalledSource, ProblemSet
from threepo.types import Problem


def _open(name, split, settings):
    problems = tuple(Problem(id=str(i), prompt=f"say {i}", answer=str(i)) for i in range(8))
    return ProblemSet(FiniteProblems(name, problems, settings.seed, 8), None, name)


SOURCE = InstalledSource(open=_open, endless=False)
"""
USES = """
import json, sys
from threepo.cli import main

settings = json.loads(sys.argv[1])
assert main(["train", *settings]) == 0
if "engine.kind=counting" in settings:
    from threepo.lab.study_summary import STATISTICS, Result
    from threepo.rollout.counting import CountingEngine

    assert CountingEngine.generated == 2 * 4 * 4 + 2 * 3, CountingEngine.generated
    one, other = (Result(0.0, 1, 0.0, [1], [0.0], seconds, 1, "") for seconds in (3.0, 1.0))
    assert STATISTICS["time"](one, other) == 2.0
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package and all additions, and a package that brings an environment."""
    folder = tmp_path_factory.mktemp("copy")
    shutil.copytree(SOURCE, folder / "threepo", ignore=shutil.ignore_patterns("__pycache__"))
    for path, text in OWN.items():
        (folder / "threepo" / path).write_text(text)
    for path, old, new in ((p, *e) for touched in ADDITIONS.values() for p, edits in touched.items() for e in edits):
        text = (folder / "threepo" / path).read_text()
        assert text.count(old) == 1, (path, old)
        (folder / "threepo" / path).write_text(text.replace(old, new))
    (folder / "own_words.py").write_text(ENVIRONMENT)
    information = folder / "own_words-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: own-words\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[threepo.sources]\nown = own_words:SOURCE\n")
    return folder


def run(copy: Path, folder: Path, *settings: str) -> None:
    """Train in a process that has the copy as its package."""
    done = run_program(USES, copy, json.dumps([*TINY, *settings, f"run.folder={folder}"]), PYTHONPATH=str(copy))
    assert done.returncode == 0, done.stdout + done.stderr


def test_one_run_uses_an_addition_of_every_kind(copy: Path, tmp_path: Path) -> None:
    """The problems of another package, which need no change of this one, are those that are held out."""
    settings = ["optimizer.kind=sign", "engine.kind=counting", "objective.loss=squared", "objective.strength=2"]
    settings += ["method.advantage.rule=sign", "ess_schedule.kind=halving", "data.train=doubling"]
    settings += [
        "reward.function=brevity",
        'run.trackers=["table"]',
        "noise.unit=rms",
        "noise.size=0.1",
        "noise.by_row=1",
    ]
    settings += ["method.draws=2", "method.gradient_at=generator", "method.rollouts_per_prompt=4"]
    settings += ["data.prompts_per_step=4", "sampling.max_new_tokens=6", "run.steps=2", "schedule.warmup_share=0"]
    settings += ["data.eval=own:words", "eval.every=2", "eval.problems=3", "eval.samples=1"]
    run(copy, tmp_path / "run", *settings)
    rows = read_metrics(tmp_path / "run")
    trained = [row for row in rows if "reward/mean" in row]
    assert [row["posterior/ess"] for row in trained] == [1, 0.5], "the schedule acts"
    assert all(row["reward/mean"] < 0 for row in trained), "the grader pays"
    assert (tmp_path / "run" / "metrics.csv").read_text().count("\n") == 2 + 2, "the tracker follows"
    assert ["eval/pass_at_1" in row for row in rows] == [True, False, True], "its problems are held out"


@pytest.mark.parametrize("addition", ADDITIONS)
def test_the_page_names_the_files_that_an_addition_touches(addition: str) -> None:
    (row,) = (line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith(f"| {addition} |"))
    touched = {path if edits else f"{path.rpartition('/')[0]}/" for path, edits in ADDITIONS[addition].items()}
    assert set(re.findall(r"`(\w+/[\w/]*(?:\.py)?)`", row)) == touched


MINE = """
import csv, math
from dataclasses import dataclass

import torch

from threepo.config import IVONConfig, LocalEngineConfig, ObjectiveConfig, OptimizerConfig, PPOConfig
from threepo.config.engine import EngineConfig
from threepo.config.records import Positive
from threepo.config.schedules import EssScheduleConfig
from threepo.objectives.token_losses import TokenLoss
from threepo.posterior.ivon import IVON
from threepo.posterior.noise import noise_key, normal_chunks
from threepo.posterior.noise_structures import Noise
from threepo.posterior.point_optimizers import Point
from threepo.rollout.local import LocalEngine

SEEN = []


def signs(rewards, settings):
    return (rewards - rewards.mean(dim=-1, keepdim=True)).sign()


class Gate(ObjectiveConfig):
    steepness: Positive = 2.0

    code = "mine:gate"


def gate(inputs, settings):
    return -inputs.advantages * torch.sigmoid(settings.steepness * (inputs.ratio() - 1))


def soft(log_ratio, row_of, rows, settings):
    return log_ratio.exp().tanh()


class Halving(EssScheduleConfig):
    def factor(self, now):
        return 0.5 ** (now.progress * 4)


class _Lion(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self):
        for p, group in ((p, group) for group in self.param_groups for p in group["params"]):
            momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
            self.state[p]["steps"] = self.state[p].get("steps", 0) + 1
            p.sub_((0.9 * momentum + 0.1 * p.grad).sign(), alpha=group["lr"] / self.state[p]["steps"])
            momentum.mul_(0.99).add_(p.grad, alpha=0.01)


class PointLion(Point, _Lion):
    pass


class Lion(OptimizerConfig):
    lr: Positive = 1e-4

    code = "mine:build_lion"


def build_lion(settings, model, groups, seed):
    return PointLion(groups, seed=seed, model=model, defaults={"lr": settings.lr})


@dataclass(frozen=True)
class Shared(Noise):
    \"\"\"All parameters have the same eight numbers, again and again.\"\"\"

    @classmethod
    def of(cls, draw, name, shape):
        return cls(noise_key(draw, "shared"), draw.sign)

    def _numbers(self, start, stop, device):
        eight = next(z for _, z in normal_chunks(self.key, 0, 8, device))
        yield 0, eight[torch.arange(start, stop, device=device) % 8]


class Counted(EngineConfig):
    code = "mine:CountedEngine"
    memory_gib = 0.0


class CountedEngine(LocalEngine):
    def generate(self, requests, sampling, seed):
        SEEN.append(len(requests))
        return super().generate(requests, sampling, seed)


class Table:
    id = ""

    def __init__(self, folder, config, known, first_step):
        self.path = folder / "mine.csv"

    def log(self, step, metrics):
        with open(self.path, "a", newline="") as file:
            csv.writer(file).writerow([step, metrics.get("posterior/ess")])

    def finish(self, summary):
        pass


class Later(IVONConfig):
    delay: Positive = 2.0

    code = "mine:build_later"


def build_later(settings, model, groups, seed):
    return IVON(groups, lr=settings.rate, ess=settings.ess * settings.delay, seed=seed, model=model)


class Wide(PPOConfig):
    steepness: Positive = 2.0

    code = "mine:WIDE"


WIDE = TokenLoss(gate)


class Roomy(LocalEngineConfig):
    room: Positive = 2.0


class Uncoded(OptimizerConfig):
    lr: Positive = 1e-4


def letters(completions, **_):
    return [sum(letter.isalpha() for letter in text[:4]) / 4 for text in completions]


def narrow(rewards, settings):
    return rewards[..., :1]


def negative(log_ratio, row_of, rows, settings):
    return -log_ratio.exp()
"""
"""A module with a user's own code of every kind that a recipe can name."""
BY_NAME = {
    "method.advantage.rule": "mine:signs",
    "objective.loss": "mine:Gate",
    "method.correction.kind": "mine:soft",
    "ess_schedule.kind": "mine:Halving",
    "optimizer.kind": "mine:Lion",
    "noise.structure": "mine:Shared",
    "engine.kind": "mine:Counted",
    "reward.function": "mine:letters",
}
NOISY = ("method.draws=2", "method.gradient_at=fresh", "noise.unit=rms", "noise.size=0.2", "objective.mini_batches=2")


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the user's module, which is the current one."""
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    return tmp_path


def own_config(folder: Path, *settings: str) -> TrainConfig:
    common = [*RLVR, *NOISY, "optimizer.lr=1e-3", "run.checkpoint_every=1"]
    named = [f"{setting}={name}" for setting, name in BY_NAME.items()]
    last = ["run.steps=4", "schedule.warmup_share=0", "run.keep_checkpoints=0", f"run.folder={folder}"]
    return load(TrainConfig, "", [*common, *named, *last, 'run.trackers=["mine:Table"]', *settings])


def test_a_users_own_code_of_every_kind_needs_no_change_of_the_package(mine: Path) -> None:
    whole, stopped = mine / "whole", mine / "stopped"
    api.train(own_config(whole, "objective.steepness=3.0"))
    assert sys.modules["mine"].SEEN == [32] * 4, "the engine generates"
    written = [line.split(",") for line in (whole / "mine.csv").read_text().splitlines()]
    assert [(int(step), float(ess)) for step, ess in written] == [(i, 0.5**i) for i in range(4)], "tracker and schedule"
    assert read_metrics(whole)[-1]["correction/kept_share"] == 1, "the correction masks nothing"

    shutil.copytree(whole, stopped)
    for step, path in checkpoints(stopped):
        if step > 2:
            shutil.rmtree(path)
    (stopped / "summary.json").unlink()
    resume(stopped)
    assert outcome(stopped) == outcome(whole), "bitwise"


WITHOUT = {
    "method.advantage.rule": ["method.advantage.rule=dr_grpo"],
    "objective.loss": ["objective.loss=ppo"],
    "method.correction.kind": ["method.correction.kind=none"],
    "ess_schedule.kind": ["ess_schedule.kind=constant"],
    "optimizer.kind": ["optimizer.kind=adamw"],
    "noise.structure": ["noise.structure="],
}
"""Settings that take back one of the user's codes."""


def test_each_code_of_a_user_changes_what_is_learned(mine: Path) -> None:
    def learned(name: str, *settings: str) -> str:
        folder = model_folder(api.train(own_config(mine / name, "run.steps=2", "run.checkpoint_every=0", *settings)))
        return (folder / "model.safetensors").read_bytes().hex()

    ends = [learned("whole"), learned("again"), *(learned(name, *settings) for name, settings in WITHOUT.items())]
    assert ends[0] == ends[1]
    assert len(set(ends)) == len(WITHOUT) + 1


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("objective.loss=mine:Gaet", "objective.loss = 'mine:Gaet': module 'mine' has no function or class 'Gaet'"),
        (
            "objective.loss=mine:gate",
            "objective.loss = 'mine:gate': must be a subclass of threepo.config.objective.",
        ),
        ("objective.steepnes=2.0", "unknown key objective.steepnes; did you mean objective.steepness?"),
        ("objective.steepness=-1.0", "objective.steepness = -1.0: must be greater than 0"),
        ("optimizer.kind=mine:Uncoded", "mine:Uncoded.code = '': must be 'module:name'"),
        ("optimizer.kind=mine:Gate", "must be a subclass of threepo.config.optimizers.OptimizerConfig"),
        ("method.advantage.rule=sings", "'pass_at_k' or your own 'module:name'"),
        ("method.advantage.rule=mine:sings", "method.advantage.rule = 'mine:sings': module 'mine' has no"),
        ("method.advantage.rule=mine:narrow", r"returned \[4, 1, 1\] for rewards \[4, 1, 8\]"),
        ("method.correction.kind=mine:negative", "returned other than a finite weight of 0 or more for each token"),
        ("noise.structure=mine:signs", "must be a subclass of threepo.posterior.noise_structures.Noise"),
        ("noise.rank=1", "noise.structure = 'mine:Shared': has no rank and is not tied"),
        ("engine.kind=vllm", "noise.structure = 'mine:Shared': vLLM's processes do not import your code"),
        ("run.trackers=['mine:Tabel']", "run.trackers = 'mine:Tabel': module 'mine' has no"),
    ],
)
def test_mistakes_in_own_code_are_one_line(setting: str, words: str, mine: Path) -> None:
    with pytest.raises(UserError, match=words):
        api.train(own_config(mine / "run", setting))


def test_a_record_can_inherit_from_one_of_ours(mine: Path) -> None:
    names = ["optimizer.kind=mine:Later", "objective.loss=mine:Wide", "engine.kind=mine:Roomy"]
    own = ["optimizer.delay=3.0", "objective.clip_low=0.1", "method.draws=2", "noise.unit=posterior", "noise.size=1.0"]
    config = own_config(mine / "run", "run.steps=1", *names, *own, "optimizer.lr=1.0", "optimizer.ess=1e6")
    assert build(TrainConfig, to_dict(config)) == config
    run = api.train(config)
    assert threepo.Posterior.from_pretrained(run).hessian, "as IVON learns"


def test_classes_and_functions_are_given_from_python_by_themselves(mine: Path) -> None:
    module = importlib.import_module("mine")
    settings: dict[str, Any] = {"objective": {"loss": module.Gate, "mini_batches": 2}, "run.steps": 1}
    settings |= {"method.advantage.rule": module.signs, "method.rollouts_per_prompt": 2, "data.prompts_per_step": 2}
    settings |= {"sampling.max_new_tokens": 4, "run.threads": 1, "run.trackers": [module.Table]}
    run = threepo.train("tiny-qwen2", "sorting", module.letters, folder=mine / "run", **settings)
    assert run.config["objective"]["loss"] == "mine:Gate"
    assert run.config["method"]["advantage"]["rule"] == "mine:signs"
    assert run.config["run"]["trackers"] == ["mine:Table"]


def test_a_posterior_that_names_a_users_noise_imports_nothing(mine: Path) -> None:
    run = api.train(own_config(mine / "run", "run.steps=1"))
    posterior = threepo.Posterior.from_pretrained(run)
    means = {name: torch.zeros(4, 4) for group in posterior.groups for name in group.parameters}
    del sys.modules["mine"]
    with pytest.raises(UserError, match="noise_structure = 'mine:Shared': .* import mine first"):
        posterior.perturb_(means.items(), posterior.address(0))
    assert "mine" not in sys.modules
    importlib.import_module("mine")
    posterior.perturb_(means.items(), posterior.address(0))
    noisy = [means[name].view(2, 8) for name in posterior.noisy_names]
    assert all(mean.any() and torch.equal(*mean) for mean in noisy), "eight numbers, twice"
