"""A probe as a command: its folder, its picture, and the recipe that follows from it."""

import json
from pathlib import Path
from typing import Any

from threepo.config import TrainConfig
from threepo.config.recipes import Table, load
from threepo.config.records import to_dict
from threepo.data.rows import digest
from threepo.evaluation.records import set_name
from threepo.lab.probe import prior, probe
from threepo.lab.probe_config import ProbeConfig
from threepo.lab.probe_findings import recipe, write_recipe
from threepo.lab.probe_report import draw_picture


def default_folder(config: TrainConfig, settings: ProbeConfig) -> Path:
    """runs/probe-MODEL-DATA-DIGEST: equal settings have equal folders, different settings have different ones."""
    model = Path(config.model.path)
    text = json.dumps([to_dict(config), to_dict(settings)], sort_keys=True)
    name = "-".join([model.name, set_name(Path(config.data.train).stem), digest([text])[:8]])
    return Path("runs") / f"probe-{name}"


def run_probe(
    config: TrainConfig, settings: ProbeConfig, folder: Path, training: Table | None = None, write: Path | None = None
) -> dict[str, Any]:
    """Predict what noise on the weights would do to a training, before it. Returns what summary.json holds.

    `write`: where the recipe goes that follows, made of the tables `training`; none is written where noise does not
    help.
    """
    summary = probe(config, settings, folder)
    draw_picture(summary, folder / "probe.png")
    if write and summary["draws"]:
        learned = prior(config)
        proposed = recipe(summary, config, training or {}, str(learned.folder) if learned else "")
        write_recipe(write, proposed, summary["verdict"])
        load(TrainConfig, str(write))  # it must be one
    return summary
