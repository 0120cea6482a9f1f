"""AdamW as a policy optimizer: torch's AdamW, with sums, clipping and skipping around it."""

import math

import pytest
import torch

from threepo.posterior.point_optimizers import PointAdamW, PointSGD
from threepo.posterior.policy_optimizer import named_in_groups
from threepo.types import Draw


def test_steps_are_those_of_torch_with_clipping() -> None:
    ours, theirs = (torch.nn.Parameter(torch.linspace(-1, 1, 20)) for _ in range(2))
    a = PointAdamW([("w", ours)], max_grad_norm=0.5, lr=0.1)
    b = torch.optim.AdamW([theirs], lr=0.1)
    for step in range(10):
        grad = torch.linspace(1, -2, 20) * (step + 1)
        ours.grad = grad * 64  # a sum over 64 tokens
        assert a.observe(None)
        a.step(divisor=64)
        theirs.grad = grad.clone()
        torch.nn.utils.clip_grad_norm_([theirs], 0.5)
        b.step()
        assert a.step_metrics()["optimizer/grad_norm"] == pytest.approx(float(grad.norm()), rel=1e-5)
        assert ours.grad is None
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


def test_every_gradient_of_a_step_is_divided_by_its_own_divisor() -> None:
    """The sums 6 over 2 tokens and 20 over 5 give the mean of 3 and 4."""
    p = torch.nn.Parameter(torch.zeros(3))
    optimizer = PointSGD([("w", p)], max_grad_norm=0.0, lr=1.0)
    for total, count in ((6.0, 2.0), (20.0, 5.0)):
        (total * p).sum().backward()
        optimizer.observe(None, count)
    assert optimizer.gradients()[p].tolist() == [7.0] * 3
    optimizer.step()
    assert p.tolist() == [-3.5] * 3
    (2.0 * p).sum().backward()
    optimizer.observe(None)
    optimizer.step()
    assert p.tolist() == [-5.5] * 3, "nothing is left of the step before"


def test_there_are_no_draws() -> None:
    p = torch.nn.Parameter(torch.ones(2))
    optimizer = PointAdamW([("w", p)])
    with pytest.raises(RuntimeError, match="no posterior"), optimizer.at(Draw(0, 0, 0)):
        pass
    with pytest.raises(RuntimeError, match="no posterior"):
        next(optimizer.weights(Draw(0, 0, 0)))
    with optimizer.at(None):
        pass
    assert [name for name, _ in optimizer.weights(None)] == ["w"]


def test_a_gradient_that_is_not_finite_skips_the_step() -> None:
    p = torch.nn.Parameter(torch.ones(2))
    optimizer = PointAdamW([("w", p)])
    p.grad = torch.tensor([1.0, math.nan])
    optimizer.observe(None)
    optimizer.step()
    assert p.eq(1).all()
    assert p.grad is None
    assert optimizer.skipped_steps == 1


def test_parameters_without_names_go_by_position() -> None:
    optimizer = torch.optim.SGD([{"params": [torch.zeros(1), torch.zeros(1)]}, {"params": [torch.zeros(1)]}])
    assert [name for name, _, _ in named_in_groups(optimizer.param_groups)] == ["param.0", "param.1", "param.2"]
