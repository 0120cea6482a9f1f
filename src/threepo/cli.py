"""The command line. Nothing heavy is imported before a command needs it, so help and mistakes answer at once.

Exit status: 0 done; 2 something in the input to fix, said in one line; 128 + n stopped by signal n, state saved.
"""

import argparse
import os
import signal
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import threepo
from threepo.errors import Interrupted, ThreepoWarning, UserError
from threepo.files import write_json
from threepo.ranks.group import AgreedError, RankError, joined, started

_PATIENCE = 15.0
"""Seconds in which the first rank can say what all have to say; it may take so long to end its engine."""
_format_warning = warnings.formatwarning


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    # Before `datasets` is imported: ours is the only progress bar, and an error is one line.
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("DATASETS_VERBOSITY", "critical")
    warnings.formatwarning = _one_line
    options = _parse(build_parser(), arguments)
    ranks = started()
    failure: type[Exception] | None = None
    try:
        if ranks.size > 1 and options.command not in (_train, _eval):
            raise UserError("torchrun: only `threepo train`, `sft` and `eval` run on several ranks; start it without")
        with nullcontext() if ranks.first else _silence():
            options.command(options)
        sys.stdout.flush()
        return 0
    except (UserError, RankError) as error:
        message, status, failure = str(error), 2, type(error)  # the error itself would keep a folder open
    except Interrupted as stop:
        message, status = str(stop), 128 + stop.signal_number
    except KeyboardInterrupt:
        message, status = "interrupted", 128 + signal.SIGINT
    except BrokenPipeError:  # a reader such as `head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python would write the rest at exit
        return 128 + signal.SIGPIPE
    if ranks.first:
        print(f"threepo: {message}", file=sys.stderr, flush=True)
    else:
        _follow(ranks.rank, message, failure)
    return status


@contextmanager
def _silence() -> Iterator[None]:
    """Within the body, what is printed goes nowhere: the first rank prints the same."""
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield


def _follow(rank: int, message: str, failure: type[Exception] | None) -> None:
    """How a rank ends that is not the first, which mostly says the same; torchrun ends all when one has ended."""
    if not (failure and issubclass(failure, RankError)):
        time.sleep(_PATIENCE if failure else 1.0)
    if failure and not issubclass(failure, AgreedError):  # still here, so the first has not failed
        print(f"threepo: rank {rank}: {message}", file=sys.stderr, flush=True)


def _one_line(message: Any, category: Any, *where: Any, **more: Any) -> str:
    """How a warning is printed: those about the run in one line, all others as Python does."""
    ours = issubclass(category, ThreepoWarning)
    return f"threepo: warning: {message}\n" if ours else _format_warning(message, category, *where, **more)


