"""The compiled kernels compute the bits of the torch ones; any layout, dtype and split of the work gives the same."""

import math
import shutil
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drawn import normal
from threepo.posterior import kernels, native, torch_kernels
from threepo.posterior.noise import BLOCK, noise_key
from threepo.posterior.noise_structures import Noise
from threepo.posterior.operations import HESSIAN_RANGE, WHOLE, AddNoiseTimes, Perturb, Region, Scalars, Update
from threepo.posterior.shards import _box
from threepo.types import Draw

DRAW = Draw(3, 5, 1)
NOISE = Noise(noise_key(DRAW, "w"))
SIZES = st.one_of(st.integers(1, 3 * BLOCK), st.just(3 * 65536 + 17))
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


def regions(starts: st.SearchStrategy[int]) -> st.SearchStrategy[Region]:
    """Regions in one row, and in rows narrower and wider than a block of the kernels and of torch_kernels."""
    rows = st.one_of(st.integers(1, 40), st.integers(400, 1100), st.just(8 * BLOCK + 5))
    gaps = st.one_of(st.integers(0, 40), st.integers(400, 1100), st.just(3 * BLOCK))
    in_rows = st.builds(lambda start, row, gap: Region(start, row, row + gap), starts, rows, gaps)
    return st.one_of(starts.map(Region), in_rows)


REGIONS = regions(st.integers(0, 5000))


