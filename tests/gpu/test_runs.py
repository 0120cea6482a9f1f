"""Whole runs on a GPU: each method's first step is the CPU's, and a resumed run is the uninterrupted one."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from families import SHAPE as FAMILY_SHAPE
from gpu.conftest import Figure
from runs import RLVR, outcome, sft_config, train_config
from threepo import api
from threepo.cli import main
from threepo.models import attention
from threepo.models.attention import takes_packed_rows
from threepo.models.logprobs import Scorer
from threepo.models.packing import flatten
from threepo.models.policy import Policy
from threepo.run_folder import read_metrics
from threepo.types import Row, integers
from training.conftest import LOWER_HALF
from training.test_pretended_device import RUNS, settings_of

CLOSE = ("reward/mean", "update/rms", "optimizer/grad_norm", "policy/entropy", "correction/kept_share")
"""Metrics of the first step that rounding changes little."""


@pytest.fixture
def learnable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """As training/conftest.py has it."""
    monkeypatch.chdir(tmp_path)
    Path("first_character.py").write_text(LOWER_HALF)
    return ["reward.function=first_character:reward", "model.tiny.tied=false", "schedule.warmup_share=0"]


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Only with warnings: torch has no other cumulative sum than the one that it warns of."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", RUNS)
def test_the_first_step_is_that_of_a_cpu(name: str, learnable: list[str], tmp_path: Path, figure: Figure) -> None:
    first = []
    for folder, device in (("here", "cpu"), ("there", "cuda")):
        api.train(train_config(tmp_path / folder, *learnable, *settings_of(name), f"model.device={device}"))
        first.append(next(row for row in read_metrics(tmp_path / folder) if row["step"] == 0))
    here, there = first
    assert there["update/rms"] > 0
    tolerance = 0.05 if name == "bfloat16" else 1e-3
    for key in CLOSE[name == "bfloat16" :]:  # where a token that rounds otherwise may earn another reward
        if key in here:
            assert there[key] == pytest.approx(here[key], rel=tolerance), key
    for key in ("correction/kl", "optimizer/grad_norm"):
        if key in there:
            figure(f"{key}, there and here", f"{there[key]:.6g}, {here[key]:.6g}")


@pytest.mark.parametrize("preset", ["c3po", "auto"])
def test_resumed_is_uninterrupted(preset: str, learnable: list[str], tmp_path: Path, deterministic: None) -> None:
    settings = [*learnable, *settings_of("c3po" if preset == "c3po" else "auto"), "model.device=cuda"]
    api.train(train_config(tmp_path / "whole", *settings, "run.steps=4"))
    api.train(train_config(tmp_path / "parts", *settings, "run.steps=2"))
    assert main(["train", "--resume", str(tmp_path / "parts"), "run.steps=4"]) == 0
    assert outcome(tmp_path / "parts") == outcome(tmp_path / "whole")


def test_repeated_without_deterministic_algorithms(learnable: list[str], tmp_path: Path, figure: Figure) -> None:
    """A figure: whether two runs are equal to the bit as users start them."""
    for name in ("one", "two"):
        settings = [*learnable, *settings_of("c3po"), "model.device=cuda", "run.steps=3"]
        api.train(train_config(tmp_path / name, *settings))
    one, two = (outcome(tmp_path / name) for name in ("one", "two"))
    figure("two runs are equal to the bit", one == two)
    first = [next(row for row in each["metrics"] if row["step"] == 0) for each in (one, two)]
    for key in CLOSE:
        assert first[0][key] == pytest.approx(first[1][key], rel=1e-3), key


def test_evaluated_tuned_adapted_and_probed(learnable: list[str], tmp_path: Path) -> None:
    run, there = tmp_path / "run", "model.device=cuda"
    api.train(train_config(run, *learnable, *settings_of("c3po"), there))
    assert main(["eval", str(run), "eval.draws=2", "eval.problems=2", "eval.samples=2", there]) == 0
    api.train(sft_config(tmp_path / "sft", "run.steps=2", there))
    adapted = [*learnable, *settings_of("c3po"), there, f"model.path={run}", "model.lora.rank=4"]
    api.train(train_config(tmp_path / "adapted", *(s for s in adapted if "tiny" not in s)))
    quick = ["probe.solved_at_most=1", "probe.candidates=4", "probe.looks=4", "probe.problems=2", "probe.draws=4"]
    quick += ["probe.rollouts=2", 'probe.places=["embedding"]', "probe.sizes=[0.1]", "probe.temperatures=[1.5]"]
    assert main(["probe", str(run), *quick, there, "--output", str(tmp_path / "probe")]) == 0


def test_four_bits(learnable: list[str], tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    run, there = tmp_path / "run", "model.device=cuda"
    api.train(train_config(run, *learnable, *settings_of("c3po"), there, "model.tiny.hidden_size=64"))
    adapted = [*learnable, *settings_of("c3po"), there, f"model.path={run}", "model.lora.rank=4"]
    adapted = [s for s in adapted if "tiny" not in s]
    bits = ["model.lora.base_dtype=nf4", "model.compute_dtype=bfloat16"]
    api.train(train_config(tmp_path / "adapted", *adapted, *bits))
    (row,) = (row for row in read_metrics(tmp_path / "adapted") if row["step"] >= 0)
    assert row["update/rms"] > 0
    assert row["policy/entropy"] > 0


@pytest.mark.parametrize("name", ["c3po", "bfloat16"])
def test_one_card_offloaded_is_one_card(name: str, learnable: list[str], tmp_path: Path) -> None:
    """In the first step, with the weights in CPU memory; the second starts from weights that were updated there."""
    settings = [*learnable, *settings_of(name), "model.device=auto", "run.steps=2"]
    runs = []
    for offload in ("false", "true"):
        api.train(train_config(tmp_path / offload, *settings, f"parallel.offload={offload}"))
        runs.append([row for row in read_metrics(tmp_path / offload) if row["step"] >= 0])
    (plain, _), (offloaded, second) = runs
    for key in CLOSE[name == "bfloat16" :]:
        assert offloaded[key] == pytest.approx(plain[key], rel=0.05 if name == "bfloat16" else 1e-3), key
    assert second["update/rms"] > 0


@pytest.mark.parametrize("window", [0, 40])
def test_rows_of_any_length_need_no_tiles(window: int, monkeypatch: pytest.MonkeyPatch, figure: Figure) -> None:
    """In bfloat16 attention takes packed rows as they are, with the scores and gradients of tiles but for rounding."""
    own = {"sliding_window": window, "use_sliding_window": True, "max_window_layers": 0} if window else {}
    shape = FAMILY_SHAPE | {"hidden_size": 256, "num_key_value_heads": 2, "max_position_embeddings": 512}
    config = Qwen2Config(**shape, **own)
    model = AutoModelForCausalLM.from_config(config).cuda()
    assert takes_packed_rows(model)
    lengths = [5, 17, 64, 130, 131, 300, 512]
    texts = [integers(torch.randint(3, config.vocab_size, (length,)).tolist()) for length in lengths]
    rows = [Row(i, text, ((1, len(text)),)) for i, text in enumerate(texts)]
    micro, asked, found = flatten(rows, torch.device("cuda")), [], []
    inner = attention.for_any_lengths
    for kind in (lambda *x: asked.append(inner(*x)) or asked[-1], lambda *_: None):
        monkeypatch.setattr(attention, "for_any_lengths", kind)
        model.zero_grad()
        logprobs = Policy(Scorer(model, True, True), None, torch.bfloat16).logprobs(micro).logprobs
        logprobs.sum().backward()
        found.append([logprobs.detach(), *(p.grad for p in model.parameters())])
    assert all(taken is not None for taken in asked)
    assert len(asked) == config.num_hidden_layers
    figure("log-probs, largest difference", f"{(found[0][0] - found[1][0]).abs().max():.2g}")
    for ours, tiled in zip(*found, strict=True):
        assert (ours - tiled).norm() < 0.05 * tiled.norm()  # 0.018 where a CPU rounds as a fused kernel does


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.skipif("torch.cuda.device_count() < 2", reason="needs two CUDA devices")
def test_two_ranks_with_nccl(learnable: list[str], tmp_path: Path, offload: bool) -> None:
    """The first step of two ranks is that of one process."""
    settings = [*learnable, *settings_of("c3po"), "model.device=auto"]
    api.train(train_config(tmp_path / "one", *settings))
    ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "threepo"]
    own = [f"run.folder={tmp_path / 'two'}", f"parallel.offload={str(offload).lower()}"]
    subprocess.run([*ranks, "train", *RLVR, *settings, *own], check=True, timeout=200)
    one, two = (next(r for r in read_metrics(tmp_path / name) if r["step"] == 0) for name in ("one", "two"))
    for key in CLOSE:
        assert two[key] == pytest.approx(one[key], rel=1e-3), key
