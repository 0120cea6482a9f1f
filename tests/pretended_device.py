"""A pretended accelerator: its tensors lie in CPU memory, say that they are on another device, and refuse to mix.

Code that computes on it uses only tensors that it has put there, as it must on a GPU. What a GPU allows is allowed:
copies between devices, numbers of no dimension and indices from the CPU. Attention leaves its outputs in the order of
memory of CUDA's kernels. Gradients are not watched on their way back,
as autograd hands them on without their type.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from threepo.models.four_bit import FourBit

DEVICE = torch.device("ipu:0")
"""A type of device that torch knows by name, and has nothing for."""
_CPU = torch.device("cpu")
_COPIES = {"copy_", "_foreach_copy_", "__set__", "__get__", "_has_compatible_shallow_copy_type"}
_INDEXED = {"__getitem__", "__setitem__", "index_put_", "index_put", "index"}
_MOVES = {"to", "cpu", "type_as"}
_AS_PLAIN = {"numpy", "__array__", "data_ptr", "untyped_storage"}


class OnDevice(torch.Tensor):
    """A tensor on the pretended device."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """As in `Pretended`, also where no mode is active, as in the threads of autograd."""
        return _call(func, args, kwargs or {})


class Pretended(TorchFunctionMode):
    """Makes what is asked to be on the pretended device, and refuses to mix."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(func, args, kwargs or {})


def _call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = getattr(func, "__name__", "")
    owner = getattr(func, "__self__", None)
    if name == "_parse_to" or func is torch.device:  # which only read their arguments
        return func(*args, **kwargs)
    if name == "__get__" and args:
        found = _property(getattr(owner, "__name__", ""), args[0])
        if found is not None:
            return found
    if name == "__deepcopy__" and isinstance(args[0], OnDevice):
        return _copied(*args)
    leaves = list(_leaves((args, kwargs)))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if any(isinstance(leaf, torch.device | str) for leaf in leaves):
        args, kwargs, named = _told(args), _told(kwargs), (args, kwargs)
    else:
        named = args, kwargs
    there = any(map(_is_there, tensors))
    asked = _asked(name, *named)
    if there and name not in _MOVES | _COPIES:
        if name in _AS_PLAIN:
            if name in ("numpy", "__array__"):
                raise TypeError("a tensor of the pretended device has no numpy array; copy it to the CPU first")
        elif not _fits(name, args, tensors):
            shapes = [(tuple(t.shape), str(DEVICE if _is_there(t) else _CPU)) for t in tensors]
            raise RuntimeError(f"{name}: expected all tensors on one device, found {shapes}")
    with torch._C.DisableTorchFunction():
        there_too = torch.is_autocast_enabled(DEVICE.type)
        with torch.autocast("cpu", torch.get_autocast_dtype(DEVICE.type)) if there_too else nullcontext():
            result = func(*args, **kwargs)
        if there and name == "scaled_dot_product_attention":
            result = result.transpose(1, 2).contiguous().transpose(1, 2)
        if name in _MOVES and asked is not None and result is args[0] and there != (asked.type == DEVICE.type):
            result = result.clone()
    if name == "__set__" and getattr(owner, "__name__", "") == "data":
        _become(args[0], isinstance(args[1], OnDevice))
        return None
    if result is None or isinstance(result, bool | int | float | str | torch.Size):
        return result
    on_device = there if asked is None else asked.type == DEVICE.type
    if isinstance(result, torch.Tensor):
        return _placed(result, on_device, tensors)
    return tree_map(lambda value: _placed(value, on_device, tensors), result)


def _leaves(value: Any) -> Iterator[Any]:
    """All that is in tuples, lists and dictionaries; torch's own function takes ten times as long."""
    if isinstance(value, tuple | list):
        for one in value:
            yield from _leaves(one)
    elif isinstance(value, dict):
        yield from _leaves(list(value.values()))
    else:
        yield value


def _is_there(tensor: torch.Tensor) -> bool:
    """True if a tensor is on the device; one in four bits is where these are."""
    return isinstance(tensor.codes if isinstance(tensor, FourBit) else tensor, OnDevice)


def _placed(value: Any, on_device: bool, given: list[torch.Tensor]) -> Any:
    """A result where it belongs; what was given and comes back, as from operations in place, is left as it is."""
    if not isinstance(value, torch.Tensor) or isinstance(value, FourBit) or any(value is one for one in given):
        return value
    with torch._C.DisableTorchFunction():
        if on_device and not isinstance(value, OnDevice):
            return value.as_subclass(OnDevice)
        if not on_device and isinstance(value, OnDevice):
            return value.clone().as_subclass(torch.Tensor)
    return value


def _copied(tensor: OnDevice, memo: dict[int, Any]) -> Any:
    """A deep copy, unless it has been made."""
    if id(tensor) not in memo:
        copied = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        copied._is_param = isinstance(tensor, torch.nn.Parameter)
        memo[id(tensor)] = copied
    return memo[id(tensor)]


def _become(tensor: torch.Tensor, on_device: bool) -> None:
    """Let a tensor whose data was replaced say that it is where the data is."""
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    if on_device and not isinstance(tensor, OnDevice):
        tensor.__class__ = OnDevice
        tensor._is_param = is_parameter
    elif not on_device and isinstance(tensor, OnDevice):
        tensor.__class__ = torch.nn.Parameter if is_parameter else torch.Tensor


def _property(name: str, tensor: Any) -> Any:
    """What a tensor of the pretended device says of itself, where that differs from the CPU."""
    if not _is_there(tensor):
        return None
    return {"device": DEVICE, "is_cpu": False, "is_cuda": False}.get(name)


def _asked(name: str, args: Any, kwargs: Any) -> torch.device | None:
    """The device that a call names."""
    named = _CPU if name == "cpu" else kwargs.get("device")
    if name in ("to", "type_as"):
        first = args[1] if len(args) > 1 else kwargs.get("other")
        if isinstance(first, torch.Tensor):
            return DEVICE if isinstance(first, OnDevice) else _CPU
        if isinstance(first, str | torch.device):
            named = first
    return None if named is None else torch.device(named)


def _told(value: Any) -> Any:
    """Arguments with the CPU in place of the pretended device."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, torch.device) and leaf.type == DEVICE.type:
            return _CPU
        return "cpu" if isinstance(leaf, str) and leaf.startswith(DEVICE.type) else leaf

    return tree_map(one, value)


def _fits(name: str, args: Any, tensors: list[torch.Tensor]) -> bool:
    """True if a GPU would take these tensors together."""
    if torch._C._current_graph_task_id() != -1:  # in a backward pass
        return True
    if name in _INDEXED:
        return isinstance(args[0], OnDevice)
    with torch._C.DisableTorchFunction():
        return all(_is_there(tensor) or tensor.dim() == 0 for tensor in tensors)


@contextmanager
def pretended_device() -> Iterator[torch.device]:
    """The device, for the body."""
    run = threading.Thread.run

    def run_pretending(thread: threading.Thread) -> None:
        with Pretended():
            run(thread)

    module = SimpleNamespace(_initialized=False)
    threads = patch.object(threading.Thread, "run", run_pretending)
    with Pretended(), threads, patch.object(torch, DEVICE.type, module, create=True):
        yield DEVICE
