"""Actions of the command line's commands, given their parsed arguments; cli.py has the arguments.

Nothing heavy is imported before a command needs it.
"""

import argparse
import os
import signal
import warnings
from pathlib import Path
from typing import Any

from threepo.errors import Interrupted, ThreepoWarning, UserError
from threepo.files import write_json
from threepo.ranks.launch import join_world, ranks_started


def train(options: argparse.Namespace) -> None:
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
        from threepo.lab.plan import plan

        found = plan(config, options.prompt_tokens, options.response_tokens, options.ranks or ranks_started())
        for label, lines in found.items():
            print(*(f"{'' if i else label:12} {line}" for i, line in enumerate(lines)), sep="\n")
        return
    if not config.run.folder:
        raise UserError("run.folder = '': no recipe names the folder; set run.folder")
    with join_world(config.parallel.timeout_s) as world:
        from threepo import api

        folder = None
        if options.resume:
            config, folder = api.reopen(options.resume, config, steps, world)
        train: Any = api.train if options.kind == "train" else api.fine_tune
        path = train(config, folder, world)
        world.on_first(lambda: print(api.closing_words(path)))


_WHERE = ("parallel.", "engine.vllm.servers", "engine.vllm.weights_folder")
"""Beginnings of settings that say where a run runs; a run that is resumed may run elsewhere."""


def _recorded(options: argparse.Namespace, record: Any) -> tuple[Any, Any]:
    """The configuration of the run to resume, and the length that it gets; None: its own."""
    from threepo.config.recipes import merge, parse_overrides
    from threepo.config.records import build
    from threepo.run_folder import recorded_config

    names = [text.partition("=")[0].strip() for text in options.settings]
    if options.recipe or not all(name in ("run.steps", "model.path") or name.startswith(_WHERE) for name in names):
        taken = "all but run.steps, parallel.* and engine.vllm.servers from the run folder"
        branch = f"to change them, start a new run from its checkpoint, with model.path={options.resume}"
        raise UserError(f"--resume takes {taken}; leave out the recipe and other settings ({branch})")
    given = parse_overrides(options.settings)
    steps = given.pop("run", {}).get("steps")
    recorded = recorded_config(options.resume, record)
    if "model.path" in names and not recorded["model"].get("lora", {}).get("rank"):
        raise UserError("--resume with model.path is for adapters whose model has moved; this run has its own weights")
    return build(record, merge(recorded, given)), steps


def evaluate(options: argparse.Namespace) -> None:
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
    with join_world(config.parallel.timeout_s) as world:
        summary = evaluate(config, folder, world=world)
    Console().print(evaluation_table(summary))
    print(f"every completion and the settings: {folder}")


def _compare(options: argparse.Namespace) -> None:
    from rich.console import Console

    if any((options.model, *options.settings, options.recipe, options.benchmarks, options.benchmark_files)):
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


def probe(options: argparse.Namespace) -> None:
    from rich.console import Console

    from threepo.lab.probe_config import load_probing

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
    from threepo.lab.probe_report import table

    folder = options.output or api.probe_folder(config, settings)
    summary = api.probe(config, settings, folder, training, options.write)
    console = Console()
    console.print(table(summary))
    console.print(summary["verdict"], highlight=False)
    print(f"all figures: {folder}")
    if options.write and options.write.is_file():
        print(f"next: threepo train {options.write}")


def report(options: argparse.Namespace) -> None:
    from rich.console import Console

    from threepo.lab.report import read_runs, tables

    runs = read_runs([*map(Path, options.runs)])
    named = os.path.abspath(options.baseline or runs[0].path)
    baseline = next((run for run in runs if os.path.abspath(run.path) == named), None)
    if baseline is None:
        raise UserError(f"--baseline {options.baseline}: must be one of the RUNs")
    for table in tables(runs):
        Console().print(table)
    if options.output is None:
        return
    from threepo.lab.curves import plot

    if options.output.suffix[1:].isalpha():  # of a file; qwen2.5 is a folder
        plot(runs, options.output)
        return
    from threepo.lab.page import PAGE, write_page

    write_page(runs, baseline, options.output)
    print(f"page: {options.output / PAGE}")


def explore(options: argparse.Namespace) -> None:
    from rich.console import Console

    baseline, *runs = map(Path, options.runs)
    if not runs:
        raise UserError(f"explore {baseline}: name the baseline, and at least one run to compare with it")
    from threepo.lab.exploration import explore
    from threepo.lab.exploration_view import exploration_tables, plot_exploration

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


def study(options: argparse.Namespace) -> None:
    from rich.console import Console

    from threepo.lab.study_config import load_study

    study = load_study(options.study, options.settings)
    if unequal := study.unequal_rollouts():
        warnings.warn(f"the methods differ in rollouts of a run: {unequal}", ThreepoWarning, stacklevel=2)
    if options.dry_run:
        from threepo.lab.study import forecast

        print("\n".join(forecast(study)))
        return
    if not options.summary:
        from threepo.lab.study import run_study

        run_study(study)
    from threepo.lab.study_summary import summarise
    from threepo.lab.study_view import shown_tables, write_results

    summary = summarise(study)
    write_results(study, summary)
    for table in shown_tables(summary):
        Console().print(table)
    for entry in summary["left_out"]:
        print(f"left out: {entry['run']}: {entry['state']}: {entry['reason']}")
    print(f"figures, tables and curves: {study.folder}")


def sample(options: argparse.Namespace) -> None:
    if options.draws < 1 or options.first < 0:
        raise UserError(f"--draws {options.draws} --first {options.first}: at least 1 draw, from number 0 on")
    from threepo import api

    for path in api.sample(options.checkpoint, options.output, range(options.first, options.first + options.draws)):
        print(path)


def merge(options: argparse.Namespace) -> None:
    from threepo import api

    api.merge(options.model, options.output)
    print(options.output)


def push(options: argparse.Namespace) -> None:
    if options.public and options.dry_run:
        raise UserError("--public --dry-run: --dry-run uploads nothing; leave out one of the two")
    from threepo.lab import hub

    evaluations = options.evaluations or ()
    if options.dry_run:
        hub.write(options.run, options.repo, options.dry_run, evaluations)
        print(f"what would be uploaded: {options.dry_run}")
    else:
        print(hub.push(options.run, options.repo, evaluations, options.public))


def show_data(options: argparse.Namespace) -> None:
    from threepo.lab.show import listing, shown_problem

    if options.source is None:
        print(listing())
        return
    split: Any = "heldout" if options.heldout else "train"
    print(shown_problem(options.source, options.settings, split, options.index, options.model))


def demo(options: argparse.Namespace) -> None:
    from rich.console import Console

    from threepo.lab.demo import demonstrate

    again = "run it again to go on: finished stages are not repeated"
    try:
        demonstrate(options.folder, Console())
    except Interrupted as stop:
        raise Interrupted(stop.signal_number, f"{str(stop).partition(';')[0]}; {again}") from None
    except KeyboardInterrupt:
        raise Interrupted(signal.SIGINT, f"interrupted; {again}") from None


def doctor(options: argparse.Namespace) -> None:
    from threepo.lab.doctor import doctor

    doctor()