def in_blocks(size: int, region: Region, most: int) -> int:
    """The size, or as much of it as lies in some `most` blocks: torch makes the noise between rows too."""
    if region.row == region.stride:
        return size
    return min(size, region.row * max(1, most * BLOCK // region.stride))


CASES = st.tuples(SIZES, REGIONS).map(lambda case: (in_blocks(*case, most=1024), case[1]))

SIGNS = st.sampled_from([1, -1])

needs_native = pytest.mark.skipif(native.LIBRARY.loaded is None, reason="no compiled kernels here")


def test_the_kernels_were_compiled_where_there_is_a_compiler() -> None:
    assert native.LIBRARY.loaded or not any(map(shutil.which, ("cc", "gcc", "clang")))


def sigma(ess: float, weight_decay: float, noise_scale: float, isotropic: float | None = None) -> Scalars:
    """Sigma of a Hessian, or of `isotropic` instead."""
    root = 0.0 if isotropic is None else math.sqrt(ess * (isotropic + weight_decay))
    return Scalars(weight_decay, ess, root, noise_scale)


def noise(kernels: ModuleType, size: int, made: Noise = NOISE, region: Region = WHOLE) -> torch.Tensor:
    """The noise that these kernels add to a mean of 0 with a sigma of 1."""
    z = torch.zeros(size)
    kernels.run([Perturb(z, z, torch.ones(size), made, sigma(1.0, 0.0, 1.0), region)])
    return z


def step(estimator: str, scalars: Scalars, **changed: float) -> Scalars:
    """A whole step's, of the mean of four gradients."""
    settings = {
        "beta1": 0.9,
        "grad_weight": 0.1 * 0.25,
        "beta2": 0.99,
        "estimate_weight": 0.01,
        "retraction_weight": 0.5e-4,
        "estimate_factor": 0.25 / scalars.noise_scale if estimator == "price" else 0.25 * scalars.ess,
        "momentum_factor": 1 / 0.19,
        "clip_radius": 2.0,
        "step_size": 1e-3,
    }
    return scalars._replace(estimator=estimator, **(settings | changed))


SCALARS = st.builds(
    sigma,
    st.sampled_from([1.0, 50.0, 1e9]),
    st.sampled_from([0.0, 1e-8, 0.1]),
    st.sampled_from([1.0, 0.7]),
    st.sampled_from([None, 0.3]),
)


@needs_native
@given(case=CASES, sign=SIGNS)
def test_compiled_noise_is_the_noise_that_torch_defines(case: tuple[int, Region], sign: int) -> None:
    size, region = case
    made = Noise(NOISE.key, sign)
    assert torch.equal(noise(native, size, made, region), noise(torch_kernels, size, made, region))
    assert torch.equal(noise(torch_kernels, size, made, region), sign * noise(torch_kernels, size, NOISE, region))


@needs_native
@given(case=CASES, dtype=DTYPES, out_dtype=DTYPES, scalars=SCALARS)
def test_compiled_perturb_is_the_torch_one(
    case: tuple[int, Region], dtype: torch.dtype, out_dtype: torch.dtype, scalars: Scalars
) -> None:
    size, region = case
    torch.manual_seed(size)
    mean, h = torch.randn(size).to(dtype), torch.rand(size) + 1e-4
    ours, defined = torch.empty(size, dtype=out_dtype), torch.empty(size, dtype=out_dtype)
    native.run([Perturb(ours, mean, h, NOISE, scalars, region)])
    torch_kernels.run([Perturb(defined, mean, h, NOISE, scalars, region)])
    assert torch.equal(ours, defined)


@needs_native
@given(case=CASES, dtype=DTYPES, sign=SIGNS)
def test_compiled_accumulation_is_the_torch_one(case: tuple[int, Region], dtype: torch.dtype, sign: int) -> None:
    size, region = case
    torch.manual_seed(size)
    grad, total = torch.randn(size).to(dtype), torch.randn(size)
    ours, defined = total.clone(), total.clone()
    made = Noise(NOISE.key, sign)
    native.run([AddNoiseTimes(ours, grad, made, region)])
    torch_kernels.run([AddNoiseTimes(defined, grad, made, region)])
    assert torch.equal(ours, defined)


@needs_native
@given(
    case=CASES,
    dtype=DTYPES,
    copied=st.booleans(),
    summed=st.booleans(),
    estimator=st.sampled_from(["price", "gradsq", "none"]),
    scalars=SCALARS,
    grad_size=st.sampled_from([1e-6, 1.0, 1e30]),
    sign=SIGNS,
)
def test_compiled_update_is_the_torch_one(
    case: tuple[int, Region],
    dtype: torch.dtype,
    copied: bool,
    summed: bool,
    estimator: str,
    scalars: Scalars,
    grad_size: float,
    sign: int,
) -> None:
    size, region = case
    torch.manual_seed(size)
    mean, grad = torch.randn(size).to(dtype), (torch.randn(size) * grad_size).to(dtype)
    h, g, second = torch.rand(size) + 1e-4, torch.randn(size), torch.randn(size) if summed else None
    results = []
    for module in (native, torch_kernels):
        own = [tensor.clone() for tensor in (mean, h, g)]
        copy = torch.empty(size, dtype=torch.bfloat16) if copied else None
        made = Noise(NOISE.key, sign)
        update = Update(own[0], copy, own[1], own[2], grad, second, made, step(estimator, scalars), region)
        (clipped,) = module.run([update])
        results.append([*own, clipped, *([copy] if copied else [])])
    for ours, defined in zip(*results, strict=True):
        assert torch.equal(ours, defined)


@needs_native
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_number_of_threads_changes_nothing(threads: int) -> None:
    size = 5 * native.SERIAL + 77
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    mean, h, g, grad = torch.randn(size), torch.rand(size) + 0.1, torch.randn(size), torch.randn(size)
    results = []
    for module in (native, torch_kernels):
        m, hessian, momentum, total = mean.clone(), h.clone(), g.clone(), g.clone()
        module.run([Perturb(m, m, hessian, NOISE, sigma(10.0, 0.1, 1.0), Region(300))])
        module.run([AddNoiseTimes(total, grad, NOISE, Region(300))])
        scalars = step("price", sigma(10.0, 0.1, 1.0))
        (clipped,) = module.run([Update(m, None, hessian, momentum, grad, None, NOISE, scalars, Region(300))])
        results.append((m, hessian, momentum, total, clipped))
    for ours, defined in zip(*results, strict=True):
        assert torch.equal(ours, defined)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_every_dtype_adds_in_wide_and_rounds_once(dtype: torch.dtype) -> None:
    mean, h = torch.randn(2000).to(dtype), torch.full((2000,), 0.25)
    out = torch.empty_like(mean)
    kernels.run([Perturb(out, mean, h, NOISE, sigma(100.0, 0.0, 1.0))])
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
    scalars = step("price", sigma(10.0, 0.1, 1.0))
    results = []
    for mean in (strided.clone(memory_format=torch.preserve_format), dense.clone()):
        hessian, momentum = h.clone(), g.clone()
        kernels.run([Perturb(mean, mean, hessian, NOISE, scalars)])
        kernels.run([Update(mean, None, hessian, momentum, grad, None, NOISE, scalars)])
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
    weights = {"beta2": beta2, "estimate_weight": 1 - beta2, "retraction_weight": 0.5 * (1 - beta2) ** 2}
    factors = {"estimate_factor": ess if estimator == "gradsq" else 1.0, "momentum_factor": 1.0, "grad_weight": 0.1}
    scalars = step(estimator, sigma(ess, delta, 1.0), **weights, **factors)
    for _ in range(3):
        kernels.run([Update(mean, None, hessian, momentum, torch.full((BLOCK,), grad), None, NOISE, scalars)])
        assert hessian.min() >= HESSIAN_RANGE[0] * 0.99
        assert all(bool(tensor.isfinite().all()) for tensor in (mean, hessian, momentum))
        kernels.run([Perturb(torch.empty(BLOCK), mean, hessian, NOISE, scalars)])


def test_shapes_that_do_not_fit_are_refused_before_anything_is_written() -> None:
    mean = torch.zeros(10)
    with pytest.raises(RuntimeError, match="shapes differ"):
        kernels.run([Perturb(mean, mean, torch.ones(9), NOISE, sigma(1.0, 0.0, 1.0))])
    with pytest.raises(RuntimeError, match="shapes differ"):
        kernels.run([AddNoiseTimes(torch.zeros(11), torch.ones(10), NOISE)])
    scalars = step("price", sigma(1.0, 0.0, 1.0))
    with pytest.raises(RuntimeError, match="shapes differ"):
        kernels.run([Update(mean, None, torch.ones(10), torch.zeros(10), torch.ones(5), None, NOISE, scalars)])
    assert mean.eq(0).all()


def test_autograd_notices_what_the_kernels_write() -> None:
    p = torch.nn.Parameter(torch.ones(5000))
    loss = (p**2).sum()
    with torch.no_grad():
        kernels.run([Perturb(p, p, torch.ones(5000), NOISE, sigma(1.0, 0.0, 1.0))])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@given(size=st.integers(1, 3 * BLOCK), region=REGIONS)
def test_noise_of_rows_is_that_of_their_elements_in_the_whole(size: int, region: Region) -> None:
    start, row, stride = region
    elements = torch.tensor([start + i // row * stride + i % row for i in range(size)])
    whole = noise(torch_kernels, int(elements[-1]) + 1)
    assert torch.equal(noise(torch_kernels, size, NOISE, region), whole[elements])


@given(st.data())
def test_a_box_of_a_tensor_is_found_in_its_pieces(data: st.DataObject) -> None:
    whole = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    offset = tuple(data.draw(st.integers(0, size - 1)) for size in whole)
    part = tuple(data.draw(st.integers(0, size - o)) for size, o in zip(whole, offset, strict=True))
    indices = torch.arange(math.prod(whole)).view(whole)
    box = indices[tuple(slice(o, o + n) for o, n in zip(offset, part, strict=True))].reshape(-1)
    found = torch.full_like(box, -1)
    pieces = _box(whole, part, offset)
    for held, (start, row, stride) in zip(found.chunk(max(len(pieces), 1)), pieces, strict=bool(pieces)):
        held.copy_(torch.tensor([start + i // row * stride + i % row for i in range(len(held))]))
    assert torch.equal(found, box)
    if len([d for d, n in enumerate(part) if n != whole[d]]) <= 1:
        assert len(pieces) <= 1, "cut along one dimension, it is one call"


@needs_native
@pytest.mark.parametrize("threads", [1, 2])
def test_many_operations_in_one_call_are_what_each_is_alone(threads: int) -> None:
    """Of sizes that threads cut across, among them nothing, some in rows, with scalars of their own."""
    torch.set_num_threads(threads)
    sizes = [1, 0, 1023, 70_000, 0, 5, 200_001, 333]
    results = []
    for together in (True, False):
        torch.manual_seed(0)
        updates = []
        for index, size in enumerate(sizes):
            tensors = (torch.randn(size), None, torch.rand(size) + 0.1, torch.randn(size), torch.randn(size), None)
            scalars = step("price", sigma(10.0, 0.1, 1.0), clip_radius=0.5 + index)
            region = Region(index, 100, 128) if index % 2 else Region(index)
            updates.append(Update(*tensors, Noise(noise_key(DRAW, str(index))), scalars, region))
        clipped = native.run(updates) if together else [torch_kernels.run([update])[0] for update in updates]
        results.append(
            [tensor for update in updates for tensor in (update.mean, update.hessian, update.momentum)] + clipped
        )
    for ours, defined in zip(*results, strict=True):
        assert torch.equal(ours, defined)


def test_one_call_takes_tensors_of_different_backends() -> None:
    """Backends that alternate, and memory that is not contiguous."""
    shapes = [(7, 3), (300_001,), (2, 5), (1024,), (4,)]
    dtypes = [torch.float32, torch.float32, torch.float64, torch.float32, torch.bfloat16]
    means = [torch.zeros(shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    means[0] = torch.zeros(3, 7).t()
    noises = [Noise(noise_key(DRAW, str(mean.shape))) for mean in means]
    kernels.run(
        Perturb(mean, mean, torch.ones(mean.shape), noise, sigma(1.0, 0.0, 1.0))
        for mean, noise in zip(means, noises, strict=True)
    )
    for mean in means:
        z = normal(DRAW, str(mean.shape), 0, mean.numel()).view(mean.shape)
        assert torch.equal(mean, z.to(mean.dtype))
