"""The commands of the laboratory, each with its arguments: they ask what noise does, and read what runs have left.

Nothing heavy is imported before a command needs it.
"""

import argparse
import os
from pathlib import Path
from typing import Any

from threepo.commands import Command, argument, command, path_argument, settings_argument, without_collector
from threepo.errors import UserError
from threepo.files import write_json
from threepo.run_folder import REPORT

LAB_COMMANDS: list[Command] = []


@command(
    LAB_COMMANDS,
    "probe",
    "predict whether noise on the weights would help, where, and how large",
    argument("model", metavar="MODEL", help="model directory, checkpoint, run folder or hub id"),
    settings_argument("such as data.train=sorting"),
    argument("--recipe", default="", help="training that the probe is about"),
    argument("--ess", metavar="LIST", help="sizes of the posterior, such as 1e8,1e9,1e10"),
    argument("--draws", type=int, help="draws of each noise (default 64)"),
    argument("--rollouts", type=int, help="completions per problem and draw (default 16)"),
    argument("--exact", action="store_true", help="chances from the probability of the only right answer"),
    argument("--output", type=path_argument, help="folder for all figures (default: in runs/)"),
    argument("--write", type=path_argument, metavar="RECIPE", help="write the training recipe that follows, if any"),
)
def probe(options: argparse.Namespace) -> None:
    """Predict what noise on the weights would do to a training."""
    from rich.console import Console

    from threepo.lab.probe_config import load_probing

    asked: dict[str, Any] = {"draws": options.draws, "rollouts": options.rollouts, "exact": options.exact or None}
    flags = {name: value for name, value in asked.items() if value is not None}
    if options.ess:
        try:
            flags["ess"] = [float(size) for size in options.ess.split(",")]
        except ValueError:
            raise UserError(f"--ess {options.ess}: must be numbers with commas between them, such as 1e8,1e9") from None
    if options.write and options.write.suffix != ".toml":
        raise UserError(f"--write {options.write}: a recipe's name ends in .toml")
    config, settings, training = load_probing(options.model, options.recipe, options.settings, flags)
    with without_collector():
        from threepo.lab.probe import default_folder, run_probe
        from threepo.lab.probe_findings import findings_table

    folder = options.output or default_folder(config, settings)
    summary = run_probe(config, settings, folder, training, options.write)
    Console().print(findings_table(summary), summary["verdict"], sep="\n", highlight=False)
    print(f"all figures: {folder}")
    if options.write and summary["draws"]:
        print(f"next: threepo train {options.write}")
    elif options.write:
        print(f"{options.write} is not written, as no noise is advised")


@command(
    LAB_COMMANDS,
    "report",
    "tables of training runs, and a page with findings, figures and rollouts",
    argument("runs", nargs="+", metavar="RUN", help="run folders"),
    argument(
        "--output",
        type=path_argument,
        metavar="FOLDER",
        help="folder of the page (default: report/ in the first RUN), or a .png, .pdf or .svg file for curves alone",
    ),
    argument("--baseline", type=path_argument, metavar="RUN", help="pair the others with this run, not the first"),
    argument("--live", action="store_true", help="rewrite the page while the runs train"),
)
def report(options: argparse.Namespace) -> None:
    """Print findings and tables of runs, and write a page or curves."""
    from rich.console import Console

    from threepo.lab.report import findings, read_runs, tables

    runs = read_runs([*map(Path, options.runs)])
    named = os.path.abspath(options.baseline or runs[0].path)
    baseline = next((run for run in runs if os.path.abspath(run.path) == named), None)
    if baseline is None:
        raise UserError(f"--baseline {options.baseline}: must be one of the RUNs")
    Console().print(*tables(runs))
    for name, words in findings(runs, baseline):
        print(f"{name}: {words}")
    folder = options.output or runs[0].path / REPORT
    if folder.suffix[1:].isalpha():  # of a file; qwen2.5 is a folder
        from threepo.lab.curves import plot

        if options.live:
            raise UserError(f"--live: follows with a page, and --output {folder} is a picture; name a folder")
        plot(runs, folder)
        return
    from threepo.lab.page import REFRESH, follow, write_page

    print(f"page: {write_page(runs, baseline, folder, REFRESH * options.live)}", flush=True)
    if options.live:
        follow(runs, baseline, folder)


