"""A posterior as a file: what is saved is what is drawn from, whoever draws."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from threepo.config import ModelConfig, TinyConfig
from threepo.errors import UserError
from threepo.models.policy import Policy, load_policy
from threepo.posterior.gaussian import FixedWeights, Posterior, layer_kind
from threepo.posterior.ivon import IVON
from threepo.posterior.metrics import posterior_metrics
from threepo.run_folder import POSTERIOR_FILE
from threepo.types import Draw


def trained(model: torch.nn.Module) -> IVON:
    """An optimizer whose Hessian is no longer constant."""
    optimizer = IVON(model.named_parameters(), ess=1e4, seed=9)
    for _ in range(2):
        with optimizer.sampled_params(train=True):
            sum((p**2).sum() for p in model.parameters()).backward()
        optimizer.step()
    return optimizer


def test_a_saved_posterior_draws_the_same_weights(policy: Policy, tmp_path: Path) -> None:
    optimizer = trained(policy.model)
    Posterior.of(optimizer).save(tmp_path)
    loaded = Posterior.from_pretrained(tmp_path)
    assert (loaded.step, loaded.seed) == (2, 9)
    draw = Draw(4, 5, 6)
    expected = {name: value.clone() for name, value in optimizer.weights(draw)}
    for name, value in FixedWeights(policy.model, loaded).weights(draw):
        assert torch.equal(value, expected[name]), name
    loaded.perturb_(policy.model.named_parameters(), draw)
    for name, p in policy.model.named_parameters():
        assert torch.equal(p, expected[name]), name


def test_a_program_that_reads_every_file_of_a_folder_finds_the_weights(policy: Policy, tmp_path: Path) -> None:
    """As ExLlama does, whatever the index says: under the weights' names, the Hessian would replace them."""
    optimizer = trained(policy.model)
    policy.save(tmp_path)
    Posterior.of(optimizer).save(tmp_path)
    found = {name: value for file in sorted(tmp_path.glob("*.safetensors")) for name, value in load_file(file).items()}
    for name, p in policy.model.named_parameters():
        assert torch.equal(found[name], p), name


def test_loading_a_hessian_leaves_the_optimizers_own_settings(policy: Policy, tmp_path: Path) -> None:
    source = trained(policy.model)
    Posterior.of(source).save(str(tmp_path))
    fresh = IVON(policy.model.named_parameters(), ess=7.0)
    Posterior.from_pretrained(tmp_path).load_into(fresh)
    for p in policy.model.parameters():
        assert torch.equal(fresh.state[p]["hessian"], source.state[p]["hessian"])
        assert fresh.state[p]["momentum"].eq(0).all()
    assert fresh.param_groups[0]["ess"] == 7.0
    assert fresh.param_groups[0]["step"] == 0


