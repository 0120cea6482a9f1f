"""What needs a CUDA device: skipped where there is none, with figures that the report keeps."""

import os
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before cuBLAS is used: some tests compare bit for bit

import pytest
import torch

Figure = Callable[[str, object], None]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in (item for item in items if Path(__file__).parent in item.path.parents):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device: make test-gpu"))


@pytest.fixture
def figure(record_property: Callable[[str, object], None]) -> Figure:
    """Keeps a number under a name, for the report."""
    return record_property
