"""Runs on low-rank adapters: the lattice works unchanged, a stopped run goes on bitwise, warm starts chain."""

import os
import shlex
import signal
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch
from safetensors.torch import load_file

from runs import RLVR, SFT, outcome
from threepo import api
from threepo.cli import main
from threepo.config import ModelConfig, SFTConfig, TinyConfig, TrainConfig
from threepo.config.recipes import load
from threepo.errors import Interrupted, UserError
from threepo.files import read_json
from threepo.models.policy import load_policy
from threepo.run_folder import checkpoints, read_metrics
from threepo.training import rlvr

pytest.importorskip("peft")

REWARD = "def reward(completions, **_):\n    return [float(bool(c) and c[0] < 'P') for c in completions]\n"
ADAPTERS = ("model.lora.rank=4", "optimizer.hess_init=1e-2", "optimizer.lr=1e3", "optimizer.ess=1e5")
POINT = ("model.lora.rank=4", "optimizer.lr=1e-2", "optimizer.weight_decay=0")


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("first_letter.py").write_text(REWARD)
    shape = TinyConfig(hidden_size=32, intermediate_size=64, layers=1, heads=2, kv_heads=1, tied=False)
    load_policy(ModelConfig(path="tiny-qwen2", tiny=shape), 5).save(tmp_path / "base")
    return tmp_path / "base"


def config(folder: str, base: Path, *settings: str) -> TrainConfig:
    common = [text for text in RLVR if not text.startswith("model.")]
    own = [
        f"model.path={base}",
        "reward.function=first_letter:reward",
        "schedule.warmup_share=0",
        "sampling.max_new_tokens=4",
        f"run.folder={folder}",
    ]
    return load(TrainConfig, "", [*common, *own, "run.steps=4", *settings])


def table(evaluation: Path) -> list[str]:
    """The texts of an evaluation."""
    (file,) = (evaluation / "completions").glob("*.parquet")
    return pyarrow.parquet.read_table(file)["completion"].to_pylist()  # type: ignore[no-any-return]


def tensors(folder: str) -> dict[str, torch.Tensor]:
    return load_file(checkpoints(Path(folder))[-1][1] / "adapter_model.safetensors")


