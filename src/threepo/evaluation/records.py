"""An evaluation's folder: every completion with its verdict, saved in parts as they come, so that none is lost.

evaluation.json              the settings, and what else the records depend on: weights, and problems as they are put
parts/SET/00000.parquet      completions of the first problems of a set, while the evaluation goes on
completions/SET.parquet      all of a set, when they are all there
summary.json                 the scores, once all sets are done

A part is a function of these settings alone, so an evaluation that was interrupted anywhere and begun again ends like
one that never was.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from threepo.config import DataConfig, EvaluationConfig
from threepo.config.records import first_difference, to_plain
from threepo.config.sources import is_file
from threepo.errors import UserError
from threepo.evaluation.scores import Mark
from threepo.files import atomic_file, disk_errors, lock, read_json, write_text
from threepo.run_folder import CHECKPOINTS, COMPLETIONS, CONFIG, METRICS, SUMMARY, model_folder

EVALUATION, PARTS, LOCK = "evaluation.json", "parts", "eval.lock"
_MARK = ("problem_id", "correct", "status", "parsed_answer", "finish_reason", "draw_index")


def default_folder(config: EvaluationConfig) -> Path:
    """runs/eval-MODEL-SETS-DIGEST: the same for the same settings, another one for others."""
    model = model_folder(Path(config.model.path))
    name = f"{model.parents[1].name}-{model.name}" if model.parent.name == CHECKPOINTS else model.name
    sets = [label.partition("=")[0] for label in config.benchmarks.names] or [data_label(config.data)]
    some = "+".join(sets) if len(sets) <= 3 else f"{len(sets)}-benchmarks"
    settings = json.dumps([to_plain(config), str(model)], sort_keys=True)
    digest = hashlib.blake2b(settings.encode(), digest_size=4).hexdigest()
    return Path("runs") / f"eval-{name}-{set_name(some)}-{digest}"


def data_label(data: DataConfig) -> str:
    """What the results of held-out problems are called by."""
    source = data.eval or data.train
    return Path(source.removesuffix(".gz")).stem if is_file(source) else source


def set_name(label: str) -> str:
    """A set's label as a file name."""
    return re.sub(r"[^\w.+-]+", "-", label).strip("-")


@dataclass(frozen=True)
class Origin:
    """What records come from; those of one folder all come from the same."""

    config: Mapping[str, Any]
    """The settings, as plain values."""
    fingerprint: Mapping[str, str]
    """Digests of what else they depend on, by what a message calls it."""
    versions: Mapping[str, str]
    """Of the packages at work. These may change between the parts of an evaluation, and all are kept."""


def refuse_taken(folder: Path, config: Mapping[str, Any], fingerprint: Mapping[str, str]) -> None:
    """Raise `UserError` if the folder holds anything but an evaluation under these settings.

    And of these weights and problems, as far as the fingerprint names them: an empty one asks about the settings alone.
    """
    if not (folder / EVALUATION).is_file():
        for name in (CONFIG, SUMMARY, METRICS, CHECKPOINTS, COMPLETIONS):
            if (folder / name).exists():
                raise UserError(f"--output {folder}: holds a {name} that is no evaluation's; choose another folder")
        return
    recorded = read_json(folder / EVALUATION)
    difference = first_difference(recorded["config"], dict(config))
    if difference:
        raise UserError(
            f"--output {folder}: holds an evaluation under other settings ({difference}); choose another folder"
        )
    for name, value in fingerprint.items():
        if recorded["fingerprint"].get(name) != value:
            raise UserError(
                f"--output {folder}: holds an evaluation of other {name}: they have changed since it began, so it "
                f"cannot be continued; choose another folder"
            )


class Records:
    """An open evaluation folder; holds a lock on it until it is left or the process ends."""

    def __init__(self, path: Path, origin: Origin) -> None:
        """A new evaluation, or one to go on with; `UserError` if the folder is taken by anything else."""
        self.path = path
        self._made = not path.exists()
        with disk_errors(path):
            path.mkdir(parents=True, exist_ok=True)
        self._lock = lock(path / LOCK, path)
        try:
            refuse_taken(path, origin.config, origin.fingerprint)
            self.versions = self._register(origin)
            if self.finished:
                self._drop_parts()  # a kill just after the scores were written left them here
        except BaseException:
            self._lock.close()
            raise

    def _register(self, origin: Origin) -> list[dict[str, str]]:
        """Write down where the records come from; returns all versions of packages that have been at work."""
        file, versions = self.path / EVALUATION, dict(origin.versions)
        known: list[dict[str, str]] = read_json(file)["versions"] if file.is_file() else []
        if versions not in known:
            known.append(versions)
            write_text(file, json.dumps({**asdict(origin), "versions": known}, indent=2) + "\n")
        return known

    def __enter__(self) -> "Records":
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        self._lock.close()
        if isinstance(error, UserError) and not (self.path / PARTS).exists() and not self.finished:
            for name in (EVALUATION, LOCK):  # mended input should find nothing of what never began
                (self.path / name).unlink(missing_ok=True)
            if self._made:
                self.path.rmdir()

    @property
    def finished(self) -> bool:
        """Whether the scores are there."""
        return (self.path / SUMMARY).is_file()

    def has(self, label: str, part: int) -> bool:
        """Whether this part of a set is saved."""
        return self._whole(label).is_file() or self._part(label, part).is_file()

    def write(self, label: str, part: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Save a part: rows as `training.run_folder.completion_row` makes them, with whatever columns beside."""
        import pyarrow
        import pyarrow.parquet

        with atomic_file(self._part(label, part)) as temporary:
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), temporary, compression="zstd")

    def join(self, label: str, parts: int) -> None:
        """Put all parts of a set, saved every one, into one file."""
        import pyarrow
        import pyarrow.parquet

        if self._whole(label).is_file():
            return
        tables = [pyarrow.parquet.read_table(self._part(label, part)) for part in range(parts)]
        with atomic_file(self._whole(label)) as temporary:
            # A column that is empty throughout a part has no type of its own there; it takes that of the others.
            table = pyarrow.concat_tables(tables, promote_options="default")
            pyarrow.parquet.write_table(table, temporary, compression="zstd")

    def marks(self, label: str) -> list[Mark]:
        """What scores need to know of a joined set, in its order."""
        return read_marks(self._whole(label))

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write the scores; the parts have done their service."""
        write_text(self.path / SUMMARY, json.dumps(summary, indent=2, allow_nan=False) + "\n")
        self._drop_parts()

    def _drop_parts(self) -> None:
        shutil.rmtree(self.path / PARTS, ignore_errors=True)

    def _part(self, label: str, part: int) -> Path:
        return self.path / PARTS / set_name(label) / f"{part:05d}.parquet"

    def _whole(self, label: str) -> Path:
        return self.path / COMPLETIONS / f"{set_name(label)}.parquet"


def read_marks(path: Path) -> list[Mark]:
    """Marks of the completions in a parquet file, in its order."""
    import pyarrow.parquet

    rows = pyarrow.parquet.read_table(path, columns=list(_MARK)).to_pylist()
    return [
        Mark(
            row["problem_id"],
            row["correct"],
            row["status"],
            row["parsed_answer"],
            row["finish_reason"] == "length",
            row["draw_index"],
        )
        for row in rows
    ]
