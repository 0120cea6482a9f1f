"""The files that servers draw from: their draws are the trainer's, bit for bit, however they were pushed."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from posterior.test_gaussian import trained
from threepo.config import AdamWConfig, ModelConfig, NoiseConfig, TinyConfig
from threepo.errors import UserError
from threepo.models.policy import load_policy
from threepo.posterior.draw_file import (
    PushedWeights,
    RoundedWeights,
    file_contents,
    round_hessian,
    round_mean,
    roundings,
)
from threepo.posterior.gaussian import FixedWeights, Posterior
from threepo.posterior.ivon import IVON
from threepo.posterior.point_optimizers import PointAdamW
from threepo.posterior.policy_optimizer import WeightSource
from threepo.ranks import pushed_files
from threepo.ranks.files import save_tensors
from threepo.ranks.pushed_files import PushedFiles
from threepo.ranks.world import ALONE
from threepo.rollout.payloads import parameter_names
from threepo.training.optimizers import build_optimizer
from threepo.types import Arm, Draw

DRAW = Draw(9, 2, 1)


@pytest.fixture
def model() -> torch.nn.Module:
    """A model with a tied head, and a tensor that is not trained."""
    tiny = TinyConfig(hidden_size=16, intermediate_size=24, layers=1, heads=2, kv_heads=1, tied=True)
    made = load_policy(ModelConfig(path="tiny-qwen2", tiny=tiny), seed=2).model
    made.model.norm.weight.requires_grad_(False)
    return made  # type: ignore[no-any-return]


def sources_of(model: torch.nn.Module) -> dict[str, WeightSource]:
    isotropic = IVON(model.named_parameters(), ess=1e4, noise_shape="isotropic")
    named = dict(model.named_parameters())
    named["lm_head.weight"] = named.pop("model.embed_tokens.weight")
    silent = [{"params": [named.popitem()], "noise_scale": 0.0}, {"params": list(named.items())}]
    optimizer = trained(model)
    return {
        "ivon": optimizer,
        "isotropic": isotropic,
        "by the name of the head, and partly without noise": IVON(silent, ess=1e4),
        "checkpoint": FixedWeights(model, Posterior.of(optimizer)),
        "noise of a size": build_optimizer(AdamWConfig(), NoiseConfig(unit="rms", size=0.3), model, 0),
    }


def written(source: WeightSource, model: torch.nn.Module, path: Path, noisy: bool = True) -> Path:
    saved = {name: p.detach() for name, p in model.named_parameters()}
    tensors, metadata = file_contents(source, saved, parameter_names(model), noisy)
    save_tensors(path, tensors, ALONE, metadata)
    return path


def drawn(server: PushedWeights, draw: Draw | None, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: value.to(dtype) for name, value in server.draw(draw, dtype, torch.device("cpu"))}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_its_draws_are_those_of_the_source(model: torch.nn.Module, dtype: torch.dtype, tmp_path: Path) -> None:
    for number, (what, source) in enumerate(sources_of(model).items()):
        path, parameter_of = written(source, model, tmp_path / f"{number}.safetensors"), parameter_names(model)
        for draw in (DRAW, replace(DRAW, sign=-1), replace(DRAW, arm=Arm("mlp", 0.5)), None):
            into = {name: torch.empty_like(p, dtype=dtype) for name, p in source.weights(None)}
            expected = {parameter_of[name]: value.to(dtype) for name, value in source.weights(draw, into)}
            server = PushedWeights()
            server.follow(path, [])
            found = drawn(server, draw, dtype)
            assert found.keys() == model.state_dict().keys()
            for name, value in found.items():
                assert torch.equal(value, expected[parameter_of[name]]), (what, draw, name)
        with safe_open(path, framework="pt") as file:
            hessians = [name for name in file.keys() if name.startswith("hessian")]  # noqa: SIM118 - not a dict
        assert bool(hessians) == (what not in ("isotropic", "noise of a size"))


def test_a_mean_alone_is_half_as_large(model: torch.nn.Module, tmp_path: Path) -> None:
    optimizer = trained(model)
    mean = written(optimizer, model, tmp_path / "mean.safetensors", noisy=False)
    point = written(PointAdamW(model.named_parameters()), model, tmp_path / "point.safetensors")
    both = written(optimizer, model, tmp_path / "both.safetensors")
    assert mean.stat().st_size == point.stat().st_size < 0.6 * both.stat().st_size


def pushed(files: PushedFiles, source: WeightSource, model: torch.nn.Module) -> int:
    """Bytes of a push of what the source is now."""
    saved = {name: p.detach() for name, p in model.named_parameters()}
    tensors, metadata = file_contents(source, saved, parameter_names(model), noisy=True)
    return files.push(tensors, metadata, roundings(source, tensors))


def step_a_little(source: Any, step: int) -> None:
    """Move weights, Hessians and the size of the noise; few numbers change when they are rounded."""
    random = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for name, p in source.named():
            if name != "model.norm.weight":
                p.add_(1e-5 * torch.randn(p.shape, generator=random))
    for state in getattr(source, "state", {}).values():
        for hessian in (state[key] for key in ("hessian",) if key in state):
            hessian.mul_(1 + 1e-3 * torch.rand(hessian.shape, generator=random))
    for group in getattr(source, "param_groups", ()):
        group["ess"] = group["ess"] * 0.7


@pytest.mark.parametrize("what", range(5))
def test_pushes_of_changes_give_the_draws_of_full_ones(what: int, model: torch.nn.Module, tmp_path: Path) -> None:
    """A server that follows, one that comes late and one that only gets full pushes make the same draws, to the bit.

    They are those of the rounded mean and Hessian. Every third push is full.
    """
    source: Any = list(sources_of(model).values())[what]
    names, dtype = parameter_names(model), torch.bfloat16
    often, always = (PushedFiles(tmp_path / name, full, ALONE) for name, full in (("often", 3), ("always", 2)))
    follower, fulls, sizes = PushedWeights(), [], []
    for step in range(7):
        sizes.append(pushed(often, source, model))
        always._known = {}
        pushed(always, source, model)
        late, fresh = PushedWeights(), PushedWeights()
        for server, files in ((follower, often), (late, often), (fresh, always)):
            server.follow(files.full, files.changes)
        fulls.append(not often.changes)
        with safe_open(always.full, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                kind, _, called = name.partition(" ")
                entry = next(entry for entry in source.noisy() if entry.name == called) if kind == "hessian" else None
                exact = entry.hessian if entry else dict(source.named())[called].detach()
                rounded = round_hessian(exact) if entry else exact
                assert torch.equal(file.get_tensor(name), rounded.bfloat16())
        for draw in (Draw(9, step, 1), Draw(9, step, 1, sign=-1), Draw(9, step, 1, arm=Arm("mlp", 0.5)), None):
            expected = {names[n]: v.to(dtype) for n, v in RoundedWeights(source).weights(draw)}
            for server in (follower, late, fresh):
                found = drawn(server, draw, dtype)
                assert found.keys() == model.state_dict().keys()
                assert all(torch.equal(value, expected[names[name]]) for name, value in found.items()), (step, draw)
        step_a_little(source, step)
    assert fulls == [True, False, False, True, False, False, True]
    assert sizes[0] == sizes[3] == sizes[6] == sum(path.stat().st_size for path in [always.full]) - header(always.full)
    assert 0 < max(sizes[1:3]) < 0.5 * sizes[0]
    assert len(list((tmp_path / "often").glob("*.safetensors"))) == 1, "a full push replaces what was before it"
    often.close()
    assert not list((tmp_path / "often").glob("*.safetensors"))


def header(path: Path) -> int:
    """Bytes of a safetensors file before its numbers."""
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def test_changes_never_take_more_room_than_a_full_push(model: torch.nn.Module, tmp_path: Path) -> None:
    optimizer = trained(model)
    files = PushedFiles(tmp_path, 100, ALONE)
    first = pushed(files, optimizer, model)
    assert pushed(files, optimizer, model) == 0
    assert len(files.changes) == 1
    since = 0
    for step in range(60):
        step_a_little(optimizer, step)
        size = pushed(files, optimizer, model)
        since = 0 if not files.changes else since + size
        assert since <= first
    assert len(files.changes) < 60, "sixty such pushes are more than a full one"
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.1)
    assert pushed(files, optimizer, model) == first
    assert not files.changes


def test_after_a_push_that_failed_the_next_one_is_full(
    model: torch.nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer, files, server = trained(model), PushedFiles(tmp_path, 2, ALONE), PushedWeights()

    def full_disk(*_: Any) -> None:
        raise UserError("no space")

    for _ in range(2):
        pushed(files, optimizer, model)
    with monkeypatch.context() as patched, pytest.raises(UserError):
        patched.setattr(pushed_files, "save_tensors", full_disk)
        pushed(files, optimizer, model)
    with pytest.raises(FileNotFoundError):
        server.follow(files.full, files.changes)
    pushed(files, optimizer, model)
    server.follow(files.full, files.changes)
    assert not files.changes
    assert len(drawn(server, DRAW, torch.bfloat16)) == len(model.state_dict())


def test_what_is_not_trained_is_not_rounded_and_large_tensors_have_places(tmp_path: Path) -> None:
    """Tensors of a model that no optimizer has, such as counts and routing biases, change in place."""
    tensors = {
        "mean bias": torch.tensor([1.2345678]),
        "mean count": torch.tensor([0, 3]),
        "mean w": torch.zeros(1 << 17),
    }
    names = {"names": json.dumps({name.removeprefix("mean "): [name] for name in tensors}), "groups": "[]"}
    files, server = PushedFiles(tmp_path, 9, ALONE), PushedWeights()
    for value in (7, 8, 9):
        tensors["mean count"][1] = value
        tensors["mean w"][100_000 + value] = value / 256
        files.push(tensors, names, {"mean w": round_mean})
        server.follow(files.full, files.changes)
        found = dict(server.draw(None, torch.bfloat16, torch.device("cpu")))
        assert found["mean bias"].item() == tensors["mean bias"].item()
        assert found["mean count"].tolist() == [0, value]
        assert torch.equal(found["mean w"].float(), tensors["mean w"])
    assert len(files.changes) == 2


def test_what_the_source_refuses_is_refused(model: torch.nn.Module) -> None:
    optimizer = trained(model)
    with optimizer.perturbed(DRAW), pytest.raises(RuntimeError, match="while the weights are perturbed"):
        list(RoundedWeights(optimizer).weights(None))
    with pytest.raises(UserError, match="no draws can be made"):
        list(RoundedWeights(FixedWeights(model)).weights(DRAW))


def test_noise_below_the_resolution_of_bfloat16_moves_few_weights(model: torch.nn.Module) -> None:
    for ess, least, most in ((1e4, 0.9, 1.0), (1e14, 0.0, 0.1)):
        moved, noisy = RoundedWeights(IVON(model.named_parameters(), ess=ess)).moved(DRAW)
        assert least * noisy <= moved <= most * noisy
        assert noisy == sum(p.numel() for p in model.parameters() if p.requires_grad)


def test_hessians_have_four_significant_bits() -> None:
    hessian = torch.logspace(-30, 18, 10_000)
    rounded = round_hessian(hessian)
    mantissa, _ = torch.frexp(rounded)
    assert torch.equal(mantissa * 16, (mantissa * 16).round())
    assert float((rounded / hessian - 1).abs().max()) < 1 / 16 + 1e-6
    assert torch.equal(rounded.bfloat16().float(), rounded)
