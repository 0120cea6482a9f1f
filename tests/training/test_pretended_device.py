"""Runs on a pretended accelerator (pretended_device.py): nothing that is on the device meets what is not.

It finds what the first user with a GPU would find: a mask, a draw or a loss that was made in CPU memory.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pretended_device import DEVICE, OnDevice, pretended_device
from runs import sft_config, train_config
from threepo import api
from threepo.cli import main
from threepo.config import LoRAConfig, ModelConfig, TinyConfig
from threepo.config.engine import VLLMEngineConfig
from threepo.errors import UserError
from threepo.models import packing
from threepo.models.four_bit import four_bit
from threepo.models.policy import load_policy
from threepo.posterior import kernels
from threepo.posterior.draw_file import file_contents, roundings
from threepo.posterior.gaussian import FixedWeights, Posterior
from threepo.posterior.ivon import IVON
from threepo.posterior.operations import Perturb
from threepo.ranks.pushed_files import PushedFiles
from threepo.ranks.world import ALONE
from threepo.rollout.local import LocalEngine
from threepo.rollout.payloads import choose_payload, parameter_names
from threepo.run_folder import checkpoints, read_metrics
from threepo.training import rlvr
from threepo.types import Draw

RUNS = {
    "grpo": ["method.preset=grpo", "objective.reference_kl=0.1", "objective.entropy_coefficient=0.01"],
    "c3po": ["method.preset=c3po", "model.gradient_checkpointing=true", "ess_schedule.kind=kl_steps"],
    "m3po": ["method.preset=m3po"],
    "replay, low rank": ["method.preset=c3po_replay", "noise.rank=2"],
    "auto": ["method.preset=auto"],
    # One head of keys, with which some draw earns something.
    "evolution": [
        "method.preset=es",
        "method.draws=8",
        "data.prompts_per_step=4",
        "model.tiny.heads=2",
        "model.tiny.kv_heads=1",
    ],
    "several losses": ["method.preset=grpo", "objective.loss=gspo", "objective.mini_batches=2"],
    "clip_cov": ["method.preset=grpo", "objective.loss=clip_cov"],
    "bfloat16": ["method.preset=c3po", "model.compute_dtype=bfloat16", "engine.dtype=bfloat16"],
    "overlap": [
        *("method.preset=c3po", "overlap.lag=1", "overlap.stream=true", "run.steps=2", "eval.every=2"),
        "engine.memory_gib=1",
    ],
}
COMMON = (
    *("run.steps=1", "data.prompts_per_step=2", "sampling.max_new_tokens=4"),
    *(f"model.device={DEVICE.type}", "optimizer.ess=1e7", "model.tiny.heads=4", "model.tiny.kv_heads=2"),
)


@pytest.fixture
def device() -> Iterator[torch.device]:
    with pretended_device() as device:
        yield device


def settings_of(name: str) -> list[str]:
    own = RUNS[name]
    point = any(f"method.preset={preset}" in own for preset in ("grpo", "auto", "es"))
    return [*(setting for setting in COMMON if not (point and setting.startswith("optimizer.ess"))), *own]


@pytest.mark.parametrize("name", RUNS)
def test_a_run_keeps_to_its_device(
    name: str, learnable: list[str], device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, states of the optimizer and the engine's weights stay there, and the policy learns."""
    held: list[Any] = []
    assemble = rlvr.assemble
    monkeypatch.setattr(rlvr, "assemble", lambda *arguments: held.append(assemble(*arguments)) or held[-1])
    generate, served = LocalEngine.generate, list[torch.Tensor]()

    def seen(engine: LocalEngine, *arguments: Any) -> Any:
        served.extend(stack.memory for stack in engine._ensemble.stacks.values())
        return generate(engine, *arguments)

    monkeypatch.setattr(LocalEngine, "generate", seen)
    api.train(train_config(tmp_path / "run", *learnable, *settings_of(name)))
    assert served
    assert all(isinstance(memory, OnDevice) for memory in served)
    (run,) = held
    states = [value for state in run.optimizer.state.values() for value in state.values()]
    tensors = [*run.policy.model.parameters(), *(v for v in states if isinstance(v, torch.Tensor) and v.dim())]
    assert all(isinstance(tensor, OnDevice) and tensor.device == DEVICE for tensor in tensors)
    assert len(tensors) > len(list(run.policy.model.parameters())) or name == "evolution"
    rows = [row for row in read_metrics(tmp_path / "run") if row["step"] >= 0]
    assert all(row["update/rms"] > 0 for row in rows)


