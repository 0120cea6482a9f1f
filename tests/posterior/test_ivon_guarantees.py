"""IVON's guarantees for any input: the mean, the user's tensors and the state survive."""

import copy
import io
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict, set_optimizer_state_dict

from threepo.errors import UserError
from threepo.posterior import kernels
from threepo.posterior.gaussian import Posterior
from threepo.posterior.ivon import IVON
from threepo.posterior.ivon_settings import NOISE_SCALES, RANGES
from threepo.posterior.noise import noise_key
from threepo.posterior.noise_structures import Noise
from threepo.posterior.operations import Perturb, Scalars
from threepo.types import Draw

DRAW = Draw(0, 0, 0)


def step(optimizer: IVON, p: nn.Parameter, grad: torch.Tensor, draws: int = 1) -> None:
    for _ in range(draws):
        draw = optimizer.next_draw()
        with optimizer.perturbed(draw):
            p.grad = grad
        optimizer.observe(draw)
    optimizer.step()


@pytest.mark.parametrize("cut", [(slice(None), slice(None, None, 2)), (slice(None), 0), (slice(None), slice(0, 1))])
def test_a_view_is_written_and_its_neighbours_are_not(cut: tuple[slice | int, ...]) -> None:
    base = torch.arange(24.0).view(6, 4)
    before = base.clone()
    p = nn.Parameter(base[cut])
    dense = nn.Parameter(base[cut].contiguous())
    a, b = (IVON([("w", q)], ess=1.0, hess_init=1.0, clip_radius=1.0) for q in (p, dense))
    with a.perturbed(DRAW), b.perturbed(DRAW):
        assert torch.equal(p, dense)
        inside = base.clone()
    assert torch.equal(base, before)
    inside[cut] = before[cut]
    assert torch.equal(inside, before), "neighbours stayed as they were inside the block too"
    for optimizer, q in ((a, p), (b, dense)):
        step(optimizer, q, torch.ones(q.shape))
    assert torch.equal(p, dense)


def test_gradients_of_any_layout_count_as_they_read() -> None:
    wide = torch.randn(2000, 2)
    for strided in (torch.ones(1).expand(2000), wide[:, 0], torch.randn(4000)[::2]):
        p, q = nn.Parameter(torch.zeros(2000)), nn.Parameter(torch.zeros(2000))
        a, b = IVON([("w", p)]), IVON([("w", q)])
        step(a, p, strided, draws=2)
        step(b, q, strided.contiguous(), draws=2)
        assert torch.equal(a.state[p]["momentum"], b.state[q]["momentum"])


@pytest.mark.parametrize("cumulative", [False, True])
def test_gradients_that_somebody_holds_on_to_stay_as_they_are(cumulative: bool) -> None:
    p = nn.Parameter(torch.zeros(5))
    optimizer = IVON([("w", p)], betas=(0.0, 0.9), debias=False)
    held = torch.ones(5)
    for index in range(3):
        p.grad = held
        optimizer.observe(Draw(0, 0, index), 1.0 if cumulative else 2.0, cumulative=cumulative)
    optimizer.step()
    assert held.eq(1).all()
    expected = (1 + 2 + 3) / 3 if cumulative else 0.5
    torch.testing.assert_close(optimizer.state[p]["momentum"], torch.full((5,), expected))


@pytest.mark.parametrize("size", [20, 5], ids=["of several parameters", "of this one alone"])
def test_a_gradient_in_a_reused_buffer_is_copied(size: int) -> None:
    """DDP with gradient_as_bucket_view has such buffers: the next backward pass writes into the same memory."""
    bucket = torch.ones(size)
    p = nn.Parameter(torch.zeros(5))
    optimizer = IVON([("w", p)], betas=(0.0, 0.9), debias=False)
    for value in (1.0, 3.0):
        bucket.fill_(value)
        p.grad = bucket[size - 5 : size]
        optimizer.observe(optimizer.next_draw())
    optimizer.step()
    assert optimizer.state[p]["momentum"].eq(2).all()


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_parameter_may_have_no_gradient_at_some_of_the_draws(missing: int) -> None:
    """It counts as 0 there; the other gradients are summed in float32, in separate memory."""
    held = [torch.full((5,), 2049.0, dtype=torch.float16) for _ in range(3)]  # and 4098 + 2049 is none of float16's
    p, q = nn.Parameter(torch.zeros(5, dtype=torch.float16)), nn.Parameter(torch.zeros(2))
    optimizer = IVON([("p", p), ("q", q)], betas=(0.0, 0.9), debias=False)
    for index in range(3):
        p.grad, q.grad = None if index == missing else held[index], torch.ones(2)
        optimizer.observe(Draw(0, 0, index))
    optimizer.step()
    assert all(torch.equal(grad, torch.full_like(grad, 2049.0)) for grad in held)
    torch.testing.assert_close(optimizer.state[p]["momentum"], 2 / 3 * held[0].float())


