"""The operations in compiled C for CPUs (native.c), in as many threads as torch uses. Same bits as torch_kernels.py.

Optional (see threepo.compiled): without the library `takes` declines everything.
"""

import ctypes
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from threepo.compiled import Library
from threepo.posterior.operations import AddNoiseTimes, Operation, Perturb, Scalars, Update

LIBRARY = Library(
    Path(__file__).with_name("_native.so"), version=4, slower="drawing weights and IVON's steps take 8 times as long"
)
_FUNCTIONS = {Perturb: "perturb", AddNoiseTimes: "add_noise_times", Update: "update"}
_DTYPES = {torch.float32: 0, torch.bfloat16: 1}
_ESTIMATORS = {"none": 0, "price": 1, "gradsq": 2}
_SERIAL = 1 << 16
"""Elements below which a second thread costs more than it brings."""

# The structures of native.c.
_OPERATION = struct.Struct("@QQ4q7P4i")
_TENSORS = ("mean", "out", "hessian", "momentum", "grad", "second")


class _Scalars(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_float) for name in Scalars._fields[:-1]),
        ("estimator", ctypes.c_int32),
    )


class _Work(ctypes.Structure):
    _fields_ = (
        ("operations", ctypes.c_char_p),
        ("count", ctypes.c_int64),
        ("next", ctypes.c_int64),
        ("clipped", ctypes.POINTER(ctypes.c_int64)),
    )


def takes(*tensors: torch.Tensor | None) -> bool:
    """Whether these tensors can be handed to the library."""
    return (
        all(t is None or (t.is_cpu and t.dtype in _DTYPES and t.is_contiguous()) for t in tensors)
        and LIBRARY.loaded is not None
    )


def run(operations: Sequence[Operation]) -> list[torch.Tensor]:
    """See torch_kernels.run; all operations are of one kind."""
    kind = type(operations[0])
    made: dict[Scalars, _Scalars] = {}  # many operations have the same
    packed, total = [], 0
    for operation in operations:
        tensors: list[Any] = [getattr(operation, name, None) for name in _TENSORS]
        scalars = getattr(operation, "scalars", None)
        mean, out, _, _, grad, _ = tensors
        count = (mean if grad is None else grad).numel()
        total += count
        if scalars is not None and scalars not in made:
            made[scalars] = _Scalars(*scalars[:-1], _ESTIMATORS[scalars.estimator])
        pointers = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        address = 0 if scalars is None else ctypes.addressof(made[scalars])
        dtypes = [0 if tensor is None else _DTYPES[tensor.dtype] for tensor in (mean, out, grad)]
        key = operation.key or (0, 0)
        packed.append(_OPERATION.pack(*key, *operation.region, count, *pointers, address, *dtypes, 0))
    clipped = (ctypes.c_int64 * len(packed))()
    work = _Work(operations=b"".join(packed), count=total, clipped=clipped)
    threads = min(torch.get_num_threads(), -(-total // _SERIAL))
    LIBRARY.call(f"threepo_{_FUNCTIONS[kind]}", work, threads)
    return list(torch.tensor(list(clipped)).unbind()) if kind is Update else []