@command(
    LAB_COMMANDS,
    "explore",
    "test, from saved completions, whether runs explored more than a baseline",
    argument("runs", nargs="+", metavar="RUN", help="the baseline, then the runs: folders or files"),
    argument("--verdict", default="", metavar="COLUMN", help="column that says what is right, as a reward"),
    argument("--right-above", type=float, metavar="X", help="a verdict above this is right (default: only 1)"),
    argument("--output", type=path_argument, metavar="FOLDER", help="write exploration.json and .png there"),
)
def explore(options: argparse.Namespace) -> None:
    """Compare the completions of runs with a baseline's."""
    from rich.console import Console

    baseline, *runs = map(Path, options.runs)
    if not runs:
        raise UserError(f"explore {baseline}: name the baseline, and at least one run to compare with it")
    from threepo.lab.exploration import explore
    from threepo.lab.exploration_view import exploration_tables, plot_exploration

    comparison = explore(baseline, runs, verdict=options.verdict, above=options.right_above)
    Console().print(*exploration_tables(comparison))
    for name, run in comparison["runs"].items():
        for side, steps in run["steps_in_one_only"].items():
            if steps:
                print(f"{name}: left out {steps} steps that only the {side} has")
    if options.output:
        write_json(options.output / "exploration.json", comparison)
        plot_exploration(comparison, options.output / "exploration.png")


@command(
    LAB_COMMANDS,
    "study",
    "methods x seeds: tuned alike, compared in pairs, with intervals",
    argument("study", metavar="STUDY", help="TOML file or shipped study; started again, it goes on"),
    settings_argument("such as study.jobs=4"),
    argument("--summary", action="store_true", help="run nothing; write the tables of what is finished"),
    argument("--dry-run", action="store_true", help="list the runs, and estimate the time left"),
)
def study(options: argparse.Namespace) -> None:
    """Run a study, and write its tables."""
    from rich.console import Console

    from threepo.lab.study_config import load_study

    study = load_study(options.study, options.settings)
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
    Console().print(*shown_tables(summary))
    waiting = [entry for entry in summary["left_out"] if entry["state"] == "not begun"]
    for entry in (entry for entry in summary["left_out"] if entry not in waiting):
        print(f"left out: {entry['run']}: {entry['state']}: {entry['reason']}")
    if waiting:
        print(f"left out: {len(waiting)} runs that have not begun; table.md lists them")
    print(f"figures, tables and curves: {study.folder}")


@command(
    LAB_COMMANDS,
    "push",
    "upload a run's model to the Hugging Face hub, with a card",
    argument("run", type=path_argument, metavar="RUN", help="run folder"),
    argument("repo", metavar="ORG/NAME", help="repository; a new one is private"),
    argument(
        "--evaluations", nargs="+", type=path_argument, metavar="EVAL", help="folders of threepo eval, for the card"
    ),
    argument("--public", action="store_true", help="make a new repository public"),
    argument("--dry-run", type=path_argument, metavar="FOLDER", help="write the files there, upload nothing"),
)
def push(options: argparse.Namespace) -> None:
    """Upload a model, or write what would be uploaded."""
    if options.public and options.dry_run:
        raise UserError("--public --dry-run: --dry-run uploads nothing; leave out one of the two")
    from threepo.lab import hub

    evaluations = options.evaluations or ()
    if options.dry_run:
        hub.write(options.run, options.repo, options.dry_run, evaluations)
        print(f"what would be uploaded: {options.dry_run}")
    else:
        print(hub.push(options.run, options.repo, evaluations, options.public))


LAB_COMMANDS.append(Command("data", "list sources of problems, or show a problem"))


@command(LAB_COMMANDS, "data list", "list sources of problems")
def list_sources(options: argparse.Namespace) -> None:
    """List what data.train can name."""
    from threepo.lab.show import source_table

    print(source_table())


@command(
    LAB_COMMANDS,
    "data show",
    "one problem as a policy reads it, and the number of problems",
    argument("source", metavar="SOURCE", help="as in data.train, such as gsm8k or problems.jsonl"),
    settings_argument("such as data.prompt_column=question", "data.key=value"),
    argument("--index", type=int, default=0, help="which problem, from 0 (default 0)"),
    argument("--heldout", action="store_true", help="a held-out problem"),
    argument("--model", default="", help="model directory or hub id, for its tokenizer and chat template"),
)
def show_problem(options: argparse.Namespace) -> None:
    """Show one problem."""
    from threepo.lab.show import problem_text

    split: Any = "heldout" if options.heldout else "train"
    print(problem_text(options.source, options.settings, split, options.index, options.model))


@command(
    LAB_COMMANDS,
    "demo",
    "two acts, minutes on a CPU: four methods tie; noise finds what GRPO does not",
    argument("--folder", type=path_argument, default=Path("runs/demo"), help="default: runs/demo"),
)
def demo(options: argparse.Namespace) -> None:
    """Run the demonstration."""
    from rich.console import Console

    with without_collector():
        from threepo.lab.demo import demonstrate

    demonstrate(options.folder, Console())


@command(
    LAB_COMMANDS,
    "doctor",
    "what is installed, what works here, and how to fix the rest",
    argument("--bundle", type=path_argument, metavar="FILE", help="write it as JSON, to send with a report; no data"),
    argument("--run", type=path_argument, metavar="RUN", help="add this run's settings and metrics"),
)
def doctor(options: argparse.Namespace) -> None:
    """Check the installation."""
    from threepo.lab.doctor import doctor

    doctor(options.bundle, options.run)
