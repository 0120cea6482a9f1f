"""IVON's groups: numbers made of their settings, the state of each parameter, and sums observed since a step.

Of the tensors in `IVON.state[p]`, `hessian`, `momentum` and, for a parameter of low precision, `mean` (a float32
master) have the parameter's shape. `missed_steps` counts the steps of its group in which it had no gradient: 0-dim, on
the CPU, float32 like the step of torch's own optimizers. The momentum is debiased by the other steps, which updated it.
"""

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from threepo.errors import ThreepoWarning, UserError
from threepo.posterior import kernels
from threepo.posterior.noise_structures import check_structure
from threepo.posterior.operations import HESSIAN_RANGE, AddNoiseTimes, Scalars
from threepo.posterior.perturbation import sigma_scalars
from threepo.posterior.policy_optimizer import Entry, model_name, named_in_groups
from threepo.posterior.shards import local
from threepo.types import Draw

RANGES = {"lr": (0.0, 1e18), "ess": (1e-8, 1e20), "hess_init": HESSIAN_RANGE, "weight_decay": (0.0, HESSIAN_RANGE[1])}
"""Wider than any useful value. Inside, ess * (h + weight_decay) neither overflows nor vanishes in float32."""
NOISE_SCALES = (1e-10, 1e10)
"""The range of noise_scale; 0, which is no noise, is allowed too."""
CLIPPED_SHARE = 0.99
"""From this share of clipped coordinates on there is a warning."""
ADAMW_LR, SMALL_MOVE = 1e-3, 1e-6
"""An lr up to the first is of AdamW's size. If it also moves no weight by more than the second, it is a mistake."""


def step_scalars(group: Mapping[str, Any], updates: int, draws: list[Draw | None], factor: float) -> Scalars:
    """The numbers of a parameter's `updates`-th update from sums over `draws` (None: at the mean).

    `factor` turns the sum of the gradients into their mean.
    """
    (beta1, beta2), price = group["betas"], group["estimator"] == "price"
    learns = group["learn_hessian"] and group["noise_scale"] > 0 and None not in draws
    estimate = factor / (group["noise_scale"] or 1.0) if price else group["ess"] * (len(draws) * factor**2)
    return sigma_scalars(group)._replace(
        beta1=beta1,
        grad_weight=(1 - beta1) * factor,
        beta2=beta2,
        estimate_weight=1 - beta2,
        retraction_weight=0.5 * (1 - beta2) ** 2,
        estimate_factor=estimate,
        momentum_factor=1 / (1 - beta1**updates) if group["debias"] else 1.0,
        clip_radius=group["clip_radius"],
        step_size=_step_size(group),
        estimator=group["estimator"] if learns else "none",
    )


def _step_size(group: Mapping[str, Any]) -> float:
    return float(group["lr"] * (group["hess_init"] + group["weight_decay"] if group["rescale_lr"] else 1.0))


def check(group: Mapping[str, Any]) -> None:
    """Raise `UserError` if a parameter group has settings, or parameters, that IVON cannot work with."""
    ranges = RANGES | ({"noise_scale": NOISE_SCALES} if group["noise_scale"] != 0 else {})
    for name, (low, high) in ranges.items():
        if not low <= group[name] <= high:
            raise UserError(f"IVON {name} = {group[name]!r}: must lie between {low:g} and {high:g}")
    if not group["clip_radius"] > 0:
        raise UserError(f"IVON clip_radius = {group['clip_radius']!r}: must be greater than 0; inf clips nothing")
    if not all(0 <= beta < 1 for beta in group["betas"]):
        raise UserError(f"IVON betas = {group['betas']!r}: both must lie in [0, 1)")
    for name, choices in (("estimator", ("price", "gradsq")), ("noise_shape", ("learned", "isotropic"))):
        if group[name] not in choices:
            raise UserError(f"IVON {name} = {group[name]!r}: must be {' or '.join(map(repr, choices))}")
    check_structure(group["noise_structure"])
    if not -(2**63) <= group["seed"] < 2**63:
        raise UserError(f"IVON seed = {group['seed']!r}: must be a signed 64-bit number")
    for p in group["params"]:
        if not p.dtype.is_floating_point:
            raise UserError(f"IVON params: one has dtype {p.dtype}; leave out what has no gradient")


def warn_of_small_moves(group: Mapping[str, Any], stacklevel: int) -> None:
    """`ThreepoWarning` if the learning rate is one for AdamW, with which IVON hardly moves."""
    move = _step_size(group) * group["clip_radius"]
    if 0 < group["lr"] <= ADAMW_LR and move < SMALL_MOVE:
        factors = "lr * (hess_init + weight_decay)" if group["rescale_lr"] else "lr"
        warnings.warn(
            f"IVON lr = {group['lr']:g}: no weight moves by more than {factors} * clip_radius = {move:.2g} a step; "
            f"AdamW's learning rates are too small here: set lr (in TrainingArguments: learning_rate) to 1 "
            f"(reinforcement learning) to 50 (fine-tuning)",
            ThreepoWarning,
            stacklevel=stacklevel + 1,
        )


