"""What IVON holds for one parameter, in `IVON.state[p]`.

`hessian`, `momentum` and, for a parameter of low precision, `mean` (a float32 master) have the parameter's shape.
`missed_steps` counts the steps of its group in which it had no gradient: 0-dim, on the CPU, float32 like the step of
torch's own optimizers. The momentum is debiased by the other steps, those that updated it.
"""

from collections.abc import Mapping
from typing import Any

import torch

from threepo.errors import UserError
from threepo.posterior.policy_optimizer import model_name, named_in_groups


def fill(state: dict[str, Any], p: torch.Tensor, group: dict[str, Any]) -> None:
    """Make the missing tensors of a parameter's state: float32, in its shape and on its devices."""
    if "hessian" not in state:
        zeros = torch.zeros_like(p, dtype=torch.float32, requires_grad=False, memory_format=torch.contiguous_format)
        state["hessian"], state["momentum"] = torch.full_like(zeros, group["hess_init"]), zeros
        state["missed_steps"] = torch.tensor(float(group["step"]))
    if "mean" not in state and p.dtype in (torch.bfloat16, torch.float16) and group["master_weights"]:
        state["mean"] = torch.empty_like(state["momentum"]).copy_(p.detach())


def missed_steps(saved: Mapping[str, Any]) -> torch.Tensor:
    """The count in saved state. Older versions saved the first step of late parameters, counted from 1, or nothing."""
    missed = saved.get("missed_steps", saved.get("first_step", torch.tensor(1.0)) - 1)
    return missed.detach().to("cpu", torch.float32, copy=True)  # type: ignore[no-any-return]


def loaded(saved: Mapping[str, torch.Tensor], p: torch.Tensor) -> dict[str, torch.Tensor]:
    """A copy of a parameter's saved state, in float32 for a parameter of any dtype (torch would cast it to that)."""
    tensors = {name: value.detach() for name, value in saved.items() if name not in ("missed_steps", "first_step")}
    copies = {name: value.to(p.device, torch.float32, copy=True) for name, value in tensors.items()}
    return copies | {"missed_steps": missed_steps(saved)}


def saved_in_order(state_dict: dict[str, Any]) -> list[tuple[str | None, dict[str, torch.Tensor]]]:
    """Name (None: saved without names) and state (empty: none saved) of every parameter in a `state_dict`."""
    found: list[tuple[str | None, dict[str, torch.Tensor]]] = []
    for group in state_dict["param_groups"]:
        names = group.get("param_names") or [None] * len(group["params"])
        found += [(name, state_dict["state"].get(key, {})) for name, key in zip(names, group["params"], strict=True)]
    return found


def check_saved(state_dict: dict[str, Any], param_groups: list[dict[str, Any]]) -> None:
    """`UserError` if saved state is not IVON's, or belongs to other parameters or another order of them."""
    if any("hess_init" not in group for group in state_dict["param_groups"]):
        raise UserError("IVON state: was saved by another optimizer; load one of an IVON")
    # Torch refuses another number of parameters.
    for (saved, state), (name, p, group) in zip(
        saved_in_order(state_dict), named_in_groups(param_groups), strict=False
    ):
        if saved and "param_names" in group and model_name(saved) != name:
            raise UserError(f"IVON state: has {saved!r} where this optimizer has {name!r}; give it the same order")
        if "hessian" in state and state["hessian"].shape != p.shape:
            shapes = f"{list(state['hessian'].shape)} in it and {list(p.shape)} here"
            raise UserError(f"IVON state: {name!r} has shape {shapes}; it belongs to another model")