def _parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Arguments in any order: argparse does not accept positional words after an option."""
    options, rest = parser.parse_known_args(arguments)
    unknown = [word for word in rest if word.startswith("-")]
    if unknown or (rest and not hasattr(options, "more")):
        parser.error(f"unrecognized arguments: {' '.join(unknown or rest)}")
    if rest:
        setattr(options, options.more, [*getattr(options, options.more), *rest])
    return options


def build_parser() -> argparse.ArgumentParser:
    """All commands with their arguments."""
    parser = argparse.ArgumentParser(prog="threepo", description="RLVR that explores in weight space.")
    version = f"threepo {threepo.__version__}"
    parser.add_argument("--version", action="version", version=version, help="print the version and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    kinds = {"train": "reinforcement learning from verifiable rewards", "sft": "warm start by supervised fine-tuning"}
    for name, text in kinds.items():
        train = commands.add_parser(name, help=text)
        train.add_argument("recipe", nargs="?", default="", metavar="RECIPE", help="a TOML file or a shipped recipe")
        train.add_argument("settings", nargs="*", metavar="section.key=value", help="override settings of the recipe")
        train.add_argument("--resume", type=_path, metavar="RUN", help="continue this run; run.steps=N extends it")
        train.add_argument("--list", action="store_true", help="list the shipped recipes")
        train.add_argument("--dry-run", action="store_true", help="print memory and compute of the run, load nothing")
        for kind in ("prompt", "response"):
            text = f"--dry-run: mean tokens of a {kind} (default: of the longest)"
            train.add_argument(f"--{kind}-tokens", type=int, default=0, help=text)
        text = "--dry-run: number of ranks, each with a GPU (default: those of torchrun, or 1)"
        train.add_argument("--ranks", type=int, default=0, help=text)
        train.set_defaults(command=_train, more="settings", kind=name)

    evaluate = commands.add_parser("eval", help="pass@k and maj@k of a model on benchmarks or held-out problems")
    evaluate.add_argument("model", nargs="?", metavar="MODEL", help="model directory, checkpoint, run folder or hub id")
    evaluate.add_argument("settings", nargs="*", metavar="section.key=value", help="such as data.train=sorting")
    evaluate.add_argument("--recipe", default="", help="take data, reward and eval settings from this recipe")
    evaluate.add_argument("--benchmarks", metavar="NAMES", help="such as aime24,math500 or math500=FILE (see the docs)")
    evaluate.add_argument("--benchmark-files", type=_path, metavar="FOLDER", help="read aime24.jsonl, ... from here")
    evaluate.add_argument("--output", type=_path, help="folder for scores and completions (default: in runs/)")
    evaluate.add_argument("--compare", nargs=2, type=_path, metavar=("A", "B"), help="test two evaluations' difference")
    evaluate.set_defaults(command=_eval, more="settings")

    probe = commands.add_parser("probe", help="before training: would noise on the weights help, where, how large")
    probe.add_argument("model", metavar="MODEL", help="model directory, checkpoint, run folder or hub id")
    probe.add_argument("settings", nargs="*", metavar="section.key=value", help="such as data.train=sorting")
    probe.add_argument("--recipe", default="", help="the training that the probe is about")
    probe.add_argument("--ess", metavar="LIST", help="sizes of the posterior, such as 1e8,1e9,1e10")
    probe.add_argument("--draws", type=int, help="draws of each noise (default 64)")
    probe.add_argument("--rollouts", type=int, help="completions of each problem by each draw (default 16)")
    probe.add_argument("--exact", action="store_true", help="chances from the probability of the only right answer")
    probe.add_argument("--output", type=_path, help="folder for figures and picture (default: in runs/)")
    probe.add_argument("--write", type=_path, metavar="RECIPE", help="write the training recipe that follows, if any")
    probe.set_defaults(command=_probe, more="settings")

    report = commands.add_parser("report", help="table and curves of training runs")
    report.add_argument("runs", nargs="+", metavar="RUN", help="run folders")
    report.add_argument("--output", type=_path, help="draw the curves into this .png, .pdf or .svg file")
    report.set_defaults(command=_report, more="runs")

    explore = commands.add_parser("explore", help="did runs explore more than a baseline, from saved completions")
    explore.add_argument("runs", nargs="+", metavar="RUN", help="the baseline, then the runs: folders or files")
    explore.add_argument("--heldout", nargs="+", type=_path, metavar="EVAL", help="an evaluation of each, in order")
    explore.add_argument("--by-draw", action="store_true", help="a group is what one draw wrote, as M3PO credits it")
    explore.add_argument("--verdict", default="", metavar="COLUMN", help="column that says what is right, as a reward")
    explore.add_argument("--right-above", type=float, metavar="X", help="right is a verdict above this (default: is 1)")
    explore.add_argument("--output", type=_path, metavar="FOLDER", help="write exploration.json and .png there")
    explore.set_defaults(command=_explore, more="runs")

    sample = commands.add_parser("sample", help="write models drawn from a checkpoint's posterior")
    sample.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="checkpoint or run folder of an IVON run")
    sample.add_argument("--draws", type=int, default=1, help="number of models (default 1)")
    sample.add_argument("--first", type=int, default=0, help="number of the first draw (default 0)")
    sample.add_argument("--output", type=_path, required=True, help="folder for draw-0, draw-1, ...")
    sample.set_defaults(command=_sample)

    data = commands.add_parser("data", help="the sources of problems, and a problem as a policy reads it")
    parts = data.add_subparsers(title="commands", metavar="COMMAND", required=True)
    parts.add_parser("list", help="list the sources of problems").set_defaults(command=_data, source=None)
    show = parts.add_parser("show", help="one problem as a policy reads it, and the number of problems")
    show.add_argument("source", metavar="SOURCE", help="what data.train can name, such as gsm8k or problems.jsonl")
    show.add_argument("settings", nargs="*", metavar="data.key=value", help="such as data.prompt_column=question")
    show.add_argument("--index", type=int, default=0, help="which problem, from 0 (default 0)")
    show.add_argument("--heldout", action="store_true", help="a held-out problem, not one to train on")
    show.add_argument("--model", default="", help="model directory or hub id, for its tokenizer and chat template")
    show.set_defaults(command=_data, more="settings")

    demo = commands.add_parser("demo", help="warm start, four methods, a comparison: minutes on a CPU")
    demo.add_argument("--folder", type=_path, default=Path("runs/demo"), help="default: runs/demo")
    demo.set_defaults(command=_demo)
    return parser


def _path(text: str) -> Path:
    """A path from the command line; an empty one is a variable that was not set, not the current directory."""
    if not text:
        raise argparse.ArgumentTypeError("is empty; name a path")
    return Path(text).expanduser()


def _train(options: argparse.Namespace) -> None:
    """Start or resume a training run of either kind."""
    from threepo.config import SFTConfig, TrainConfig, recipes

    record: Any = TrainConfig if options.kind == "train" else SFTConfig
    if options.list:
        print("\n".join(recipes.shipped_recipes()))
        return
    if "=" in options.recipe:  # settings alone, without a recipe
        options.recipe, options.settings = "", [options.recipe, *options.settings]
    if options.dry_run and options.resume:
        raise UserError("--dry-run --resume: --dry-run plans a recipe; leave out one of the two")
    for name, tokens in (("prompt", options.prompt_tokens), ("response", options.response_tokens)):
        if tokens < 0 or (tokens and not options.dry_run):
            raise UserError(f"--{name}-tokens {tokens}: must be above 0, and goes with --dry-run only")
    if options.ranks < 0 or (options.ranks and not options.dry_run):
        raise UserError(f"--ranks {options.ranks}: must be above 0, and goes with --dry-run only: torchrun starts them")
    config: Any = None
    steps = None
    if options.resume:
        config, steps = _recorded(options, record)
    elif options.recipe or options.settings:
        config = recipes.load(record, options.recipe, options.settings)
    else:
        raise UserError("name a recipe, or --resume a run; --list shows the shipped recipes")
    if options.dry_run:
        from threepo.training.plan import plan

        found = plan(config, options.prompt_tokens, options.response_tokens, options.ranks or started().size)
        for label, lines in found.items() if started().first else ():
            print(*(f"{'' if i else label:12} {line}" for i, line in enumerate(lines)), sep="\n")
        return
    if not config.run.folder:
        raise UserError("run.folder = '': no recipe names the folder; set run.folder")
    with joined(config.parallel.timeout_s) as ranks:
        folder = None
        if options.resume:
            config, folder = _resumed(options.resume, config, steps, ranks)
        from threepo import api

        train: Any = api.train if options.kind == "train" else api.fine_tune
        path = train(config, folder, ranks)
        if ranks.first:
            print(api.closing_words(path))


_WHERE = ("parallel.", "engine.vllm.servers", "engine.vllm.weights_folder")
"""Beginnings of settings that say where a run runs; a run that is resumed may run elsewhere."""


def _recorded(options: argparse.Namespace, record: Any) -> tuple[Any, Any]:
    """The configuration of the run to resume, and the length that it gets; None: its own."""
    from threepo.config.recipes import merge, parse_overrides
    from threepo.config.records import build
    from threepo.files import read_json
    from threepo.run_folder import CONFIG, refuse_no_run

    names = [text.partition("=")[0].strip() for text in options.settings]
    if options.recipe or not all(name == "run.steps" or name.startswith(_WHERE) for name in names):
        taken = "all but run.steps, parallel.* and engine.vllm.servers from the run folder"
        raise UserError(f"--resume takes {taken}; leave out the recipe and other settings")
    given = parse_overrides(options.settings)
    steps = given.pop("run", {}).get("steps")
    refuse_no_run(options.resume)
    recorded = read_json(options.resume / CONFIG)
    made_by = "train" if "method" in recorded else "sft"
    if made_by != options.kind:
        raise UserError(f"--resume {options.resume}: is a run of `threepo {made_by}`; resume it with that command")
    return build(record, merge(recorded, given)), steps


def _resumed(path: Path, config: Any, steps: Any, ranks: Any) -> tuple[Any, Any]:
    """The configuration and the open folder of the run to resume; the first rank opens it."""
    from threepo.run_folder import FollowedFolder, RunFolder

    folder: RunFolder = FollowedFolder(path)
    with ranks.together():
        if ranks.first:
            folder = RunFolder(path)
            config = config if steps is None else folder.extend(config, steps)
    return ranks.gather(config)[0], folder


def _eval(options: argparse.Namespace) -> None:
    from rich.console import Console

    from threepo.config import recipes

    if options.compare:
        _compare(options)
        return
    if not options.model:
        raise UserError("name a MODEL to evaluate, or two evaluations to --compare")
    benchmarks: dict[str, Any] = {} if options.benchmarks is None else {"names": options.benchmarks.split(",")}
    if options.benchmark_files:
        benchmarks["folder"] = str(options.benchmark_files)
    config = recipes.load_evaluation(options.model, options.recipe, options.settings, benchmarks)
    from threepo.api import evaluate
    from threepo.evaluation.records import default_folder
    from threepo.evaluation.scores import evaluation_table

    folder = options.output or default_folder(config)
    with joined(config.parallel.timeout_s) as ranks:
        summary = evaluate(config, folder, ranks=ranks)
        if ranks.first:
            Console().print(evaluation_table(summary))
            print(f"every completion and the settings: {folder}")


def _compare(options: argparse.Namespace) -> None:
    from rich.console import Console

    if any((options.model, *options.settings, options.recipe, options.benchmarks, options.benchmark_files)):
        raise UserError("--compare A B: takes the folders of two evaluations, and no other option but --output")
    from threepo.evaluation.compare import compare, comparison_table

    comparison = compare(*options.compare)
    Console().print(comparison_table(comparison))
    for name in comparison["only_in_one"]:
        print(f"left out, because only one of them has it: {name}")
    for different in comparison["settings_that_differ"]:
        print(f"different setting: {different['setting']} = {different['first']!r} in A, {different['second']!r} in B")
    if options.output:
        write_json(options.output / "comparison.json", comparison)


def _probe(options: argparse.Namespace) -> None:
    from rich.console import Console

    from threepo.config.probe import load_probing

    flags = {name: value for name in ("draws", "rollouts") if (value := getattr(options, name)) is not None}
    flags |= {"exact": True} if options.exact else {}
    if options.ess:
        try:
            flags["ess"] = [float(size) for size in options.ess.split(",")]
        except ValueError:
            raise UserError(f"--ess {options.ess}: must be numbers with commas between them, such as 1e8,1e9") from None
    if options.write and options.write.suffix != ".toml":
        raise UserError(f"--write {options.write}: a recipe's name ends in .toml")
    config, settings, training = load_probing(options.model, options.recipe, options.settings, flags)
    from threepo import api
    from threepo.evaluation.probe_report import table

    folder = options.output or api.probe_folder(config, settings)
    summary = api.probe(config, settings, folder, training, options.write)
    console = Console()
    console.print(table(summary))
    console.print(summary["verdict"], highlight=False)
    print(f"all figures: {folder}")
    if options.write and options.write.is_file():
        print(f"next: threepo train {options.write}")


def _report(options: argparse.Namespace) -> None:
    from rich.console import Console

    from threepo.analysis.report import plot, read_run, tables

    runs = {path: read_run(Path(path)) for path in options.runs}
    for table in tables(runs):
        Console().print(table)
    if options.output:
        plot(list(runs.values()), options.output)


def _explore(options: argparse.Namespace) -> None:
    from rich.console import Console

    baseline, *runs = map(Path, options.runs)
    if not runs:
        raise UserError(f"explore {baseline}: name the baseline, and at least one run to compare with it")
    from threepo.analysis.exploration import explore
    from threepo.analysis.exploration_view import exploration_tables, plot_exploration

    rule = {"verdict": options.verdict, "above": options.right_above, "by_draw": options.by_draw}
    comparison = explore(baseline, runs, heldout=options.heldout or (), **rule)
    for table in exploration_tables(comparison):
        Console().print(table)
    for name, run in comparison["runs"].items():
        for side, steps in run["steps_in_one_only"].items():
            if steps:
                print(f"{name}: left out {steps} steps that only the {side} has")
    if options.output:
        write_json(options.output / "exploration.json", comparison)
        plot_exploration(comparison, options.output / "exploration.png")


def _sample(options: argparse.Namespace) -> None:
    if options.draws < 1 or options.first < 0:
        raise UserError(f"--draws {options.draws} --first {options.first}: at least 1 draw, from number 0 on")
    from threepo import api

    for path in api.sample(options.checkpoint, options.output, range(options.first, options.first + options.draws)):
        print(path)


def _data(options: argparse.Namespace) -> None:
    from threepo.show import listing, shown_problem

    if options.source is None:
        print(listing())
        return
    split: Any = "heldout" if options.heldout else "train"
    print(shown_problem(options.source, options.settings, split, options.index, options.model))


def _demo(options: argparse.Namespace) -> None:
    from rich.console import Console

    from threepo.api import demonstrate

    demonstrate(options.folder, Console())
