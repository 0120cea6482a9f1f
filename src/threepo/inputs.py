"""Inputs of a run that are objects of Python: they are written into its folder, and the run reads them from there.

So a run of `threepo.train` can be resumed from the command line, where its objects do not exist.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from threepo.errors import UserError
from threepo.files import atomic_file, atomic_folder, disk_errors
from threepo.ranks.world import World
from threepo.run_folder import CONFIG, EVALUATION, INPUTS


class SavedInputs:
    """A model, a tokenizer and data for a run, of which those that are objects get a file in its folder."""

    def __init__(self, folder: str | Path) -> None:
        """`folder`: the run's; empty where none is named, which is refused once there is an object."""
        self._folder = folder and Path(folder).expanduser().absolute()
        self._writers: dict[Path, Callable[[Path], object]] = {}

    def tables(self, model: Any, tokenizer: Any, table: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """The tables of a recipe that name the inputs: [model], and `table` with the settings that `data` has."""
        paths = dict(model) if isinstance(model, Mapping) else {}
        if model is not None and not isinstance(model, Mapping):
            paths["path"] = self._pretrained("model", model)
        if tokenizer is not None:
            paths["tokenizer"] = self._pretrained("tokenizer", tokenizer)
        elif hasattr(model, "save_pretrained"):
            raise UserError("tokenizer is missing: a model object needs tokenizer=, as AutoTokenizer makes it")
        sources = {key: self._source(f"{table}.{key}", value) for key, value in data.items() if value is not None}
        return ({"model": paths} if paths else {}) | ({table: sources} if sources else {})

    def _pretrained(self, name: str, value: Any) -> str:
        if hasattr(value, "save_pretrained"):
            from threepo.models.loading import save_object

            return self._add(name, partial(save_object, value))
        if isinstance(value, str | os.PathLike):
            return os.fspath(value)
        raise UserError(f"{name} = {type(value).__name__}: must be a directory, a hub id or an object of transformers")

    def _source(self, setting: str, data: Any) -> str:
        if isinstance(data, str | Path):
            return str(data)
        name, given = setting.split(".")[1], f"{setting} = {type(data).__name__}"
        if isinstance(data, Sized) and not len(data):
            raise UserError(f"{given}: has no rows; give some, or leave it out")
        if hasattr(data, "to_parquet"):
            return self._add(f"{name}.parquet", data.to_parquet)
        if not isinstance(data, Iterable) or isinstance(data, Mapping):
            raise UserError(f"{given}: must be a name, rows as dictionaries, or a Dataset")
        try:
            text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in data).encode()
        except (TypeError, UnicodeError) as error:
            raise UserError(f"{setting}: a row cannot be written as JSON: {error}; use plain values") from error
        return self._add(f"{name}.jsonl", lambda path: path.write_bytes(text))

    def _add(self, name: str, write: Callable[[Path], object]) -> str:
        if not self._folder:
            raise UserError("folder is missing: objects are written into it; name one, such as folder='runs/first'")
        path = self._folder / INPUTS / name
        self._writers[path] = write
        return str(path)

    @contextmanager
    def written(self, world: World) -> Iterator[None]:
        """Write the files for the body; delete them again if it fails, or is interrupted, before its run has begun."""
        if not self._writers:
            yield
            return
        world.on_first(self._make_folder)
        try:
            world.on_first(self._write)
            yield
        except (Exception, KeyboardInterrupt) as error:
            if world.all_know(error):
                world.on_first(self._delete_unused)
            raise

    def _make_folder(self) -> None:
        """Make the folder of inputs; `UserError` if there is one already that no evaluation has begun with."""
        folder = Path(self._folder)
        if (folder / CONFIG).is_file():
            raise UserError(f"folder {folder}: holds a run already; choose another one")
        if (folder / EVALUATION).is_file():
            return
        if (folder / INPUTS).exists():
            fix = "choose another folder, or delete that one if a start that was killed has left it"
            raise UserError(f"folder {folder}: has a folder {INPUTS} already; {fix}")
        with disk_errors(folder):
            (folder / INPUTS).mkdir(parents=True)

    def _write(self) -> None:
        """Write all files; of an evaluation that continues, check that they are the same."""
        folder = Path(self._folder)
        for path, write in self._writers.items():
            if not (folder / EVALUATION).is_file():
                with atomic_file(path) if path.suffix else atomic_folder(path) as temporary:
                    write(temporary)
                continue
            with TemporaryDirectory() as scratch:
                write(copy := Path(scratch) / path.name)
                if _digests(copy) != _digests(path):
                    what = f"an evaluation with another {path.stem}"
                    raise UserError(f"folder {folder}: holds {what}; choose another folder")

    def _delete_unused(self) -> None:
        """Delete the files, unless a run or an evaluation has begun with them, which are then its own."""
        folder = Path(self._folder)
        if not any((folder / name).is_file() for name in (CONFIG, EVALUATION)):
            shutil.rmtree(folder / INPUTS, ignore_errors=True)
            with suppress(OSError):  # something else is in it
                folder.rmdir()


def _digests(path: Path) -> dict[str, str]:
    """The digest of a file, or of each file in a folder."""
    files = (file for file in (path, *path.rglob("*")) if file.is_file())
    return {str(file.relative_to(path)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
