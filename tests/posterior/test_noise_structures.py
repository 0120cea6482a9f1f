"""A structure of noise is one class and one line of a table: here one is added while the program runs."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from drawn import normal
from threepo.config.method import NOISE_STRUCTURES, NoiseConfig
from threepo.errors import UserError
from threepo.posterior import noise_structures
from threepo.posterior.gaussian import FixedWeights, Posterior
from threepo.posterior.ivon import IVON
from threepo.posterior.noise import normal_chunks
from threepo.posterior.noise_structures import StructuredNoise
from threepo.posterior.point_optimizers import PointAdamW
from threepo.types import Draw

DRAW, MIRRORED = Draw(1, 2, 3), Draw(1, 2, 3, sign=-1)
SIGNS = "signs=1"


class SignNoise(StructuredNoise):
    """Numbers of a matrix are -1 or 1: the signs of normal numbers, with mean 0, variance 1 and no correlation."""

    def _numbers(self, start: int, stop: int, device: torch.device) -> Iterator[tuple[int, torch.Tensor]]:
        return ((offset, z.sign()) for offset, z in normal_chunks(self.key, start, stop, device))


@pytest.fixture(autouse=True)
def _added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(noise_structures.STRUCTURES, "signs", SignNoise)


def model() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 4))


def test_it_perturbs_and_a_mirrored_draw_has_the_opposite_signs() -> None:
    net = model()
    before = net[0].weight.detach().clone()  # type: ignore[union-attr]
    optimizer = PointAdamW(net.named_parameters(), noise_scale=0.5, noise_structure=SIGNS, lr=1e-3)
    moved = [dict(optimizer.weights(draw))["0.weight"].detach() - before for draw in (DRAW, MIRRORED)]
    torch.testing.assert_close(moved[0].abs(), torch.full_like(before, 0.5))
    torch.testing.assert_close(moved[1], -moved[0])
    assert 0 < moved[0].sign().add(1).sum() / 2 < before.numel()
    with optimizer.perturbed(DRAW):
        assert torch.equal(net[0].weight, before + moved[0])  # type: ignore[arg-type]
    assert torch.equal(net[0].weight, before)  # type: ignore[arg-type]


def test_ivon_learns_the_diagonal_with_it_and_saves_it(tmp_path: Path) -> None:
    """z^2 = 1, so the price estimate of a diagonal quadratic has no variance: h is 2 after one step with beta2 = 0."""
    w = torch.nn.Parameter(torch.zeros(3, 4))
    optimizer = IVON([("w", w)], lr=0.0, ess=1e4, hess_init=1.0, betas=(0.9, 0.0), noise_structure=SIGNS)
    for draw in (optimizer.next_draw(), optimizer.next_draw()):
        with optimizer.perturbed(draw):
            w.square().sum().backward()
        optimizer.observe(draw)
    optimizer.step()
    expected = 2.0 + 0.5 * (1.0 - 2.0) ** 2  # with the Riemannian correction
    torch.testing.assert_close(optimizer.state[w]["hessian"], torch.full((3, 4), expected), rtol=1e-4, atol=0)
    Posterior.of(optimizer).save(tmp_path)
    net = torch.nn.ParameterDict({"w": w})
    read = dict(FixedWeights(net, Posterior.from_pretrained(tmp_path)).weights(MIRRORED))
    assert torch.equal(read["w"], dict(optimizer.weights(MIRRORED))["w"])


def test_tied_noise_is_that_of_the_shape(tmp_path: Path) -> None:
    """Also in posteriors that are saved, and in steps of IVON, whose price estimator needs the same numbers."""
    net = torch.nn.ParameterDict({"a": torch.zeros(3, 4), "b": torch.zeros(3, 4), "c": torch.zeros(4, 3)})
    optimizer = IVON(net.named_parameters(), ess=1.0, hess_init=1.0, weight_decay=0.0, noise_structure="tied")
    drawn = {name: value.clone() for name, value in optimizer.weights(DRAW)}
    assert torch.equal(drawn["a"], drawn["b"])
    assert not torch.equal(drawn["a"].view(-1), drawn["c"].view(-1))
    assert drawn["a"].unique().numel() == 12
    assert torch.equal(drawn["a"].view(-1), normal(DRAW, "tied 3x4", 0, 12)), "the address in files that are saved"
    free = dict(IVON(net.named_parameters(), ess=1.0, hess_init=1.0, weight_decay=0.0).weights(DRAW))
    assert not torch.equal(free["a"], free["b"])
    Posterior.of(optimizer).save(tmp_path)
    read = dict(FixedWeights(net, Posterior.from_pretrained(tmp_path)).weights(DRAW))
    assert all(torch.equal(read[name], value) for name, value in drawn.items())
    with optimizer.perturbed(DRAW):
        sum(p.square().sum() for p in net.values()).backward()  # type: ignore[union-attr]
    optimizer.observe(DRAW)
    optimizer.step()
    states = [optimizer.state[p]["hessian"] for p in net.values()]
    assert torch.equal(states[0], states[1])


def test_tied_noise_has_no_rank() -> None:
    assert NoiseConfig(tied=True).group_structure == "tied"
    with pytest.raises(UserError, match=r"noise.tied = true: has no low-rank form; set noise.rank = 0"):
        NoiseConfig(tied=True, rank=2)


def test_every_structure_is_a_setting_that_recipes_pass_on() -> None:
    """One that config/method.py does not name would be ignored, without a word."""
    assert {*NOISE_STRUCTURES, "signs"} == set(noise_structures.STRUCTURES)
    for name in NOISE_STRUCTURES:
        assert NoiseConfig(**{name: 2}).group_structure == f"{name}=2"


def test_an_unknown_structure_is_refused() -> None:
    known = r"one of 'rank=n',.*'signs=n', with n of 1 or more"
    for wrong in ("stripes=1", "rank=0", "rank", "rank=-1", "rank=1, signs=1"):
        with pytest.raises(UserError, match=known):
            IVON(model().named_parameters(), noise_structure=wrong)
        with pytest.raises(UserError, match=known):
            PointAdamW(model().named_parameters(), noise_structure=wrong)


@pytest.mark.parametrize("structure", ["", SIGNS, "tied"])
def test_parameter_groups_hold_plain_values(structure: str) -> None:
    """PyTorch's distributed checkpoints flatten groups: an empty dictionary does not come back from them."""
    for optimizer in (
        IVON(model().named_parameters(), noise_structure=structure),
        PointAdamW(model().named_parameters(), noise_structure=structure),
    ):
        for group in optimizer.param_groups:
            values = [value for name, value in group.items() if name not in ("params", "param_names")]
            flat = [item for value in values for item in (value if isinstance(value, tuple) else (value,))]
            assert all(item is None or isinstance(item, int | float | str) for item in flat), group