@pytest.mark.filterwarnings("ignore:.*every completion was cut:threepo.errors.ThreepoWarning")
@pytest.mark.parametrize(
    ("preset", "settings"),
    [
        ("m3po", (*ADAPTERS, "model.lora.init=usual")),
        ("c3po_replay", (*ADAPTERS, "model.lora.base_dtype=nf4")),
        ("fixed_replay", (*POINT, "noise.unit=rms", "noise.size=0.3")),
        ("grpo", (*POINT, "objective.reference_kl=0.1", "objective.reference_reset_every=2")),
        ("c3po", (*ADAPTERS, "ess_schedule.kind=controller", "model.gradient_checkpointing=true")),
    ],
)
def test_it_learns_and_a_stopped_run_goes_on_bitwise(
    preset: str, settings: tuple[str, ...], base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere, too: the run folder was moved, and so was the base."""
    settings = (f"method.preset={preset}", "eval.every=2", *settings)
    api.train(config("whole", base, *settings))
    rows = [row for row in read_metrics(Path("whole")) if row["step"] >= 0]
    assert sum(row["optimizer/grad_norm"] > 0 for row in rows) >= 3
    learned = tensors("whole")
    assert all(value.any() for name, value in learned.items() if "lora_B" in name)

    inner = rlvr.begin_rollouts

    def stopped(run: rlvr.RLRun, step: int) -> Any:
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return inner(run, step)

    with monkeypatch.context() as patch:
        patch.setattr(rlvr, "begin_rollouts", stopped)
        with pytest.raises(Interrupted, match="after step 3 of 4"):
            api.train(config("parts", base, *settings))
    os.rename("parts", "moved")
    os.rename(base, "elsewhere")
    assert main(["train", "--resume", "moved", "model.path=elsewhere"]) == 0
    whole, parts = outcome(Path("whole")), outcome(Path("moved"))
    for key in whole:
        assert parts[key] == whole[key], key


def test_without_noise_every_method_is_grpo_bitwise(base: Path) -> None:
    """Contract 11, with the same optimizer. Replay adds its rows up draw by draw, and so rounds otherwise."""
    common = (*ADAPTERS, "optimizer.kind=ivon", "noise.size=0", "run.steps=3", "eval.every=0")
    found = {}
    for preset in ("grpo", "b3po", "c3po_replay", "c3po"):
        axes = {"grpo": (), "c3po": ("method.preset=c3po", "method.correction.weight=one")}
        api.train(config(preset, base, *axes.get(preset, (f"method.preset={preset}",)), *common))
        found[preset] = tensors(preset)
    assert any(value.any() for name, value in found["grpo"].items() if "lora_B" in name)
    for name, value in found["grpo"].items():
        assert torch.equal(found["b3po"][name], value)
        assert torch.equal(found["c3po"][name], value)
        torch.testing.assert_close(found["c3po_replay"][name], value, rtol=1e-3, atol=1e-6)


def test_a_rounded_base_changes_no_bit_and_goes_with_any_checkpoint(base: Path) -> None:
    coarse = (*ADAPTERS, "method.preset=c3po", "model.compute_dtype=bfloat16", "engine.dtype=bfloat16")
    api.train(config("whole", base, *coarse))
    api.train(config("rounded", base, *coarse, "model.lora.base_dtype=bfloat16"))
    ours, others = tensors("rounded"), tensors("whole")
    assert all(torch.equal(ours[name], others[name]) for name in others)
    api.train(config("further", base, *coarse, "model.path=rounded", "run.steps=1"))
    assert main(["eval", "rounded", "data.train=sorting", "eval.problems=2", "sampling.max_new_tokens=4"]) == 0
    with pytest.raises(UserError, match="needs model.compute_dtype = 'bfloat16'"):
        config("float32", base, *ADAPTERS, "model.lora.base_dtype=bfloat16")
    with pytest.raises(UserError, match="without adapters nothing reads it"):
        config("all", base, "model.lora.base_dtype=bfloat16", "model.compute_dtype=bfloat16")
    with pytest.raises(UserError, match="model.lora.alpha = 8.0: without adapters nothing reads it"):
        config("all", base, "model.lora.alpha=8")


def test_a_probe_asks_about_what_is_trained(base: Path) -> None:
    """Its default places have frozen ones among them, where noise would be none."""
    config = ["data.train=sorting", "data.levels=[2]", "sampling.max_new_tokens=4", "model.lora.rank=4"]
    asked = ["probe.sizes=[0.3]", "probe.ess=[1e5]", "probe.temperatures=[]", "probe.problems=2", "probe.candidates=4"]
    few = ["probe.looks=2", "probe.solved_at_most=1.0", "--draws", "2", "--rollouts", "16", "--output", "asked"]
    assert main(["probe", str(base), *config, *asked, *few]) == 0
    noise = read_json(Path("asked/summary.json"))["noise"]
    assert {"posterior", "all", "attention", "mlp"} < {found["place"] for found in noise}
    assert not {"norm", "embedding", "model.norm.weight"} & {found["place"] for found in noise}
    assert all(found["kl"] > 1e-6 for found in noise)


def test_fine_tuning_then_learning_then_evaluating(base: Path) -> None:
    """Training continues a warm start's adapters and their Hessian; the base stays the same."""
    own = [text for text in SFT if not text.startswith("model.")]
    lora = ["model.lora.rank=4", "optimizer.hess_init=1e-2"]
    warm = load(SFTConfig, "", [*own, f"model.path={base}", "run.steps=3", "run.folder=warm", *lora])
    api.train(warm)
    before = tensors("warm")
    assert any(value.any() for name, value in before.items() if "lora_B" in name)
    settings = ("method.preset=c3po", *ADAPTERS, "optimizer.load_hessian=warm")
    trained = config("trained", Path("warm"), *settings)
    api.train(trained)
    first = load_policy(trained.model)
    assert [n for n, p in first.model.named_parameters() if p.requires_grad] == [
        n for n, _ in first.model.named_parameters() if "lora_B" in n
    ]
    after = tensors("trained")
    assert all(torch.equal(before[name], after[name]) for name in before if "lora_A" in name)
    assert any(not torch.equal(before[name], after[name]) for name in before)
    few = ["data.train=sorting", "data.levels=[2]", "eval.problems=2", "eval.samples=2", "sampling.max_new_tokens=4"]
    assert main(["eval", "trained", *few, "--output", "mean"]) == 0
    assert main(["eval", "trained", *few, "eval.draws=2", "--output", "draws"]) == 0
    assert main(["merge", "trained", "--output", "merged"]) == 0
    assert main(["eval", "merged", *few, "--output", "of-merged"]) == 0
    texts = [table(Path(folder)) for folder in ("mean", "of-merged", "draws")]
    assert texts[0] == texts[1] != texts[2]
    refused = config("refused", Path("warm"), "method.preset=grpo")
    with pytest.raises(UserError, match="holds adapters; set model.lora.rank to theirs, or merge them"):
        api.train(refused)
    assert "threepo train RECIPE model.path=warm model.lora.rank=4" in api.closing_words(Path("warm"))
    other = ["model.lora.alpha=8", "model.lora.init=usual", 'model.lora.targets=["q_proj"]']
    shaped = load(SFTConfig, "", [*own, f"model.path={base}", "run.steps=1", "run.folder=shaped", *lora, *other])
    api.train(shaped)
    printed = shlex.split(api.closing_words(Path("shaped")).partition("RECIPE ")[2])
    api.train(config("again", Path("shaped"), "method.preset=c3po", "run.steps=1", *printed))
    unlike = ("method.preset=c3po", "model.lora.rank=4", "optimizer.load_hessian=shaped")
    with pytest.raises(UserError, match=r"its run trained other weights; set \[model.lora\] as there"):
        api.train(config("unlike", base, *unlike))
    assert main(["train", "--resume", "trained", "run.steps=7", "model.path=base"]) == 0
