"""IVON on several ranks: sharded, replicated, saved at one world size and loaded at another, to the last bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from launch import launch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from threepo import IVON
from threepo.errors import UserError

PROGRAM = Path(__file__).with_name("sharded_program.py")
SIX_STEPS = ("--steps", "0:6")


def run(out: Path, layout: str, *options: str, ranks: int = 0) -> dict[str, Any]:
    """What rank 0 of `sharded_program.py` wrote."""
    launch(str(PROGRAM), str(out), "--layout", layout, *options, ranks=ranks)
    return torch.load(out, weights_only=True)  # type: ignore[no-any-return]


def assert_same(ours: dict[str, Any], expected: dict[str, Any]) -> None:
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(ours[name], value), name
    assert ours["step"] == expected["step"]
    assert ours["metrics"] == pytest.approx(expected["metrics"], rel=1e-6)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    result = run(tmp_path_factory.mktemp("alone") / "out.pt", "plain", *SIX_STEPS)
    for name in ("0.weight", "3.weight"):
        assert torch.equal(result[f"draw/{name}"], result[f"perturbed/{name}"])
        assert not torch.equal(result[f"draw/{name}"], result[f"mean/{name}"])
    return result


@pytest.mark.parametrize(
    ("layout", "ranks", "checks"),
    [
        ("hsdp", 4, ["cut_twice", "written", "pushes", "copies"]),
        ("ddp", 2, ["columns", "not_finite", "metrics", "loading", "written", "pushes"]),
    ],
)
def test_replicas_and_shards_of_replicas_follow_one_process(
    layout: str, ranks: int, checks: list[str], alone: dict[str, Any], tmp_path: Path
) -> None:
    """And what sharded_state.py checks."""
    assert_same(run(tmp_path / "out.pt", layout, *SIX_STEPS, "--checks", *checks, ranks=ranks), alone)


def test_two_ranks_then_one_then_two_equals_one_process_throughout(alone: dict[str, Any], tmp_path: Path) -> None:
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    run(tmp_path / "a.pt", "fsdp", "--steps", "0:2", "--save", first, ranks=2)
    run(tmp_path / "b.pt", "fsdp", "--steps", "2:4", "--load", first, "--save", second, ranks=1)
    assert_same(run(tmp_path / "c.pt", "fsdp", "--steps", "4:6", "--load", second, ranks=2), alone)
    assert_same(run(tmp_path / "d.pt", "plain", "--steps", "4:6", "--load", second), alone)


def test_dtensors_without_their_module_are_refused() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        p = torch.nn.Parameter(distribute_tensor(torch.ones(4), init_device_mesh("cpu", (1,))))
        with pytest.raises(UserError, match="model=model"):
            IVON([("w", p)])
    finally:
        torch.distributed.destroy_process_group()
