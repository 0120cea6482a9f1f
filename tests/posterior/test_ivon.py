"""IVON: contracts 3 and 7, against the equations, and in the hands of users who do unexpected things."""

import contextlib
import copy
import math
import re
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import ReferenceIVON

from drawn import normal
from threepo.errors import ThreepoWarning, UserError
from threepo.posterior import noise_structures
from threepo.posterior.ivon import IVON
from threepo.posterior.noise_structures import StructuredNoise
from threepo.posterior.point_optimizers import PointAdamW
from threepo.types import Draw

SETTINGS = {
    "lr": 0.3,
    "ess": 50.0,
    "hess_init": 0.4,
    "weight_decay": 1e-3,
    "clip_radius": 0.9,
}


def curvature(size: int) -> torch.Tensor:
    return torch.linspace(0.2, 3.0, size)


def quadratic_grad(weights: torch.Tensor) -> torch.Tensor:
    """Gradient of 0.5 * sum(c * (w - 1)^2)."""
    return curvature(weights.numel()).to(weights.dtype) * (weights - 1)


@pytest.mark.parametrize("estimator", ["price", "gradsq"])
@pytest.mark.parametrize(("draws", "debias"), [(1, True), (3, False)])
@pytest.mark.parametrize(("rescale_lr", "noise_scale"), [(True, 1.0), (False, 0.5)])
def test_follows_the_reference_for_80_steps(
    estimator: str, draws: int, debias: bool, rescale_lr: bool, noise_scale: float
) -> None:
    size = 40
    start = torch.linspace(-2, 2, size)
    p = torch.nn.Parameter(start.clone())
    variant = {"estimator": estimator, "debias": debias, "rescale_lr": rescale_lr, "noise_scale": noise_scale}
    ours = IVON([("w", p)], betas=(0.9, 0.95), **variant, **SETTINGS)
    reference = ReferenceIVON(start.tolist(), beta1=0.9, beta2=0.95, **variant, **SETTINGS)
    for step in range(80):
        noises, grads = [], []
        for index in range(draws):
            draw = Draw(0, step, index)
            with ours.perturbed(draw):
                p.grad = quadratic_grad(p.detach())
            ours.observe(draw)
            noises.append(normal(draw, "w", 0, size).tolist())
            at = torch.tensor(reference.perturbed(noises[-1]), dtype=torch.float64)
            grads.append(quadratic_grad(at).tolist())
        ours.step()
        reference.step(noises, grads)
    for name, got, expected in (
        ("mean", p.detach(), reference.m),
        ("Hessian", ours.state[p]["hessian"], reference.h),
        ("momentum", ours.state[p]["momentum"], reference.g),
    ):
        expected = torch.tensor(expected, dtype=torch.float64)
        difference = (got.double() - expected).norm() / expected.norm()
        assert difference < 1e-5, f"{name} differs by {difference:.1e}"


