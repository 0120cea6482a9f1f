"""threepo inside TRL on two ranks, by DDP and by FSDP2: what one process computes."""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import launch

if find_spec("trl") is None:
    pytest.skip("trl is not installed", allow_module_level=True)

PROGRAM = str(Path(__file__).with_name("trl_program.py"))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the program found, in one process and on two ranks."""
    answers = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(PROGRAM).parents[1]), os.environ.get("PYTHONPATH", "")]))
        for how, ranks in (("alone", 0), ("ddp", 2), ("fsdp2", 2)):
            folder = tmp_path_factory.mktemp(how)
            launch(PROGRAM, str(folder), *(["fsdp2"] if how == "fsdp2" else []), ranks=ranks)
            answers[how] = torch.load(folder / "found.pt", weights_only=False)
    return answers


def assert_close(left: dict[str, Any], right: dict[str, Any]) -> None:
    for name, value in right["tensors"].items():
        scale = 1e-5 * value.abs().max() if not name.startswith("hessian/") else 1e-7
        assert (left["tensors"][name] - value).abs().max() <= scale, name
    for ours, theirs in zip(left["log"], right["log"], strict=True):
        for key in ("loss", "grad_norm", "reward", *(["correction/kept_share"] if "correction/kl" in theirs else [])):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-5, abs=1e-6), key
        chosen = [{key: log[key] for key in log if key.startswith("arms/")} for log in (ours, theirs)]
        assert chosen[0] == pytest.approx(chosen[1], rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
@pytest.mark.parametrize("method", ["c3po", "m3po", "arms", "by an engine"])
def test_two_ranks_compute_what_one_process_does(found: dict[str, Any], how: str, method: str) -> None:
    assert_close(found[how][method], found["alone"][method])
    assert all(("arms/share/mean" in entry) == (method == "arms") for entry in found[how][method]["log"])


@pytest.mark.parametrize("how", ["alone", "ddp", "fsdp2"])
def test_a_resumed_run_is_one_that_never_stopped(found: dict[str, Any], how: str) -> None:
    went_on, resumed = found[how]["c3po"]["tensors"], found[how]["resumed"]["tensors"]
    assert all(torch.equal(resumed[name], value) for name, value in went_on.items())


def test_fsdp2_shards_and_leaves_no_state_behind(found: dict[str, Any]) -> None:
    """accelerate exchanges an optimizer's parameters after it is made."""
    assert [found[how]["c3po"]["sharded"] for how in ("alone", "ddp", "fsdp2")] == [False, False, True]
    assert all(run["stale states"] == 0 for run in found["fsdp2"].values())


@pytest.mark.parametrize("how", ["alone", "ddp", "fsdp2"])
def test_neftune_is_in_no_ratio(found: dict[str, Any], how: str) -> None:
    """Without the noise of draws, the weights that generate and those that learn are the same."""
    steps = found[how]["neftune"]["log"]
    assert len(steps) == 2
    assert all(step["correction/kept_share"] == 1 and step["correction/kl"] < 1e-9 for step in steps)


def test_sharded_ranks_generate_what_others_do(found: dict[str, Any]) -> None:
    assert_close(found["fsdp2"]["generated"], found["ddp"]["generated"])