def warn_of_clipping(param_groups: list[dict[str, Any]], share: float, stacklevel: int) -> None:
    """`ThreepoWarning` if the clip radius, and not the gradient, decides how far nearly every weight moves."""
    if share < CLIPPED_SHARE:
        return
    group = min(param_groups, key=lambda group: group["clip_radius"])
    warnings.warn(
        f"IVON clip_radius = {group['clip_radius']:g}: {share:.0%} of the weights are at it, so each moves by "
        f"{_step_size(group) * group['clip_radius']:.2g} a step, whatever its gradient; if the loss hardly falls, "
        f"raise clip_radius (inf clips nothing) or lr",
        ThreepoWarning,
        stacklevel=stacklevel + 1,
    )


def fill(state: dict[str, Any], p: torch.Tensor, group: dict[str, Any]) -> None:
    """Make the missing tensors of a parameter's state: float32, in its shape and on its devices."""
    if "hessian" not in state:
        zeros = torch.zeros_like(p, dtype=torch.float32, requires_grad=False, memory_format=torch.contiguous_format)
        state["hessian"], state["momentum"] = torch.full_like(zeros, group["hess_init"]), zeros
        state["missed_steps"] = torch.tensor(float(group["step"]))
    if "mean" not in state and p.dtype in (torch.bfloat16, torch.float16) and group["master_weights"]:
        state["mean"] = torch.empty_like(state["momentum"]).copy_(p.detach())


def loaded(saved: Mapping[str, torch.Tensor], p: torch.Tensor) -> dict[str, torch.Tensor]:
    """A copy of a parameter's saved state, in float32 for a parameter of any dtype (torch would cast it to that)."""
    devices = {name: "cpu" if name == "missed_steps" else p.device for name in saved}
    return {name: value.detach().to(devices[name], torch.float32, copy=True) for name, value in saved.items()}


def matched(
    state_dict: dict[str, Any], param_groups: list[dict[str, Any]]
) -> list[tuple[dict[str, Any], torch.Tensor]]:
    """Every parameter of `param_groups` with its state in `state_dict`, which is empty where none was saved.

    `UserError` if that is not IVON's, or belongs to other parameters or another order of them.
    """
    found = []
    for group in state_dict["param_groups"]:
        if "hess_init" not in group:
            raise UserError("IVON state: was saved by another optimizer; load one of an IVON")
        names = group.get("param_names") or [None] * len(group["params"])
        found += [(name, state_dict["state"].get(key, {})) for name, key in zip(names, group["params"], strict=True)]
    entries = named_in_groups(param_groups)
    for (saved, state), (name, p, group) in zip(found, entries, strict=False):  # torch refuses another number
        if saved and "param_names" in group and model_name(saved) != name:
            raise UserError(f"IVON state: has {saved!r} where this optimizer has {name!r}; give it the same order")
        if "hessian" in state and state["hessian"].shape != p.shape:
            shapes = f"{list(state['hessian'].shape)} in it and {list(p.shape)} here"
            raise UserError(f"IVON state: {name!r} has shape {shapes}; it belongs to another model")
    return [(state, p) for (_, state), (_, p, _) in zip(found, entries, strict=False)]


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

    def add(self, found: Iterable[tuple[Entry, torch.Tensor]], draw: Draw | None, cumulative: bool) -> None:
        """Add the gradients of parameters at `draw`."""
        kernels.run([left for entry, grad in found for left in self._add(entry, grad, draw, cumulative)])
        self.draws.append(draw)

    def _add(self, entry: Entry, grad: torch.Tensor, draw: Draw | None, cumulative: bool) -> list[AddNoiseTimes]:
        """Add one gradient. Returns the operation that is left, because one call for all parameters is faster."""
        p = entry[1]
        if local(grad)._is_view() or local(grad).untyped_storage().nbytes() > local(grad).nbytes:
            grad = grad.clone()  # a view of a buffer, such as DDP's, that the next backward writes into
        if cumulative:
            grad = self.carried[p] = self.carried[p] + grad if p in self.carried else grad
        earlier = self.grad.get(p)
        if earlier is None and not self.draws:
            self.grad[p] = grad
            return []
        owned = p in self.second  # then self.grad[p] is our own sum, not the tensor that backward left
        if not owned:
            self.second[p] = torch.zeros_like(p, dtype=torch.float32, requires_grad=False)
            if earlier is not None:  # at once, because two threads must not add to the same sum
                kernels.run(self._add_second(entry, earlier, self.draws[0]))
        if earlier is None:
            self.grad[p] = grad.to(torch.float32, copy=True)
        elif owned:
            earlier.add_(grad)
        else:  # the caller may still use the first gradient
            self.grad[p] = earlier.float() + grad
        return self._add_second(entry, grad, draw)

    def _add_second(self, entry: Entry, grad: torch.Tensor, draw: Draw | None) -> list[AddNoiseTimes]:
        if entry.group["estimator"] == "gradsq":
            self.second[entry.p].add_(grad.float().square())
            return []
        if draw is None:
            return []
        return [AddNoiseTimes(self.second[entry.p], grad, entry.noise(draw))]