@pytest.mark.parametrize("estimator", ["price", "gradsq"])
def test_the_reference_itself_follows_the_published_package(estimator: str) -> None:
    """ivon-opt is a peer for the test's own reference: its perturbations are read off the weights it hands out."""
    ivon = pytest.importorskip("ivon")
    size = 30
    start = torch.linspace(-2, 2, size, dtype=torch.float64)
    p = torch.nn.Parameter(start.clone())
    peer = ivon.IVON(
        [p],
        lr=0.3,
        ess=50.0,
        hess_init=0.4,
        beta1=0.9,
        beta2=0.95,
        weight_decay=1e-3,
        clip_radius=0.9,
        hess_approx=estimator,
        rescale_lr=True,
    )
    reference = ReferenceIVON(
        start.tolist(), beta1=0.9, beta2=0.95, estimator=estimator, debias=True, rescale_lr=True, **SETTINGS
    )
    torch.manual_seed(0)
    for _ in range(100):
        with peer.sampled_params(train=True):
            noise = [(w - m) / reference.sigma(i) for i, (w, m) in enumerate(zip(p.tolist(), reference.m, strict=True))]
            grad = quadratic_grad(p.detach())
            p.grad = grad.clone()
        peer.step()
        reference.step([noise], [grad.tolist()])
    torch.testing.assert_close(p.detach(), torch.tensor(reference.m, dtype=torch.float64), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("draws", [1, 3])
def test_float64_weights_are_trained_like_float32_ones(draws: int) -> None:
    weights = {}
    for dtype in (torch.float32, torch.float64):
        p = torch.nn.Parameter(torch.linspace(-1, 1, 50).to(dtype))
        optimizer = IVON([("w", p)], **SETTINGS)
        for _ in range(3):
            for _ in range(draws):
                with optimizer.sampled_params(train=True):
                    p.grad = quadratic_grad(p.detach())
            optimizer.step()
        weights[dtype] = p.detach()
    p.grad = torch.full_like(p, 1e300)
    assert not optimizer.observe(None), "what float32 cannot hold, the state cannot either"
    torch.testing.assert_close(weights[torch.float64].float(), weights[torch.float32], rtol=1e-5, atol=1e-6)


def test_one_step_by_hand() -> None:
    """m = 2, h = 0.5, delta = 0.5, ess = 4: sigma = 1 / sqrt(4) = 0.5."""
    p = torch.nn.Parameter(torch.tensor([2.0]))
    optimizer = IVON(
        [("w", p)], lr=0.1, ess=4.0, hess_init=0.5, weight_decay=0.5, betas=(0.5, 0.9), clip_radius=math.inf
    )
    draw = Draw(0, 0, 0)
    z = float(normal(draw, "w", 0, 1))
    with optimizer.perturbed(draw):
        assert p.item() == pytest.approx(2 + 0.5 * z, rel=1e-6)
        p.grad = torch.tensor([3.0])
    optimizer.observe(draw)
    optimizer.step()
    f = 4 * (0.5 + 0.5) * (0.5 * z * 3)
    hessian = 0.9 * 0.5 + 0.1 * f + 0.5 * 0.01 * (0.5 - f) ** 2 / 1.0
    momentum = 0.5 * 3 / (1 - 0.5)  # debiased
    assert float(optimizer.state[p]["hessian"]) == pytest.approx(hessian, rel=1e-5, abs=1e-6)
    assert p.item() == pytest.approx(2 - 0.1 * (0.5 + 0.5) * (momentum + 0.5 * 2) / (hessian + 0.5), rel=1e-5)


def test_price_estimates_the_curvature_of_a_quadratic_without_bias() -> None:
    size, draws, beta2 = 20_000, 8, 0.99
    p = torch.nn.Parameter(torch.zeros(size))
    optimizer = IVON([("w", p)], ess=1.0, hess_init=1.0, weight_decay=0.0, betas=(0.9, beta2))
    for index in range(draws):
        draw = Draw(0, 0, index)
        with optimizer.perturbed(draw):
            p.grad = 2.5 * (p.detach() - 1)
        optimizer.observe(draw)
    optimizer.step()
    # h_new = b h + (1 - b) f + (1 - b)^2 / 2 (h - f)^2 / h with h = 1, solved for d = f - h.
    moved = optimizer.state[p]["hessian"].double() - 1
    d = ((1 + 2 * moved).clamp(min=0).sqrt() - 1) / (1 - beta2)
    f = 1 + d
    assert float(f.mean()) == pytest.approx(2.5, abs=5 * float(f.std()) / size**0.5)
    assert float(f.std()) / size**0.5 < 0.02


@given(
    f=st.floats(-1e8, 1e8),
    h=st.floats(1e-6, 1e3),
    delta=st.floats(0, 1.0),
    beta2=st.floats(0.0, 0.99999),
)
def test_the_hessian_never_loses_more_than_half(f: float, h: float, delta: float, beta2: float) -> None:
    """h_new + delta >= (h + delta) / 2 for any estimate f (contract 7); a gradient is made that gives this f."""
    p = torch.nn.Parameter(torch.zeros(1))
    optimizer = IVON([("w", p)], ess=1.0, hess_init=h, weight_decay=delta, betas=(0.9, beta2))
    z = float(normal(Draw(0, 0, 0), "w", 0, 1))
    p.grad = torch.tensor([f / (z * math.sqrt(h + delta))])
    optimizer.observe(Draw(0, 0, 0))
    optimizer.step()
    assert float(optimizer.state[p]["hessian"]) + delta >= (h + delta) / 2 * (1 - 1e-5)


def test_several_draws_are_a_true_mean_in_any_order() -> None:
    draws = [Draw(0, 0, i) for i in range(3)]
    results = []
    for order in (draws, draws[::-1]):
        p = torch.nn.Parameter(torch.linspace(-1, 1, 50))
        optimizer = IVON([("w", p)], **SETTINGS)
        for draw in order:
            with optimizer.perturbed(draw):
                p.grad = quadratic_grad(p.detach())
            optimizer.observe(draw)
        optimizer.step()
        results.append(p.detach())
    torch.testing.assert_close(results[0], results[1], rtol=1e-6, atol=1e-7)


def test_the_divisor_turns_a_sum_into_the_gradient_that_was_meant() -> None:
    def run(factor: float, divisor: float | None) -> torch.Tensor:
        p = torch.nn.Parameter(torch.linspace(-1, 1, 50))
        optimizer = IVON([("w", p)], **SETTINGS)
        for index in range(2):
            with optimizer.perturbed(Draw(0, 0, index)):
                p.grad = factor * quadratic_grad(p.detach())
            optimizer.observe(Draw(0, 0, index))
        optimizer.step(divisor=divisor)
        return p.detach()

    torch.testing.assert_close(run(64.0, 2 * 64.0), run(1.0, None), rtol=1e-6, atol=1e-7)


def test_cumulative_reproduces_the_released_weights() -> None:
    """method.md 7: of M = 4 gradients the mean takes 1, 3/4, 1/2 and 1/4."""
    p = torch.nn.Parameter(torch.zeros(4))
    optimizer = IVON([("w", p)], betas=(0.0, 0.9999), clip_radius=math.inf, debias=False, noise_scale=0.0)
    for index in range(4):
        grad = torch.zeros(4)
        grad[index] = 1.0
        p.grad = grad
        optimizer.observe(Draw(0, 0, index), cumulative=True)
    optimizer.step()
    torch.testing.assert_close(optimizer.state[p]["momentum"], torch.tensor([1.0, 0.75, 0.5, 0.25]), rtol=1e-6, atol=0)


def test_cumulative_gradients_are_what_the_hessian_learns_from() -> None:
    """Price multiplies each draw's noise with the gradient carried to it: z0 g0 + z1 (g0 + g1), by hand."""
    p, first, second = torch.nn.Parameter(torch.zeros(3)), torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, -1.0, 0.5])
    optimizer = IVON([("w", p)], lr=0.0, ess=1.0, hess_init=1.0, weight_decay=0.0, betas=(0.9, 0.9))
    for index, grad in enumerate((first, second)):
        p.grad = grad.clone()
        optimizer.observe(Draw(0, 0, index), cumulative=True)
    optimizer.step()
    z = [normal(Draw(0, 0, index), "w", 0, 3) for index in range(2)]
    f = (z[0] * first + z[1] * (first + second)) / 2
    expected = 0.9 + 0.1 * f + 0.5 * 0.01 * (1 - f) ** 2
    torch.testing.assert_close(optimizer.state[p]["hessian"], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_mean_is_restored_bitwise_also_after_an_exception(dtype: torch.dtype) -> None:
    p = torch.nn.Parameter(torch.randn(5000).to(dtype))
    before = p.detach().clone()
    optimizer = IVON([("w", p)], ess=10.0, hess_init=1.0)
    with optimizer.perturbed(Draw(0, 0, 0)):
        assert not torch.equal(p, before)
    assert torch.equal(p, before)
    with pytest.raises(ZeroDivisionError), optimizer.perturbed(Draw(0, 0, 1)):
        _ = 1 / 0
    assert torch.equal(p, before)
    for index in range(100):
        with optimizer.perturbed(Draw(0, 1, index)):
            pass
    assert torch.equal(p, before)


def test_the_mean_is_restored_when_perturbing_itself_fails_half_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The noise of the second parameter fails after the first has been written."""
    good, bad = torch.nn.Parameter(torch.randn(100)), torch.nn.Parameter(torch.randn(4, 5))
    before, written = good.detach().clone(), []

    class Failing(StructuredNoise):
        def _numbers(self, start: int, stop: int, device: torch.device) -> Iterator[tuple[int, torch.Tensor]]:
            written.append(not torch.equal(good, before))
            raise ZeroDivisionError

    monkeypatch.setitem(noise_structures.STRUCTURES, "failing", Failing)
    groups = [{"params": [("good", good)]}, {"params": [("bad", bad)], "noise_structure": "failing=1"}]
    optimizer = IVON(groups, ess=10.0)
    for _ in range(2):  # and the optimizer goes on
        with pytest.raises(ZeroDivisionError), optimizer.perturbed(Draw(0, 0, 0)):
            pass
        assert torch.equal(good, before)
    assert written == [True, True]


def test_a_backward_after_leaving_the_block_is_refused_by_autograd() -> None:
    p = torch.nn.Parameter(torch.randn(3))
    optimizer = IVON([("w", p)], ess=10.0)
    with optimizer.perturbed(Draw(0, 0, 0)):
        loss = (p**2).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_noise_goes_by_name_and_not_by_position() -> None:
    a, b = torch.nn.Parameter(torch.zeros(10)), torch.nn.Parameter(torch.zeros(10))
    one = dict(IVON([("a", a), ("b", b)], ess=1.0).weights(Draw(0, 0, 0)))
    two = dict(IVON([("b", b), ("a", a)], ess=1.0).weights(Draw(0, 0, 0)))
    assert torch.equal(one["a"], two["a"])
    assert not torch.equal(one["a"], one["b"])


def test_sigma_has_the_stated_size() -> None:
    p = torch.nn.Parameter(torch.zeros(200_000))
    optimizer = IVON([("w", p)], ess=1e9, hess_init=1e-3, weight_decay=1e-8)
    with optimizer.perturbed(Draw(0, 0, 0)):
        assert p.std().item() == pytest.approx(1 / math.sqrt(1e9 * (1e-3 + 1e-8)), rel=0.01)


def test_without_noise_the_hessian_stays_and_the_mean_moves() -> None:
    p = torch.nn.Parameter(torch.ones(10))
    optimizer = IVON([("w", p)], noise_scale=0.0)
    before = p.detach().clone()
    with optimizer.perturbed(Draw(0, 0, 0)):
        assert torch.equal(p, before)
        (p**2).sum().backward()
    optimizer.observe(Draw(0, 0, 0))
    optimizer.step()
    assert optimizer.state[p]["hessian"].eq(1e-3).all()
    assert not torch.equal(p, before)


def test_a_gradient_at_the_mean_leaves_the_hessian_alone() -> None:
    p = torch.nn.Parameter(torch.ones(10))
    optimizer = IVON([("w", p)])
    with optimizer.at(None):
        (p**2).sum().backward()
    optimizer.observe(None)
    optimizer.step()
    assert optimizer.state[p]["hessian"].eq(1e-3).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_is_dropped_and_counted(bad: float) -> None:
    p, q = torch.nn.Parameter(torch.ones(10)), torch.nn.Parameter(torch.ones(3))
    optimizer = IVON([("p", p), ("q", q)])
    before = copy.deepcopy(optimizer.state_dict())
    p.grad = torch.ones(10)
    q.grad = torch.tensor([0.0, bad, 0.0])
    assert optimizer.observe(Draw(0, 0, 0)) is False
    optimizer.step()
    assert optimizer.skipped_steps == 1
    assert p.eq(1).all()
    assert p.grad is None
    for group in before["param_groups"]:
        group["skipped_steps"] = 1
    assert optimizer.state_dict()["param_groups"] == before["param_groups"]


@pytest.mark.parametrize("bad_draw", [0, 1])
def test_one_bad_draw_of_two_skips_the_step(bad_draw: int) -> None:
    """The divisor counts the tokens of both, so going on with one would make a step of another size."""
    p = torch.nn.Parameter(torch.ones(10))
    optimizer = IVON([("p", p)])
    accepted = []
    for index in range(2):
        p.grad = torch.full((10,), math.nan if index == bad_draw else 1.0)
        accepted.append(optimizer.observe(Draw(0, 0, index)))
    assert accepted == [bad_draw == 1, False]
    optimizer.step(divisor=2.0)
    assert p.eq(1).all()
    assert optimizer.skipped_steps == 1
    p.grad = torch.ones(10)
    optimizer.observe(Draw(0, 0, 2))
    optimizer.step()
    assert not p.eq(1).any()
    assert optimizer.skipped_steps == 1


def test_a_skipped_step_never_makes_the_same_draw_again_also_after_loading() -> None:
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = IVON([("p", p)], seed=7)
    skipped = optimizer.next_draw()
    optimizer.discard()
    loaded = IVON([("p", p)])
    loaded.load_state_dict(optimizer.state_dict())
    assert loaded.skipped_steps == 1
    assert optimizer.next_draw() == loaded.next_draw() == Draw(7, 0, 1) != skipped
    p.grad = torch.ones(3)
    optimizer.observe(None)
    optimizer.step()
    assert optimizer.next_draw() == Draw(7, 1, 0), "draws are counted from the last step on"


def test_what_the_last_step_reported_is_forgotten_when_one_is_skipped() -> None:
    """Otherwise a run that was stopped in between would log something else."""
    p = torch.nn.Parameter(torch.ones(3))
    for optimizer in (IVON([("p", p)]), PointAdamW([("p", p)])):
        p.grad = torch.ones(3)
        optimizer.observe(None)
        optimizer.step()
        assert optimizer.step_metrics()["optimizer/grad_norm"] == pytest.approx(3**0.5)
        optimizer.discard()
        assert optimizer.step_metrics()["optimizer/grad_norm"] == 0
        assert optimizer.step_metrics().get("posterior/clipped_share", 0.0) == 0


def test_parameters_without_gradient_are_left_alone() -> None:
    used, unused = torch.nn.Parameter(torch.ones(5)), torch.nn.Parameter(torch.ones(5))
    optimizer = IVON([("used", used), ("unused", unused)])
    with optimizer.perturbed(Draw(0, 0, 0)):
        (used**2).sum().backward()
    optimizer.observe(Draw(0, 0, 0))
    optimizer.step()
    assert unused.eq(1).all()
    assert not used.eq(1).any()


def test_frozen_parameters_get_no_noise_and_can_be_unfrozen_later() -> None:
    frozen = torch.nn.Parameter(torch.ones(5), requires_grad=False)
    p = torch.nn.Parameter(torch.ones(5))
    optimizer = IVON([("frozen", frozen), ("p", p)], ess=1.0)
    with optimizer.perturbed(Draw(0, 0, 0)):
        assert frozen.eq(1).all()
    frozen.requires_grad_(True)
    with optimizer.perturbed(Draw(0, 0, 0)):
        assert not frozen.eq(1).any()


def test_groups_have_settings_of_their_own() -> None:
    quiet, loud = torch.nn.Parameter(torch.zeros(1000)), torch.nn.Parameter(torch.zeros(1000))
    optimizer = IVON([{"params": [quiet], "noise_scale": 0.0}, {"params": [loud], "ess": 4.0}], hess_init=1.0)
    with optimizer.perturbed(Draw(0, 0, 0)):
        assert quiet.eq(0).all()
        assert loud.std().item() == pytest.approx(0.5, rel=0.1)


def test_misuse_is_refused() -> None:
    p = torch.nn.Parameter(torch.ones(5))
    optimizer = IVON([("w", p)])
    with pytest.raises(RuntimeError, match="without a gradient"):
        optimizer.step()
    with pytest.raises(RuntimeError, match="no parameter has a gradient"):
        optimizer.observe(Draw(0, 0, 0))
    with optimizer.perturbed(Draw(0, 0, 0)):
        with pytest.raises(RuntimeError, match="another draw is made while"), optimizer.perturbed(Draw(0, 0, 1)):
            pass
        with pytest.raises(RuntimeError, match="while the weights are perturbed"):
            optimizer.state_dict()
        with pytest.raises(RuntimeError, match="while the weights are perturbed"):
            list(optimizer.weights(None))
        p.grad = torch.ones(5)
    assert p.eq(1).all(), "the refused second draw must not disturb the first one's restoration"
    optimizer.observe(Draw(0, 0, 0))
    with pytest.raises(RuntimeError, match="observed but not used"):
        optimizer.state_dict()
    for bad in (
        {"noise_shape": "round"},
        {"betas": (0.9, 1.0)},
        {"betas": (1.0, 0.9)},
        {"clip_radius": 0.0},
        {"estimator": "magic"},
    ):
        with pytest.raises(UserError, match=next(iter(bad))):
            IVON([torch.nn.Parameter(torch.ones(2))], **bad)


@pytest.mark.parametrize(
    ("settings", "move", "times"),
    [
        ({"lr": 1e-5, "clip_radius": 1e-3}, "1e-11", "3.3e+05"),  # with the paper's radius: 1e-5 * 1e-3 * 1e-3
        ({"lr": 1e-3, "clip_radius": 1e-3}, "1e-09", "3.3e+05"),
        ({"lr": 5e-6, "hess_init": 0.1, "clip_radius": 0.1}, "5e-08", "33"),
        ({"lr": 1e-7, "rescale_lr": False, "clip_radius": 0.5}, "5e-08", "0.67"),
    ],
)
def test_a_learning_rate_of_adamws_size_warns(settings: dict[str, float], move: str, times: str) -> None:
    """With the largest move, and the rate that moves weights by a third of AdamW's."""
    with pytest.warns(
        ThreepoWarning,
        match=rf"lr = {settings['lr']:g}: no weight moves by more than .*= {move} a step.* {re.escape(times)} times",
    ):
        IVON([torch.nn.Parameter(torch.ones(2))], **settings)


def test_small_learning_rates_that_move_weights_do_not_warn() -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for settings in ({"lr": 0.0}, {"lr": 1e-2}, {"lr": 1e-3, "hess_init": 1.0, "clip_radius": math.inf}):
            IVON([torch.nn.Parameter(torch.ones(2))], **settings)
    assert not told


def test_gradients_of_one_draw_are_not_those_of_another() -> None:
    """Also where the weights were at the other draw before, for rollouts or for gradients that are observed."""
    p = torch.nn.Parameter(torch.ones(2))
    optimizer = IVON([p])
    first, second = optimizer.next_draw(), optimizer.next_draw()
    with optimizer.perturbed(second):
        p.detach().sum()
    for draw, other in ((first, second), (second, first)):
        with optimizer.perturbed(draw):
            p.grad = quadratic_grad(p.detach())
        with pytest.raises(RuntimeError, match=rf"observe\(Draw\(.*index={other.index}.*gradients are of other draws"):
            optimizer.observe(other)
        assert optimizer.observe(draw)
    optimizer.step()


def test_gradients_of_two_draws_are_not_observed_as_one() -> None:
    """Micro-batches of one draw add up. A look at another, dropped gradients and observed ones do no harm."""
    model = torch.nn.Linear(3, 2)
    optimizer = IVON(model.named_parameters())
    first, second, third = (optimizer.next_draw() for _ in range(3))

    def backward(draw: Draw, *, drop: Callable[[], None] = lambda: None, error: bool = False) -> None:
        with contextlib.suppress(MemoryError), optimizer.perturbed(draw):
            drop()
            model(torch.ones(1, 3)).square().sum().backward()
            if error:
                raise MemoryError

    backward(first)
    backward(first)
    with optimizer.perturbed(second), torch.no_grad():
        model(torch.ones(1, 3))
    assert optimizer.observe(first)
    for drop in (model.zero_grad, optimizer.zero_grad, partial(optimizer.zero_grad, set_to_none=False)):
        backward(third)
        backward(second, drop=drop)
        assert optimizer.observe(second)
        backward(third)
        drop()
        backward(second)
        assert optimizer.observe(second)
    for error in (False, True):
        backward(third, error=error)
        backward(second)
        with pytest.raises(RuntimeError, match=rf"gradients are of other draws, Draw\(.*index={third.index}"):
            optimizer.observe(second)
        optimizer.zero_grad()


def test_an_evaluation_leaves_the_draws_of_training_alone() -> None:
    p = torch.nn.Parameter(torch.zeros(6))
    optimizer = IVON([("p", p)], ess=1e4)
    seen = [p.detach().clone()]
    for _ in range(2):
        with torch.no_grad(), optimizer.sampled_params():
            seen.append(p.detach().clone())
    seen.append(dict(optimizer.weights(Draw(optimizer.seed, 0, 0)))["p"])
    assert not any(torch.equal(a, b) for a, b in combinations(seen, 2))
    assert optimizer.next_draw() == Draw(optimizer.seed, 0, 0)


def train(optimizer: IVON, p: torch.nn.Parameter, steps: range) -> None:
    for _ in steps:
        with optimizer.sampled_params(train=True):
            p.grad = quadratic_grad(p.detach())
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_dict_holds_all_state(dtype: torch.dtype) -> None:
    """Saved after 5 of 10 steps and loaded into a fresh optimizer: the same ten steps, bitwise; state stays float32."""
    p = torch.nn.Parameter(torch.linspace(-1, 1, 50).to(dtype))
    optimizer = IVON([("w", p)], **SETTINGS)
    train(optimizer, p, range(5))
    q = torch.nn.Parameter(p.detach().clone())
    saved = copy.deepcopy(optimizer.state_dict())
    train(optimizer, p, range(5))
    resumed = IVON([("w", q)], **SETTINGS)
    resumed.load_state_dict(saved)
    assert resumed.state[q]["hessian"].dtype == torch.float32
    train(resumed, q, range(5))
    assert torch.equal(p, q)
    assert torch.equal(optimizer.state[p]["hessian"], resumed.state[q]["hessian"])
    assert resumed.param_groups[0]["step"] == 10


def test_no_norm_clipping_and_elementwise_clip() -> None:
    """A huge gradient moves every weight by exactly lr * (h0 + delta) * xi, and its statistics stay unclipped."""
    p = torch.nn.Parameter(torch.zeros(10))
    optimizer = IVON([("w", p)], lr=1.0, noise_scale=0.0, clip_radius=1e-3)
    with optimizer.perturbed(Draw(0, 0, 0)):
        p.grad = torch.full((10,), 1e3)
    optimizer.observe(Draw(0, 0, 0))
    optimizer.step()
    torch.testing.assert_close(p.detach(), torch.full((10,), -(1e-3 + 1e-8) * 1e-3), rtol=1e-6, atol=0)
    torch.testing.assert_close(optimizer.state[p]["momentum"], torch.full((10,), 100.0), rtol=1e-6, atol=0)
    assert optimizer.step_metrics()["posterior/clipped_share"] == 1.0


def far_away(optimizer: IVON, p: torch.nn.Parameter, steps: int) -> None:
    """Steps with a gradient of 1 in every coordinate."""
    for _ in range(steps):
        with optimizer.sampled_params(train=True):
            p.grad = torch.ones_like(p)
        optimizer.step()


def test_steps_are_clipped_only_if_asked() -> None:
    p = torch.nn.Parameter(torch.ones(1000))
    far_away(IVON([("w", p)], lr=0.1, ess=1e3, hess_init=0.1), p, 10)
    assert torch.allclose(p, torch.zeros(1000), atol=0.2)  # ten steps of lr * gradient
