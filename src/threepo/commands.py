"""The commands that train, evaluate and write models, each with its arguments; lab/commands.py has the laboratory's.

Nothing heavy is imported before a command needs it.
"""

import argparse
import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from threepo.errors import UserError
from threepo.files import write_json
from threepo.ranks.launch import join_world, ranks_started
from threepo.types import Arm

Action = Callable[[argparse.Namespace], None]
Argument = tuple[tuple[str, ...], dict[str, Any]]
"""Arguments of `ArgumentParser.add_argument`."""


@dataclass(frozen=True)
class Command:
    """A command of the command line."""

    name: str
    """One word, or two, of which the first is a group of commands."""
    help: str
    action: Action | None = None
    """The function of the parsed arguments; None for a group."""
    arguments: tuple[Argument, ...] = ()
    on_ranks: bool = False
    """True if several ranks of torchrun can run it together."""

    @property
    def more(self) -> str:
        """The argument that takes any number of words, which may stand anywhere; empty if there is none."""
        return next((n[0] for n, how in self.arguments if n[0][0] != "-" and how.get("nargs") in ("*", "+")), "")


COMMANDS: list[Command] = []


def command(
    table: list[Command], name: str, text: str, *arguments: Argument, on_ranks: bool = False
) -> Callable[[Action], Action]:
    """Put the decorated action into the table as a command, with its help `text` and its arguments."""

    def put(action: Action) -> Action:
        table.append(Command(name, text, action, arguments, on_ranks))
        return action

    return put


def argument(*names: str, **how: Any) -> Argument:
    """An argument, as `ArgumentParser.add_argument` describes it."""
    return names, how


def path_argument(text: str) -> Path:
    """A path from the command line; an empty one is a variable that was not set, not the current directory."""
    if not text:
        raise argparse.ArgumentTypeError("is empty; name a path")
    return Path(text).expanduser()


def settings_argument(text: str, pattern: str = "section.key=value") -> Argument:
    """Any number of settings."""
    return argument("settings", nargs="*", metavar=pattern, help=text)


