"""The demonstration in two acts: an easy task, where four methods tie, and one from which GRPO learns nothing.

threepo demo. Every stage is a recipe of demo/ with a folder of the same name; finished stages are not repeated.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
SECOND_ACT = ("choices/grpo", "choices/replay")
PROBED = {"exact": True, "draws": 64, "temperatures": (1.5,), "most_kl": 2.0}
"""Settings of the second act's probe."""


@dataclass
class Demonstration:
    """A demonstration: its folder, where it is told, and settings on top of the recipes."""

    folder: Path
    console: Console
    overrides: Sequence[str]
    """Settings of the methods' recipes, section.key=value."""
    warm_start_overrides: Sequence[str]
    """Settings of the warm starts' recipes."""
    seconds: float = 0.0
    """Time that all stages took, also in earlier processes."""

    def warm_start(self, name: str) -> Path:
        """Fine-tune from random weights."""
        self._announce("Warm start: supervised fine-tuning", name)
        return self._stage(name, SFTConfig, self.warm_start_overrides)

    def method(self, name: str, start: Path) -> RunReport:
        """Train with reinforcement learning."""
        self._announce(f"RLVR: {Path(name).name}", name)
        return read_run(self._stage(name, TrainConfig, [*self.overrides, f"model.path={start}"]))

    def probe(self, name: str, start: Path, recipe: str) -> dict[str, Any]:
        """Ask whether the noise of a recipe will help."""
        began, folder = time.monotonic(), self.folder / name
        self._announce("Will the noise help? A probe before training", name)
        noise = load(TrainConfig, f"demo/{recipe}").noise
        flags = {**PROBED, "places": tuple(noise.where), "sizes": (noise.size,)}
        config, settings, _ = load_probing(str(start), f"demo/{recipe}", self.overrides, flags)
        summary = read_json(folder / SUMMARY) if (folder / SUMMARY).is_file() else run_probe(config, settings, folder)
        self.seconds += time.monotonic() - began
        self.console.print(summary["verdict"], highlight=False)
        return summary

    def _announce(self, what: str, name: str) -> None:
        self.console.print(f"{what}, in {self.folder / name}", highlight=False)

    def _stage(self, name: str, record: Any, overrides: Sequence[str]) -> Path:
        """Bring the run of the recipe demo/NAME to its end."""
        folder = complete(load(record, f"demo/{name}", [*overrides, f"run.folder={self.folder / name}"]))
        self.seconds += float(read_json(folder / SUMMARY)["seconds"])
        return folder


def demonstrate(
    folder: Path, console: Console, overrides: Sequence[str] = (), warm_start_overrides: Sequence[str] = ()
) -> dict[str, Any]:
    """Run both acts. Returns the content of summary.json; a picture of each act is in the same folder.

    `overrides` (section.key=value) change the methods' recipes, `warm_start_overrides` the warm starts'.
    """
    demonstration = Demonstration(folder, console, overrides, warm_start_overrides)
    start = demonstration.warm_start("warm_start")
    first = [demonstration.method(name, start) for name in FIRST_ACT]
    console.print("\nSecond act: the same comparison where a temperature finds nothing", highlight=False)
    start = demonstration.warm_start("choices/warm_start")
    probed = demonstration.probe("choices/probe", start, SECOND_ACT[-1])
    second = [demonstration.method(name, start) for name in SECOND_ACT]
    acts = {"curves.png": first, "second_act.png": second}
    for picture, runs in acts.items():
        plot(runs, folder / picture)
        console.print(f"\n{_task(runs[0])}; curves: {folder / picture}", highlight=False)
        for table in tables(runs):
            console.print(table)
    words = conclusion(probed, *second)
    summary = {"seconds": demonstration.seconds, **_summary(first)}
    summary["second_act"] = {**_summary(second), "probe": probed, "conclusion": words}
    write_json(folder / SUMMARY, summary)
    report = f"threepo report {' '.join(str(run.path) for run in second)} --output {folder / 'report'}"
    console.print(f"\n{words}\n\n{demonstration.seconds:.0f} s\nnext: {report}", highlight=False, soft_wrap=True)
    return summary


def conclusion(probed: Mapping[str, Any], without: RunReport, noisy: RunReport) -> str:
    """Sentences that compare a method with noise and one without, and say what the task was made for."""
    chance, with_noise = (f"{row['mu']['value']:.2g}" for row in (probed["mean"], probed["noise"][0]))
    plain, improved = (run.summary()["pass_at_1_after"] for run in (without, noisy))
    rollouts = without.summary()["rollouts"]
    words = (
        f"{_task(without)}: before training, the chance of a right answer was {chance}, and {with_noise} with noise on "
        f"the weights. Of {rollouts:,} rollouts each, {without.name} got {_right(without):,} right and ended at "
        f"{100 * plain:.1f} %, {noisy.name} got {_right(noisy):,} right and ended at {100 * improved:.1f} %."
    )
    if improved - plain < 0.1:
        return f"{words} Here noise on the weights did not help."
    return (
        f"{words} The task was made for such noise: many decisions must be alike, as they are after similar prompts. "
        f"An entropy bonus instead of noise (method.preset=entreg) solved it as soon in ten seeds: docs/second_act.md."
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
