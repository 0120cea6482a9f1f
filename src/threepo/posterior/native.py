"""The operations in compiled C for CPUs (native.c), in as many threads as torch uses. Same bits as torch_kernels.py.

Optional (see threepo.compiled): without the library `takes` declines everything.
"""

import ctypes
import struct
from collections.abc import Sequence
from pathlib import Path

import torch

from threepo.compiled import SERIAL, Library, fields
from threepo.posterior.operations import AddNoiseTimes, Operation, Perturb, Scalars, Update

_SLOWER = "drawing weights and IVON's steps take 8 times as long"
LIBRARY = Library(Path(__file__).with_name("_native.so"), version=6, slower=_SLOWER)
_FUNCTIONS = {Perturb: "perturb", AddNoiseTimes: "add_noise_times", Update: "update"}
_DTYPES = {torch.float32: 0, torch.bfloat16: 1}
_ESTIMATORS = {"none": 0, "price": 1, "gradsq": 2}

# The structures of native.c.
_OPERATION = struct.Struct("@QQ4q7P4i")
_TENSORS = ("mean", "out", "grad", "hessian", "momentum", "second")
"""Tensors in the order of their pointers; the first three have dtypes."""


class _Scalars(ctypes.Structure):
    _fields_ = fields(float=" ".join(Scalars._fields[:-1]), int32="estimator")


class _Bits(ctypes.Structure):
    _fields_ = fields(void_p="data", int64="count next sum", int32="dtype")


class _Work(ctypes.Structure):
    _fields_ = fields(char_p="operations", int64="count next", void_p="clipped")


def takes(*tensors: torch.Tensor | None) -> bool:
    """True if these tensors can be handed to the library."""
    fit = all(t is None or (t.is_cpu and t.dtype in _DTYPES and t.is_contiguous()) for t in tensors)
    return fit and LIBRARY.loaded is not None


def run(operations: Sequence[Operation]) -> list[torch.Tensor]:
    """See torch_kernels.run; all operations are of one kind."""
    kind = type(operations[0])
    made: dict[Scalars, _Scalars] = {}  # many operations have the same
    packed, total = [], 0
    for operation in operations:
        tensors = [getattr(operation, name, None) for name in _TENSORS]
        pointers = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        dtypes = [0 if tensor is None else _DTYPES[tensor.dtype] for tensor in tensors[:3]]
        count = getattr(operation, operation.WRITTEN[0]).numel()
        total += count
        if (scalars := getattr(operation, "scalars", None)) and scalars not in made:
            made[scalars] = _Scalars(*scalars[:-1], _ESTIMATORS[scalars.estimator])
        address = ctypes.addressof(made[scalars]) if scalars else 0
        key, sign = (operation.noise.key, operation.noise.sign) if operation.noise else ((0, 0), 1)
        packed.append(_OPERATION.pack(*key, *operation.region, count, *pointers, address, *dtypes, sign))
    clipped = (ctypes.c_int64 * len(packed))()
    work = _Work(operations=b"".join(packed), count=total, clipped=ctypes.addressof(clipped))
    LIBRARY.call(f"threepo_{_FUNCTIONS[kind]}", work, min(torch.get_num_threads(), -(-total // SERIAL)))
    return list(torch.tensor(list(clipped)).unbind()) if kind is Update else []


def bit_sum(tensor: torch.Tensor) -> int:
    """See rollout/bit_sums.py; for a tensor that the library `takes`."""
    work = _Bits(data=tensor.data_ptr(), count=tensor.numel(), dtype=_DTYPES[tensor.dtype])
    LIBRARY.call("threepo_bit_sum", work, min(torch.get_num_threads(), -(-tensor.numel() // SERIAL)))
    return int(work.sum)
