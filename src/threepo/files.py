"""Files that are either there, whole, or not there: every write of threepo that matters goes through here."""

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from threepo.errors import UserError

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn an operating system's refusal to write `path` into a one-line `UserError`."""
    try:
        yield
    except OSError as error:
        if error.errno in _NO_SPACE:
            raise UserError(f"cannot write {path}: {error.strerror}; free some space, then resume the run") from error
        if error.errno in {errno.EACCES, errno.EPERM, errno.EROFS}:
            raise UserError(f"cannot write {path}: {error.strerror}; choose a folder that you may write") from error
        raise


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; what is written there becomes `path` on success and vanishes otherwise.

    The content is on disk (fsync) before it gets its name, so neither a killed process nor a power cut leaves half
    a file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with disk_errors(path):
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        os.close(handle)
        temporary = Path(name)
        try:
            yield temporary
            os.chmod(temporary, 0o644)  # mkstemp makes 0600; a run folder is read by colleagues too
            _sync(temporary)
            os.replace(temporary, path)
            _sync(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """The same for a folder: it appears under its name when all in it is written. `path` must not exist yet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with disk_errors(path):
        temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
        try:
            yield temporary
            os.chmod(temporary, 0o755)
            for file in sorted(temporary.rglob("*")):
                _sync(file)
            _sync(temporary)
            os.rename(temporary, path)
            _sync(path.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` atomically, as UTF-8."""
    with atomic_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
