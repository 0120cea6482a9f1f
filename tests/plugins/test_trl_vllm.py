"""TRL's trainer with threepo's vLLM engine (`make test-vllm`): what vLLM writes is what the trainer's draws would."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

if find_spec("trl") is None or find_spec("vllm") is None:
    pytest.skip("trl or vllm is not installed; `make test-vllm` installs both", allow_module_level=True)

from datasets import Dataset
from trl_models import NOISY, PLAIN, ROLLOUTS, VLLM, WIDE, Checked, make

import threepo
from ranks.launch import launch_anew
from threepo.errors import UserError

PROGRAM = str(Path(__file__).parents[1] / "ranks" / "trl_program.py")


def test_draws_write_in_vllm_and_gradients_are_taken_in_trl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trl_models.SHAPE", WIDE)
    data = Dataset.from_dict({"prompt": ["Say 9: "]})
    settings = {"ivon": NOISY, "eval_dataset": data, "per_device_eval_batch_size": ROLLOUTS}
    trainer = make(Checked, tmp_path, method=threepo.C3PO, engine=VLLM, **settings)
    trainer.train()
    trainer.evaluate()
    assert (len(trainer.own[True]), len(trainer.own[False])) == (PLAIN["max_steps"] * 4, 1)
    assert max(trainer.own[True] + trainer.own[False]) < 1e-4  # nats
    assert min(trainer.others) > 1e-2
    steps = [entry for entry in trainer.state.log_history if "correction/kl" in entry]
    assert all(0 < step["correction/kept_share"] < 1 and step["correction/kl"] > 1e-3 for step in steps)
    with pytest.raises(UserError, match=r"max_model_len = 64: a prompt and its completion take"):
        trainer._generate_by_engine([[65] * 60], [None], [0])


@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_each_rank_has_a_replica_that_serves_two_draws(how: str, tmp_path: Path) -> None:
    """Rows are of all four draws on each rank, so half of them come from the replica of the other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]))
        launch_anew(PROGRAM, str(tmp_path), how, "vllm", ranks=2)
    for rank in (0, 1):
        found = torch.load(tmp_path / f"checked-{rank}.pt", weights_only=False)
        assert found["sharded"] == (how == "fsdp2")
        assert len(found["own"]) == 2 * 4
        assert max(found["own"]) < 1e-4
        assert min(found["others"]) > 1e-2
