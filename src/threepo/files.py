"""Atomic writes, locks, JSON and errors of the disk: every file of threepo that matters goes through here."""

import errno
import hashlib
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import IO, Any

from pydantic import TypeAdapter, ValidationError

from threepo.errors import UserError

UNFINISHED = ".unfinished"
"""End of the name of what is being written or deleted; a killed process leaves it behind."""
_adapter: Any = cache(TypeAdapter)

_FIXES = {
    "free some space, then repeat the command, or resume the run": (errno.ENOSPC, errno.EDQUOT, errno.EFBIG),
    "choose a folder that you may write": (errno.EACCES, errno.EPERM, errno.EROFS),
    "something else has that name; choose another": (errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.EBUSY),
    "the path is not valid; choose another path": (errno.ENOENT, errno.ENAMETOOLONG, errno.EINVAL),
}


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn the operating system's refusal to write `path` into a `UserError`."""
    try:
        yield
    except Exception as error:
        told = re.search(r"\(os error (\d+)\)", str(error))  # as libraries written in Rust (safetensors) do
        code = getattr(error, "errno", None) or int(told[1] if told else 0)
        for fix, codes in _FIXES.items():
            if code in codes:
                raise UserError(f"cannot write {path}: {os.strerror(code)}; {fix}") from error
        raise


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path; the file or folder that is made there becomes `path` on success and vanishes otherwise.

    The content is on disk (fsync) before it gets its name: neither a killed process nor a power cut leaves half of it.
    """
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(UNFINISHED, f".{path.name}.", path.parent) as folder:
            temporary = Path(folder) / path.name
            yield temporary
            for part in (*temporary.rglob("*"), temporary):
                _sync(part)
            os.replace(temporary, path)
            _sync(path.parent)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder that becomes `path` as in `atomic_file`; `path` must not exist, or be an empty folder."""
    with atomic_file(path) as temporary:
        temporary.mkdir()
        yield temporary


def sweep(folder: Path, besides: str = "") -> None:
    """Delete what killed processes left unfinished in `folder` and its subfolders, but not in `besides`.

    Nobody may be writing there.
    """
    for leftover in (*folder.glob(f".*{UNFINISHED}"), *folder.glob(f"*/.*{UNFINISHED}")):
        if leftover.parent.name != besides:
            shutil.rmtree(leftover, ignore_errors=True)


def lock(path: Path) -> IO[bytes]:
    """Lock the file `path` until the returned handle is closed or the process ends. `UserError` if another has it."""
    import fcntl  # not there on Windows, where the rest of this file works

    with disk_errors(path):
        handle = open(path, "ab")  # noqa: SIM115 - held for as long as the caller needs the folder
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        handle.close()
        raise UserError(f"folder {path.parent}: is in use by another process; wait, or choose another") from error
    except OSError as error:  # some network file systems have no locks
        handle.close()
        fix = f"its disk cannot lock files ({error.strerror}); choose a folder on another one"
        raise UserError(f"folder {path.parent}: {fix}") from error
    return handle


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` atomically, as UTF-8."""
    with atomic_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def append_line(path: Path, text: str) -> None:
    """Append a line that is on disk when this returns; a killed process may leave half of it."""
    with disk_errors(path), open(path, "ab") as file:
        file.write((text + "\n").encode())
        file.flush()
        os.fsync(file.fileno())


def read_lines_as(path: Path, shape: Any, first: int = 0) -> list[Any]:
    """The JSON of each line from `first` on; none without a file. A line that a kill left unfinished is ignored."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []
    places = [(f"{path}, line {number}", line) for number, line in enumerate(lines, start=1)]
    return [parse_json(line, shape, name, "delete the line") for name, line in places[first:]]


def write_json(path: Path, value: Any) -> None:
    """Write `value` to `path` atomically, as JSON that a person can read; NaN is refused."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def json_digest(value: Any, size: int = 8) -> str:
    """A digest of `size` bytes of a JSON value; the order of keys does not matter."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=size).hexdigest()


def finite(value: Any) -> Any:
    """`value` with null for NaN and infinity, which JSON does not have, at any depth of dictionaries and lists."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; `UserError` if it is damaged."""
    found: dict[str, Any] = read_json_as(path, dict[str, Any], "restore the file")
    return found


def read_json_as(path: Path, shape: Any, fix: str) -> Any:
    """The JSON value in a file; `UserError` if it cannot be read or does not have this `shape`, a type."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); {fix}") from error
    return parse_json(text, shape, str(path), fix)


def parse_json(text: bytes, shape: Any, name: str, fix: str) -> Any:
    """The value of a JSON text; messages call it `name`."""
    try:
        return _adapter(shape).validate_python(json.loads(text.decode()))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "it"
        raise UserError(f"{name}: is damaged ({place}: {first['msg']}); {fix}") from error
    except ValueError as error:
        raise UserError(f"{name}: not valid JSON ({error}); {fix}") from error


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
