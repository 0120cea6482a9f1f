"""The command line. Nothing heavy is imported before a command needs it, so help and mistakes answer at once.

Exit status: 0 done; 1 what was printed could not be written; 2 something in the input to mend, said in one line;
128 + n stopped by signal n, state saved.
"""

import argparse
import contextlib
import errno
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO, cast

from threepo.errors import Interrupted, UserError
from threepo.files import writable_folder, write_text


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    try:
        with contextlib.redirect_stdout(cast(TextIO, _Output(sys.stdout)) if sys.stdout else None):  # None: closed
            try:
                return _main(arguments)
            finally:  # also where argparse has printed help, and exits
                print(end="", flush=True)  # so that what is wrong with the output is found here
    except _OutputLost as lost:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python would write the rest at its end
        if lost.number == errno.EPIPE:  # whoever read it has enough, as `head` has
            return 141  # as a program that SIGPIPE ends
        print(f"threepo: cannot write the output: {os.strerror(lost.number)}", file=sys.stderr)
        return 1


class _OutputLost(Exception):
    """Standard output takes no more. No `OSError`: those of files are told otherwise, and libraries pass over some."""

    def __init__(self, number: int) -> None:
        super().__init__(os.strerror(number))
        self.number = number


class _Output:
    """Standard output, with `_OutputLost` for what goes wrong with it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with _telling_output():
            return self._stream.write(text)

    def flush(self) -> None:
        with _telling_output():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def _telling_output() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _OutputLost(error.errno or errno.EIO) from error


def _main(arguments: Sequence[str] | None) -> int:
    # Before `datasets` is imported: one progress bar is enough, and what fails is said in one line.
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("DATASETS_VERBOSITY", "critical")
    parser = build_parser()
    options = _parse(parser, arguments)
    try:
        return int(options.command(options))
    except UserError as error:
        print(f"threepo: {error}", file=sys.stderr)
        return 2
    except Interrupted as stop:
        print(f"threepo: {stop}", file=sys.stderr)
        return 128 + stop.signal_number
    except KeyboardInterrupt:
        print("threepo: interrupted", file=sys.stderr)
        return 130


def _parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Arguments in any order: argparse itself takes no further ones of a list once an option stood in between."""
    options, rest = parser.parse_known_args(arguments)
    unknown = [word for word in rest if word.startswith("-")]
    if unknown or (rest and not hasattr(options, "more")):
        parser.error(f"unrecognized arguments: {' '.join(unknown or rest)}")
    if rest:
        kind = Path if options.more == "runs" else str
        setattr(options, options.more, [*getattr(options, options.more), *map(kind, rest)])
    return options


def build_parser() -> argparse.ArgumentParser:
    """All commands with their arguments."""
    parser = argparse.ArgumentParser(prog="threepo", description="RLVR that explores in weight space.")
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    train = commands.add_parser("train", help="reinforcement learning from verifiable rewards")
    _recipe_arguments(train)
    train.set_defaults(command=_train)

    sft = commands.add_parser("sft", help="warm start by supervised fine-tuning")
    _recipe_arguments(sft)
    sft.set_defaults(command=_sft)

    evaluate = commands.add_parser("eval", help="pass@k and maj@k of a model on benchmarks or held-out problems")
    evaluate.add_argument("model", nargs="?", metavar="MODEL", help="model directory, checkpoint, run folder or hub id")
    evaluate.add_argument("settings", nargs="*", metavar="section.key=value", help="such as data.train=sorting")
    evaluate.add_argument("--recipe", default="", help="take data, reward and eval settings from this recipe")
    evaluate.add_argument("--benchmarks", metavar="NAMES", help="such as aime24,math500 or math500=FILE (see the docs)")
    evaluate.add_argument("--benchmark-files", type=_path, metavar="FOLDER", help="read aime24.jsonl, ... from here")
    evaluate.add_argument("--output", type=_path, help="folder of scores and completions (default: in runs/)")
    evaluate.add_argument("--compare", nargs=2, type=_path, metavar=("A", "B"), help="test two evaluations' difference")
    evaluate.set_defaults(command=_eval, more="settings")

    report = commands.add_parser("report", help="table and curves of training runs")
    report.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders")
    report.add_argument("--output", type=_path, help="draw the curves into this PNG")
    report.set_defaults(command=_report, more="runs")

    sample = commands.add_parser("sample", help="write models drawn from a checkpoint's posterior")
    sample.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="checkpoint or run folder of an IVON run")
    sample.add_argument("--draws", type=int, default=1, help="how many (default 1)")
    sample.add_argument("--first", type=int, default=0, help="number of the first draw (default 0)")
    sample.add_argument("--output", type=_path, required=True, help="folder for draw-0, draw-1, ...")
    sample.set_defaults(command=_sample)

    data = commands.add_parser("data", help="what there is to train on, and how a policy is asked")
    _data_arguments(data)

    demo = commands.add_parser("demo", help="warm start, four methods, a comparison: minutes on a CPU")
    demo.add_argument("--folder", type=_path, default=Path("runs/demo"), help="default: runs/demo")
    demo.set_defaults(command=_demo)
    return parser


