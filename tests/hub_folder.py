"""A hub of models that is a folder: what an upload would send, as it was at that time."""

import shutil
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any


class HubFolder:
    """The two calls of huggingface_hub's HfApi that transformers' Trainer makes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.uploads: list[Path] = []
        """A folder for each upload, in order."""

    def create_repo(self, repo_id: str, **_: Any) -> Any:
        return SimpleNamespace(repo_id=repo_id)

    def upload_folder(self, *, folder_path: str, ignore_patterns: list[str], **_: Any) -> Future[None]:
        self.uploads.append(self.folder / str(len(self.uploads)))
        shutil.copytree(folder_path, self.uploads[-1], ignore=shutil.ignore_patterns(*ignore_patterns))
        done: Future[None] = Future()
        done.set_result(None)
        return done
