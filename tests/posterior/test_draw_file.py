"""The files that servers draw from: their draws are the trainer's, bit for bit, however they were pushed."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from posterior.test_gaussian import trained
from threepo.config import AdamWConfig, ModelConfig, NoiseConfig, TinyConfig
from threepo.models.policy import load_policy
from threepo.posterior.draw_file import PushedWeights, RoundedWeights, file_contents, round_hessian
from threepo.posterior.gaussian import FixedWeights, Posterior
from threepo.posterior.ivon import IVON
from threepo.posterior.point_optimizers import PointAdamW
from threepo.posterior.policy_optimizer import WeightSource
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


def test_pushes_of_changes_give_the_draws_of_full_ones(model: torch.nn.Module, tmp_path: Path) -> None:
    """A server that follows, one that comes late and one that only gets full pushes make the same draws, to the bit.

    Every third push is full. The optimizer moves far from its start, where little of a weight's change is rounded away.
    """
    optimizer = trained(model)
    saved = {name: p.detach() for name, p in model.named_parameters()}
    names, dtype = parameter_names(model), torch.bfloat16
    often, always = (PushedFiles(tmp_path / name, full, ALONE) for name, full in (("often", 3), ("always", 1)))
    follower, full_pushes, sizes = PushedWeights(), [], []
    for step in range(7):
        contents = file_contents(optimizer, saved, names, noisy=True, rounded=True)
        sizes.append(often.push(*contents))
        always.push(*contents)
        late, fresh = PushedWeights(), PushedWeights()
        for server, files in ((follower, often), (late, often), (fresh, always)):
            server.follow(files.full, files.changes)
        full_pushes.append(not often.changes)
        for draw in (Draw(9, step, 1), Draw(9, step, 1, arm=Arm("mlp", 0.5)), None):
            expected = {names[n]: v.to(dtype) for n, v in RoundedWeights(optimizer).weights(draw)}
            for server in (follower, late, fresh):
                found = drawn(server, draw, dtype)
                assert found.keys() == model.state_dict().keys()
                assert all(torch.equal(value, expected[names[name]]) for name, value in found.items()), (step, draw)
        with optimizer.perturbed(Draw(9, step, 0)):
            for p in filter(lambda p: p.requires_grad, model.parameters()):
                p.grad = 0.01 * torch.randn(p.shape, generator=torch.Generator().manual_seed(step))
        optimizer.observe(Draw(9, step, 0))
        optimizer.param_groups[0]["lr"] = 1e-5 if step < 5 else 0.0
        optimizer.step()
    assert full_pushes == [True, False, False, True, False, False, True]
    whole = sum(tensor.numel() * 2 for tensor in contents[0].values())
    assert sizes[0] == sizes[3] == whole
    assert 0 < sizes[1] < 0.5 * whole
    assert len(list((tmp_path / "often").glob("*.safetensors"))) == 1, "a full push replaces what was before it"
    often.close()
    assert not list((tmp_path / "often").glob("*.safetensors"))


def test_more_changes_than_weights_are_a_full_push(model: torch.nn.Module, tmp_path: Path) -> None:
    optimizer = trained(model)
    saved = {name: p.detach() for name, p in model.named_parameters()}
    files = PushedFiles(tmp_path, 100, ALONE)
    first = files.push(*file_contents(optimizer, saved, parameter_names(model), noisy=True, rounded=True))
    assert files.push(*file_contents(optimizer, saved, parameter_names(model), noisy=True, rounded=True)) == 0
    assert len(files.changes) == 1
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.1)
    assert files.push(*file_contents(optimizer, saved, parameter_names(model), noisy=True, rounded=True)) == first
    assert not files.changes


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