def _recipe_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "recipe", nargs="?", default="", metavar="RECIPE", help="a TOML file or a shipped recipe's name"
    )
    parser.add_argument("settings", nargs="*", metavar="section.key=value", help="override settings of the recipe")
    parser.add_argument("--resume", type=_path, metavar="RUN", help="continue the run in this folder")
    parser.add_argument("--list", action="store_true", help="list the shipped recipes")
    parser.add_argument("--dry-run", action="store_true", help="print memory and compute of the run, load nothing")
    for kind in ("prompt", "response"):
        parser.add_argument(
            f"--{kind}-tokens", type=int, default=0, help="--dry-run: their mean (default: the longest)"
        )
    parser.set_defaults(more="settings")


def _data_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    listing = commands.add_parser("list", help="list the sources of problems")
    listing.set_defaults(command=_data_list)
    show = commands.add_parser("show", help="one problem as a policy reads it, and how many there are")
    show.add_argument("source", metavar="SOURCE", help="what data.train can name, such as gsm8k or problems.jsonl")
    show.add_argument("settings", nargs="*", metavar="data.key=value", help="such as data.prompt_column=question")
    show.add_argument("--index", type=int, default=0, help="which problem, from 0 (default 0)")
    show.add_argument("--heldout", action="store_true", help="of the held-out problems, not those to train on")
    show.add_argument("--model", default="", help="model directory or hub id, for its tokenizer and chat template")
    show.set_defaults(command=_data_show, more="settings")


def _path(text: str) -> Path:
    """A path from the command line; an empty one is a variable that was not set, and not the directory here."""
    if not text:
        raise argparse.ArgumentTypeError("is empty; name a path")
    return Path(text).expanduser()


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib.metadata import version

        print(f"threepo {version('threepo')}")
        parser.exit()


def _train(options: argparse.Namespace) -> int:
    from threepo.config import TrainConfig

    return _run(options, TrainConfig)


def _sft(options: argparse.Namespace) -> int:
    from threepo.config import SFTConfig

    return _run(options, SFTConfig)


def _run(options: argparse.Namespace, record: type) -> int:
    """Start or resume a training run of either kind."""
    from threepo.config import TrainConfig
    from threepo.config.reader import build
    from threepo.training import recipe
    from threepo.training.run_folder import RunFolder

    if options.list:
        print("\n".join(recipe.shipped_recipes()))
        return 0
    if "=" in options.recipe:  # settings alone, without a recipe
        options.recipe, options.settings = "", [options.recipe, *options.settings]
    _check_dry_run(options)
    folder = None
    if options.resume:
        if options.recipe or options.settings:
            raise UserError("--resume takes everything from the run folder; leave out the recipe and the settings")
        folder, plain = RunFolder.open(options.resume)
        other = "sft" if record is TrainConfig else "train"
        if ("data" in plain) != (record is TrainConfig):  # which every run of `threepo train` has, and no other
            folder.close()
            raise UserError(f"--resume {options.resume}: is a run of `threepo {other}`; resume it with that command")
        config: Any = build(record, plain)
    else:
        if not options.recipe and not options.settings:
            raise UserError("name a recipe, or --resume a run; --list shows the shipped recipes")
        config = recipe.load(record, options.recipe, options.settings)
        if options.dry_run:
            return _dry_run(config, options)
        if not config.run.folder:
            raise UserError("run.folder = '': without a recipe to name the folder after, set run.folder")
    from threepo import jobs

    job: Any = jobs.train if record is TrainConfig else jobs.fine_tune
    print(jobs.closing(job(config, folder)))
    return 0


