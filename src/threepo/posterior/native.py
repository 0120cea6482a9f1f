"""The compiled CPU kernels (native.c), in as many threads as torch uses. Same functions, same bits as plain.py.

The library is optional (see threepo.compiled): without it `available` is False and plain.py does the work.
"""

import ctypes
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from threepo.compiled import load_library, together
from threepo.posterior.noise import Key
from threepo.posterior.operands import AddNoiseTimes, Perturb, Place, Update
from threepo.posterior.scalars import ESTIMATE_BOUND, HESSIAN_RANGE, Scale, StepNumbers

VERSION = 3
"""Of the interface to native.c, which has the same number."""
LIBRARY = Path(__file__).with_name("_native.so")
_DTYPES = {torch.float32: 0, torch.bfloat16: 1}
_ESTIMATORS = {"none": 0, "price": 1, "gradsq": 2}
_SERIAL = 1 << 16
"""Elements below which a second thread costs more than it brings."""


_JOB = struct.Struct("@QQ4q7P4i")
"""Job of native.c."""


class _Numbers(ctypes.Structure):
    _fields_ = (
        *(
            (name, ctypes.c_float)
            for name in (
                *("weight_decay", "ess", "root", "noise_scale"),
                *("beta1", "grad_weight", "beta2", "estimate_weight", "retraction_weight", "second_factor"),
                *("momentum_factor", "clip_radius", "step_size", "estimate_bound", "hessian_low", "hessian_high"),
            )
        ),
        ("estimator", ctypes.c_int32),
    )


class _Work(ctypes.Structure):
    _fields_ = (
        ("jobs", ctypes.c_char_p),
        *((name, ctypes.c_int64) for name in ("count", "next")),
        ("clipped", ctypes.POINTER(ctypes.c_int64)),
    )


def _load() -> ctypes.CDLL | None:
    library = load_library(LIBRARY, "threepo_version", VERSION)
    if library is None:
        return None
    for name in ("normal", "perturb", "add_noise_times", "update"):
        function = getattr(library, f"threepo_{name}")
        function.argtypes, function.restype = (ctypes.c_void_p,), None
    return library


_library = _load()
available = _library is not None


def takes(*tensors: torch.Tensor | None) -> bool:
    """Whether these tensors can be handed to the library."""
    return available and all(t is None or (t.is_cpu and t.dtype in _DTYPES and t.is_contiguous()) for t in tensors)


class _Jobs:
    """An array of jobs for the library, and what has to stay alive with it."""

    def __init__(self) -> None:
        self.packed: list[bytes] = []
        self.count = 0
        self._numbers: dict[int, tuple[object, _Numbers, int]] = {}

    def add(
        self,
        count: int,
        place: Place,
        key: Key | None,
        numbers: int = 0,
        *,
        mean: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        hessian: torch.Tensor | None = None,
        momentum: torch.Tensor | None = None,
        grad: torch.Tensor | None = None,
        second: torch.Tensor | None = None,
    ) -> None:
        self.count += count
        self.packed.append(
            _JOB.pack(
                *(key or (0, 0)),
                *(*place, count),
                *(_at(mean), _at(out), _at(hessian), _at(momentum), _at(grad), _at(second), numbers),
                *(_dtype(mean), _dtype(out), _dtype(grad), 0),
            )
        )

    def numbers(self, of: Scale | StepNumbers) -> int:
        """Address of the library's form of these numbers; many jobs have the same."""
        if id(of) not in self._numbers:
            made = _scale_numbers(of) if isinstance(of, Scale) else _step_numbers(of)
            self._numbers[id(of)] = (of, made, ctypes.addressof(made))
        return self._numbers[id(of)][2]

    def run(self, function: Any) -> list[int]:
        """All jobs, shared out to the threads; how many coordinates of each an update clipped."""
        clipped = (ctypes.c_int64 * len(self.packed))()
        work = _Work(jobs=b"".join(self.packed), count=self.count, clipped=clipped)
        together(function, work, min(torch.get_num_threads(), -(-self.count // _SERIAL)))
        return list(clipped)


def _at(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _dtype(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else _DTYPES[tensor.dtype]


def _scale_numbers(scale: Scale) -> _Numbers:
    return _Numbers(
        weight_decay=scale.weight_decay, ess=scale.ess, root=scale.fixed_root, noise_scale=scale.noise_scale
    )


def _step_numbers(numbers: StepNumbers) -> _Numbers:
    made = _scale_numbers(numbers.scale)
    made.beta1, made.grad_weight, made.beta2 = numbers.beta1, numbers.grad_weight, numbers.beta2
    made.estimate_weight, made.retraction_weight = 1 - numbers.beta2, numbers.retraction_weight
    made.second_factor, made.momentum_factor = numbers.estimate_factor, 1 / numbers.debias
    made.clip_radius, made.step_size = numbers.clip_radius, numbers.step_size
    made.estimate_bound, (made.hessian_low, made.hessian_high) = ESTIMATE_BOUND, HESSIAN_RANGE
    made.estimator = _ESTIMATORS[numbers.estimator]
    return made


def normal(out: torch.Tensor, key: Key, place: Place) -> None:
    """See plain.normal."""
    assert _library is not None
    jobs = _Jobs()
    jobs.add(out.numel(), place, key, out=out)
    jobs.run(_library.threepo_normal)


def perturb(work: Sequence[Perturb]) -> None:
    """See plain.perturb."""
    assert _library is not None
    jobs = _Jobs()
    for out, mean, hessian, key, scale, place in work:
        jobs.add(mean.numel(), place, key, jobs.numbers(scale), mean=mean, out=out, hessian=hessian)
    jobs.run(_library.threepo_perturb)


def add_noise_times(work: Sequence[AddNoiseTimes]) -> None:
    """See plain.add_noise_times."""
    assert _library is not None
    jobs = _Jobs()
    for total, grad, key, place in work:
        jobs.add(grad.numel(), place, key, grad=grad, second=total)
    jobs.run(_library.threepo_add_noise_times)


def update(work: Sequence[Update]) -> list[torch.Tensor]:
    """See plain.update."""
    assert _library is not None
    jobs = _Jobs()
    for state, (grad, second, key), numbers, place in work:
        tensors = {"mean": state.mean, "out": state.copy, "hessian": state.hessian, "momentum": state.momentum}
        jobs.add(grad.numel(), place, key, jobs.numbers(numbers), grad=grad, second=second, **tensors)
    return list(torch.tensor(jobs.run(_library.threepo_update)).unbind())
