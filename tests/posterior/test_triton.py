"""The Triton kernels where there is no GPU: their bits in Triton's interpreter, and what they compile to."""

import functools
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from threepo.posterior import kernels, torch_kernels

TESTS = Path(__file__).parents[1]
INTERPRETED = ["tests/posterior/triton_interpreted.py", "tests/models/triton_scores_interpreted.py"]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed (it exists for Linux on x86-64)"
)


def test_interpreted_kernels_compute_what_torch_does() -> None:
    # In a process of its own, because Triton decides when it is imported whether it interprets.
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *INTERPRETED]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=TESTS.parent, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


F32 = "fp32"
SCALARS = (F32,) * 4
ROWS = {"row": "i32", "stride": "i32", "rows": "constexpr"}
ADDRESS = {"start": "i32", "count": "i32", **ROWS, "first": "i64", "second": "i64", "sign": F32}
SIGNATURES: dict[str, tuple[dict[str, Any], dict[tuple[int, ...], Any]]] = {
    "_perturb": (
        {"tensors": ("*bf16", "*fp32", "*fp32"), **ADDRESS, "scalars": SCALARS, "isotropic": "constexpr"},
        {(5,): False, (10,): False},
    ),
    "_add_noise_times": ({"total": "*fp32", "grad": "*fp16", **ADDRESS}, {(6,): True}),
    "_update": (
        {
            "tensors": ("*fp32", "*bf16", "*fp32", "*fp32", "*bf16", "constexpr"),
            "clipped": "*i64",
            **ADDRESS,
            "scalars": SCALARS,
            "step": (F32,) * 12,
            **dict.fromkeys(("estimator", "isotropic"), "constexpr"),
        },
        {(0, 5): None, (6,): True, (12,): "price", (13,): False},
    ),
}


@functools.cache
def compiled(name: str, arch: int, **options: bool) -> dict[str, Any]:
    """A kernel compiled by Triton, from its intermediate representation down to the machine code."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from threepo.posterior import triton_kernels

    signature, constants = SIGNATURES[name]
    source = ASTSource(getattr(triton_kernels, name), signature, constexprs=constants)
    asm: dict[str, Any] = triton.compile(
        source, target=GPUTarget("cuda", arch, 32), options=triton_kernels._OPTIONS | options
    ).asm
    return asm


def arithmetic(ptx: str) -> set[str]:
    return set(re.findall(r"\b(?:add|sub|mul|div|sqrt|rcp|rsqrt|ex2|lg2|sin|cos|fma|mad|min|max)\.[a-z.]*f32\b", ptx))


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted kernels are not compiled")
class TestCompiled:
    @pytest.fixture(autouse=True)
    def _own_cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    @pytest.mark.parametrize("arch", [80, 90, 100])
    @pytest.mark.parametrize("name", SIGNATURES)
    def test_every_operation_rounds_once_to_nearest_and_keeps_subnormals(self, name: str, arch: int) -> None:
        asm = compiled(name, arch)
        # With .rn, ptxas may not fuse either; .ftz would flush and .approx or .full be a few bits off.
        allowed = {f"{operation}.rn.f32" for operation in ("add", "sub", "mul", "div", "sqrt")}
        assert {"mul.rn.f32", "add.rn.f32", "sqrt.rn.f32"} <= arithmetic(asm["ptx"]) <= allowed
        assert "ftz" not in asm["ptx"]
        assert "f64" not in asm["ptx"]
        assert asm["cubin"]

    def test_without_our_options_it_would_not(self) -> None:
        assert "fma.rn.f32" in arithmetic(compiled("_perturb", 90, enable_fp_fusion=True)["ptx"])

    @pytest.mark.parametrize("name", SIGNATURES)
    def test_elements_are_counted_in_64_bits(self, name: str) -> None:
        offsets = re.findall(r"tt\.addptr .*tensor<[\dx]+x(i\d+)>", compiled(name, 90)["ttir"])
        assert set(offsets) == {"i64"}

    @pytest.mark.parametrize(
        ("arch", "dtype", "fused"),
        [(80, "*bf16", False), (90, "*fp32", False), (100, "*bf16", False), (90, "*bf16", True)],
    )
    def test_the_scores_of_tokens_compile_and_fuse_no_product(self, arch: int, dtype: str, fused: bool) -> None:
        """None with our options; with fusion, some."""
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        from threepo.models import triton_scores

        options = {key: value for key, value in triton_scores._OPTIONS.items() if key != "block"}
        for kernel in (triton_scores._forward, triton_scores._backward):
            signature = dict.fromkeys(kernel.arg_names, "*fp32") | {"logits": dtype, "grad": dtype, "targets": "*i64"}
            signature |= {"inverse": F32, "vocabulary": "i32", "block": "constexpr"}
            signature = {name: kind for name, kind in signature.items() if name in kernel.arg_names}
            constants = {(kernel.arg_names.index("block"),): triton_scores.BLOCK}
            source = ASTSource(kernel, signature, constexprs=constants)
            asked = options | {"enable_fp_fusion": fused or options["enable_fp_fusion"]}
            asm = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=asked).asm
            assert ("fma.rn.f32" in arithmetic(asm["ptx"])) is fused  # the logarithm's own flush subnormals
            assert asm["cubin"]

    def test_both_halves_of_a_block_come_from_one_hash(self) -> None:
        ttir = compiled("_perturb", 90)["ttir"]
        assert len(re.findall(r"arith\.muli .*tensor<512xi64>", ttir)) == 3
        assert ttir.count("tt.store") == 1


def test_they_are_chosen_for_cuda_tensors_of_their_dtypes() -> None:
    from threepo.posterior import triton_kernels

    with FakeTensorMode():  # tensors of a device that is not here, without memory
        mean, half = torch.empty(8, device="cuda"), torch.empty(8, device="cuda", dtype=torch.bfloat16)
        double, here = torch.empty(8, device="cuda", dtype=torch.float64), torch.empty(8)
    assert kernels.backend(mean, half, None) is triton_kernels
    assert kernels.backend(mean, double) is torch_kernels
    assert kernels.backend(mean, here) is torch_kernels


def test_a_triton_that_flushes_subnormals_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    from threepo.posterior import triton_kernels

    with FakeTensorMode():
        mean = torch.empty(8, device="cuda")
    monkeypatch.setattr(triton_kernels, "available", False)
    assert kernels.backend(mean) is torch_kernels
