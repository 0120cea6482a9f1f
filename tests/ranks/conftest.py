"""A working directory with the reward of rank_runs.py."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from launch import working_folder
from rank_runs import REWARD


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working directory with a reward that a random policy can learn."""
    with working_folder(tmp_path_factory.mktemp("ranks"), REWARD) as path:
        yield path
