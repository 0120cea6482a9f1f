"""IVON in the surroundings that PyTorch users have: schedulers, accumulation, autocast, bfloat16, shared weights."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from threepo.errors import UserError
from threepo.posterior.gaussian import Posterior
from threepo.posterior.ivon import IVON
from threepo.types import Draw

SETTINGS = {"lr": 0.5, "ess": 1e3, "hess_init": 0.1, "clip_radius": 0.5}
X, Y = torch.linspace(-1, 1, 64).view(16, 4), torch.linspace(0, 1, 16).view(16, 1)


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)


def loss_of(model: Callable[[torch.Tensor], torch.Tensor], rows: slice = slice(None)) -> torch.Tensor:
    return ((model(X[rows]).float() - Y[rows]) ** 2).sum() / len(X)


def steps(model: nn.Module, optimizer: IVON, count: int) -> None:
    for _ in range(count):
        draw = optimizer.next_draw()
        with optimizer.perturbed(draw):
            loss_of(model).backward()
        optimizer.observe(draw)
        optimizer.step()


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def test_gradients_accumulate_under_one_draw() -> None:
    whole, parts = network(), network()
    a, b = IVON(whole.named_parameters(), **SETTINGS), IVON(parts.named_parameters(), **SETTINGS)
    draw = Draw(0, 0, 0)
    with a.perturbed(draw):
        loss_of(whole).backward()
    for rows in (slice(0, 8), slice(8, 16)):
        with b.perturbed(draw):  # entering twice under the same draw gives the same weights
            loss_of(parts, rows).backward()
    a.observe(draw)
    b.observe(draw)
    a.step()
    b.step()
    for p, q in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)


def test_a_closure_is_evaluated_at_a_draw_of_its_own() -> None:
    by_hand, closed = network(), network()
    a, b = IVON(by_hand.named_parameters(), **SETTINGS), IVON(closed.named_parameters(), **SETTINGS)

    def closure() -> torch.Tensor:
        b.zero_grad()
        loss = loss_of(closed)
        loss.backward()
        return loss

    for _ in range(3):
        steps(by_hand, a, 1)
        assert b.step(closure).item() > 0
    assert same(by_hand, closed)


def test_code_written_for_ivon_opt_runs() -> None:
    by_hand, sampled = network(), network()
    a, b = IVON(by_hand.named_parameters(), **SETTINGS), IVON(sampled.named_parameters(), **SETTINGS)
    steps(by_hand, a, 3)
    for _ in range(3):
        with b.sampled_params(train=True):
            b.zero_grad()
            loss_of(sampled).backward()
        b.step()
    assert same(by_hand, sampled)


def test_the_example_of_the_guide_learns() -> None:
    page = (Path(__file__).parents[2] / "docs" / "guides" / "optimizer.md").read_text()
    found: dict[str, Any] = {}
    torch.manual_seed(0)
    exec(page.split("```python\n")[1].split("```")[0], found)
    x, y = (torch.cat(parts) for parts in zip(*found["data"], strict=True))
    with torch.no_grad():
        before, after = (nn.functional.mse_loss(predicted, y) for predicted in (torch.zeros_like(y), found["model"](x)))
    assert after < 0.05 * before


def test_a_scheduler_drives_the_learning_rate() -> None:
    model = network()
    optimizer = IVON(model.named_parameters(), **SETTINGS)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0 if step >= 1 else 1.0)
    before = copy.deepcopy(model)
    steps(model, optimizer, 1)
    assert not same(model, before)
    schedule.step()
    before = copy.deepcopy(model)
    steps(model, optimizer, 1)
    assert same(model, before), "a learning rate of 0 moves nothing"


def test_autocast_computes_low_and_keeps_the_mean_in_float32() -> None:
    model = network()
    optimizer = IVON(model.named_parameters(), **SETTINGS)
    with torch.autocast("cpu", torch.bfloat16):
        steps(model, optimizer, 3)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {value.dtype for state in optimizer.state.values() for value in state.values()} == {torch.float32}


def test_draws_differ_within_one_block_of_autocast() -> None:
    """Autocast keeps copies of the weights until its block ends."""
    model = torch.nn.Linear(8, 8)
    optimizer = IVON(model.named_parameters(), **SETTINGS | {"ess": 10.0})
    posterior, x = Posterior.of(optimizer), torch.ones(1, 8)

    def outputs() -> list[torch.Tensor]:
        found = [model(x)]
        for index in range(2):
            with optimizer.perturbed(Draw(0, 0, index)):
                found.append(model(x))
        found.append(model(x))
        kept = [p.detach().clone() for p in model.parameters()]
        posterior.perturb_(model.named_parameters(), Draw(0, 0, 1))
        found.append(model(x))
        for p, mean in zip(model.parameters(), kept, strict=True):
            p.detach().copy_(mean)
        return found

    exact = outputs()
    with torch.autocast("cpu", torch.bfloat16):
        low = outputs()
        torch.clear_autocast_cache()
    for one, other in zip(exact, low, strict=True):
        assert torch.allclose(one, other.float(), atol=0.05)
    assert float((exact[1] - exact[2]).abs().max()) > 0.5


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_sees_the_perturbed_weights(backend: str) -> None:
    plain, compiled = network(), network()
    fast = torch.compile(compiled, backend=backend)
    a, b = IVON(plain.named_parameters(), **SETTINGS), IVON(compiled.named_parameters(), **SETTINGS)
    for _ in range(3):
        steps(plain, a, 1)
        draw = b.next_draw()
        with b.perturbed(draw):
            loss_of(fast).backward()
        b.observe(draw)
        b.step()
    for p, q in zip(plain.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)


def test_compiled_steps_and_blocks_are_those_of_an_eager_loop() -> None:
    """A compiled function would keep for itself what it assigns to the optimizer."""
    plain, compiled = network(), network()
    a, b = IVON(plain.named_parameters(), **SETTINGS), IVON(compiled.named_parameters(), **SETTINGS)
    step = torch.compile(lambda: b.step(), backend="eager")

    def evaluated() -> torch.Tensor:
        with b.sampled_params(), torch.no_grad():
            return loss_of(compiled)

    looked = torch.compile(evaluated, backend="eager")
    for _ in range(3):
        for model, optimizer in ((plain, a), (compiled, b)):
            for _ in range(2):
                draw = optimizer.next_draw()
                with optimizer.perturbed(draw):
                    loss_of(model).backward()
                optimizer.observe(draw)
        a.step()
        step()
        looked()
    assert same(plain, compiled)
    assert a.step_metrics() == b.step_metrics()


def test_the_count_of_steps_is_float32_whatever_the_default_is() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        first, late = (torch.nn.Parameter(torch.ones(2, dtype=torch.float32)) for _ in range(2))
        optimizer = IVON([("first", first), ("late", late.requires_grad_(False))], **SETTINGS)
        optimizer.param_groups[0]["step"] = 1003
        late.requires_grad_(True)
        optimizer.trainable()
    finally:
        torch.set_default_dtype(before)
    assert float(optimizer.state[late]["missed_steps"]) == 1003


def masters(optimizer: IVON) -> list[dict[str, torch.Tensor]]:
    """The states as whatever asks for them finds them."""
    return [optimizer.state[p] for _, p, _ in optimizer.trainable()]


def test_masters_follow_weights_that_are_set_before_the_first_step() -> None:
    """DDP copies the first rank's weights into parameters whose optimizer was made before."""
    model = network().bfloat16()
    optimizer = IVON(model.named_parameters(), **SETTINGS)
    optimizer.trainable()
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.5)
    assert all(bool((state["mean"] == 0.5).all()) for state in masters(optimizer))
    with optimizer.perturbed(Draw(0, 0, 0)):
        optimizer.noisy()  # nothing is taken over from a draw
    assert all(bool((p == 0.5).all()) for p in model.parameters())
    assert all(bool((state["mean"] == 0.5).all()) for state in masters(optimizer))
    held = masters(optimizer)
    held[0]["mean"].add_(1e-5)  # finer than the weights, as in a checkpoint
    finer = [state["mean"].clone() for state in held]
    assert all(torch.equal(state["mean"], kept) for state, kept in zip(masters(optimizer), finer, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_weights_have_float32_masters(dtype: torch.dtype) -> None:
    """Steps of a ten-thousandth of a weight vanish in bfloat16; in the masters they add up."""
    p = nn.Parameter(torch.ones(2000, dtype=dtype))
    optimizer = IVON([("p", p)], lr=1e-4, ess=1e4, hess_init=1.0, clip_radius=1.0, weight_decay=0.0)
    start = p.detach().clone()
    drawn = dict_of(optimizer, Draw(0, 0, 0))["p"]
    with optimizer.perturbed(Draw(0, 0, 0)):
        assert torch.equal(p, drawn)
        assert not torch.equal(p, start)
    assert torch.equal(p, start), "bitwise"
    for _ in range(100):
        p.grad = torch.ones_like(p)
        optimizer.observe(optimizer.next_draw())
        optimizer.step()
    master = optimizer.state[p]["mean"]
    assert float(master.mean()) == pytest.approx(1 - 100 * 1e-4, abs=2e-3)
    assert torch.equal(p, master.to(dtype))
    resumed_p = nn.Parameter(torch.zeros(2000, dtype=dtype))
    resumed = IVON([("p", resumed_p)])
    resumed.load_state_dict(optimizer.state_dict())
    assert torch.equal(resumed.state[resumed_p]["mean"], master)
    assert torch.equal(resumed_p, p)


def dict_of(optimizer: IVON, draw: Draw) -> dict[str, torch.Tensor]:
    return dict(optimizer.weights(draw))


def test_a_gradient_is_moved_not_copied_and_only_two_states_are_held() -> None:
    p = nn.Parameter(torch.ones(100))
    optimizer = IVON([("p", p)])
    assert sorted(name for name, value in optimizer.state[p].items() if value.ndim) == ["hessian", "momentum"]
    p.grad = torch.ones(100)
    address = p.grad.data_ptr()
    optimizer.observe(Draw(0, 0, 0))
    assert p.grad is None
    assert optimizer._observed.grad[p].data_ptr() == address
    assert not optimizer._observed.second


def test_shared_weights_are_perturbed_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
            self.head.weight = self.embed.weight

    model = Tied()
    optimizer = IVON(model.named_parameters(), ess=10.0)
    drawn = dict_of(optimizer, Draw(0, 0, 0))["embed.weight"]
    with optimizer.perturbed(Draw(0, 0, 0)):
        assert torch.equal(model.head.weight, drawn)
    assert len(optimizer.state) == 1


def test_mixed_dtypes_and_positions_for_names() -> None:
    low, high = nn.Parameter(torch.ones(50, dtype=torch.bfloat16)), nn.Parameter(torch.ones(50))
    optimizer = IVON([low, high], ess=10.0, hess_init=1.0, clip_radius=0.1)
    names = dict(optimizer.weights(Draw(0, 0, 0)))
    assert list(names) == ["param.0", "param.1"]
    assert names["param.0"].dtype == torch.bfloat16
    low.grad, high.grad = torch.ones_like(low), torch.ones_like(high)
    optimizer.observe(Draw(0, 0, 0))
    optimizer.step()
    assert not low.eq(1).all()
    assert not high.eq(1).any()


def test_what_cannot_be_trained_is_refused() -> None:
    with pytest.raises(UserError, match="dtype torch.complex64"):
        IVON([nn.Parameter(torch.ones(3, dtype=torch.complex64))])
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    with pytest.raises(UserError, match="named 'weight'"):
        IVON([{"params": first.named_parameters()}, {"params": second.named_parameters()}])


def test_isotropic_noise_has_one_sigma_and_may_freeze_the_hessian() -> None:
    results = {}
    for learn in (True, False):
        p = nn.Parameter(torch.zeros(5000))
        optimizer = IVON(
            [("p", p)], ess=100.0, hess_init=0.04, weight_decay=0.0, noise_shape="isotropic", learn_hessian=learn
        )
        optimizer.state[p]["hessian"][:2500] = 4.0  # ten times less noise, if sigma followed it
        with optimizer.perturbed(Draw(0, 0, 0)):
            assert p[:2500].std().item() == pytest.approx(0.5, rel=0.05)
            assert p[2500:].std().item() == pytest.approx(0.5, rel=0.05)
            p.grad = torch.randn(5000)
        before = optimizer.state[p]["hessian"].clone()
        optimizer.observe(Draw(0, 0, 0))
        optimizer.step()
        results[learn] = torch.equal(optimizer.state[p]["hessian"], before)
    assert results == {True: False, False: True}


def test_price_with_isotropic_noise_still_estimates_the_curvature() -> None:
    """f = z x / sigma with the sigma that was drawn with, whatever the Hessian is."""
    p = nn.Parameter(torch.zeros(40_000))
    optimizer = IVON([("p", p)], ess=1.0, hess_init=1.0, weight_decay=0.0, betas=(0.9, 0.99), noise_shape="isotropic")
    optimizer.state[p]["hessian"].fill_(3.0)
    for index in range(4):
        with optimizer.perturbed(Draw(0, 0, index)):
            p.grad = 3.0 * p.detach()
        optimizer.observe(Draw(0, 0, index))
    optimizer.step()
    assert float(optimizer.state[p]["hessian"].mean()) == pytest.approx(3.0, abs=0.01)


def test_a_gradient_scaler_costs_one_step_an_overflow() -> None:
    p = nn.Parameter(torch.ones(4))
    optimizer = IVON([("p", p)])
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    moved = []
    for slope in (1.0, float("inf"), 1.0):
        draw = optimizer.next_draw()
        with optimizer.perturbed(draw):
            scaler.scale((p * slope).sum()).backward()
        scaler.unscale_(optimizer)
        optimizer.observe(draw)
        before = p.detach().clone()
        optimizer.step()
        scaler.update()
        moved.append(not torch.equal(p, before))
    assert moved == [True, False, True]
    assert optimizer.skipped_steps == 1
    assert scaler.get_scale() == 2.0


def test_weights_set_in_training_stay_once_their_masters_have_them() -> None:
    layer = nn.Linear(4, 1, dtype=torch.bfloat16)
    optimizer = IVON(layer.named_parameters(), **SETTINGS)
    for _ in range(2):
        with optimizer.sampled_params(train=True):
            layer(X.bfloat16()).float().square().sum().backward()
        optimizer.step()
    with torch.no_grad():
        for p in layer.parameters():
            optimizer.state[p]["mean"].copy_(p.zero_())
    with optimizer.perturbed(optimizer.next_draw()):
        pass
    assert not any(p.any() for p in layer.parameters())
