"""The Triton kernels compute the bits of the torch ones on a CPU: in Triton's interpreter, or on a GPU.

test_triton.py runs this with TRITON_INTERPRET=1, `make test-gpu` without.
"""

import os
from collections.abc import Sequence
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posterior.test_kernels import NOISE, SCALARS, SIGNS, in_blocks, noise, regions, sigma, step
from threepo.posterior import torch_kernels
from threepo.posterior import triton_kernels as kernels
from threepo.posterior.noise import _GOLDEN, _MIX1, _MIX2, BLOCK, Key
from threepo.posterior.noise_structures import Noise
from threepo.posterior.operations import HESSIAN_RANGE, AddNoiseTimes, Operation, Perturb, Region, Scalars, Update

# Lanes beyond the end of a tensor divide nothing by nothing, and NumPy says so.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SIZES = st.one_of(st.integers(1, 2 * BLOCK), st.sampled_from([1, BLOCK // 2, BLOCK, 3 * BLOCK]))
STARTS = st.one_of(st.integers(0, 3000), st.sampled_from([0, 1, BLOCK - 1, BLOCK, 2**31 - 700, 2**41 + 5]))
CASES = st.tuples(SIZES, regions(STARTS)).map(lambda case: (in_blocks(*case, most=16), case[1]))  # 10 ms for each block
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
some = settings(max_examples=12)
ON_GPU = os.environ.get("TRITON_INTERPRET") != "1"


class triton_kernels:
    """The kernels, on copies of tensors on the GPU where they are not interpreted."""

    @staticmethod
    def run(operations: Sequence[Operation]) -> list[torch.Tensor]:
        if not ON_GPU:
            return kernels.run(operations)
        there: dict[int, torch.Tensor] = {}

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            """The copy of a tensor; a tensor that is given twice has one."""
            return there.setdefault(id(tensor), tensor.cuda())

        copies = []
        for operation in operations:
            tensors = {f.name: getattr(operation, f.name) for f in fields(operation)}
            tensors = {name: value for name, value in tensors.items() if isinstance(value, torch.Tensor)}
            copies.append(replace(operation, **{name: moved(value) for name, value in tensors.items()}))
            assert kernels.takes(*map(moved, tensors.values()))
        clipped = kernels.run(copies)
        for operation in operations:
            for name in operation.WRITTEN:
                if (tensor := getattr(operation, name)) is not None:
                    tensor.copy_(moved(tensor))
        return [count.cpu() for count in clipped]


def assert_same_bits(ours: torch.Tensor, defined: torch.Tensor) -> None:
    assert ours.dtype == defined.dtype
    assert ours.shape == defined.shape
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[ours.element_size()]
    assert torch.equal(ours.view(integers), defined.view(integers))


@some
@given(case=CASES, sign=SIGNS)
def test_noise(case: tuple[int, Region], sign: int) -> None:
    size, region = case
    ours, defined = (
        noise(kernels, size, Noise(NOISE.key, sign), region) for kernels in (triton_kernels, torch_kernels)
    )
    assert_same_bits(ours, defined)


