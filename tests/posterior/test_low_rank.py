"""Noise of low rank: its definition, its moments, what IVON learns from it, and that all makers of a draw agree."""

import math
from pathlib import Path
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drawn import normal
from threepo.config import NoiseConfig
from threepo.errors import UserError
from threepo.posterior import kernels
from threepo.posterior.evolution import evolve
from threepo.posterior.gaussian import FixedWeights, Posterior
from threepo.posterior.ivon import IVON
from threepo.posterior.noise_structures import LowRankNoise, noise_of
from threepo.posterior.operations import AddNoiseTimes, Perturb, Region, Scalars
from threepo.posterior.point_optimizers import PointAdamW, PointSGD
from threepo.types import Draw

DRAW = Draw(3, 5, 1)
UNIT = Scalars(weight_decay=0.0, ess=1.0, fixed_root=1.0, noise_scale=1.0)


def noise(rows: int, columns: int, rank: int, draw: Draw = DRAW) -> torch.Tensor:
    """A draw's noise on a matrix "w" at a sigma of 1."""
    z = torch.zeros(rows, columns)
    kernels.run([Perturb(z, z, z, noise_of(draw, "w", z.shape, f"rank={rank}"), UNIT)])
    return z


@pytest.mark.parametrize(("rows", "columns", "rank"), [(1, 1, 1), (7, 5, 1), (5, 7, 3), (300, 700, 2), (40, 30, 16)])
def test_it_is_the_product_of_two_factors_of_full_noise(rows: int, columns: int, rank: int) -> None:
    numbers = normal(DRAW, "w", 0, (rows + columns) * rank).double()
    u, v = numbers[: rows * rank].view(rows, rank), numbers[rows * rank :].view(columns, rank)
    torch.testing.assert_close(noise(rows, columns, rank).double(), u @ v.T / math.sqrt(rank), rtol=0, atol=1e-5)
    assert torch.linalg.matrix_rank(noise(rows, columns, rank), rtol=1e-5) == min(rows, columns, rank)


def test_vectors_have_full_noise() -> None:
    for shape in (torch.Size([9]), torch.Size([2, 3, 4])):
        assert noise_of(DRAW, "w", shape, "rank=2") == noise_of(DRAW, "w", shape, "")
    assert isinstance(noise_of(DRAW, "w", torch.Size([2, 3]), "rank=2"), LowRankNoise)


@given(st.integers(1, 40), st.integers(1, 300), st.integers(1, 4), st.data())
def test_an_element_is_the_same_in_every_slice(rows: int, columns: int, rank: int, data: st.DataObject) -> None:
    whole = noise(rows, columns, rank).view(-1)
    made = noise_of(DRAW, "w", torch.Size([rows, columns]), f"rank={rank}")
    start = data.draw(st.integers(0, rows * columns - 1))
    stop = data.draw(st.integers(start + 1, rows * columns))
    for offset, z in made.numbers(start, stop, torch.device("cpu")):
        assert torch.equal(z, whole[start + offset : start + offset + len(z)])


def test_shards_by_rows_and_by_columns_have_the_noise_of_the_whole() -> None:
    whole = noise(6, 10, 2)
    made = noise_of(DRAW, "w", whole.shape, "rank=2")
    for shape, region, expected in [
        ((2, 10), Region(20), whole[2:4]),
        ((6, 3), Region(4, 3, 10), whole[:, 4:7]),
    ]:
        z, sums = torch.zeros(shape), torch.zeros(shape)
        kernels.torch_kernels.run([Perturb(z, z, z, made, UNIT, region)])
        kernels.torch_kernels.run([AddNoiseTimes(sums, torch.full(shape, 2.0), made, region)])
        assert torch.equal(z, expected)
        assert torch.equal(sums, 2 * expected)


def test_entries_have_unit_variance_and_are_uncorrelated() -> None:
    """The price estimate of the diagonal needs this. There are 1000 draws; bounds are five standard errors."""
    z = torch.stack([noise(3, 4, 2, Draw(0, 0, i)).view(-1) for i in range(1000)]).double()
    products = z[:, :, None] * z[:, None, :]
    errors = products.std(dim=0) / math.sqrt(len(z))
    assert ((products.mean(dim=0) - torch.eye(12)).abs() < 5 * errors).all()
    # E z^4 = 3 + 6 / r, so z^2, the estimate where H is the identity, has the variance 2 (1 + 3 / r).
    fourth = (z**4).mean(dim=1)
    assert abs(float(fourth.mean()) - 6) < 5 * float(fourth.std()) / math.sqrt(len(z))


