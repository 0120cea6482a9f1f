"""Compiled libraries work after a fork, and a missing one is reported."""

from pathlib import Path

import pytest
import torch

from drawn import normal
from programs import run_program
from threepo import compiled
from threepo.compiled import Library
from threepo.posterior import native
from threepo.rollout import decode_attention, stacked_linear
from threepo.types import Draw

DRAW = Draw(0, 0, 0)
needs_native = pytest.mark.skipif(native.LIBRARY.loaded is None, reason="no compiled kernels here")


def test_a_missing_library_is_said_once_with_what_it_costs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The message comes at its first use; the numbers are the same without it."""
    expected = normal(DRAW, "weight", 0, 5000)
    monkeypatch.setattr(native, "LIBRARY", Library(tmp_path / "_native.so", 4, "everything takes twice as long"))
    assert capsys.readouterr().err == ""
    for _ in range(2):
        assert torch.equal(normal(DRAW, "weight", 0, 5000), expected)
    assert capsys.readouterr().err == (
        "threepo: _native.so is missing: everything takes twice as long, with torch instead; install a C "
        "compiler (cc, gcc or clang), then threepo again\n"
    )


def test_a_library_that_cannot_be_loaded_is_not_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "_native.so").write_text("of another processor")
    assert Library(tmp_path / "_native.so", 4, "all is slower").loaded is None
    assert capsys.readouterr().err.startswith("threepo: _native.so cannot be loaded: all is slower, with torch instead")


@pytest.mark.parametrize("library", [native.LIBRARY, decode_attention.LIBRARY, stacked_linear.LIBRARY])
def test_a_library_of_another_version_is_not_used(library: Library, capsys: pytest.CaptureFixture[str]) -> None:
    if library.loaded is None:
        pytest.skip("not compiled here")
    assert Library(library._path, 999, "all is slower").loaded is None
    assert f"{library._path.name} was compiled from another version of its source: all is slower" in (
        capsys.readouterr().err
    )


@needs_native
def test_one_thread_does_it_all_where_torch_has_no_openmp_team(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(3)
    expected = normal(DRAW, "weight", 0, 1 << 20)
    monkeypatch.setattr(compiled, "_openmp", None)
    assert torch.equal(normal(DRAW, "weight", 0, 1 << 20), expected)


def test_the_kernels_work_in_a_forked_process(tmp_path: Path) -> None:
    """Threads do not survive a fork: a team that was at work before must not be waited for after it."""
    program = """
import os, signal, torch
from threepo.posterior import kernels
from threepo.posterior.noise_structures import Noise
from threepo.posterior.operations import Perturb, Scalars

torch.set_num_threads(2)
mean, hessian, before, after = torch.ones(4, 1 << 20).unbind()  # before the fork: torch's own operations wait after it
scalars = Scalars(weight_decay=0.0, ess=1.0, fixed_root=0.0, noise_scale=1.0)
kernels.run([Perturb(before, mean, hessian, Noise((1, 2)), scalars)])
child = os.fork()
if not child:
    signal.alarm(30)  # a child that waits forever must not be left behind
kernels.run([Perturb(after, mean, hessian, Noise((1, 2)), scalars)])
same = bool((before.numpy() == after.numpy()).all())
if not child:
    os._exit(0 if same else 1)
assert same and os.waitpid(child, 0)[1] == 0
"""
    done = run_program(program, tmp_path)
    assert done.returncode == 0, done.stderr