@contextmanager
def without_collector() -> Iterator[None]:
    """Pause garbage collection for the body, which imports; a seventh of the time would go into searching for none."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _training_arguments() -> Iterator[Argument]:
    yield argument("recipe", nargs="?", default="", metavar="RECIPE", help="TOML file or shipped recipe")
    yield settings_argument("override its settings")
    yield argument("--resume", type=path_argument, metavar="RUN", help="continue this run; run.steps=N extends it")
    yield argument("--list", action="store_true", help="list shipped recipes")
    yield argument("--dry-run", action="store_true", help="print the run's memory and compute")
    for kind in ("prompt", "response"):
        text = f"--dry-run: mean {kind} tokens (default: longest)"
        yield argument(f"--{kind}-tokens", type=int, default=0, help=text)
    text = "--dry-run: ranks (default: torchrun's, or 1)"
    yield argument("--ranks", type=int, default=0, help=text)


@command(COMMANDS, "sft", "warm start by supervised fine-tuning", *_training_arguments(), on_ranks=True)
@command(COMMANDS, "train", "reinforcement learning from verifiable rewards", *_training_arguments(), on_ranks=True)
def train(options: argparse.Namespace) -> None:
    """Start or resume a training run of either kind."""
    from threepo.config import SFTConfig, TrainConfig, recipes

    record: Any = TrainConfig if options.command.name == "train" else SFTConfig
    if options.list:
        print("\n".join(recipes.shipped_recipes()))
        return
    if "=" in options.recipe and not os.path.isfile(options.recipe):  # settings alone, without a recipe
        options.recipe, options.settings = "", [options.recipe, *options.settings]
    if options.dry_run and options.resume:
        raise UserError("--dry-run --resume: --dry-run plans a recipe; leave out one of the two")
    for name in ("prompt-tokens", "response-tokens", "ranks"):
        number = getattr(options, name.replace("-", "_"))
        if number < 0 or (number and not options.dry_run):
            who = ": torchrun starts them" if name == "ranks" else ""
            raise UserError(f"--{name} {number}: must be above 0, and goes with --dry-run only{who}")
    if options.resume:
        changes = recipes.parse_overrides(options.settings)
        if options.recipe or not recipes.can_change(changes):
            machine = "what depends on the machine (docs/scaling.md#resume-on-other-gpus)"
            taken = f"all but run.steps and {machine} from the run folder"
            branch = f"to change them, start a new run from its checkpoint, with model.path={options.resume}"
            raise UserError(f"--resume takes {taken}; leave out the recipe and other settings ({branch})")
        config = recipes.load_resumed(record, options.resume, changes)
    elif options.recipe or options.settings:
        config = recipes.load(record, options.recipe, options.settings)
    else:
        raise UserError("name a recipe, or --resume a run; --list shows the shipped recipes")
    if options.dry_run:
        from threepo.lab.plan import plan

        found = plan(config, options.prompt_tokens, options.response_tokens, options.ranks or ranks_started())
        for label, lines in found.items():
            print(*(f"{'' if i else label:12} {line}" for i, line in enumerate(lines)), sep="\n")
        return
    if not config.run.folder:
        raise UserError("run.folder = '': no recipe names the folder; set run.folder")
    with without_collector():
        from threepo import api
    with join_world(config.parallel.timeout_s, config.parallel.offload) as world:
        path = api.train(config, options.resume or None, world)
        world.on_first(lambda: print(api.closing_words(path)))


@command(
    COMMANDS,
    "eval",
    "pass@k and maj@k of a model on benchmarks or held-out problems",
    argument("model", nargs="?", metavar="MODEL", help="model directory, checkpoint, run folder or hub id"),
    settings_argument("such as data.train=sorting"),
    argument("--recipe", default="", help="recipe with data, reward and eval settings"),
    argument("--benchmarks", metavar="NAMES", help="such as aime24,math500 or math500=FILE"),
    argument("--output", type=path_argument, help="folder for scores and completions (default: in runs/)"),
    argument("--compare", nargs=2, type=path_argument, metavar=("A", "B"), help="test two evaluations' difference"),
    on_ranks=True,
)
def evaluate(options: argparse.Namespace) -> None:
    """Score a model, or compare two evaluations."""
    from rich.console import Console

    from threepo.config import recipes

    if options.compare:
        _compare(options)
        return
    if not options.model:
        raise UserError("name a MODEL to evaluate, or two evaluations to --compare")
    benchmarks: dict[str, Any] = {} if options.benchmarks is None else {"names": options.benchmarks.split(",")}
    config = recipes.load_evaluation(options.model, options.recipe, options.settings, benchmarks)
    with without_collector():
        from threepo import api
        from threepo.evaluation.records import default_folder
        from threepo.evaluation.scores import evaluation_table

    folder = options.output or default_folder(config)
    with join_world(config.parallel.timeout_s, config.parallel.offload) as world:
        summary = api.evaluate(config, folder, world=world)
    Console().print(evaluation_table(summary))
    print(f"every completion and the settings: {folder}")


def _compare(options: argparse.Namespace) -> None:
    from rich.console import Console

    if any((options.model, *options.settings, options.recipe, options.benchmarks)):
        raise UserError("--compare A B: takes the folders of two evaluations, and no other option but --output")
    from threepo.evaluation.compare import compare_evaluations, comparison_table

    comparison = compare_evaluations(*options.compare)
    Console().print(comparison_table(comparison))
    for name in comparison["only_in_one"]:
        print(f"left out, because only one of them has it: {name}")
    for different in comparison["settings_that_differ"]:
        print(f"different setting: {different['setting']} = {different['first']!r} in A, {different['second']!r} in B")
    if options.output:
        write_json(options.output / "comparison.json", comparison)


@command(
    COMMANDS,
    "sample",
    "write models drawn from a checkpoint's posterior",
    argument("checkpoint", type=path_argument, metavar="CHECKPOINT", help="checkpoint or run folder of an IVON run"),
    argument("--draws", type=int, default=1, help="number of models (default 1)"),
    argument("--first", type=int, default=0, help="the first draw's number (default 0)"),
    argument("--arm", default="", metavar="'PLACE SIZE'", help="place, and factor of the run's noise"),
    argument("--output", type=path_argument, required=True, help="folder for draw-0, draw-1, ..."),
)
def sample(options: argparse.Namespace) -> None:
    """Write models drawn from a posterior."""
    if options.draws < 1 or options.first < 0:
        raise UserError(f"--draws {options.draws} --first {options.first}: at least 1 draw, from number 0 on")
    with without_collector():
        from threepo import api

    arm = Arm.parse(options.arm) if options.arm else None
    draws = range(options.first, options.first + options.draws)
    for path in api.sample(options.checkpoint, options.output, draws, arm):
        print(path)


@command(
    COMMANDS,
    "merge",
    "write a model with adapters as one without",
    argument("model", type=path_argument, metavar="MODEL", help="checkpoint or run folder with adapters"),
    argument("--output", type=path_argument, required=True, help="folder for the model"),
)
def merge(options: argparse.Namespace) -> None:
    """Write a model with adapters as one without."""
    with without_collector():
        from threepo import api

    api.merge(options.model, options.output)
    print(options.output)


@command(
    COMMANDS,
    "certify",
    "check that a vLLM or SGLang server computes with a model's weights",
    argument("url", metavar="URL", help="such as http://10.0.0.7:8000"),
    argument("--model", required=True, metavar="PATH", help="model directory, checkpoint, run folder or hub id"),
    argument("--kind", choices=("vllm", "sglang"), default="vllm", help="vllm or sglang (default vllm)"),
    argument("--served", default="", metavar="NAME", help="model's name on the server (default: its first)"),
    argument("--dtype", choices=("bfloat16", "float16", "float32"), help="the server's (default: told, or bfloat16)"),
    argument("--tolerance", type=float, help="largest mean difference in log-prob (default 0.1; float32: 1e-3)"),
    argument("--json", action="store_true", help="print the result as JSON"),
)
def certify(options: argparse.Namespace) -> None:
    """Compare a server's log-probs with a model's; exit status 1 if its weights are others."""
    with without_collector():
        import torch

        from threepo.certify import Certificate, WrongWeights, completions_server, sglang_server
        from threepo.config import ModelConfig
        from threepo.models.policy import load_policy

    engine = sglang_server(options.url) if options.kind == "sglang" else completions_server(options.url, options.served)
    model = load_policy(ModelConfig(path=options.model, device="cpu")).model  # the server may fill the GPU
    dtype = getattr(torch, options.dtype) if options.dtype else None
    certificate = Certificate(model, dtype=dtype, tolerance=options.tolerance)
    try:
        result = certificate.check(engine)
    except WrongWeights as error:
        if options.json:
            print(error.result.json())
        raise
    print(result.json() if options.json else result)
