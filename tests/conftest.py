"""Fixtures of all tests: one thread unless a test asks for more, no hub, and a tiny policy."""

import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: a test must not depend on a network
# Clients read these when they are made: servers of tests are on this machine.
os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1,localhost"
# Before datasets is imported: nor may it leave anything behind. It is silent as in `threepo.cli`.
os.environ["HF_DATASETS_CACHE"] = tempfile.mkdtemp()
os.environ.update(HF_DATASETS_DISABLE_PROGRESS_BARS="1", DATASETS_VERBOSITY="critical")
# Before torch: threads that spin starve each other on a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
from hypothesis import settings

from threepo.config import ModelConfig, TinyConfig

if TYPE_CHECKING:  # where tests are shared among processes, the one that shares them out needs no torch
    from threepo.models.policy import Policy

gc.disable()  # until all test modules are imported
settings.register_profile("suite", deadline=None, max_examples=50, print_blob=True)
settings.load_profile("suite")

SMALL = TinyConfig(hidden_size=32, intermediate_size=64, layers=2, heads=2, kv_heads=1, context=128)


def pytest_collection_finish() -> None:
    """Let the garbage collector skip what the imports have made: a look at all of it takes a fifth of a second."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _no_cache_left() -> Iterator[None]:
    yield
    shutil.rmtree(os.environ["HF_DATASETS_CACHE"])


@pytest.fixture(autouse=True)
def _same_threads() -> None:
    import torch

    torch.set_num_threads(1)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Background processes of a shell ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def policy() -> "Policy":
    """A fresh, randomly initialised tiny Qwen2 with tied embeddings."""
    from threepo.models.policy import load_policy

    return load_policy(ModelConfig(path="tiny-qwen2", tiny=SMALL), seed=7)