def key_for(bits: int) -> Key:
    """The key whose counter 0 is mixed to these bits: SplitMix64 backwards."""

    def unshift(value: int, shift: int) -> int:
        result = value
        for _ in range(64 // shift):
            result = value ^ (result >> shift)
        return result

    second, mask = 0x0123456789ABCDEF, (1 << 64) - 1
    z = unshift(bits, 31) * pow(_MIX2, -1, 1 << 64) & mask
    z = (unshift(z, 27) ^ second) * pow(_MIX1, -1, 1 << 64) & mask
    return unshift(z, 30), second


@pytest.mark.parametrize("sign", [0, 1 << 63])
def test_the_ends_of_the_noise_s_range(sign: int) -> None:
    """The upper half of the bits makes the radius, the lower one the angle."""
    highs, lows = [0, 1, 0x5A827999, 0x7FFFFF7F, 0x7FFFFFC0, 0x7FFFFFFF], [0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF]
    for high, low in [*((high, 1) for high in highs), *((0x5A827999, low) for low in lows)]:
        key = Noise(key_for(sign | high << 32 | low))
        ours, defined = (noise(ks, BLOCK, key, Region(0)) for ks in (triton_kernels, torch_kernels))
        assert_same_bits(ours, defined)
        radius = defined[0].hypot(defined[BLOCK // 2])
        if high == 0 and sign == 0:
            assert radius > 6.5  # u is below 2^-30: the key is the one that was wanted
        if high == (0x7FFFFFFF if sign == 0 else 0):
            assert radius == 0


def test_counters_start_where_the_key_says() -> None:
    block, bits = 2**31 + 7, 1 << 63
    first, second = key_for(bits)
    key = ((first - block * (BLOCK // 2) * _GOLDEN) % 2**64, second)
    assert noise(triton_kernels, BLOCK, Noise(key), Region(block * BLOCK))[0] == 0


@pytest.mark.parametrize("key", [(0, 0), (1, 1), (16, 2**31), (2**32 - 1, 2**63), (2**64 - 1, 2**64 - 2**31)])
def test_keys_of_any_width(key: Key) -> None:
    ours, defined = (noise(kernels, 100, Noise(key), Region(0)) for kernels in (triton_kernels, torch_kernels))
    assert_same_bits(ours, defined)


@some
@given(case=CASES, dtype=DTYPES, out_dtype=DTYPES, scalars=SCALARS)
def test_perturb(case: tuple[int, Region], dtype: torch.dtype, out_dtype: torch.dtype, scalars: Scalars) -> None:
    size, region = case
    torch.manual_seed(size)
    mean, h = torch.randn(size).to(dtype), torch.rand(size) + 1e-4
    ours, defined = torch.empty(size, dtype=out_dtype), torch.empty(size, dtype=out_dtype)
    triton_kernels.run([Perturb(ours, mean, h, NOISE, scalars, region)])
    torch_kernels.run([Perturb(defined, mean, h, NOISE, scalars, region)])
    assert_same_bits(ours, defined)
    if dtype == out_dtype:
        triton_kernels.run([Perturb(mean, mean, h, NOISE, scalars, region)])
        assert_same_bits(mean, defined)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_of_all_kinds_of_numbers(dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    every = torch.arange(-(2**15), 2**15, 17)
    if dtype == torch.float32:  # ties of bfloat16, and their neighbours
        bits = every[:, None] * 2**16 + torch.tensor([0x7FFF, 0x8000, 0x8001])
        mean = bits.to(torch.int32).view(torch.float32).reshape(-1)
    else:
        mean = every.to(torch.int16).view(dtype)
    mean = mean[mean.isfinite()]
    ours, defined = torch.empty(len(mean), dtype=out_dtype), torch.empty(len(mean), dtype=out_dtype)
    still = sigma(1.0, 1.0, 0.0)
    triton_kernels.run([Perturb(ours, mean, torch.ones(len(mean)), NOISE, still, Region(0))])
    torch_kernels.run([Perturb(defined, mean, torch.ones(len(mean)), NOISE, still, Region(0))])
    assert_same_bits(ours, defined)


@some
@given(case=CASES, dtype=DTYPES)
def test_accumulation(case: tuple[int, Region], dtype: torch.dtype) -> None:
    size, region = case
    torch.manual_seed(size)
    grad, total = torch.randn(size).to(dtype), torch.randn(size)
    ours, defined = total.clone(), total.clone()
    triton_kernels.run([AddNoiseTimes(ours, grad, NOISE, region)])
    torch_kernels.run([AddNoiseTimes(defined, grad, NOISE, region)])
    assert_same_bits(ours, defined)


@settings(max_examples=25)
@given(
    case=CASES,
    dtype=DTYPES,
    copy_dtype=st.one_of(st.none(), DTYPES),
    summed=st.booleans(),
    estimator=st.sampled_from(["price", "gradsq", "none"]),
    scalars=SCALARS,
    grad_size=st.sampled_from([0.0, 1e-30, 1e-6, 1.0, 1e30]),
    least_hessian=st.booleans(),
)
def test_update(
    case: tuple[int, Region],
    dtype: torch.dtype,
    copy_dtype: torch.dtype | None,
    summed: bool,
    estimator: str,
    scalars: Scalars,
    grad_size: float,
    least_hessian: bool,
) -> None:
    size, region = case
    torch.manual_seed(size)
    grad_size = min(grad_size, 1e3) if dtype == torch.float16 else grad_size
    mean, grad = torch.randn(size).to(dtype), (torch.randn(size) * grad_size).to(dtype)
    h = torch.full((size,), HESSIAN_RANGE[0]) if least_hessian else torch.rand(size) + 1e-4
    g, second = torch.randn(size), torch.randn(size) if summed else None
    results = []
    for module in (triton_kernels, torch_kernels):
        own = [tensor.clone() for tensor in (mean, h, g)]
        copy = None if copy_dtype is None else torch.empty(size, dtype=copy_dtype)
        update = Update(own[0], copy, own[1], own[2], grad, second, NOISE, step(estimator, scalars), region)
        (clipped,) = module.run([update])
        results.append([*own, clipped, *([] if copy is None else [copy])])
    for ours, defined in zip(*results, strict=True):
        assert_same_bits(ours, defined)


def test_a_view_in_the_middle_of_a_tensor_is_all_that_is_written() -> None:
    whole, h = torch.full((5000,), 7.0), torch.ones(5000)
    part = slice(1001, 3333)
    triton_kernels.run([Perturb(whole[part], whole[part], h[part], NOISE, sigma(1.0, 0.0, 1.0), Region(1001))])
    assert whole[:1001].eq(7).all()
    assert whole[3333:].eq(7).all()
    assert not whole[part].eq(7).any()


def test_nothing_to_do_is_no_error() -> None:
    empty = torch.empty(0)
    triton_kernels.run([AddNoiseTimes(empty, empty, NOISE, Region(5))])
    scalars = step("none", sigma(1.0, 0.0, 1.0))
    nothing = Update(empty, None, empty, empty, empty, None, None, scalars, Region(5))
    assert triton_kernels.run([nothing]) == [0]