def test_rollouts_ahead_leave_memory_to_the_update(learnable: list[str], device: torch.device, tmp_path: Path) -> None:
    settings = [*settings_of("overlap"), "engine.memory_gib=0"]
    with pytest.raises(UserError, match=r"engine.memory_gib = 0.0: rollouts ahead would take the update's memory"):
        api.train(train_config(tmp_path / "run", *learnable, *settings))


def test_hessians_of_a_file_are_copied_to_the_device_one_at_a_time(
    learnable: list[str], device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All at once they would take as much memory as the weights, for which nobody has looked."""
    run = tmp_path / "run"
    api.train(train_config(run, *learnable, *settings_of("c3po")))
    copied: list[int] = []
    work = kernels.run

    def counted(operations: Any) -> Any:
        given = list(operations)
        copied.append(sum(isinstance(one.hessian, OnDevice) for one in given if isinstance(one, Perturb)))
        return work(given)

    monkeypatch.setattr(kernels, "run", counted)
    path = checkpoints(run)[-1][1]
    policy = load_policy(ModelConfig(path=str(path), device=DEVICE.type), 0)
    weights = FixedWeights(policy.model, Posterior.from_pretrained(path))
    into = {name: torch.empty_like(p) for name, p in policy.model.named_parameters()}
    made = dict(weights.weights(Draw(0, 0, 0), into))
    with weights.at(Draw(0, 0, 0)):
        assert all(torch.equal(made[name], p.detach()) for name, p in policy.model.named_parameters())
    assert len(copied) > 10
    assert max(copied) == 1


def test_the_first_step_is_that_of_a_cpu(learnable: list[str], tmp_path: Path) -> None:
    found = []
    for name in ("cpu", DEVICE.type):
        settings = [*learnable, *settings_of("c3po"), f"model.device={name}"]
        if name == "cpu":
            api.train(train_config(tmp_path / name, *settings))
        else:
            with pretended_device():
                api.train(train_config(tmp_path / name, *settings))
        found.append(next(row for row in read_metrics(tmp_path / name) if row["step"] == 0))
    for key in ("reward/mean", "update/rms", "optimizer/grad_norm", "policy/entropy", "correction/kept_share"):
        assert found[1][key] == pytest.approx(found[0][key], rel=1e-4), key


def test_resumed_evaluated_tuned_adapted_and_probed(learnable: list[str], device: torch.device, tmp_path: Path) -> None:
    run = tmp_path / "run"
    api.train(train_config(run, *learnable, *settings_of("c3po")))
    assert main(["train", "--resume", str(run), "run.steps=2"]) == 0
    assert [row["step"] for row in read_metrics(run)] == [0, 1]
    small = ["eval.problems=2", "eval.samples=2", f"model.device={DEVICE.type}"]
    assert main(["eval", str(run), "eval.draws=2", *small]) == 0
    api.train(sft_config(tmp_path / "sft", "run.steps=2", f"model.device={DEVICE.type}"))
    api.train(train_config(tmp_path / "adapted", *adapted(learnable, run)))
    quick = ["probe.solved_at_most=1", "probe.candidates=4", "probe.looks=4", "probe.problems=2", "probe.draws=4"]
    quick += ["probe.rollouts=2", 'probe.places=["embedding"]', "probe.sizes=[0.1]", "probe.temperatures=[1.5]"]
    assert main(["probe", str(run), *quick, f"model.device={DEVICE.type}", "--output", str(tmp_path / "probe")]) == 0


def adapted(learnable: list[str], model: Path) -> list[str]:
    """Settings of a run that trains adapters of a model."""
    settings = [*learnable, *settings_of("c3po"), f"model.path={model}", "model.lora.rank=4"]
    return [setting for setting in settings if "tiny" not in setting]


def test_a_base_in_four_bits(learnable: list[str], device: torch.device, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    run = tmp_path / "run"  # a width of whole blocks
    api.train(train_config(run, *learnable, *settings_of("c3po"), "model.tiny.hidden_size=64"))
    # torch.utils.checkpoint does not repeat the autocast of this device.
    bits = ["model.lora.base_dtype=nf4", "model.compute_dtype=bfloat16", "model.gradient_checkpointing=false"]
    api.train(train_config(tmp_path / "adapted", *adapted(learnable, run), *bits))
    four_bits_on_the_cpu = four_bit(torch.ones(64, 64))
    with pytest.raises(RuntimeError, match="expected all tensors on one device"):
        torch.nn.functional.linear(torch.ones(1, 64, device=device), four_bits_on_the_cpu)


def test_a_batch_left_on_the_cpu_is_found(
    learnable: list[str], device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flatten = packing.flatten
    for module in ("threepo.training.scoring", "threepo.training.update"):
        monkeypatch.setattr(f"{module}.flatten", lambda rows, _: flatten(rows, torch.device("cpu")), raising=False)
    with pytest.raises(RuntimeError, match="expected all tensors on one device"):
        api.train(train_config(tmp_path / "run", *learnable, *settings_of("c3po")))


@pytest.mark.parametrize(
    "mixed",
    [
        lambda there, here: there + here,
        lambda there, here: here.mul_(there),
        lambda there, here: torch.cat([there, here]),
        lambda there, here: here[there.long()],
        lambda there, here: torch.where(there > 0, here, here),
        lambda there, here: torch._foreach_add([there], [here]),
        lambda there, here: torch.nn.functional.linear(there, here.unsqueeze(0)),
        lambda there, here: there.numpy(),
    ],
)
def test_the_device_refuses_to_mix(mixed: Any, device: torch.device) -> None:
    with pytest.raises((RuntimeError, TypeError)):
        mixed(torch.ones(3, device=device), torch.ones(3))


def test_the_device_allows_what_a_gpu_allows(device: torch.device) -> None:
    there, here = torch.zeros(3, device=device), torch.ones(3)
    there.copy_(here)
    there[torch.tensor([0])] = 5.0
    assert (there * torch.tensor(2.0)).tolist() == [10.0, 2.0, 2.0]
    assert there.cpu().device.type == "cpu"
    here.copy_(there)
    assert here.tolist() == [5.0, 1.0, 1.0]
    layer = torch.nn.Linear(3, 1).to(device)
    layer(there).backward()
    assert {p.device for p in layer.parameters()} == {p.grad.device for p in layer.parameters()} == {DEVICE}


@pytest.mark.parametrize("adapted", [False, True], ids=["weights", "adapters"])
def test_what_vllm_is_given_of_a_draw_is_the_cpus(adapted: bool, tmp_path: Path) -> None:
    """Memory that replicas read, files that servers read, and the sums and log-probs by which both are checked."""
    tiny = TinyConfig(hidden_size=32, intermediate_size=64, layers=2, heads=2, kv_heads=1, context=128)
    load_policy(ModelConfig(path="tiny-qwen2", tiny=tiny), 7).save(tmp_path / "base")
    lora = LoRAConfig(rank=4, alpha=8) if adapted else LoRAConfig()
    settings, draw, prompt = VLLMEngineConfig(dtype="bfloat16"), Draw(0, 0, 0), tuple(range(5, 40))
    written, measured = [], []
    for name in ("cpu", DEVICE.type):
        with nullcontext() if name == "cpu" else pretended_device():
            policy = load_policy(ModelConfig(path=str(tmp_path / "base"), device=name, lora=lora), 7)
            optimizer = IVON(policy.model.named_parameters(), ess=1e5, hess_init=1e-2)
            payload = choose_payload(policy, settings)
            assert bool(payload.adapters) == adapted
            given = {key: torch.empty(shape, dtype=dtype) for key, (shape, dtype) in payload.layout.items()}
            payload.write(optimizer, draw, given)
            source = payload.source_sums(optimizer, draw)
            assert source.items() <= payload.sums(given).items()
            assert len(source) > 10
            measured.append(payload.logprobs(given, prompt))
            if not adapted:  # which servers do not take
                files = PushedFiles(tmp_path / name, 4, ALONE)
                contents, about = file_contents(optimizer, policy.saved_tensors(), parameter_names(policy.model), True)
                files.push(contents, about, roundings(optimizer, contents))
                given |= {f"pushed {key}": value for key, value in load_file(files.full).items()}
                files.close()
            written.append(given)
    assert written[0].keys() == written[1].keys()
    for key, value in written[0].items():
        assert torch.equal(written[1][key], value), key
    for here, there in zip(*measured, strict=True):
        assert there == pytest.approx(here, abs=1e-5)
