"""The command line. Nothing heavy is imported before a command needs it, so help and mistakes answer at once.

Exit status: 0 done; 2 something in the input to fix, said in one line; 128 + n stopped by signal n, state saved.
"""

import argparse
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import threepo
from threepo import commands
from threepo.errors import Interrupted, ThreepoWarning, UserError
from threepo.ranks import launch
from threepo.ranks.world import RankError

_format_warning = warnings.formatwarning


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    # Before `datasets` is imported: ours is the only progress bar, and an error is one line.
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("DATASETS_VERBOSITY", "critical")
    warnings.formatwarning = _one_line
    options = _parse(build_parser(), arguments)
    failure: type[Exception] | None = None
    neighbours: Sequence[int] = ()
    try:
        if options.command not in (commands.train, commands.evaluate):
            launch.refuse_several(
                "torchrun: only `threepo train`, `sft` and `eval` run on several ranks; start without it"
            )
        with launch.one_voice():
            options.command(options)
        sys.stdout.flush()
        return 0
    except (UserError, RankError) as error:
        message, status, failure = str(error), 2, type(error)  # the error itself would keep a folder open
        neighbours = getattr(error, "neighbours", ())
    except Interrupted as stop:
        message, status = str(stop), 128 + stop.signal_number
    except KeyboardInterrupt:
        message, status = "interrupted", 128 + signal.SIGINT
    except BrokenPipeError:  # a reader such as `head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python would write the rest at exit
        return 128 + signal.SIGPIPE
    launch.report_end(message, failure, neighbours)
    return status


def _one_line(message: Any, category: Any, *where: Any, **more: Any) -> str:
    """Formats a warning: one about the run in one line, any other as Python does."""
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
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    kinds = {"train": "reinforcement learning from verifiable rewards", "sft": "warm start by supervised fine-tuning"}
    for name, text in kinds.items():
        train = subparsers.add_parser(name, help=text)
        train.add_argument("recipe", nargs="?", default="", metavar="RECIPE", help="a TOML file or a shipped recipe")
        train.add_argument("settings", nargs="*", metavar="section.key=value", help="override settings of the recipe")
        train.add_argument("--resume", type=_path, metavar="RUN", help="continue this run; run.steps=N extends it")
        train.add_argument("--list", action="store_true", help="list the shipped recipes")
        train.add_argument("--dry-run", action="store_true", help="print memory and compute of the run, load nothing")
        for kind in ("prompt", "response"):
            text = f"--dry-run: mean tokens of a {kind} (default: of the longest)"
            train.add_argument(f"--{kind}-tokens", type=int, default=0, help=text)
        text = "--dry-run: number of world, each with a GPU (default: those of torchrun, or 1)"
        train.add_argument("--ranks", type=int, default=0, help=text)
        train.set_defaults(command=commands.train, more="settings", kind=name)

    evaluate = subparsers.add_parser("eval", help="pass@k and maj@k of a model on benchmarks or held-out problems")
    evaluate.add_argument("model", nargs="?", metavar="MODEL", help="model directory, checkpoint, run folder or hub id")
    evaluate.add_argument("settings", nargs="*", metavar="section.key=value", help="such as data.train=sorting")
    evaluate.add_argument("--recipe", default="", help="take data, reward and eval settings from this recipe")
    evaluate.add_argument("--benchmarks", metavar="NAMES", help="such as aime24,math500 or math500=FILE (see the docs)")
    evaluate.add_argument("--benchmark-files", type=_path, metavar="FOLDER", help="read aime24.jsonl, ... from here")
    evaluate.add_argument("--output", type=_path, help="folder for scores and completions (default: in runs/)")
    evaluate.add_argument("--compare", nargs=2, type=_path, metavar=("A", "B"), help="test two evaluations' difference")
    evaluate.set_defaults(command=commands.evaluate, more="settings")
    _add_tools(subparsers)
    return parser


