"""The certificate inside TRL's own GRPOTrainer with a real vLLM in its process (`make test-vllm`).

TRL pushes with vLLM's `load_weights`, which the CPU build cannot do twice (it repacks weights; the error is loud). So a
sync of the tests pushes what TRL would push with vLLM's `reload_weights` instead, and puts faults in.
"""

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

if find_spec("trl") is None or find_spec("vllm") is None:
    pytest.skip("trl or vllm is not installed; `make test-vllm` installs both", allow_module_level=True)

from datasets import Dataset
from safetensors.torch import save_file
from trl import GRPOConfig, GRPOTrainer
from trl.generation.vllm_client import VLLMClient
from trl_models import PLAIN, reward

from rollout.test_certify_servers import PLAIN as PLAIN_SERVER
from rollout.test_vllm import tiny
from rollout.test_vllm_servers import started, wait_for
from threepo.certify import WrongWeights
from threepo.errors import UserError
from threepo.plugins.certificate import CertificateCallback

SETTINGS = {
    "use_vllm": True,
    "learning_rate": 1e-3,
    "max_steps": 3,
    "bf16": True,
    "model_init_kwargs": {"dtype": "float32"},
}
COLOCATE = {"vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.05, "vllm_max_model_length": 512}


class Fault:
    """What a sync does with the parameters that TRL would push, from the `first` sync on."""

    def __init__(self) -> None:
        self.kind, self.first, self.syncs = "", 0, 0

    def change(self, name: str, value: torch.Tensor) -> torch.Tensor | None:
        """What is pushed for a parameter; None: nothing."""
        kind = self.kind if self.syncs >= self.first else ""
        if kind == "norms" and "norm" in name:
            return None
        here = name == "lm_head.weight"
        return value * {"5 %": 1.05, "nan": float("nan")}.get(kind, 1.0) if here else value

    def sync(self, generation: Any) -> None:
        """TRL's sync, on the CPU build."""
        self.syncs += 1
        kind = self.kind if self.syncs >= self.first else ""
        pushed = [(name, self.change(name, p)) for name, p in generation._iter_named_params()]
        runner = generation.llm.llm_engine.model_executor.driver_worker.model_runner
        if kind != "stale":
            runner.reload_weights(weights_iterator=iter([(name, p) for name, p in pushed if p is not None]))
        if kind != "cache":
            generation.llm.reset_prefix_cache()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[GRPOTrainer, Fault]]:
    """A trainer whose syncs may have a fault; vLLM is in bfloat16, to which it rounds float32."""
    folder, policy, fault = tmp_path_factory.mktemp("trl"), tiny("tiny-qwen2", tied=False), Fault()
    policy.save(folder / "model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        yield make(folder, **COLOCATE), fault


def make(folder: Path, **settings: Any) -> GRPOTrainer:
    """TRL's own trainer."""
    data = Dataset.from_dict({"prompt": [f"Say {i}: " for i in range(8)]})
    args = GRPOConfig(str(folder / "out"), **PLAIN | SETTINGS | settings)
    return GRPOTrainer(str(folder / "model"), reward, args, train_dataset=data)


@pytest.fixture
def trainer(trained: tuple[GRPOTrainer, Fault]) -> Iterator[tuple[GRPOTrainer, Fault]]:
    """The trainer without a fault, and without another test's callback."""
    trainer, fault = trained
    fault.__init__()
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    sync = trainer.vllm_generation.sync_weights = lambda: fault.sync(trainer.vllm_generation)
    sync()
    fault.syncs = 0
    yield trainer, fault
    trainer.vllm_generation.sync_weights = sync
    trainer.callback_handler.callbacks = [
        c for c in trainer.callback_handler.callbacks if not isinstance(c, CertificateCallback)
    ]
    trainer.model.load_state_dict(before)
    trainer._last_loaded_step = -1


def test_a_training_without_a_fault_is_certified(
    trainer: tuple[GRPOTrainer, Fault], capfd: pytest.CaptureFixture[str]
) -> None:
    one, fault = trainer
    page = (Path(__file__).parents[2] / "docs" / "certificate.md").read_text(encoding="utf-8")
    [block] = [text for text in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "CertificateCallback" in text]
    exec(compile(block, "docs/certificate.md", "exec"), {"trainer": one})
    [callback] = [each for each in one.callback_handler.callbacks if isinstance(each, CertificateCallback)]
    assert fault.syncs == 3 + 2
    assert [result.ok for result in callback.results] == [True] * 3
    assert len(callback.results[0].arrived) == 15
    assert callback.results[0].unseen == ()
    assert callback.results[0].dtype == "bfloat16"
    logged = [entry["certificate/difference"] for entry in one.state.log_history if "loss" in entry]
    assert logged == [result.mean for result in callback.results]
    out = capfd.readouterr().out
    assert "threepo: vllm.LLM computes with the model's weights" in out
    print(out)


FAULTS = {
    "stale": "noise does not arrive in any kind of tensor",
    "norms": r"noise does not arrive in model\.layers\.\*\.input_layernorm\.weight, \S+, model\.norm\.weight\.",
    "nan": "off by nan",
    "5 %": "off by",
    "cache": r"log-probs after a fixed prompt are .* its prefix cache holds keys and values of other weights",
}


@pytest.mark.parametrize("kind", FAULTS)
def test_faults_end_the_training_before_its_first_step(kind: str, trainer: tuple[GRPOTrainer, Fault]) -> None:
    one, fault = trainer
    fault.kind = kind
    before = {name: value.clone() for name, value in one.model.state_dict().items()}
    one.add_callback(CertificateCallback(one))
    with pytest.raises(WrongWeights, match=FAULTS[kind]) as error:
        one.train()
    print(error.value)
    assert one.state.global_step == 0
    assert all(torch.equal(value, before[name]) for name, value in one.model.state_dict().items())


def test_a_sync_that_stops_working_is_found_when_weights_have_moved(trainer: tuple[GRPOTrainer, Fault]) -> None:
    one, fault = trainer
    fault.kind, fault.first = "stale", 5  # the rehearsal has three, the second step one
    one.args.learning_rate = 3e-2
    one.add_callback(CertificateCallback(one))
    with pytest.raises(WrongWeights, match="they fit the weights of check 3, which") as error:
        one.train()
    print(error.value)
    assert one.state.global_step == 2


def test_a_trainer_without_vllm_is_refused(trainer: tuple[GRPOTrainer, Fault], monkeypatch: pytest.MonkeyPatch) -> None:
    one, _ = trainer
    monkeypatch.setattr(one, "use_vllm", False)
    with pytest.raises(UserError, match="the trainer has no engine; set use_vllm=True"):
        CertificateCallback(one)


def test_trl_with_a_server(tmp_path: Path) -> None:
    """NCCL, by which TRL pushes, needs GPUs: here a push is a checkpoint that the server reads."""
    policy = tiny("tiny-qwen2", tied=False)
    policy.save(tmp_path / "model")
    reloads = [True]

    def push(client: VLLMClient, metadata: Any, params: Iterator[tuple[str, torch.Tensor]]) -> None:
        save_file(dict(params), tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
        if reloads[0]:
            client._post(f"{client.base_url}/collective_rpc", json={"method": "reload_weights"})

    options = PLAIN_SERVER | {"--dtype": "bfloat16", "--logprobs-mode": "processed_logprobs"}
    with started(tmp_path / "model", tmp_path / "log", **options) as one, pytest.MonkeyPatch.context() as patch:
        wait_for(lambda: one.answers("/health"), one)
        patch.setattr(VLLMClient, "init_communicator", lambda self, device: None)
        patch.setattr(VLLMClient, "update_named_params", push)
        trainer = make(tmp_path, vllm_mode="server", vllm_server_base_url=one.url, max_steps=2)
        callback = CertificateCallback(trainer)
        trainer.add_callback(callback)
        trainer.train()
        assert [result.ok for result in callback.results] == [True, True]
        assert len(callback.results[0].arrived) == 15
        assert {result.engine for result in callback.results} == {one.url}
        reloads[0] = False
        trainer = make(tmp_path, vllm_mode="server", vllm_server_base_url=one.url)
        trainer.add_callback(CertificateCallback(trainer, rehearse=False))
        with torch.no_grad():
            trainer.model.get_output_embeddings().weight *= 1.1
        with pytest.raises(WrongWeights, match=f"{one.url} does not compute with the weights of the model at check 1"):
            trainer.train()
