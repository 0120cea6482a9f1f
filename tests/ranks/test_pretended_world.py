"""The memory of --dry-run for each GPU, against torch's count of a simulated run (pretended_program.py)."""

import json
from pathlib import Path

import pytest
from launch import ended, start

from published_shapes import OLMO3_7B, QWEN25_MATH_7B, write
from threepo.config import TrainConfig
from threepo.config.recipes import load
from threepo.lab.plan import plan

PROGRAM = str(Path(__file__).with_name("pretended_program.py"))
SHAPES = {"olmo3_7b": (OLMO3_7B, True), "qwen25_math_7b": (QWEN25_MATH_7B, False)}
"""The paper's models, and whether activations are recomputed: each way costs a minute, so each is tried with one."""
ROWS, LENGTH = 4, 4095
"""A micro-batch of the paper's longest rows, which is full with 16,384 tokens."""
TIMEOUT = 500.0
"""Seconds; half a minute on two free cores."""
Counts = dict[str, dict[str, int]]
"""Bytes, by moment and kind."""


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Counts]:
    """Both models, at the same time."""
    folder = tmp_path_factory.mktemp("pretended")
    programs = {}
    for name, (shape, recomputed) in SHAPES.items():
        write(folder / name, shape)
        out, config = folder / f"{name}.json", folder / name / "config.json"
        numbers = ("8", str(ROWS), str(LENGTH), str(int(recomputed)))
        programs[name] = start(PROGRAM, str(out), str(config), *numbers, ranks=0)
    results = {name: ended(program, TIMEOUT) for name, program in programs.items()}
    assert all(status == 0 for status, _ in results.values()), results
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in SHAPES}


@pytest.mark.parametrize("name", SHAPES)
def test_the_plan_says_what_a_pretended_run_holds(name: str, counted: dict[str, Counts], tmp_path: Path) -> None:
    shape, recomputed = SHAPES[name]
    folder = write(tmp_path / "model", shape)
    settings = [f"model.path={folder}", f"model.gradient_checkpointing={str(recomputed).lower()}"]
    lines = plan(load(TrainConfig, f"paper/{name}/c3po", settings), ranks=8)["trainer"]
    before, perturbed, peak = (counted[name][moment] for moment in ("before", "perturbed", "peak"))

    def check(words: str, count: float, tolerance: float = 0.01) -> None:
        # The first line is meant: what is held has its own lines before those of a moment.
        said = next(float(line.split()[0]) for line in lines if line.partition(" ")[2].startswith(words))
        assert said == pytest.approx(count / 2**30, rel=tolerance), words

    check("GiB weights", before["Sharded Param"])
    check("GiB gradients", before["Sharded Grad"])
    check("GiB momentum and Hessian", before["OptState"])
    check("GiB the mean while perturbed", perturbed["Total"] - before["Total"])
    if recomputed:  # without it, the peak is in the head, when only one layer is gathered
        check("GiB gathered weights", peak["Unsharded Param"] + peak["All Gather"])
    check("GiB at most", peak["Total"], 0.02)
