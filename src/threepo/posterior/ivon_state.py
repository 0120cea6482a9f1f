"""IVON's state of each parameter, and the sums that it observes between two steps.

Of the tensors in `IVON.state[p]`, `hessian`, `momentum` and, for a parameter of low precision, `mean` (a float32
master) have the parameter's shape. `missed_steps` counts the steps of its group in which it had no gradient: 0-dim, on
the CPU, float32 like the step of torch's own optimizers. The momentum is debiased by the other steps, which updated it.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils.weak import TensorWeakRef

from threepo.errors import UserError
from threepo.posterior import kernels
from threepo.posterior.noise_sizes import arm_factor
from threepo.posterior.operations import AddNoiseTimes
from threepo.posterior.perturbation import eager
from threepo.posterior.policy_optimizer import Entry, model_name, named_in_groups
from threepo.posterior.shards import local
from threepo.types import Draw


def fill(state: dict[str, Any], p: torch.Tensor, group: dict[str, Any]) -> None:
    """Make the missing tensors of a parameter's state: float32, in its shape and on its devices."""
    if "hessian" not in state:
        zeros = torch.zeros_like(p, dtype=torch.float32, requires_grad=False, memory_format=torch.contiguous_format)
        state["hessian"], state["momentum"] = torch.full_like(zeros, group["hess_init"]), zeros
        state["missed_steps"] = torch.tensor(float(group["step"]), dtype=torch.float32, device="cpu")
    if "mean" not in state and p.dtype in (torch.bfloat16, torch.float16):
        state["mean"] = torch.empty_like(state["momentum"]).copy_(p.detach())


@torch.no_grad()
def follow(state: dict[str, Any], p: torch.Tensor) -> None:
    """Take over weights that were set before the first step, such as by DDP, which sends those of the first rank."""
    if "mean" in state and not torch.equal(local(p), local(state["mean"]).to(p.dtype)):
        state["mean"].copy_(p)


def matched(
    state_dict: dict[str, Any], param_groups: list[dict[str, Any]]
) -> list[tuple[dict[str, Any], torch.Tensor]]:
    """Every parameter of `param_groups` with its state in `state_dict`, which is empty where none was saved.

    `UserError` if that is not IVON's, or belongs to other parameters or another order of them.
    """
    found = []
    for group in state_dict["param_groups"]:
        if "noise_scale" not in group:  # ivon-opt has most of the other keys
            raise UserError("IVON state: was saved by another optimizer; load one of an IVON")
        names = group.get("param_names") or [None] * len(group["params"])
        found += [(name, state_dict["state"].get(key, {})) for name, key in zip(names, group["params"], strict=True)]
    pairs: list[tuple[dict[str, Any], torch.Tensor]] = []
    # Not strict, because torch refuses another number of parameters.
    for (saved, state), (name, p, group) in zip(found, named_in_groups(param_groups), strict=False):
        if saved and "param_names" in group and model_name(saved) != name:
            raise UserError(f"IVON state: has {saved!r} where this optimizer has {name!r}; give it the same order")
        if "hessian" in state and state["hessian"].shape != p.shape:
            shapes = f"{list(state['hessian'].shape)} in it and {list(p.shape)} here"
            raise UserError(f"IVON state: {name!r} has shape {shapes}; it belongs to another model")
        pairs.append((state, p))
    return pairs


class Held(NamedTuple):
    """A gradient that a parameter holds, without keeping it alive."""

    grad: TensorWeakRef
    version: int
    """How often it has been written in place; -1 if made in inference mode, where torch does not count."""


@eager
def _held(parameters: Iterable[torch.Tensor]) -> dict[torch.Tensor, Held]:
    found = {}
    for p in parameters:
        if p.grad is not None:
            found[p] = Held(TensorWeakRef(p.grad), -1 if p.grad.is_inference() else local(p.grad)._version)
    return found


class GradientDraws:
    """The draws at which the parameters got the gradients that they hold now."""

    def __init__(self) -> None:
        self.draws: set[Draw] = set()

    @contextmanager
    def noting(self, draw: Draw, parameters: Callable[[], Iterable[torch.Tensor]]) -> Iterator[None]:
        """Note the draw if gradients change in the body, and forget the others if none of theirs is left after it."""
        before = _held(parameters())
        try:
            yield
        finally:
            now = _held(parameters())
            left = {p for p, held in before.items() if p in now and now[p].grad() is held.grad()}
            if not left:
                self.draws.clear()
            if any(p not in left or held.version != before[p].version for p, held in now.items()):
                self.draws.add(draw)


@dataclass
class Observations:
    """The gradients since the last step, summed over draws, per parameter.

    A single draw needs no sums: its gradient is not copied, and the step multiplies it with its noise in passing.
    """

    draws: list[Draw | None] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    """Weight of each gradient in the step's batch, in any unit."""
    grad: dict[torch.Tensor, torch.Tensor] = field(default_factory=dict)
    """The gradient as backward left it if there is one draw; the sum over several draws in float32."""
    second: dict[torch.Tensor, torch.Tensor] = field(default_factory=dict)
    """Sum of noise * gradient / the factor of the draw's arm (price), or of squared gradients (gradsq); filled from the
    second draw on."""
    carried: dict[torch.Tensor, torch.Tensor] = field(default_factory=dict)
    """The last draw's gradient, where each draw's is added to the one before."""
    norm: float = 0.0
    """Norm of the last draw's gradient, over all parameters."""
    rejected: bool = False
    """A gradient was not finite, so there will be no step."""

    def add(
        self, found: Iterable[tuple[Entry, torch.Tensor]], draw: Draw | None, cumulative: bool, weight: float
    ) -> None:
        """Add the gradients of parameters at `draw`."""
        for entry, grad in found:
            self._add(entry, grad, draw, cumulative)
        self.draws.append(draw)
        self.weights.append(weight)

    def reach(self, name: str) -> float:
        """Share of the gradients that was taken under noise of the parameter with this name."""
        reached = [w for draw, w in zip(self.draws, self.weights, strict=True) if draw and arm_factor(draw.arm, name)]
        return math.fsum(reached) / (math.fsum(self.weights) or 1.0)

    def _add(self, entry: Entry, grad: torch.Tensor, draw: Draw | None, cumulative: bool) -> None:
        p = entry.p
        if local(grad)._is_view() or local(grad).untyped_storage().nbytes() > local(grad).nbytes:
            grad = grad.clone()  # a view of a buffer, such as DDP's, that the next backward writes into
        if cumulative:
            grad = self.carried[p] = self.carried[p] + grad if p in self.carried else grad
        if not self.draws:
            self.grad[p] = grad
            return
        earlier, owned = self.grad.get(p), p in self.second
        if not owned:
            self.second[p] = torch.zeros_like(p, dtype=torch.float32, requires_grad=False)
            if earlier is not None:
                self._add_second(entry, earlier, self.draws[0])
        self._add_second(entry, grad, draw)
        if earlier is None:
            self.grad[p] = grad.to(torch.float32, copy=True)
        elif owned:
            earlier.add_(grad)
        else:  # not in place: the caller may still use the first gradient
            self.grad[p] = earlier.float() + grad

    def _add_second(self, entry: Entry, grad: torch.Tensor, draw: Draw | None) -> None:
        second = self.second[entry.p]
        if entry.group["estimator"] == "gradsq":
            second.add_(grad.float().square())
        elif draw and (factor := arm_factor(draw.arm, entry.name)):
            scaled = grad if factor == 1.0 else grad.float() / factor
            kernels.run([AddNoiseTimes(second, scaled, entry.noise(draw))])