def _check_dry_run(options: argparse.Namespace) -> None:
    """Refuse what would be left unread, or would train where only a plan is wanted."""
    if options.dry_run and options.resume:
        raise UserError("--dry-run --resume: a plan is made of a recipe; leave out one of the two")
    for name, tokens in (("prompt", options.prompt_tokens), ("response", options.response_tokens)):
        if tokens < 0 or (tokens and not options.dry_run):
            raise UserError(f"--{name}-tokens {tokens}: is a number above 0, and of --dry-run only")


def _dry_run(config: Any, options: argparse.Namespace) -> int:
    from threepo.training.plan import plan

    for label, value in plan(config, options.prompt_tokens, options.response_tokens):
        print(f"{label:12} {value}")
    return 0


def _eval(options: argparse.Namespace) -> int:
    from rich.console import Console

    from threepo.config import EvaluationConfig
    from threepo.training import recipe

    if options.compare:
        return _compare(options)
    if not options.model:
        raise UserError("name a MODEL to evaluate, or two evaluations to --compare")
    benchmarks: dict[str, Any] = {}
    if options.benchmarks is not None:
        benchmarks["names"] = options.benchmarks.split(",")
    if options.benchmark_files:
        benchmarks["folder"] = str(options.benchmark_files)
    config = recipe.load_evaluation(options.model, options.recipe, options.settings, benchmarks)
    assert isinstance(config, EvaluationConfig)
    from threepo import jobs
    from threepo.evaluation.records import default_folder
    from threepo.evaluation.tables import evaluation_table

    folder = options.output or default_folder(config)
    with writable_folder(folder):
        summary = jobs.evaluate(config, folder)
    Console().print(evaluation_table(summary))
    print(f"every completion and the settings: {folder}")
    return 0


def _compare(options: argparse.Namespace) -> int:
    from rich.console import Console

    given = (options.model, *options.settings, options.recipe, options.benchmarks, options.benchmark_files)
    if any(given):
        raise UserError("--compare A B: takes the folders of two evaluations, and of the rest only --output")
    from threepo.evaluation.compare import compare
    from threepo.evaluation.tables import comparison_table

    comparison = compare(*options.compare)
    console = Console()
    console.print(comparison_table(comparison))
    for name in comparison["only_in_one"]:
        print(f"left out, since only one of them has it: {name}")
    for different in comparison["settings_that_differ"]:
        print(f"made differently: {different['setting']} = {different['first']!r} in A, {different['second']!r} in B")
    if options.output:
        write_text(options.output / "comparison.json", json.dumps(comparison, indent=2) + "\n")
    return 0


def _report(options: argparse.Namespace) -> int:
    from rich.console import Console

    from threepo.analysis.report import plot, read_run, table

    runs = [read_run(path) for path in options.runs]
    Console().print(table({str(path): run.summary() for path, run in zip(options.runs, runs, strict=True)}))
    if options.output:
        plot(runs, options.output)
    return 0


def _sample(options: argparse.Namespace) -> int:
    if options.draws < 1 or options.first < 0:
        raise UserError(f"--draws {options.draws} --first {options.first}: at least 1 draw, from number 0 on")
    from threepo import jobs

    for path in jobs.sample(options.checkpoint, options.output, range(options.first, options.first + options.draws)):
        print(path)
    return 0


def _data_list(options: argparse.Namespace) -> int:
    from threepo.show import listing

    print(listing())
    return 0


def _data_show(options: argparse.Namespace) -> int:
    from threepo.show import data_settings, shown_problem

    settings = data_settings(options.source, options.settings)
    print(shown_problem(settings, "heldout" if options.heldout else "train", options.index, options.model))
    return 0


def _demo(options: argparse.Namespace) -> int:
    from rich.console import Console

    from threepo.demo import run_demo

    run_demo(options.folder, Console())
    return 0
