"""The operations in compiled C for CPUs (native.c), in as many threads as torch uses. Same bits as torch_kernels.py.

Optional (see threepo.compiled): without the library `takes` declines everything.
"""

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from threepo.compiled import SERIAL, Library, fields
from threepo.posterior.operations import AddNoiseTimes, Operation, Perturb, Scalars, Update

_SLOWER = "drawing weights and IVON's steps take 8 times as long"
LIBRARY = Library(Path(__file__).with_name("_native.so"), version=4, slower=_SLOWER)
_FUNCTIONS = {Perturb: "perturb", AddNoiseTimes: "add_noise_times", Update: "update"}
_DTYPES = {torch.float32: 0, torch.bfloat16: 1}
_ESTIMATORS = {"none": 0, "price": 1, "gradsq": 2}

# The structures of native.c.
_OPERATION = struct.Struct("@QQ4q7P4i")
_TENSORS = ("mean", "out", "hessian", "momentum", "grad", "second")


class _Scalars(ctypes.Structure):
    _fields_ = fields(float=" ".join(Scalars._fields[:-1]), int32="estimator")


class _Work(ctypes.Structure):
    _fields_ = fields(char_p="operations", int64="count next", void_p="clipped")


def takes(*tensors: torch.Tensor | None) -> bool:
    """Whether these tensors can be handed to the library."""
    fit = all(t is None or (t.is_cpu and t.dtype in _DTYPES and t.is_contiguous()) for t in tensors)
    return fit and LIBRARY.loaded is not None


def _unsigned(operation: Operation) -> Operation:
    """The same operation with noise of sign 1: the library knows no other."""
    if operation.noise is None or operation.noise.sign > 0:
        return operation
    noise = replace(operation.noise, sign=1)
    if isinstance(operation, AddNoiseTimes):
        return replace(operation, noise=noise, grad=-operation.grad)
    n = operation.scalars
    n = n._replace(noise_scale=-n.noise_scale)
    if n.estimator == "price" and isinstance(operation, Update) and operation.second is None:
        n = n._replace(estimate_factor=-n.estimate_factor)
    return replace(operation, noise=noise, scalars=n)


def run(operations: Sequence[Operation]) -> list[torch.Tensor]:
    """See torch_kernels.run; all operations are of one kind."""
    kind = type(operations[0])
    operations = [_unsigned(operation) for operation in operations]  # holds the tensors that this makes
    made: dict[Scalars, _Scalars] = {}  # many operations have the same
    packed, total = [], 0
    for operation in operations:
        tensors = [getattr(operation, name, None) for name in _TENSORS]
        pointers = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        dtypes = [0 if tensor is None else _DTYPES[tensor.dtype] for tensor in (tensors[0], tensors[1], tensors[4])]
        count = getattr(operation, operation.WRITTEN[0]).numel()
        total += count
        if (scalars := getattr(operation, "scalars", None)) and scalars not in made:
            made[scalars] = _Scalars(*scalars[:-1], _ESTIMATORS[scalars.estimator])
        address = ctypes.addressof(made[scalars]) if scalars else 0
        key = operation.noise.key if operation.noise else (0, 0)
        packed.append(_OPERATION.pack(*key, *operation.region, count, *pointers, address, *dtypes, 0))
    clipped = (ctypes.c_int64 * len(packed))()
    work = _Work(operations=b"".join(packed), count=total, clipped=ctypes.addressof(clipped))
    LIBRARY.call(f"threepo_{_FUNCTIONS[kind]}", work, min(torch.get_num_threads(), -(-total // SERIAL)))
    return list(torch.tensor(list(clipped)).unbind()) if kind is Update else []
