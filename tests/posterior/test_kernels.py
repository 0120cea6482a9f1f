"""The compiled kernels compute the bits of the plain ones; any layout, dtype and split of the work gives the same."""

import math
import shutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from threepo.posterior import kernels, native, plain
from threepo.posterior.kernels import normal
from threepo.posterior.layout import _box
from threepo.posterior.noise import BLOCK, noise_key
from threepo.posterior.operands import AddNoiseTimes, Perturb, Place, Seen, State, Update
from threepo.posterior.scalars import HESSIAN_RANGE, Scale, StepNumbers
from threepo.types import Draw

DRAW = Draw(3, 5, 1)
KEY = noise_key(DRAW, "w")
SIZES = st.one_of(st.integers(1, 3 * BLOCK), st.just(3 * 65536 + 17))
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


def places(starts: st.SearchStrategy[int]) -> st.SearchStrategy[Place]:
    """In one row, and in rows narrower and wider than a block and than what plain torch takes at once."""
    rows = st.one_of(st.integers(1, 40), st.integers(400, 1100), st.just(8 * BLOCK + 5))
    gaps = st.one_of(st.integers(0, 40), st.integers(400, 1100), st.just(3 * BLOCK))
    in_rows = st.builds(lambda start, row, gap: Place(start, row, row + gap), starts, rows, gaps)
    return st.one_of(starts.map(Place), in_rows)


PLACES = places(st.integers(0, 5000))

needs_native = pytest.mark.skipif(not native.available, reason="no compiled kernels here")


def test_the_kernels_were_compiled_where_there_is_a_compiler() -> None:
    assert native.available or not any(map(shutil.which, ("cc", "gcc", "clang")))


def numbers(estimator: str, scale: Scale, **changed: float) -> StepNumbers:
    settings = {
        "beta1": 0.9,
        "beta2": 0.99,
        "grad_factor": 0.25,
        "second_factor": 0.25,
        "debias": 0.19,
        "clip_radius": 2.0,
        "step_size": 1e-3,
    }
    return StepNumbers(scale=scale, estimator=estimator, **(settings | changed))


SCALES = st.builds(
    Scale,
    st.sampled_from([1.0, 50.0, 1e9]),
    st.sampled_from([0.0, 1e-8, 0.1]),
    st.sampled_from([1.0, 0.7]),
    st.sampled_from([None, 0.3]),
)


@needs_native
@given(size=SIZES, place=PLACES)
def test_compiled_noise_is_the_noise_that_plain_torch_defines(size: int, place: Place) -> None:
    ours, defined = torch.empty(size), torch.empty(size)
    native.normal(ours, KEY, place)
    plain.normal(defined, KEY, place)
    assert torch.equal(ours, defined)


@needs_native
@given(size=SIZES, place=PLACES, dtype=DTYPES, out_dtype=DTYPES, scale=SCALES)
def test_compiled_perturb_is_the_plain_one(
    size: int, place: Place, dtype: torch.dtype, out_dtype: torch.dtype, scale: Scale
) -> None:
    torch.manual_seed(size)
    mean, h = torch.randn(size).to(dtype), torch.rand(size) + 1e-4
    ours, defined = torch.empty(size, dtype=out_dtype), torch.empty(size, dtype=out_dtype)
    native.perturb([Perturb(ours, mean, h, KEY, scale, place)])
    plain.perturb([Perturb(defined, mean, h, KEY, scale, place)])
    assert torch.equal(ours, defined)


@needs_native
@given(size=SIZES, place=PLACES, dtype=DTYPES)
def test_compiled_accumulation_is_the_plain_one(size: int, place: Place, dtype: torch.dtype) -> None:
    torch.manual_seed(size)
    grad, total = torch.randn(size).to(dtype), torch.randn(size)
    ours, defined = total.clone(), total.clone()
    native.add_noise_times([AddNoiseTimes(ours, grad, KEY, place)])
    plain.add_noise_times([AddNoiseTimes(defined, grad, KEY, place)])
    assert torch.equal(ours, defined)