def test_price_learns_the_diagonal_of_a_quadratic() -> None:
    """E[z (H sigma z)] / sigma = diag H for any uncorrelated z: the Hessian approaches the exact diagonal."""
    torch.manual_seed(0)
    root = torch.randn(12, 12)
    hessian = root @ root.T / 12 + torch.eye(12)
    copies = [torch.nn.Parameter(torch.zeros(3, 4)) for _ in range(10)]  # each has noise of its own
    settings = {"lr": 0.0, "ess": 1e4, "hess_init": 1.0, "betas": (0.9, 0.98), "noise_shape": "isotropic"}
    named = [(f"w{i}", w) for i, w in enumerate(copies)]
    optimizer = IVON(named, noise_structure="rank=1", **settings)  # type: ignore[arg-type]
    late = []
    for step in range(200):
        draw = optimizer.next_draw()
        with optimizer.perturbed(draw):
            stacked = torch.stack(copies).view(10, 12)
            (0.5 * (stacked @ hessian) * stacked).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.observe(draw)
        optimizer.step()
        if step >= 100:
            late += [optimizer.state[w]["hessian"].clone() for w in copies]
    found = torch.stack(late).mean(dim=0).view(-1)
    assert ((found / hessian.diagonal() - 1).abs() < 0.2).all()
    assert (found - 1).abs().max() > 0.5, "it has moved from where it began"


def model() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 4))


@pytest.mark.parametrize("sign", [1, -1])
def test_all_makers_of_a_draw_agree_bitwise(tmp_path: Path, sign: Literal[1, -1]) -> None:
    """They agree in the model, in separate tensors, from a file and around any model; the mean comes back."""
    draw, net = Draw(0, 0, 2, sign=sign), model()
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    optimizer = IVON(net.named_parameters(), ess=1e3, hess_init=1.0, noise_structure="rank=2")
    with optimizer.perturbed(draw):
        inside = {name: p.detach().clone() for name, p in net.named_parameters()}
    assert all(torch.equal(p, before[name]) for name, p in net.named_parameters())
    moved = inside["0.weight"] - before["0.weight"]
    assert torch.linalg.matrix_rank(moved, rtol=1e-3) == 2
    Posterior.of(optimizer).save(tmp_path)
    read = Posterior.from_pretrained(tmp_path)
    for source in (optimizer, FixedWeights(net, read)):
        for name, value in source.weights(draw):
            assert torch.equal(value, inside[name])


def test_noise_of_a_given_size_has_the_rank_too() -> None:
    net = model()
    around = Posterior.around(net.named_parameters(), NoiseConfig(unit="absolute", size=0.1, rank=1))
    adamw = PointAdamW(net.named_parameters(), noise_scale=0.1, noise_structure="rank=1", lr=1e-3)
    for source in (FixedWeights(net, around), adamw):
        z = (dict(source.weights(DRAW))["0.weight"] - net[0].weight).detach() / 0.1  # type: ignore[index, operator]
        made = noise_of(DRAW, "0.weight", z.shape, "rank=1")
        expected = torch.zeros_like(z)
        kernels.run([Perturb(expected, expected, expected, made, UNIT)])
        torch.testing.assert_close(z, expected, rtol=0, atol=1e-5)


def test_evolution_steps_along_the_noise_of_low_rank() -> None:
    w = torch.nn.Parameter(torch.zeros(4, 3))
    optimizer = PointSGD([("w", w)], lr=1.0, noise_scale=0.5, noise_structure="rank=1")
    draws = [Draw(0, 0, 0), Draw(0, 0, 1)]
    evolve(optimizer, dict(zip(draws, (1.0, -1.0), strict=True)))
    expected = (noise(4, 3, 1, draws[0]) - noise(4, 3, 1, draws[1])) / 2 / 0.5
    torch.testing.assert_close(w.detach(), expected)


def test_ranks_that_cannot_be_are_refused() -> None:
    full = Posterior.of(IVON(model().named_parameters()))
    with pytest.raises(UserError, match="noise.rank = 2: the posterior has a structure of its own; remove it"):
        full.scaled(NoiseConfig(size=0.5, rank=2))
    with pytest.raises(UserError, match="noise_structure = 'rank=-1': must be '' or 'tied' or one of"):
        IVON(model().named_parameters(), noise_structure="rank=-1")
