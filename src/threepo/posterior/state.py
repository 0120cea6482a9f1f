"""What IVON holds for a parameter, between steps and since the last one.

`IVON.state[p]` has `hessian`, `momentum` and, for a parameter of low precision, `mean` (a float32 master), all of the
parameter's shape; and `missed_steps`, the steps of its group in which it had no gradient: 0-dim, on the CPU, float32
like the step of torch's own optimizers. The momentum is debiased by the other steps, in which it was updated.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from threepo.errors import UserError
from threepo.posterior import kernels
from threepo.posterior.layout import local
from threepo.posterior.noise import noise_key
from threepo.posterior.operations import AddNoiseTimes
from threepo.posterior.policy_optimizer import named_in_groups, plain_name
from threepo.types import Draw


def fill(state: dict[str, Any], p: torch.Tensor, group: dict[str, Any]) -> None:
    """Make what is missing of a parameter's state; tensors have its shape and placement and are float32."""
    if "hessian" not in state:
        zeros = torch.zeros_like(p, dtype=torch.float32, requires_grad=False, memory_format=torch.contiguous_format)
        state["hessian"], state["momentum"] = torch.full_like(zeros, group["hess_init"]), zeros
        state["missed_steps"] = torch.tensor(float(group["step"]))
    if "mean" not in state and p.dtype in (torch.bfloat16, torch.float16) and group["master_weights"]:
        state["mean"] = torch.empty_like(state["momentum"]).copy_(p.detach())


def count_missed(states: Mapping[torch.Tensor, dict[str, Any]], moved: Mapping[torch.Tensor, object]) -> None:
    """Count a step for the parameters that are not moved in it."""
    for p, state in states.items():
        if p not in moved:
            state["missed_steps"] += 1


def updates_of(state: dict[str, Any], group: dict[str, Any]) -> int:
    """Steps that have updated the parameter's momentum, the current one included."""
    return int(group["step"]) - int(state["missed_steps"])


def missed_steps(saved: Mapping[str, Any]) -> torch.Tensor:
    """The count in saved state. Older versions saved the first step of late parameters, counted from 1, or nothing."""
    missed = saved.get("missed_steps", saved.get("first_step", torch.tensor(1.0)) - 1)
    return missed.detach().to("cpu", torch.float32, copy=True)  # type: ignore[no-any-return]


def loaded(saved: Mapping[str, torch.Tensor], p: torch.Tensor) -> dict[str, torch.Tensor]:
    """A copy of a parameter's saved state, in float32 whatever its dtype is (torch would cast it to that)."""
    tensors = {name: value.detach() for name, value in saved.items() if name not in ("missed_steps", "first_step")}
    copies = {name: value.to(p.device, torch.float32, copy=True) for name, value in tensors.items()}
    return copies | {"missed_steps": missed_steps(saved)}


def saved_in_order(state_dict: dict[str, Any]) -> list[dict[str, torch.Tensor]]:
    """What an optimizer's `state_dict` holds of every parameter; empty where nothing."""
    return [state_dict["state"].get(key, {}) for group in state_dict["param_groups"] for key in group["params"]]


def check_saved(state_dict: dict[str, Any], param_groups: list[dict[str, Any]]) -> None:
    """Raise `UserError` if saved state is not IVON's, or of other parameters or another order of them."""
    if any("hess_init" not in group for group in state_dict["param_groups"]):
        raise UserError("IVON state: was saved by another optimizer; load one of an IVON")
    own = named_in_groups(param_groups)
    names = [plain_name(name) for group in state_dict["param_groups"] for name in group.get("param_names", ())]
    # Where they differ in number, torch says so.
    for saved, (name, _, group) in zip(names, own, strict=False):
        if "param_names" in group and saved != name:
            raise UserError(f"IVON state: holds {saved!r} where this optimizer has {name!r}; give it the same order")
    for state, (name, p, _) in zip(saved_in_order(state_dict), own, strict=False):
        if "hessian" in state and state["hessian"].shape != p.shape:
            raise UserError(
                f"IVON state: {name!r} has shape {list(state['hessian'].shape)} there, {list(p.shape)} here; "
                f"it belongs to another model"
            )


@dataclass
class Observations:
    """Sums over the draws since the last step, per parameter.

    With a single draw nothing is copied, and its second statistic is not made.
    """

    draws: list[Draw | None] = field(default_factory=list)
    grad: dict[torch.Tensor, torch.Tensor] = field(default_factory=dict)
    """Of one draw: the gradient as backward left it. Of several: their sum in float32."""
    second: dict[torch.Tensor, torch.Tensor] = field(default_factory=dict)
    """Sum of noise * gradient (price), or of squared gradients (gradsq); filled from the second draw on."""
    carried: dict[torch.Tensor, torch.Tensor] = field(default_factory=dict)
    """The last draw's gradient, where each draw's is added to the one before."""
    norm: float = 0.0
    """Of the last draw's gradient, over all parameters."""
    rejected: bool = False
    """A gradient was not finite, so there will be no step."""

    def add(
        self,
        found: Iterable[tuple[str, torch.Tensor, dict[str, Any], torch.Tensor]],
        draw: Draw | None,
        cumulative: bool,
    ) -> None:
        """Take in the gradients at `draw`, as (name, parameter, group, gradient)."""
        kernels.run([product for entry in found for product in self._add(*entry, draw, cumulative)])
        self.draws.append(draw)

    def _add(
        self,
        name: str,
        p: torch.Tensor,
        group: dict[str, Any],
        grad: torch.Tensor,
        draw: Draw | None,
        cumulative: bool,
    ) -> Iterator[AddNoiseTimes]:
        """Take in one gradient. Yields what is still to be added up: for all parameters together that is faster."""
        if local(grad)._is_view() or local(grad).untyped_storage().nbytes() > local(grad).nbytes:
            grad = grad.clone()  # of a buffer, such as DDP's, that the next backward writes into
        if cumulative:
            grad = self.carried[p] = self.carried[p] + grad if p in self.carried else grad
        earlier = self.grad.get(p)
        if earlier is None and not self.draws:
            self.grad[p] = grad
            return
        owned = p in self.second  # then self.grad[p] is our sum, and not what backward left
        if not owned:
            self.second[p] = torch.zeros_like(p, dtype=torch.float32, requires_grad=False)
            if earlier is not None:
                # At once, because two threads must not add to the same sum.
                kernels.run(_add_second(self.second[p], earlier, self.draws[0], name, group))
        yield from _add_second(self.second[p], grad, draw, name, group)
        if earlier is None:
            self.grad[p] = grad.to(torch.float32, copy=True)
        elif owned:
            earlier.add_(grad)
        else:  # whoever made the gradients may hold on to them
            self.grad[p] = earlier.float() + grad


def _add_second(
    second: torch.Tensor, grad: torch.Tensor, draw: Draw | None, name: str, group: dict[str, Any]
) -> Iterator[AddNoiseTimes]:
    if group["estimator"] == "gradsq":
        second.add_(grad.float().square())
    elif draw is not None:
        yield AddNoiseTimes(second, grad, noise_key(draw, name))


@dataclass
class LastStep:
    """What there is to report of a step."""

    grad_norm: float
    clipped: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """Parameters, and how many of their local coordinates were clipped: read when somebody asks."""