def test_what_does_not_fit_is_refused(policy: Policy, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no posterior"):
        Posterior.from_pretrained(tmp_path)
    (tmp_path / POSTERIOR_FILE).write_bytes(b"not a safetensors file")
    with pytest.raises(UserError, match="damaged"):
        Posterior.from_pretrained(tmp_path)
    save_file({"w": torch.zeros(1)}, tmp_path / POSTERIOR_FILE, metadata={"format": "threepo-posterior-9"})
    with pytest.raises(UserError, match="format 'threepo-posterior-9' is not"):
        Posterior.from_pretrained(tmp_path)
    other = torch.nn.Linear(3, 3)
    Posterior.of(trained(other)).save(tmp_path)
    posterior = Posterior.from_pretrained(tmp_path)
    assert posterior.step == 2
    with pytest.raises(UserError, match="another model"):
        posterior.load_into(IVON(policy.model.named_parameters()))
    with pytest.raises(UserError, match="another model"):
        posterior.perturb_(policy.model.named_parameters(), Draw(0, 0, 0))
    with pytest.raises(UserError, match="has shape"):
        posterior.perturb_(torch.nn.Linear(3, 4).named_parameters(), Draw(0, 0, 0))
    with pytest.raises(UserError, match="no draws"):
        next(FixedWeights(policy.model).weights(Draw(0, 0, 0)))


@pytest.mark.parametrize("groups", [None, "["])
def test_damaged_metadata_are_refused(groups: str | None, tmp_path: Path) -> None:
    metadata = {"format": "threepo-posterior-2", "step": "1", "seed": "2"} | ({"groups": groups} if groups else {})
    save_file({"w": torch.ones(2)}, tmp_path / POSTERIOR_FILE, metadata=metadata)
    with pytest.raises(UserError, match="damaged"):
        Posterior.from_pretrained(tmp_path)


def test_a_run_folder_stands_for_its_newest_checkpoint_and_the_repr_is_one_line(tmp_path: Path) -> None:
    for step in (9, 10):
        optimizer = trained(torch.nn.Linear(3, 3))
        folder = tmp_path / "checkpoints" / f"step-{step}"
        folder.mkdir(parents=True)
        Posterior.of(optimizer).save(folder)
    posterior = Posterior.from_pretrained(tmp_path)
    assert posterior.folder == folder
    assert torch.equal(posterior.hessian["bias"], Posterior.of(optimizer).hessian["bias"])
    assert repr(posterior) == f"Posterior(2 parameters, 12 elements, step 2, from '{folder}')"
    assert repr(Posterior.of(optimizer)) == "Posterior(2 parameters, 12 elements, step 2)"


def test_a_draw_is_a_state_dict_of_the_saved_model(tmp_path: Path, policy: Policy) -> None:
    optimizer = trained(policy.model)
    policy.save(tmp_path)
    Posterior.of(optimizer).save(tmp_path)
    posterior = Posterior.from_pretrained(tmp_path)
    expected = dict(optimizer.weights(posterior.address(2)))
    means = dict(optimizer.weights(None))
    loaded = load_policy(ModelConfig(path=str(tmp_path)), seed=0)
    missing, unexpected = loaded.model.load_state_dict(posterior.draw(2), strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}, "only a tied head may be left out"
    for name, p in loaded.model.named_parameters():
        assert torch.equal(p, expected[name])
        assert not torch.equal(p, means[name])
    with pytest.raises(UserError, match="not read from a folder"):
        Posterior.of(optimizer).draw(0)
    for file in tmp_path.glob("model*.safetensors"):
        file.unlink()
    with pytest.raises(UserError, match="no mean"):
        posterior.draw(0)


def test_metrics_of_a_posterior_by_hand() -> None:
    """Two weights of 3 and 4 (rms sqrt(12.5)) and sigma 1/sqrt(100 * 0.04) = 0.5 everywhere, but for one Hessian."""
    model = torch.nn.ParameterDict({"mlp": torch.nn.Parameter(torch.tensor([3.0, 4.0]))})
    optimizer = IVON(model.named_parameters(), ess=100.0, hess_init=0.04, weight_decay=0.0)
    metrics = posterior_metrics(optimizer)
    assert metrics["posterior/sigma_to_rms"] == pytest.approx(0.5 / 12.5**0.5)
    assert metrics["posterior/sigma_to_rms/mlp"] == pytest.approx(0.5 / 12.5**0.5)
    assert metrics["posterior/hessian_outside_share"] == 0
    optimizer.state[model["mlp"]]["hessian"][0] = 0.01
    metrics = posterior_metrics(optimizer)
    assert metrics["posterior/hessian_outside_share"] == 0.5
    assert metrics["posterior/hessian_p05"] == pytest.approx(0.25)
    assert metrics["posterior/hessian_p95"] == pytest.approx(1.0)
    assert metrics["posterior/sigma_to_rms"] == pytest.approx(((1.0**2 + 0.5**2) / 25) ** 0.5)


def test_metrics_of_a_posterior_weigh_parameters_by_their_size() -> None:
    """Of 65,536 weights and of 2,048, 4,096 and 2,048 are looked at; the sizes are 32 to 1, and so are the shares."""
    model = {"mlp": torch.nn.Parameter(torch.ones(65_536)), "norm": torch.nn.Parameter(torch.full((2048,), 3.0))}
    optimizer = IVON(model.items(), ess=1.0, hess_init=1.0, weight_decay=0.0)
    optimizer.state[model["norm"]]["hessian"].fill_(4.0)
    found = posterior_metrics(optimizer)
    assert found["posterior/hessian_outside_share"] == pytest.approx(1 / 33)
    assert found["posterior/hessian_p95"] == 1.0
    assert found["posterior/sigma_to_rms"] == pytest.approx(((32 * 1.0 + 0.25) / (32 * 1.0 + 9.0)) ** 0.5)


@pytest.mark.parametrize("shape", [(256, 4096), (512, 2048), (1000, 1024), (64, 64, 64)])
def test_metrics_of_a_posterior_see_every_column(shape: tuple[int, ...]) -> None:
    """Half of the columns have another Hessian; reading few columns of a large matrix would miss or overstate them."""
    p = torch.nn.Parameter(torch.ones(shape))
    optimizer = IVON([("w", p)], hess_init=1.0)
    optimizer.state[p]["hessian"][..., ::2] = 3.0
    assert posterior_metrics(optimizer)["posterior/hessian_outside_share"] == pytest.approx(0.5, abs=0.02)
    optimizer.state[p]["hessian"].fill_(1.0)[..., : shape[-1] // 4] = 3.0
    assert posterior_metrics(optimizer)["posterior/hessian_outside_share"] == pytest.approx(0.25, abs=0.02)


def test_every_parameter_of_a_decoder_has_a_kind(policy: Policy) -> None:
    kinds = {layer_kind(name) for name, _ in policy.model.named_parameters()}
    assert kinds == {"embedding", "norm", "attention", "mlp"}
    assert layer_kind("lm_head.weight") == "head"


def test_posteriors_that_are_saved_now_give_the_same_draws_later() -> None:
    """docs/stability.md promises the bits of their draws."""
    folder = Path(__file__).with_name("saved_by_0_1")
    posterior, expected = Posterior.from_pretrained(folder), load_file(folder / "draws.safetensors")
    for index in (0, 3):
        for name, value in posterior.draw(index).items():
            assert torch.equal(value, expected[f"{index}/{name}"]), name
    assert not torch.equal(expected["0/embed.weight"], expected["3/embed.weight"])


def test_a_saved_posterior_is_not_taken_for_weights(tmp_path: Path) -> None:
    """By the index, other programs know which files of tensors are the model."""
    model = load_policy(ModelConfig(path="tiny-qwen2", tiny=TinyConfig(hidden_size=32, layers=1, heads=2, kv_heads=1)))
    model.save(tmp_path)
    Posterior.of(IVON(model.model.named_parameters(), ess=1e5)).save(tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(index.values()) == {"model.safetensors"}
    assert index.keys() == load_file(tmp_path / "model.safetensors").keys()
