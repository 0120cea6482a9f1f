"""IVON under draws of different arms: what the Hessian of a parameter learns from the draws that reach it."""

import math

import pytest
import torch

from threepo import IVON, Draw
from threepo.types import Arm

NORM, MLP = "model.norm.weight", "model.layers.0.mlp.up_proj.weight"
SETTINGS = {"ess": 1e4, "hess_init": 0.5, "betas": (0.9, 0.8), "weight_decay": 1e-2, "lr": 0.0}


def optimizer_of(size: int) -> tuple[dict[str, torch.nn.Parameter], IVON]:
    parameters = {name: torch.nn.Parameter(torch.linspace(-1, 1, size)) for name in (NORM, MLP)}
    return parameters, IVON(parameters.items(), **SETTINGS)  # type: ignore[arg-type]


def numbers(optimizer: IVON, draw: Draw) -> dict[str, torch.Tensor]:
    """The random numbers of a draw by parameter, read from its weights without an arm."""
    root = math.sqrt(SETTINGS["ess"] * (SETTINGS["hess_init"] + SETTINGS["weight_decay"]))
    plain = Draw(draw.seed, draw.step, draw.index)
    mean = dict(optimizer.weights(None))
    return {name: (value.double() - mean[name].double()) * root for name, value in optimizer.weights(plain)}


def expected(estimate: torch.Tensor, reach: float) -> torch.Tensor:
    """Equation 1.3 of method.md, with the step 1 - beta2 times `reach`."""
    h, delta, step = SETTINGS["hess_init"], SETTINGS["weight_decay"], (1 - SETTINGS["betas"][1]) * reach
    return h + step * (estimate - h) + 0.5 * step**2 * (h - estimate) ** 2 / (h + delta)


@pytest.mark.parametrize("structure", ["", "rank=1"])
def test_a_hessian_learns_from_the_draws_that_reach_its_parameter(structure: str) -> None:
    parameters, optimizer = optimizer_of(6)
    optimizer.param_groups[0]["noise_structure"] = structure
    draws = {Draw(1, 0, 0, arm=Arm("all", 4.0)): 3.0, Draw(1, 0, 1, arm=Arm("norm", 0.5)): 2.0, None: 5.0}
    generator, gradients = torch.Generator().manual_seed(0), {}
    for draw, weight in draws.items():
        with optimizer.at(draw):
            for name, p in parameters.items():
                p.grad = gradients[draw, name] = torch.randn(6, generator=generator)
        optimizer.observe(draw, weight=weight)
    z = {draw: numbers(optimizer, draw) for draw in draws if draw}
    optimizer.step(divisor=10.0)
    root = math.sqrt(SETTINGS["ess"] * (SETTINGS["hess_init"] + SETTINGS["weight_decay"]))
    first, second = z
    of_first = {name: z[first][name] * gradients[first, name] / 4.0 for name in parameters}
    of_second = z[second][NORM] * gradients[second, NORM] / 0.5
    # Half of the batch was under noise of the norms, three tenths under noise of the MLPs.
    sums = {NORM: (of_first[NORM] + of_second, 0.5), MLP: (of_first[MLP], 0.3)}
    for name, (total, reach) in sums.items():
        made = optimizer.state[parameters[name]]["hessian"]
        torch.testing.assert_close(made.double(), expected(total / 10.0 * root / reach, reach), rtol=1e-4, atol=1e-6)


def test_one_draw_alone_is_divided_by_its_size_too() -> None:
    parameters, optimizer = optimizer_of(4)
    draw = Draw(2, 0, 0, arm=Arm("norm", 3.0))
    for p in parameters.values():
        p.grad = torch.full((4,), 0.25)
    optimizer.observe(draw)
    z = numbers(optimizer, draw)[NORM]
    optimizer.step()
    root = math.sqrt(SETTINGS["ess"] * (SETTINGS["hess_init"] + SETTINGS["weight_decay"]))
    made = {name: optimizer.state[p]["hessian"] for name, p in parameters.items()}
    torch.testing.assert_close(made[NORM].double(), expected(z * 0.25 / 3.0 * root, 1.0), rtol=1e-4, atol=1e-6)
    assert made[MLP].eq(SETTINGS["hess_init"]).all(), "no draw reached it"


def test_the_estimate_is_right_on_average_for_any_mixture_of_arms() -> None:
    """A quadratic with curvature 2 in every coordinate, at its minimum; each draw has a part of it."""
    parameters, optimizer = optimizer_of(4096)
    arms = {Arm("all", 0.5): 1.0, Arm("mlp", 2.0): 2.0, Arm("norm", 8.0): 4.0, None: 3.0}
    for p in parameters.values():
        torch.nn.init.zeros_(p)
    for index, (arm, weight) in enumerate(arms.items()):
        draw = Draw(3, 0, index, arm=arm) if arm else None
        with optimizer.at(draw):
            torch.stack([weight * p.square().sum() for p in parameters.values()]).sum().backward()
        optimizer.observe(draw, weight=weight)
    optimizer.step(divisor=sum(arms.values()))
    h, width = SETTINGS["hess_init"], SETTINGS["hess_init"] + SETTINGS["weight_decay"]
    for name, reach in ((NORM, 0.5), (MLP, 0.3)):
        made = optimizer.state[parameters[name]]["hessian"].double()
        # Equation 1.3, solved for the estimate of each coordinate.
        estimate = h + width / ((1 - SETTINGS["betas"][1]) * reach) * ((1 + 2 * (made - h) / width).sqrt() - 1)
        assert float(estimate.mean()) == pytest.approx(2.0, abs=5 * float(estimate.std()) / 64)
        assert float(estimate.std()) < 3.0


@pytest.mark.parametrize("first_at_mean", [True, False])
@pytest.mark.parametrize("structure", ["", "rank=1"])
def test_a_parameter_whose_only_gradient_says_nothing_of_its_hessian(first_at_mean: bool, structure: str) -> None:
    """Its one gradient was taken where it had no noise; the estimate of the draw that reached it is 0 then."""
    parameters, optimizer = optimizer_of(4)
    optimizer.param_groups[0]["noise_structure"] = structure
    unreached = None if first_at_mean else Draw(1, 0, 0, arm=Arm("norm", 2.0))
    observations = [(unreached, (NORM, MLP)), (Draw(1, 0, 1), (NORM,))]
    found = []
    for order in (observations, observations[::-1]):
        for draw, names in order:
            with optimizer.at(draw):
                for name in names:
                    parameters[name].grad = torch.ones(4)
            optimizer.observe(draw)
        optimizer.step(divisor=2.0)
        state = optimizer.state[parameters[MLP]]
        found.append(state["hessian"].clone())
        state["hessian"].fill_(SETTINGS["hess_init"])
    torch.testing.assert_close(found[0].double(), expected(torch.zeros(4).double(), 0.5), rtol=1e-5, atol=1e-7)
    assert found[0].equal(found[1]), "whatever the order"
