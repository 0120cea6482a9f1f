"""TRL's trainer with threepo's vLLM engine (`make test-vllm`): what vLLM writes is what the trainer's draws would."""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

if find_spec("trl") is None or find_spec("vllm") is None:
    pytest.skip("trl or vllm is not installed; `make test-vllm` installs both", allow_module_level=True)

from datasets import Dataset
from trl_models import NOISY, ROLLOUTS, SHAPE, make

import threepo
from threepo.errors import UserError
from threepo.integrations.trl import ThreepoTrainer
from threepo.types import Draw

VLLM = {"kind": "vllm", "vllm": {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 28}}


class Checked(ThreepoTrainer):
    """Compares the log-probs of vLLM with the trainer's at every draw, or in evaluations with the mean's."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        batch = super()._generate_and_score_completions(inputs)
        tokens, told = batch["completion_mask"].bool(), batch["sampling_per_token_logps"]
        draws = [Draw(self.args.seed, self.state.global_step, i) for i in range(4)] if self.model.training else [None]
        wrote = batch["draw"] if self.model.training else torch.zeros(len(tokens), dtype=torch.long)
        for index, draw in enumerate(draws):
            with self.policy_optimizer.at(draw):
                scored = self._score(batch, torch.ones(len(tokens), dtype=torch.bool))
            gaps = ((scored - told).abs() * tokens).amax(dim=1)
            self.gaps[self.model.training][0].append(float(gaps[wrote == index].max()))
            self.gaps[self.model.training][1].extend(gaps[wrote != index].tolist())
        return batch


def test_draws_write_in_vllm_and_gradients_are_taken_in_trl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trl_models.SHAPE", replace(SHAPE, hidden_size=64))  # vLLM has no heads of 16 on a CPU
    data = Dataset.from_dict({"prompt": ["Say 9: "]})
    settings = {"ivon": NOISY, "eval_dataset": data, "per_device_eval_batch_size": ROLLOUTS}
    trainer = make(Checked, tmp_path, method=threepo.C3PO, engine=VLLM, **settings)
    trainer.gaps = {True: ([], []), False: ([], [])}
    trainer.train()
    trainer.evaluate()
    (own, others), (of_mean, _) = trainer.gaps[True], trainer.gaps[False]
    assert len(own) == 3 * 4
    assert len(of_mean) == 1
    assert max(own + of_mean) < 1e-4  # nats
    assert min(others) > 1e-2
    steps = [entry for entry in trainer.state.log_history if "correction/kl" in entry]
    assert all(0 < step["correction/kept_share"] < 1 and step["correction/kl"] > 1e-3 for step in steps)
    with pytest.raises(UserError, match=r"max_model_len = 64: a prompt and its completion take"):
        trainer._generate_by_engine([[65] * 60], [None], [0])


def test_trls_range_of_temperatures_is_vllms(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"temperature = 2\.5: engine\.kind = 'vllm' decodes at 0, or from"):
        make(ThreepoTrainer, tmp_path, method=threepo.B3PO, ivon=NOISY, engine=VLLM, temperature=2.5)
