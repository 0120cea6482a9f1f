"""The examples run as they are, and learn."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).resolve().parents[1] / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_an_example_runs(example: Path, tmp_path: Path) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"] if example.stem == "fsdp2" else []
    command = [sys.executable, *launcher, str(example)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    losses = re.search(r"loss before ([\d.]+).*, after ([\d.]+)", done.stdout)
    assert losses, done.stdout
    assert float(losses[2]) < float(losses[1]) / 5
    assert "False" not in done.stdout
    assert not list(tmp_path.iterdir()), "an example leaves nothing where it is run"


def test_there_are_examples() -> None:
    assert {example.stem for example in EXAMPLES} == {"fsdp2", "plain_pytorch", "trainer"}
