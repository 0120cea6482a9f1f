"""Checks of a wheel built for others: its kernels are compiled, its recipes are inside, it trains.

    python tests/wheel_check.py

cibuildwheel runs it after each installation (pyproject.toml), without the source.
"""

import sys
import tempfile
from pathlib import Path

import threepo
from threepo import api
from threepo.cli import main
from threepo.config import TrainConfig
from threepo.config.recipes import load
from threepo.lab.doctor import checks


def check() -> None:
    """`SystemExit` or `AssertionError` if the wheel is not whole."""
    assert "site-packages" in Path(threepo.__file__).parts, f"not the installed package: {threepo.__file__}"
    if status := main(["doctor"]):
        sys.exit(status)
    slow = [(name, found) for name, state, found in checks() if state in ("slow", "broken")]
    assert not slow, slow
    with tempfile.TemporaryDirectory() as folder:
        settings = ["run.steps=1", f"run.folder={folder}/run", "model.path=tiny-qwen2"]
        api.train(load(TrainConfig, "demo/c3po", settings))


if __name__ == "__main__":
    check()