def test_an_interrupt_while_the_mean_comes_back_is_not_overlooked(monkeypatch: pytest.MonkeyPatch) -> None:
    p = nn.Parameter(torch.ones(10))
    optimizer = IVON([("p", p)], ess=1.0)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "_foreach_copy_", interrupted)
    with pytest.raises(KeyboardInterrupt), optimizer.perturbed(DRAW):
        pass
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match=r"call restore\(\) if an interrupt"), optimizer.perturbed(DRAW):
        pass
    optimizer.restore()
    assert p.eq(1).all()
    with optimizer.perturbed(DRAW):  # and the optimizer goes on
        pass


def test_a_state_that_is_not_float32_is_refused() -> None:
    with pytest.raises(RuntimeError, match="state is float32, this is torch.bfloat16"):
        hessian, scalars = torch.ones(4).bfloat16(), Scalars(0.0, 1.0, 0.0, 1.0)
        kernels.run([Perturb(torch.ones(4), torch.ones(4), hessian, Noise(noise_key(DRAW, "w")), scalars)])


def test_copies_and_pickles_go_on_like_the_original() -> None:
    model = nn.Linear(3, 2)
    optimizer = IVON(model.named_parameters(), seed=4)
    step(optimizer, model.weight, torch.ones(2, 3))
    twin_model, twin = copy.deepcopy((model, optimizer))
    file = io.BytesIO()
    torch.save((model, optimizer), file)
    file.seek(0)
    saved_model, saved = torch.load(file, weights_only=False)
    for m, o in ((model, optimizer), (twin_model, twin), (saved_model, saved)):
        step(o, m.weight, torch.full((2, 3), 2.0))
    for other in (twin_model, saved_model):
        assert torch.equal(other.weight, model.weight)


def test_loading_state_makes_masters_checks_names_and_forgets_what_was_observed() -> None:
    p = nn.Parameter(torch.ones(10))
    optimizer = IVON([("p", p)])
    step(optimizer, p, torch.ones(10))
    state = copy.deepcopy(optimizer.state_dict())
    low = nn.Parameter(p.detach().bfloat16())
    into = IVON([("p", low)])
    low.grad = torch.ones_like(low)
    into.observe(DRAW)
    into.load_state_dict(state)
    assert torch.equal(into.state[low]["mean"], low.float())
    assert torch.equal(into.state[low]["hessian"], optimizer.state[p]["hessian"])
    with pytest.raises(RuntimeError, match="without a gradient"):
        into.step()
    with pytest.raises(UserError, match="has 'p' where this optimizer has 'q'"):
        IVON([("q", nn.Parameter(torch.ones(10)))]).load_state_dict(state)
    with pytest.raises(UserError, match=r"'p' has shape \[10\] in it and \[9\] here"):
        IVON([("p", nn.Parameter(torch.ones(9)))]).load_state_dict(state)
    with pytest.raises(UserError, match="saved by another optimizer"):
        optimizer.load_state_dict(torch.optim.AdamW([("p", p)]).state_dict())
    theirs = {"lr": 0.1, "ess": 1e4, "hess_init": 1.0, "beta1": 0.9, "beta2": 0.9995, "params": [0]}  # ivon-opt's
    with pytest.raises(UserError, match="saved by another optimizer"):
        optimizer.load_state_dict({"state": {}, "param_groups": [theirs]})
    assert optimizer.next_draw().index == 0, "nothing has changed"
    with optimizer.perturbed(DRAW), pytest.raises(RuntimeError, match="state is loaded while"):
        optimizer.load_state_dict(state)


def test_state_of_a_wrapped_model_is_that_of_the_model() -> None:
    model = nn.Linear(2, 2)
    for names in (model, torch.compile(model)):
        optimizer = IVON(names.named_parameters())
        step(optimizer, model.weight, torch.ones(2, 2))
        for into in (IVON(model.named_parameters()), IVON(model.parameters())):
            into.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            assert torch.equal(into.state[model.weight]["momentum"], optimizer.state[model.weight]["momentum"])


