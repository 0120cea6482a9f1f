"""The demonstration in two acts: an easy task, where four methods tie, and one from which GRPO learns nothing.

threepo demo. Every stage is a recipe of demo/ with a folder of the same name; finished stages are not repeated.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from threepo.api import complete
from threepo.config import SFTConfig, TrainConfig
from threepo.config.recipes import load
from threepo.files import read_json, write_json
from threepo.lab.curves import plot
from threepo.lab.probe import run_probe
from threepo.lab.probe_config import load_probing
from threepo.lab.report import RunReport, read_run, tables
from threepo.run_folder import SUMMARY

FIRST_ACT = ("grpo", "b3po", "m3po", "c3po")
SECOND_ACT = ("choices/grpo", "choices/entreg", "choices/auto")
PROBED = {"exact": True, "draws": 64, "temperatures": (1.5,), "most_kl": 2.0}
"""Settings of the second act's probe, besides the noise of a recipe that chose it by hand."""


def demonstrate(
    folder: Path, console: Console, overrides: Sequence[str] = (), warm_start_overrides: Sequence[str] = ()
) -> dict[str, Any]:
    """Run both acts. Returns the content of summary.json; a picture of each act is in the same folder.

    `overrides` (section.key=value) change the methods' recipes, `warm_start_overrides` the recipes of the warm starts.
    """

    def warm_start(name: str) -> Path:
        console.print(f"Warm start: supervised fine-tuning, in {folder / name}", highlight=False)
        return complete(load(SFTConfig, f"demo/{name}", [*warm_start_overrides, f"run.folder={folder / name}"]))

    def train(name: str, start: Path) -> RunReport:
        console.print(f"RLVR: {Path(name).name}, in {folder / name}", highlight=False)
        settings = [*overrides, f"model.path={start}", f"run.folder={folder / name}"]
        return read_run(complete(load(TrainConfig, f"demo/{name}", settings)))

    start = warm_start("warm_start")
    first = [train(name, start) for name in FIRST_ACT]
    console.print("\nSecond act: the same comparison where a temperature finds nothing", highlight=False)
    start = warm_start("choices/warm_start")
    console.print(f"Will the noise help? A probe before training, in {folder / 'choices/probe'}", highlight=False)
    probed = _probe(folder / "choices/probe", start, "demo/choices/replay", overrides)
    console.print(probed["verdict"], highlight=False)
    second = [train(name, start) for name in SECOND_ACT]
    for picture, runs in {"curves.png": first, "second_act.png": second}.items():
        plot(runs, folder / picture)
        console.print(f"\n{_task(runs[0])}; curves: {folder / picture}", highlight=False)
        for table in tables(runs):
            console.print(table)
    words = conclusion(probed, *second)
    summary = _summary(first) | {"second_act": {**_summary(second), "probe": probed, "conclusion": words}}
    write_json(folder / SUMMARY, summary)
    report = f"threepo report {' '.join(str(run.path) for run in second)} --output {folder / 'report'}"
    console.print(f"\n{words}\n\nnext: {report}", highlight=False, soft_wrap=True)
    return summary


def _probe(folder: Path, start: Path, recipe: str, overrides: Sequence[str]) -> dict[str, Any]:
    """Ask whether the noise of a recipe will help."""
    if (folder / SUMMARY).is_file():
        return dict(read_json(folder / SUMMARY))
    noise = load(TrainConfig, recipe).noise
    flags = {**PROBED, "places": tuple(noise.where), "sizes": (noise.size,)}
    config, settings, _ = load_probing(str(start), recipe, overrides, flags)
    return run_probe(config, settings, folder)


def conclusion(probed: Mapping[str, Any], plain: RunReport, bonus: RunReport, noisy: RunReport) -> str:
    """Sentences that compare GRPO, GRPO with an entropy bonus and noise, and say what the task was made for."""
    chance, with_noise = (f"{row['mu']['value']:.2g}" for row in (probed["mean"], probed["noise"][0]))
    ends = [run.summary()["pass_at_1_after"] for run in (plain, bonus, noisy)]
    results = [
        f"{run.name} got {_right(run):,} right and ended at {100 * end:.1f} %"
        for run, end in zip((plain, bonus, noisy), ends, strict=True)
    ]
    words = (
        f"{_task(plain)}: before training, the chance of a right answer was {chance}, and {with_noise} with noise of "
        f"one place and size. Of {plain.summary()['rollouts']:,} rollouts each, {', '.join(results)}. Its leading "
        f"arms: {noisy.summary()['arms']}."
    )
    if ends[-1] - ends[0] < 0.1:
        return f"{words} Here noise on the weights did not help."
    return (
        f"{words} The task was made for such noise: many decisions must be alike, as they are after similar prompts. "
        f"How both ways to explore fare as it gets harder: docs/consistent_choice.md."
    )


def _right(run: RunReport) -> int:
    """Number of right rollouts of a run whose rewards are 0 and 1."""
    rewards = [float(row["reward/mean"]) for row in run.rows if row["step"] >= 0]
    return round(sum(rewards) / len(rewards) * int(run.summary()["rollouts"]))


def _task(run: RunReport) -> str:
    data = run.config["data"]
    return f"{data['train']}, levels {', '.join(map(str, data['levels']))}"


def _summary(runs: Sequence[RunReport]) -> dict[str, Any]:
    return {"task": _task(runs[0]), "methods": {run.name: run.summary() for run in runs}}
