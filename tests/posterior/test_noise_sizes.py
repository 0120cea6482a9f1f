"""Noise of a given size: where it goes, how large it is, and that it is the same for AdamW, IVON and a loaded model."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rollout.asked import requests_for, trainer_logprobs
from threepo.config import AdamWConfig, IVONConfig, LocalEngineConfig, ModelConfig, NoiseConfig, SamplingConfig
from threepo.errors import ThreepoWarning, UserError
from threepo.models.policy import Policy
from threepo.posterior.gaussian import FixedWeights, Posterior
from threepo.posterior.ivon import IVON
from threepo.posterior.noise import noise_key, normal_chunks
from threepo.posterior.noise_sizes import noise_sizes
from threepo.posterior.point_optimizers import PointAdamW
from threepo.rollout.local import LocalEngine
from threepo.training.checkpoint import TrainState, save_checkpoint
from threepo.training.optimizers import begin_ivon, build_optimizer
from threepo.types import Arm, Draw

DRAW, MIRRORED = Draw(3, 1, 2), Draw(3, 1, 2, sign=-1)
EMBEDDING, NORM, GATE = "model.embed_tokens.weight", "model.norm.weight", "model.layers.1.mlp.gate_proj.weight"


def normals(draw: Draw, name: str, like: torch.Tensor) -> torch.Tensor:
    """The noise of a parameter, from its definition in torch."""
    chunks = [z for _, z in normal_chunks(noise_key(draw, name), 0, like.numel(), like.device)]
    return torch.cat(chunks).view_as(like)


def test_a_pattern_counts_more_than_a_kind_and_a_kind_more_than_all(policy: Policy) -> None:
    where = {"model.layers.1.*": 4.0, "mlp": 3.0, "all": 0.5, "norm": 0.0}
    found = noise_sizes(policy.model.named_parameters(), NoiseConfig(unit="absolute", size=0.1, where=where))
    assert found[GATE] == pytest.approx(0.4)
    assert found["model.layers.0.mlp.gate_proj.weight"] == pytest.approx(0.3)
    assert found["model.layers.0.self_attn.q_proj.weight"] == found[EMBEDDING] == pytest.approx(0.05)
    assert found[NORM] == 0
    only = noise_sizes(policy.model.named_parameters(), NoiseConfig(unit="absolute", where={"embedding": 2.0}))
    assert {name for name, size in only.items() if size} == {EMBEDDING}
    two = {"model.layers.1.*": 2.0, "*.gate_proj.weight": 5.0}
    for where, size in ((two, 0.5), (dict(reversed(two.items())), 0.2)):
        found = noise_sizes(policy.model.named_parameters(), NoiseConfig(unit="absolute", size=0.1, where=where))
        assert found[GATE] == pytest.approx(size), "the last of several patterns counts"


def test_rms_is_that_of_each_parameter(policy: Policy) -> None:
    found = noise_sizes(policy.model.named_parameters(), NoiseConfig(unit="rms", size=0.5))
    for name, p in policy.model.named_parameters():
        expected = 0.5 * math.sqrt(sum(x * x for x in p.detach().double().flatten().tolist()) / p.numel())
        assert found[name] == pytest.approx(expected, rel=1e-6)
    assert found[NORM] == 0.5, "gains are 1"


@pytest.mark.parametrize("key", ["head", "model.layers.7.*"])
def test_a_place_that_the_model_lacks_is_refused_with_those_it_has(key: str, policy: Policy) -> None:
    with pytest.raises(UserError, match=r"noise.where.*it has the kinds embedding, attention, mlp, norm \(a tied head"):
        noise_sizes(policy.model.named_parameters(), NoiseConfig(where={key: 1.0}))


def test_weights_that_are_all_zero_have_no_size_to_go_by(policy: Policy) -> None:
    """Biases of a new model."""
    with pytest.raises(UserError, match="noise.unit = 'rms': all weights of noise.where are 0"):
        noise_sizes(policy.model.named_parameters(), NoiseConfig(unit="rms", where={"*.q_proj.bias": 1.0}))


def test_a_matrix_that_is_all_zero_is_named_because_draws_leave_it_as_it_is() -> None:
    """Peft begins one factor of most adapters at 0: then no draw differs from the mean."""
    found = {"q_proj.lora_B.default.bias": torch.ones(2), "q_proj.hada_w2_b.default": torch.zeros(2, 2)}
    with pytest.warns(ThreepoWarning, match=r"all weights of q_proj\.hada_w2_b\.default \(1 matrices\) are 0"):
        assert list(noise_sizes(found.items(), NoiseConfig(unit="rms", size=0.5)).values()) == [0.5, 0]


SETTINGS = {
    "absolute": NoiseConfig(unit="absolute", size=0.02, where={"all": 1.0, "norm": 3.0}),
    "rms": NoiseConfig(unit="rms", size=0.3, where={"mlp": 1.0, "embedding": 0.5}),
}


@pytest.mark.parametrize("unit", SETTINGS)
def test_adamw_ivon_and_a_loaded_model_draw_mean_plus_sigma_times_noise(unit: str, policy: Policy) -> None:
    noise = SETTINGS[unit]
    sigma = noise_sizes(policy.model.named_parameters(), noise)
    means = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    posterior = Posterior.around(policy.model.named_parameters(), noise)
    sources = {
        "adamw": build_optimizer(AdamWConfig(), noise, policy.model, 0),
        "ivon": build_optimizer(IVONConfig(ess=3e7), noise, policy.model, 0),
        "loaded": FixedWeights(policy.model, posterior),
    }
    for what, source in sources.items():
        for draw, sign in ((DRAW, 1.0), (MIRRORED, -1.0)):
            drawn = dict(source.weights(draw))
            for name, mean in means.items():
                expected = mean + sign * sigma[name] * normals(DRAW, name, mean)
                torch.testing.assert_close(drawn[name], expected, rtol=0, atol=3e-7, msg=f"{what} {name}")
            with source.at(draw):
                assert all(torch.equal(p, drawn[name]) for name, p in policy.model.named_parameters()), what
            assert all(torch.equal(p, means[name]) for name, p in policy.model.named_parameters()), what


@pytest.mark.parametrize("unit", SETTINGS)
@pytest.mark.parametrize(("place", "kinds"), [("all", None), ("norm", "norm"), ("model.layers.1.*", "layers.1.")])
def test_an_arm_scales_the_noise_of_its_place_and_takes_away_the_rest(
    unit: str, place: str, kinds: str | None, policy: Policy
) -> None:
    noise = NoiseConfig(unit=SETTINGS[unit].unit, size=SETTINGS[unit].size)
    sigma = noise_sizes(policy.model.named_parameters(), noise)
    means = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    sources = {
        "adamw": build_optimizer(AdamWConfig(), noise, policy.model, 0),
        "ivon": build_optimizer(IVONConfig(ess=3e7), noise, policy.model, 0),
        "loaded": FixedWeights(policy.model, Posterior.around(policy.model.named_parameters(), noise)),
    }
    draw = Draw(3, 1, 2, sign=-1, arm=Arm(place, 0.4))
    for what, source in sources.items():
        drawn = dict(source.weights(draw))
        for name, mean in means.items():
            inside = kinds is None or kinds in name
            expected = mean - 0.4 * sigma[name] * normals(DRAW, name, mean) if inside else mean
            torch.testing.assert_close(drawn[name], expected, rtol=0, atol=3e-7 if inside else 0, msg=f"{what} {name}")
        with source.at(draw):
            assert all(torch.equal(p, drawn[name]) for name, p in policy.model.named_parameters()), what
        assert all(torch.equal(p, means[name]) for name, p in policy.model.named_parameters()), what


def test_the_arm_of_everything_at_its_own_size_is_the_draw_without_an_arm_bitwise(policy: Policy) -> None:
    source = build_optimizer(AdamWConfig(), SETTINGS["rms"], policy.model, 0)
    plain, armed = (dict(source.weights(draw)) for draw in (DRAW, replace(DRAW, arm=Arm("all", 1.0))))
    assert all(torch.equal(value, armed[name]) for name, value in plain.items())


def test_ess_divides_fixed_noise_by_its_root(policy: Policy) -> None:
    noise = NoiseConfig(unit="absolute", size=0.02)
    optimizer = build_optimizer(AdamWConfig(), noise, policy.model, 0)
    mean = policy.model.model.norm.weight.detach().clone()
    once = dict(optimizer.weights(DRAW))[NORM] - mean
    for group in optimizer.param_groups:
        group["ess"] = 4.0
    torch.testing.assert_close(dict(optimizer.weights(DRAW))[NORM] - mean, once / 2, rtol=1e-4, atol=1e-7)


def test_engine_and_trainer_agree_under_fixed_and_mirrored_noise_and_under_arms(policy: Policy) -> None:
    optimizer = build_optimizer(AdamWConfig(), SETTINGS["rms"], policy.model, 0)
    engine = LocalEngine(policy, LocalEngineConfig())
    draws = [DRAW, MIRRORED, replace(DRAW, arm=Arm("embedding", 2.0)), replace(DRAW, arm=Arm("mlp", 0.5)), None]
    engine.load(optimizer, draws, 0)
    completions = engine.generate(requests_for(policy, draws), SamplingConfig(max_new_tokens=8), seed=1)
    assert len({tuple(c.tokens) for c in completions}) > len(completions) / 2
    for completion in completions:
        with optimizer.at(completion.draw):
            expected = trainer_logprobs(policy, completion)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, rtol=0, atol=1e-5)


def test_a_checkpoint_of_adamw_has_the_noise_with_which_the_run_began(policy: Policy, tmp_path: Path) -> None:
    """Weights that training has moved have another RMS; the noise stays."""
    settings, noise = AdamWConfig(), SETTINGS["rms"]
    optimizer = build_optimizer(settings, noise, policy.model, 5)
    with torch.no_grad():
        for p in policy.model.parameters():
            p.mul_(1.5)
    before = dict(optimizer.weights(DRAW))
    save_checkpoint(tmp_path / "step-000001", policy, optimizer, TrainState(step=1))
    resumed = build_optimizer(settings, noise, policy.model, 5, tmp_path / "step-000001")
    assert all(torch.equal(before[name], value) for name, value in resumed.weights(DRAW))
    posterior = Posterior.from_pretrained(tmp_path / "step-000001")
    assert all(torch.equal(before[name], value) for name, value in FixedWeights(policy.model, posterior).weights(DRAW))
    drawn = posterior.draw(0)  # by its own address, as `threepo sample` makes it
    assert not torch.equal(drawn[GATE], dict(policy.model.named_parameters())[GATE])


def test_noise_of_a_given_size_is_no_hessian_to_start_from(
    policy: Policy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_checkpoint(
        tmp_path / "run", policy, build_optimizer(AdamWConfig(), SETTINGS["rms"], policy.model, 5), TrainState()
    )
    assert repr(Posterior.from_pretrained(tmp_path / "run")).startswith("Posterior(fixed noise on ")
    ivon, started = (
        build_optimizer(IVONConfig(), NoiseConfig(), policy.model, 5),
        ModelConfig(path=str(tmp_path / "run")),
    )
    begin_ivon(IVONConfig(), ivon, started)
    assert capsys.readouterr().err == "", "there is nothing to recommend"
    with pytest.raises(UserError, match="load_hessian: .*run has noise of a given size and no Hessian; name a run of"):
        begin_ivon(IVONConfig(load_hessian=str(tmp_path / "run")), ivon, started)


def test_a_posterior_can_be_scaled_by_kind(policy: Policy) -> None:
    optimizer = IVON(policy.model.named_parameters(), ess=1e6)
    scaled = FixedWeights(
        policy.model, Posterior.of(optimizer).scaled(NoiseConfig(size=2.0, where={"mlp": 1.5, "norm": 1.0}))
    )
    means, plain, other = (dict(optimizer.weights(draw)) for draw in (None, DRAW, DRAW))
    other = dict(scaled.weights(DRAW))
    torch.testing.assert_close(other[GATE] - means[GATE], 3 * (plain[GATE] - means[GATE]), rtol=1e-4, atol=1e-6)
    assert torch.equal(other[EMBEDDING], means[EMBEDDING])
    noise = NoiseConfig(unit="absolute", size=1e-3, where={"mlp": 1.0})
    with pytest.raises(UserError, match="noise.where.attention: no parameter of this model fits"):
        Posterior.around(policy.model.named_parameters(), noise).scaled(NoiseConfig(where={"attention": 1.0}))
    twice = NoiseConfig(where={"mlp": 2.0, "attention": 0.0})
    found = Posterior.around(policy.model.named_parameters(), noise).scaled(twice)
    assert max(group.noise_scale for group in found.groups) == 2e-3


def test_a_point_has_no_posterior(policy: Policy) -> None:
    assert Posterior.of(PointAdamW(policy.model.named_parameters())).is_point
    with pytest.raises(UserError, match="so no sigma to scale; set noise.unit = 'absolute' or 'rms'"):
        Posterior.around(policy.model.named_parameters(), NoiseConfig())


def test_price_is_the_same_from_both_halves_of_a_pair() -> None:
    """On a quadratic the gradient at m + s z is c (m + s z): z times it, with the sign of the half, estimates c > 0."""
    curvature = 2.0
    hessians = []
    for draws in ([DRAW], [MIRRORED], [DRAW, MIRRORED], [MIRRORED, DRAW]):
        p = torch.nn.Parameter(torch.zeros(4096))
        optimizer = IVON([("w", p)], ess=100.0, hess_init=0.1, betas=(0.9, 0.5))
        for draw in draws:
            with optimizer.perturbed(draw):
                (curvature / 2 * p.square()).sum().backward()
            optimizer.observe(draw)
        optimizer.step()
        hessians.append(optimizer.state[p]["hessian"].clone())
    assert torch.equal(hessians[0], hessians[1]), "at mean 0 the gradient changes its sign with the noise"
    for hessian in hessians:
        assert hessian.mean() > 0.5, "without the sign the estimates would cancel or be negative"
    torch.testing.assert_close(hessians[2], hessians[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(hessians[3], hessians[0], rtol=1e-5, atol=1e-6)