def test_a_gradient_whose_sums_would_overflow_is_not_observed() -> None:
    """One element alone has a norm up to float32's largest number, and two draws then add up to more."""
    p = nn.Parameter(torch.ones(1))
    optimizer = IVON([("p", p)])
    for index in range(2):
        p.grad = torch.tensor([3e38])
        assert not optimizer.observe(Draw(0, 0, index))
    optimizer.step()
    assert optimizer.skipped_steps == 1
    p.grad = torch.ones(1)
    assert not optimizer.observe(DRAW, 1e-30), "divided by next to nothing"


def test_a_parameter_unfrozen_later_has_state_whoever_asks_first() -> None:
    p = nn.Parameter(torch.ones(10), requires_grad=False)
    optimizer = IVON([("p", p), ("q", nn.Parameter(torch.ones(2)))], ess=1.0)
    p.requires_grad_(True)
    assert set(Posterior.of(optimizer).hessian) == {"p", "q"}
    assert not dict(optimizer.weights(DRAW))["p"].eq(1).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 8])
def test_weights_made_in_given_tensors_are_those_made_in_new_ones(dtype: torch.dtype, threads: int) -> None:
    """This holds in any memory order; a value without noise is yielded unchanged, and `into` has no copy of it."""
    torch.set_num_threads(threads)
    shapes = {"a": (300, 700), "none": (0,), "large": (1100, 1000), "frozen": (5,), "b": (7,)}
    model = {name: nn.Parameter(torch.randn(shape), requires_grad=name != "frozen") for name, shape in shapes.items()}
    quiet = nn.Parameter(torch.randn(9))
    quiet_group = {"params": [("quiet", quiet)], "noise_scale": 0.0}
    optimizer = IVON([{"params": list(model.items())}, quiet_group], ess=1.0)
    into = {name: torch.full_like(p, torch.nan, dtype=dtype) for name, p in (*model.items(), ("quiet", quiet))}
    into["a"] = torch.full((700, 300), torch.nan, dtype=dtype).T
    expected, found = dict(optimizer.weights(DRAW)), dict(optimizer.weights(DRAW, into))
    assert found.keys() == expected.keys() == into.keys()
    for name, value in found.items():
        if name in ("frozen", "quiet"):
            assert into[name].isnan().all()
            assert torch.equal(value, expected[name])
        else:
            assert value is into[name]
            assert torch.equal(value, expected[name].to(dtype))


def test_wrappers_of_a_model_do_not_change_its_noise() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    plain = dict(IVON(model.named_parameters()).weights(DRAW))
    compiled = dict(IVON(torch.compile(model).named_parameters()).weights(DRAW))
    prefixed = dict(IVON([(f"module.{name}", p) for name, p in model.named_parameters()]).weights(DRAW))
    recomputed = dict(IVON(nn.Sequential(checkpoint_wrapper(model[0])).named_parameters()).weights(DRAW))
    for name, value in plain.items():
        assert torch.equal(recomputed[name], value)
        assert torch.equal(compiled[name], value)
        assert torch.equal(prefixed[name], value)


def test_a_group_added_later_is_debiased_from_its_own_start() -> None:
    settings = {"lr": 1.0, "rescale_lr": False, "clip_radius": 10.0, "hess_init": 1.0, "learn_hessian": False}
    early, late = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    optimizer = IVON([{"params": [("early", early)]}], **settings)
    for _ in range(20):
        step(optimizer, early, torch.ones(3))
    optimizer.add_param_group({"params": [("late", late)]})
    step(optimizer, late, torch.ones(3))
    torch.testing.assert_close(late, torch.full((3,), -1.0))


DEBIASED = {"lr": 1.0, "rescale_lr": False, "clip_radius": 10.0, "hess_init": 1.0}


def joined_late(steps_before: int, steps_after: int, frozen: bool = True) -> tuple[IVON, nn.Module]:
    """Two parameters in one group; "late" is frozen, or only has no gradient, in all but the last steps."""
    model = nn.ParameterDict({"early": nn.Parameter(torch.zeros(3)), "late": nn.Parameter(torch.zeros(3))})
    model["late"].requires_grad_(not frozen)
    optimizer = IVON(model.named_parameters(), **DEBIASED)
    go_on(optimizer, model, range(steps_before), without="late")
    model["late"].requires_grad_(True)
    go_on(optimizer, model, range(steps_before, steps_before + steps_after))
    return optimizer, model


def go_on(optimizer: IVON, model: nn.Module, steps: range, without: str = "") -> None:
    for index in steps:
        draw = Draw(0, index, 0)
        with optimizer.perturbed(draw):
            for name, p in model.named_parameters():
                p.grad = None if name == without else torch.full((3,), 1.0 + index)
        optimizer.observe(draw)
        optimizer.step()


