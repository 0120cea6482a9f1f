"""All of threepo in miniature: a warm start, then GRPO, B3PO, M3PO and C3PO from it at equal rollouts, compared.

    threepo demo

Everything is written to one folder (runs/demo); the same command continues a demonstration that was stopped.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from threepo import api
from threepo.analysis.report import plot, read_run, tables
from threepo.config import SFTConfig, TrainConfig
from threepo.config.recipes import load
from threepo.config.records import build
from threepo.files import read_json, write_json
from threepo.run_folder import CONFIG, SUMMARY, RunFolder

METHODS = ("grpo", "b3po", "m3po", "c3po")


def run_demo(
    folder: Path, console: Console, overrides: Sequence[str] = (), warm_start_overrides: Sequence[str] = ()
) -> dict[str, Any]:
    """Run the stages that are not finished, print the table, draw the curves; returns what summary.json holds.

    `overrides` (section.key=value) change the four methods' recipes, `warm_start_overrides` the warm start's.
    """
    start = folder / "warm_start"
    console.print(f"Warm start: supervised fine-tuning, in {start}", highlight=False)
    seconds = _stage(start, SFTConfig, warm_start_overrides)
    for method in METHODS:
        console.print(f"RLVR: {method}, in {folder / method}", highlight=False)
        seconds += _stage(folder / method, TrainConfig, [*overrides, f"model.path={start}"])
    runs = [read_run(folder / method) for method in METHODS]
    data = runs[0].config["data"]
    summary = {
        "seconds": seconds,
        "task": f"{data['train']}, levels {', '.join(map(str, data['levels']))}",
        "methods": {run.name: run.summary() for run in runs},
    }
    plot(runs, folder / "curves.png")
    write_json(folder / SUMMARY, summary)
    for table in tables({run.name: run for run in runs}):
        console.print(table)
    console.print(f"{seconds:.0f} s. Curves: {folder / 'curves.png'}. Figures: {folder / SUMMARY}", highlight=False)
    return summary


def _stage(folder: Path, record: Any, overrides: Sequence[str]) -> float:
    """Run or resume the recipe of this name in demo/, unless it is finished; returns the seconds that it took."""
    train: Any = api.fine_tune if record is SFTConfig else api.train
    if not (folder / SUMMARY).is_file():
        if (folder / CONFIG).is_file():
            opened, config = RunFolder.open(folder)
            train(build(record, config), opened)
        else:
            train(load(record, f"demo/{folder.name}", [*overrides, f"run.folder={folder}"]))
    return float(read_json(folder / SUMMARY)["seconds"])
