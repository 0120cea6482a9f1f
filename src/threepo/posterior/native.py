"""The compiled CPU kernels (native.c), in as many threads as torch uses. Same functions, same bits as plain.py.

The library is compiled when the package is built (see hatch_build.py) and is optional: without a C compiler there,
`available` is False and plain.py does the work.
"""

import ctypes
import os
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import torch

from threepo.errors import ThreepoWarning
from threepo.posterior.noise import BLOCK, Key
from threepo.posterior.operands import Seen, State
from threepo.posterior.scalars import ESTIMATE_BOUND, HESSIAN_RANGE, Scale, StepNumbers

VERSION = 1
"""Of the interface to native.c, which has the same number."""
LIBRARY = Path(__file__).with_name("_native.so")
_DTYPES = {torch.float32: 0, torch.bfloat16: 1}
_ESTIMATORS = {"none": 0, "price": 1, "gradsq": 2}
_SERIAL = 1 << 16
"""Elements below which a second thread costs more than it brings."""


class _Key(ctypes.Structure):
    _fields_ = (("first", ctypes.c_uint64), ("second", ctypes.c_uint64))


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


def _load() -> ctypes.CDLL | None:
    if not LIBRARY.is_file():
        return None
    library = ctypes.CDLL(str(LIBRARY))
    if not hasattr(library, "threepo_version") or library.threepo_version() != VERSION:
        warnings.warn(
            f"{LIBRARY} was compiled from another native.c; install threepo again", ThreepoWarning, stacklevel=2
        )
        return None
    i32, i64, pointer = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p
    numbers = ctypes.POINTER(_Numbers)
    address = (_Key, i64, i64)
    library.threepo_normal.argtypes = (*address, pointer)
    library.threepo_perturb.argtypes = (*address, pointer, i32, pointer, i32, pointer, numbers)
    library.threepo_add_noise_times.argtypes = (*address, pointer, i32, pointer)
    library.threepo_update.argtypes = (
        *(*address, pointer, i32, pointer, i32, pointer, pointer, pointer, i32, pointer, numbers),
    )
    for function in (library.threepo_normal, library.threepo_perturb, library.threepo_add_noise_times):
        function.restype = None
    library.threepo_update.restype = i64
    return library


_library = _load()
available = _library is not None

_pool: ThreadPoolExecutor | None = None


def _forget_pool() -> None:
    global _pool
    _pool = None


os.register_at_fork(after_in_child=_forget_pool)  # threads do not survive a fork


def takes(*tensors: torch.Tensor | None) -> bool:
    """Whether these tensors can be handed to the library."""
    return available and all(
        t is None or (t.device.type == "cpu" and t.dtype in _DTYPES and t.is_contiguous()) for t in tensors
    )


def _in_threads(count: int, work: Callable[[int, int], int | None]) -> int:
    """Call work(first, size) over [0, count) in whole blocks, in torch's number of threads; the sum of the results."""
    global _pool
    threads = min(torch.get_num_threads(), -(-count // _SERIAL))
    if threads <= 1:
        return work(0, count) or 0
    if _pool is None or _pool._max_workers < threads - 1:
        _pool = ThreadPoolExecutor(threads - 1, "threepo-noise")
    size = -(-count // (threads * BLOCK)) * BLOCK
    others: list[Future[int | None]] = []
    try:
        for first in range(size, count, size):
            others.append(_pool.submit(work, first, min(size, count - first)))  # noqa: PERF401 - interrupts lose none
        total = work(0, size) or 0
    finally:
        _wait_for(others)
    return total + sum(other.result() or 0 for other in others)


def _wait_for(others: list[Future[int | None]]) -> None:
    """Until all are done, however often Ctrl-C is pressed: nobody may write into a tensor that was given back."""
    interrupt: KeyboardInterrupt | None = None
    while not all(other.done() for other in others):
        try:
            wait(others)
        except KeyboardInterrupt as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt


def _at(tensor: torch.Tensor | None, element: int) -> int | None:
    return None if tensor is None else tensor.data_ptr() + element * tensor.element_size()


def _dtype(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else _DTYPES[tensor.dtype]


def _scale_numbers(scale: Scale) -> _Numbers:
    return _Numbers(
        weight_decay=scale.weight_decay, ess=scale.ess, root=scale.fixed_root, noise_scale=scale.noise_scale
    )


def normal(out: torch.Tensor, key: Key, start: int) -> None:
    """See plain.normal."""
    assert _library is not None
    function = _library.threepo_normal
    _in_threads(len(out), lambda first, size: function(_Key(*key), start + first, size, _at(out, first)))


def perturb(
    out: torch.Tensor,
    mean: torch.Tensor,
    hessian: torch.Tensor,
    key: Key,
    start: int,
    scale: Scale,
) -> None:
    """See plain.perturb."""
    assert _library is not None
    function, numbers = _library.threepo_perturb, _scale_numbers(scale)

    def work(first: int, size: int) -> None:
        function(
            *(_Key(*key), start + first, size, _at(mean, first), _dtype(mean), _at(out, first), _dtype(out)),
            *(_at(hessian, first), numbers),
        )

    _in_threads(len(mean), work)


def add_noise_times(total: torch.Tensor, grad: torch.Tensor, key: Key, start: int) -> None:
    """See plain.add_noise_times."""
    assert _library is not None
    function = _library.threepo_add_noise_times
    _in_threads(
        len(grad),
        lambda first, size: function(
            _Key(*key), start + first, size, _at(grad, first), _dtype(grad), _at(total, first)
        ),
    )


def update(state: State, seen: Seen, start: int, numbers: StepNumbers) -> torch.Tensor:
    """See plain.update."""
    assert _library is not None
    function, packed = _library.threepo_update, _scale_numbers(numbers.scale)
    packed.beta1, packed.grad_weight, packed.beta2 = numbers.beta1, numbers.grad_weight, numbers.beta2
    packed.estimate_weight, packed.retraction_weight = 1 - numbers.beta2, numbers.retraction_weight
    packed.second_factor, packed.momentum_factor = numbers.estimate_factor, 1 / numbers.debias
    packed.clip_radius, packed.step_size = numbers.clip_radius, numbers.step_size
    packed.estimate_bound, (packed.hessian_low, packed.hessian_high) = ESTIMATE_BOUND, HESSIAN_RANGE
    packed.estimator = _ESTIMATORS[numbers.estimator]
    noise = _Key(*(seen.key or (0, 0)))
    mean, copy, grad = state.mean, state.copy, seen.grad

    def work(first: int, size: int) -> int:
        clipped: int = function(
            *(noise, start + first, size, _at(mean, first), _dtype(mean), _at(copy, first), _dtype(copy)),
            *(_at(state.hessian, first), _at(state.momentum, first)),
            *(_at(grad, first), _dtype(grad), _at(seen.second, first), packed),
        )
        return clipped

    return torch.tensor(_in_threads(len(mean), work))