@pytest.mark.parametrize("frozen", [True, False], ids=["unfrozen late", "without a gradient so far, as an expert"])
def test_momentum_is_debiased_by_the_gradients_that_a_parameter_has_had(frozen: bool) -> None:
    _, model = joined_late(20, 3, frozen)
    alone = nn.ParameterDict({"late": nn.Parameter(torch.zeros(3))})
    go_on(IVON(alone.named_parameters(), **DEBIASED), alone, range(20, 23))
    assert torch.equal(model["late"], alone["late"])
    always = nn.ParameterDict({"early": nn.Parameter(torch.zeros(3))})
    go_on(IVON(always.named_parameters(), **DEBIASED), always, range(23))
    assert torch.equal(model["early"], always["early"])


def test_steps_without_a_gradient_in_between_do_not_count() -> None:
    """Gradients of 1 in steps 1 and 4 alone: the momentum is 0.1 and then 0.19, debiased 1 each time."""
    model = nn.ParameterDict({"p": nn.Parameter(torch.zeros(1)), "other": nn.Parameter(torch.zeros(1))})
    optimizer = IVON(model.named_parameters(), noise_scale=0.0, weight_decay=0.0, **DEBIASED)
    for has_gradient in (True, False, False, True):
        model["p"].grad, model["other"].grad = torch.ones(1) if has_gradient else None, torch.ones(1)
        optimizer.observe(None)
        optimizer.step()
    assert float(optimizer.state[model["p"]]["momentum"]) == pytest.approx(0.19)
    assert float(model["p"].detach()) == pytest.approx(-2.0)


@pytest.mark.parametrize("way", ["state_dict", "checkpoint"])
def test_how_many_gradients_a_parameter_has_had_is_saved_and_loaded(way: str, tmp_path: Path) -> None:
    optimizer, model = joined_late(20, 1)
    other_model = copy.deepcopy(model)
    other = IVON(other_model.named_parameters(), **DEBIASED)
    if way == "state_dict":
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    else:
        dcp.save({"optimizer": get_state_dict(model, optimizer)[1]}, checkpoint_id=tmp_path)
        into = {"optimizer": get_state_dict(other_model, other)[1]}
        dcp.load(into, checkpoint_id=tmp_path)
        set_optimizer_state_dict(other_model, other, into["optimizer"])
    go_on(optimizer, model, range(21, 23))
    go_on(other, other_model, range(21, 23))
    assert torch.equal(model["late"], other_model["late"])


@given(
    ess=st.sampled_from(RANGES["ess"]),
    hess_init=st.sampled_from(RANGES["hess_init"]),
    weight_decay=st.sampled_from(RANGES["weight_decay"]),
    noise_scale=st.sampled_from(NOISE_SCALES),
    estimator=st.sampled_from(["price", "gradsq"]),
    grad=st.sampled_from([0.0, 1e-30, 1e18]),
    draws=st.sampled_from([1, 2]),
)
def test_the_hessian_survives_the_most_extreme_settings(grad: float, draws: int, **settings: Any) -> None:
    p = nn.Parameter(torch.ones(100))
    optimizer = IVON([("p", p)], **settings)
    for _ in range(2):
        step(optimizer, p, torch.full((100,), grad), draws)
    assert bool(optimizer.state[p]["hessian"].gt(0).all())
    assert all(bool(tensor.isfinite().all()) for tensor in (p, *optimizer.state[p].values()))


@pytest.mark.parametrize("name", [*RANGES, "noise_scale"])
def test_settings_beyond_those_are_refused(name: str) -> None:
    low, high = RANGES.get(name, NOISE_SCALES)
    for bad in (-low or -1e-30, low / 2 or -1.0, 2 * high, math.inf, math.nan):
        with pytest.raises(UserError, match=f"{name} = .*: must lie between"):
            IVON([nn.Parameter(torch.ones(2))], **{name: bad})


def test_a_step_divided_by_no_tokens_is_refused() -> None:
    """A tensor does not raise ZeroDivisionError: every weight would be NaN."""
    p = nn.Parameter(torch.ones(2))
    optimizer = IVON([p])
    p.grad = torch.zeros(2)
    optimizer.observe(None)
    with pytest.raises(RuntimeError, match=r"divisor=tensor\(0\.\)\): must be above 0"):
        optimizer.step(divisor=torch.tensor(0.0))  # type: ignore[arg-type]
    assert p.eq(1).all()