def _add_tools(subparsers: Any) -> None:
    """The commands besides training and evaluation."""
    probe = subparsers.add_parser("probe", help="before training: would noise on the weights help, where, how large")
    probe.add_argument("model", metavar="MODEL", help="model directory, checkpoint, run folder or hub id")
    probe.add_argument("settings", nargs="*", metavar="section.key=value", help="such as data.train=sorting")
    probe.add_argument("--recipe", default="", help="the training that the probe is about")
    probe.add_argument("--ess", metavar="LIST", help="sizes of the posterior, such as 1e8,1e9,1e10")
    probe.add_argument("--draws", type=int, help="draws of each noise (default 64)")
    probe.add_argument("--rollouts", type=int, help="completions of each problem by each draw (default 16)")
    probe.add_argument("--exact", action="store_true", help="chances from the probability of the only right answer")
    probe.add_argument("--output", type=_path, help="folder for figures and picture (default: in runs/)")
    probe.add_argument("--write", type=_path, metavar="RECIPE", help="write the training recipe that follows, if any")
    probe.set_defaults(command=commands.probe, more="settings")

    report = subparsers.add_parser("report", help="tables of training runs, and a page with figures and rollouts")
    report.add_argument("runs", nargs="+", metavar="RUN", help="run folders")
    text = "write a page into this folder, or only curves into a .png, .pdf or .svg file"
    report.add_argument("--output", type=_path, metavar="FOLDER", help=text)
    report.add_argument("--baseline", type=_path, metavar="RUN", help="pair the others with this run, not the first")
    report.set_defaults(command=commands.report, more="runs")

    explore = subparsers.add_parser("explore", help="did runs explore more than a baseline, from saved completions")
    explore.add_argument("runs", nargs="+", metavar="RUN", help="the baseline, then the runs: folders or files")
    explore.add_argument("--heldout", nargs="+", type=_path, metavar="EVAL", help="an evaluation of each, in order")
    explore.add_argument("--by-draw", action="store_true", help="a group is what one draw wrote, as M3PO credits it")
    explore.add_argument("--verdict", default="", metavar="COLUMN", help="column that says what is right, as a reward")
    explore.add_argument("--right-above", type=float, metavar="X", help="right is a verdict above this (default: is 1)")
    explore.add_argument("--output", type=_path, metavar="FOLDER", help="write exploration.json and .png there")
    explore.set_defaults(command=commands.explore, more="runs")

    study = subparsers.add_parser("study", help="methods x seeds: tuned alike, compared in pairs, with intervals")
    study.add_argument("study", metavar="STUDY", help="a TOML file or a shipped study; started again, it goes on")
    study.add_argument("settings", nargs="*", metavar="section.key=value", help="such as study.jobs=4")
    study.add_argument("--summary", action="store_true", help="run nothing; write the tables of what is finished")
    study.add_argument("--dry-run", action="store_true", help="list the runs, and how long the rest may take")
    study.set_defaults(command=commands.study, more="settings")

    sample = subparsers.add_parser("sample", help="write models drawn from a checkpoint's posterior")
    sample.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="checkpoint or run folder of an IVON run")
    sample.add_argument("--draws", type=int, default=1, help="number of models (default 1)")
    sample.add_argument("--first", type=int, default=0, help="number of the first draw (default 0)")
    sample.add_argument("--output", type=_path, required=True, help="folder for draw-0, draw-1, ...")
    sample.set_defaults(command=commands.sample)

    merge = subparsers.add_parser("merge", help="write a model with adapters as one without")
    merge.add_argument("model", type=_path, metavar="MODEL", help="checkpoint or run folder of a run with model.lora")
    merge.add_argument("--output", type=_path, required=True, help="folder for the model")
    merge.set_defaults(command=commands.merge)

    push = subparsers.add_parser(
        "push", help="upload a run's model to the Hugging Face hub, with a card made of the run"
    )
    push.add_argument("run", type=_path, metavar="RUN", help="run folder")
    push.add_argument("repo", metavar="ORG/NAME", help="repository; a new one is private")
    push.add_argument(
        "--evaluations", nargs="+", type=_path, metavar="EVAL", help="folders of threepo eval, for the card"
    )
    push.add_argument("--public", action="store_true", help="a new repository is for everybody")
    push.add_argument(
        "--dry-run", type=_path, metavar="FOLDER", help="write what would be uploaded there, upload nothing"
    )
    push.set_defaults(command=commands.push)

    data = subparsers.add_parser("data", help="the sources of problems, and a problem as a policy reads it")
    parts = data.add_subparsers(title="commands", metavar="COMMAND", required=True)
    parts.add_parser("list", help="list the sources of problems").set_defaults(command=commands.show_data, source=None)
    show = parts.add_parser("show", help="one problem as a policy reads it, and the number of problems")
    show.add_argument("source", metavar="SOURCE", help="what data.train can name, such as gsm8k or problems.jsonl")
    show.add_argument("settings", nargs="*", metavar="data.key=value", help="such as data.prompt_column=question")
    show.add_argument("--index", type=int, default=0, help="which problem, from 0 (default 0)")
    show.add_argument("--heldout", action="store_true", help="a held-out problem, not one to train on")
    show.add_argument("--model", default="", help="model directory or hub id, for its tokenizer and chat template")
    show.set_defaults(command=commands.show_data, more="settings")

    demo = subparsers.add_parser("demo", help="warm start, four methods, a comparison: minutes on a CPU")
    demo.add_argument("--folder", type=_path, default=Path("runs/demo"), help="default: runs/demo")
    demo.set_defaults(command=commands.demo)

    text = "what is installed, what works here, and what to do about what does not"
    subparsers.add_parser("doctor", help=text).set_defaults(command=commands.doctor)


def _path(text: str) -> Path:
    """A path from the command line; an empty one is a variable that was not set, not the current directory."""
    if not text:
        raise argparse.ArgumentTypeError("is empty; name a path")
    return Path(text).expanduser()