@needs_native
@given(
    size=SIZES,
    place=PLACES,
    dtype=DTYPES,
    copied=st.booleans(),
    summed=st.booleans(),
    estimator=st.sampled_from(["price", "gradsq", "none"]),
    scale=SCALES,
    grad_size=st.sampled_from([1e-6, 1.0, 1e30]),
)
def test_compiled_update_is_the_plain_one(
    size: int,
    place: Place,
    dtype: torch.dtype,
    copied: bool,
    summed: bool,
    estimator: str,
    scale: Scale,
    grad_size: float,
) -> None:
    torch.manual_seed(size)
    mean, grad = torch.randn(size).to(dtype), (torch.randn(size) * grad_size).to(dtype)
    h, g, second = torch.rand(size) + 1e-4, torch.randn(size), torch.randn(size) if summed else None
    results = []
    for module in (native, plain):
        own = [tensor.clone() for tensor in (mean, h, g)]
        copy = torch.empty(size, dtype=torch.bfloat16) if copied else None
        state = State(own[0], copy, own[1], own[2])
        (clipped,) = module.update([Update(state, Seen(grad, second, KEY), numbers(estimator, scale), place)])
        results.append([*own, clipped, *([copy] if copied else [])])
    for ours, defined in zip(*results, strict=True):
        assert torch.equal(ours, defined)


@needs_native
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_number_of_threads_changes_nothing(threads: int) -> None:
    size = 5 * native._SERIAL + 77
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    mean, h, g, grad = torch.randn(size), torch.rand(size) + 0.1, torch.randn(size), torch.randn(size)
    results = []
    for module in (native, plain):
        m, hessian, momentum, total, z = mean.clone(), h.clone(), g.clone(), g.clone(), torch.empty(size)
        module.normal(z, KEY, Place(300))
        module.perturb([Perturb(m, m, hessian, KEY, Scale(10.0, 0.1, 1.0), Place(300))])
        module.add_noise_times([AddNoiseTimes(total, grad, KEY, Place(300))])
        step = numbers("price", Scale(10.0, 0.1, 1.0))
        state = State(m, None, hessian, momentum)
        (clipped,) = module.update([Update(state, Seen(grad, None, KEY), step, Place(300))])
        results.append((z, m, hessian, momentum, total, clipped))
    for ours, defined in zip(*results, strict=True):
        assert torch.equal(ours, defined)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_every_dtype_adds_in_wide_and_rounds_once(dtype: torch.dtype) -> None:
    mean, h = torch.randn(2000).to(dtype), torch.full((2000,), 0.25)
    out = torch.empty_like(mean)
    kernels.perturb([Perturb(out, mean, h, KEY, Scale(100.0, 0.0, 1.0))])
    wide = mean if dtype == torch.float64 else mean.float()
    assert torch.equal(out, (wide + normal(DRAW, "w", 0, 2000) * 0.2).to(dtype))


@pytest.mark.parametrize(
    "strided",
    [
        torch.randn(30, 20).t(),
        torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last),
    ],
    ids=["transposed", "channels last"],
)
def test_noise_goes_by_the_logical_index_not_by_the_memory(strided: torch.Tensor) -> None:
    dense = strided.contiguous()
    h, g, grad = torch.rand(dense.shape) + 0.1, torch.randn(dense.shape), torch.randn(dense.shape)
    step = numbers("price", Scale(10.0, 0.1, 1.0))
    results = []
    for mean in (strided.clone(memory_format=torch.preserve_format), dense.clone()):
        hessian, momentum = h.clone(), g.clone()
        kernels.perturb([Perturb(mean, mean, hessian, KEY, step.scale)])
        kernels.update([Update(State(mean, None, hessian, momentum), Seen(grad, None, KEY), step)])
        results.append((mean, hessian, momentum))
    for ours, expected in zip(*results, strict=True):
        assert torch.equal(ours, expected)
    assert results[0][0].stride() == strided.clone().stride()


@given(
    grad=st.floats(-(2.0**127), 2.0**127, width=32),
    h=st.floats(1e-30, 1e15),
    delta=st.sampled_from([0.0, 1e-8, 1.0]),
    ess=st.sampled_from([1.0, 1e9, 1e12]),
    estimator=st.sampled_from(["price", "gradsq"]),
    beta2=st.sampled_from([0.0, 0.9, 0.9999]),
)
def test_the_hessian_stays_positive_and_everything_finite_for_any_gradient(
    grad: float, h: float, delta: float, ess: float, estimator: str, beta2: float
) -> None:
    mean, hessian, momentum = torch.zeros(BLOCK), torch.full((BLOCK,), h), torch.zeros(BLOCK)
    step = numbers(estimator, Scale(ess, delta, 1.0), beta2=beta2, grad_factor=1.0, debias=1.0)
    for _ in range(3):
        seen = Seen(torch.full((BLOCK,), grad), None, KEY)
        kernels.update([Update(State(mean, None, hessian, momentum), seen, step)])
        assert hessian.min() >= HESSIAN_RANGE[0] * 0.99
        assert all(bool(tensor.isfinite().all()) for tensor in (mean, hessian, momentum))
        kernels.perturb([Perturb(torch.empty(BLOCK), mean, hessian, KEY, step.scale)])


