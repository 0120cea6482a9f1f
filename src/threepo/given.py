"""Objects of Python for the model, tokenizer or data of a run: written into its folder, and read from there.

So a run of `threepo.train` is resumed as one of the command line, also where the objects are not.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from threepo.errors import UserError
from threepo.evaluation.records import EVALUATION
from threepo.files import atomic_file, atomic_folder
from threepo.ranks.world import World
from threepo.run_folder import CONFIG, GIVEN


class GivenObjects:
    """Objects of Python that a run reads from its folder."""

    def __init__(self, home: str | Path) -> None:
        """`home`: the folder of the run; empty where none is named, which is refused once there is an object."""
        self._home = home and path_of("folder", home).absolute()
        self._writes: dict[Path, Callable[[Path], object]] = {}
        """What writes each of them."""

    def tables(self, model: Any, tokenizer: Any, table: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """The tables of a recipe that read the objects: [model], and `table` with the settings that `data` names."""
        paths: dict[str, Any] = {}
        if isinstance(model, Mapping):
            paths |= model
        elif model is not None:
            paths["path"] = self._pretrained("model", model)
        if tokenizer is not None:
            paths["tokenizer"] = self._pretrained("tokenizer", tokenizer)
        elif hasattr(model, "save_pretrained"):
            raise UserError("tokenizer is missing: a model object needs tokenizer=, as AutoTokenizer makes it")
        sources = {key: self._source(f"{table}.{key}", value) for key, value in data.items() if value is not None}
        return ({"model": paths} if paths else {}) | ({table: sources} if sources else {})

    def _pretrained(self, name: str, value: Any) -> str:
        if hasattr(value, "save_pretrained"):
            return self._add(name, value.save_pretrained)
        if isinstance(value, str | os.PathLike):
            return os.fspath(value)
        raise UserError(f"{name} = {type(value).__name__}: must be a directory, a hub id or an object of transformers")

    def _source(self, setting: str, data: Any) -> str:
        if isinstance(data, str | Path):
            return str(data)
        if isinstance(data, Sized) and not len(data):
            raise UserError(f"{setting} = {type(data).__name__}: has no rows; give some, or leave it out")
        if hasattr(data, "to_parquet"):
            return self._add(f"{setting.split('.')[1]}.parquet", data.to_parquet)
        if not isinstance(data, Iterable) or isinstance(data, Mapping):
            raise UserError(f"{setting} = {type(data).__name__}: must be a name, rows as dictionaries, or a Dataset")
        try:
            text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in data).encode()
        except (TypeError, UnicodeError) as error:
            raise UserError(f"{setting}: a row cannot be written as JSON: {error}; use plain values") from error
        return self._add(f"{setting.split('.')[1]}.jsonl", lambda path: path.write_bytes(text))

    def _add(self, name: str, write: Callable[[Path], object]) -> str:
        if not self._home:
            raise UserError("folder is missing: objects are written into it; name one, such as folder='runs/first'")
        path = self._home / GIVEN / name
        self._writes[path] = write
        return str(path)

    @contextmanager
    def written(self, world: World) -> Iterator[None]:
        """For the body; they are deleted again if a `UserError` ends it before anything has begun that reads them."""
        with _without_bars():
            world.on_first(self._write)
            try:
                yield
            except UserError as error:
                if world.all_know(error):
                    world.on_first(self._forget)
                raise

    def _write(self) -> None:
        """Write all of them, over those that a run left which was refused."""
        for path, write in self._writes.items():
            home = path.parents[1]
            if (home / CONFIG).is_file():
                raise UserError(f"folder {home}: holds a run already; choose another one")
            if (home / EVALUATION).is_file():  # it goes on, with the same objects
                with TemporaryDirectory() as scratch:
                    write(Path(scratch) / path.name)
                    if _contents(Path(scratch) / path.name) != _contents(path):
                        fix = "choose another folder"
                        raise UserError(f"folder {home}: holds an evaluation with another {path.stem}; {fix}")
                continue
            shutil.rmtree(path, ignore_errors=True)
            with atomic_file(path) if path.suffix else atomic_folder(path) as temporary:
                write(temporary)

    def _forget(self) -> None:
        for path in self._writes:
            if not any((path.parents[1] / name).is_file() for name in (CONFIG, EVALUATION)):
                shutil.rmtree(path.parent, ignore_errors=True)
                with suppress(OSError):  # something else is in it
                    path.parents[1].rmdir()


@contextmanager
def _without_bars() -> Iterator[None]:
    """Within the body, `datasets` shows no progress bars: a run has one, as on the command line."""
    import datasets

    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()


def path_of(name: str, value: Any) -> Path:
    """The path that an argument names; `UserError` if it is none."""
    if not isinstance(value, str | Path) or "\0" in str(value):
        raise UserError(f"{name} = {value!r}: must be a path, such as {name}='runs/first'")
    return Path(value).expanduser()


def _contents(path: Path) -> dict[str, str]:
    """Digests of a file, or of the files of a folder."""
    files = (file for file in (path, *path.rglob("*")) if file.is_file())
    return {str(file.relative_to(path)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