def test_shapes_that_do_not_fit_are_refused_before_anything_is_written() -> None:
    mean = torch.zeros(10)
    with pytest.raises(RuntimeError, match="shapes differ"):
        kernels.perturb([Perturb(mean, mean, torch.ones(9), KEY, Scale(1.0, 0.0, 1.0))])
    with pytest.raises(RuntimeError, match="shapes differ"):
        kernels.add_noise_times([AddNoiseTimes(torch.zeros(11), torch.ones(10), KEY)])
    seen = Seen(torch.ones(5), None, KEY)
    with pytest.raises(RuntimeError, match="shapes differ"):
        state = State(mean, None, torch.ones(10), torch.zeros(10))
        kernels.update([Update(state, seen, numbers("price", Scale(1.0, 0.0, 1.0)))])
    assert mean.eq(0).all()


def test_autograd_notices_what_the_kernels_write() -> None:
    p = torch.nn.Parameter(torch.ones(5000))
    loss = (p**2).sum()
    with torch.no_grad():
        kernels.perturb([Perturb(p, p, torch.ones(5000), KEY, Scale(1.0, 0.0, 1.0))])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@given(size=st.integers(1, 3 * BLOCK), place=PLACES)
def test_noise_of_rows_is_that_of_their_elements_in_the_whole(size: int, place: Place) -> None:
    start, row, stride = place
    elements = torch.tensor([start + i // row * stride + i % row for i in range(size)])
    whole, rows = torch.empty(int(elements[-1]) + 1), torch.empty(size)
    plain.normal(whole, KEY, Place(0))
    plain.normal(rows, KEY, place)
    assert torch.equal(rows, whole[elements])


@given(st.data())
def test_a_box_of_a_tensor_is_found_in_its_pieces(data: st.DataObject) -> None:
    whole = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    offset = tuple(data.draw(st.integers(0, size - 1)) for size in whole)
    part = tuple(data.draw(st.integers(0, size - o)) for size, o in zip(whole, offset, strict=True))
    indices = torch.arange(math.prod(whole)).view(whole)
    box = indices[tuple(slice(o, o + n) for o, n in zip(offset, part, strict=True))].reshape(-1)
    found = torch.full_like(box, -1)
    pieces = _box(whole, part, offset)
    for local, (start, row, stride), count in pieces:
        found[local] = torch.tensor([start + i // row * stride + i % row for i in range(count)])
    assert torch.equal(found, box)
    if len([d for d, n in enumerate(part) if n != whole[d]]) <= 1:
        assert len(pieces) <= 1, "cut along one dimension, it is one call"


@needs_native
@pytest.mark.parametrize("threads", [1, 2])
def test_many_jobs_in_one_call_are_what_each_is_alone(threads: int) -> None:
    """Of sizes that threads cut across, among them nothing, some in rows, with numbers of their own."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    sizes = [1, 0, 1023, 70_000, 0, 5, 200_001, 333]
    results = []
    for together in (True, False):
        torch.manual_seed(0)
        jobs = []
        for index, size in enumerate(sizes):
            state = State(torch.randn(size), None, torch.rand(size) + 0.1, torch.randn(size))
            step = numbers("price", Scale(10.0, 0.1, 1.0), clip_radius=0.5 + index)
            place = Place(index, 100, 128) if index % 2 else Place(index)
            jobs.append(Update(state, Seen(torch.randn(size), None, noise_key(DRAW, str(index))), step, place))
        clipped = native.update(jobs) if together else [count for job in jobs for count in plain.update([job])]
        results.append([tensor for job in jobs for tensor in job.state if tensor is not None] + clipped)
    for ours, defined in zip(*results, strict=True):
        assert torch.equal(ours, defined)


def test_what_waits_for_company_is_done_whatever_comes_after_it() -> None:
    """More than one batch, kernels that alternate, and memory that is not contiguous."""
    shapes = [(7, 3), (kernels.BATCH // 2 + 1,), (2, 5), (kernels.BATCH // 2,), (4,)]
    dtypes = [torch.float32, torch.float32, torch.float64, torch.float32, torch.bfloat16]
    means = [torch.zeros(shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    means[0] = torch.zeros(3, 7).t()
    keys = [noise_key(DRAW, str(mean.shape)) for mean in means]
    kernels.perturb(
        Perturb(mean, mean, torch.ones(mean.shape), key, Scale(1.0, 0.0, 1.0))
        for mean, key in zip(means, keys, strict=True)
    )
    for mean in means:
        z = normal(DRAW, str(mean.shape), 0, mean.numel()).view(mean.shape)
        assert torch.equal(mean, z.to(mean.dtype))
