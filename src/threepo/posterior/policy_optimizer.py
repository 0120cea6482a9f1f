"""Interface of optimizers for training loops, whether they learn a posterior (IVON) or a point (AdamW)."""

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch

from threepo.posterior.noise_structures import Noise, noise_of
from threepo.posterior.shards import all_ranks_agree, local, sum_over_shards
from threepo.types import Draw

Weights = Mapping[str, torch.Tensor]
"""Tensors by parameter name."""


class Entry(NamedTuple):
    """A parameter of an optimizer, with its name and group."""

    name: str
    p: torch.nn.Parameter
    group: dict[str, Any]

    def noise(self, draw: Draw) -> Noise:
        """The parameter's noise in a draw."""
        return noise_of(draw, self.name, self.p.shape, self.group["noise_structure"])


class WeightSource(Protocol):
    """Source of a rollout engine's weights."""

    def weights(
        self, draw: Draw | None, into: Weights | None = None, *, gather: bool = False
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and values of the model's weights under `draw` (None: the mean), without touching the model.

        A perturbed value is written into the tensor of its name in `into`, in that tensor's dtype; without `into`, into
        a new tensor. A value that is not perturbed is yielded as it is, and `into` is left for the caller to fill.
        `gather`: sharded weights come whole, one at a time. Then every rank must call and read to the end, and each may
        have a draw of its own; without it, shards of different draws would not fit together.
        """


class PolicyOptimizer(WeightSource, Protocol):
    """Interface of IVON and PointAdamW for training loops: `at` and `observe` for each part of a batch, then `step`.

    A group of parameters has `noise_scale`, the size of its noise, and `ess`, by whose root that is divided.
    """

    param_groups: list[dict[str, Any]]
    """The first has `skipped_steps`: those not taken so far."""

    def at(self, draw: Draw | None) -> AbstractContextManager[None]:
        """Put the weights of `draw` into the model for the body, and restore the mean bitwise afterwards."""

    def observe(
        self, draw: Draw | None, divisor: float = ..., *, cumulative: bool = False, weight: float = ...
    ) -> bool:
        """Take the gradient of the model, divided by `divisor`, as measured at `draw`; False if it is not finite.

        `weight`: how much of the step's batch it is of, from which a learned Hessian knows how much its noise reached.
        Within a step, either all gradients have a divisor or none has.
        """

    def gradients(self) -> dict[torch.Tensor, torch.Tensor]:
        """Gradient of every parameter observed since the last step, as a sum."""

    def step(self, *, divisor: float | None = None) -> Any:
        """Update from the observed gradients: their sum over `divisor` (default: their number)."""

    def discard(self) -> None:
        """Forget the observed gradients instead of stepping, and count it."""

    def step_metrics(self) -> dict[str, float]:
        """Metrics of the last step."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def named_in_groups(param_groups: list[dict[str, Any]]) -> list[Entry]:
    """Every parameter with its name and group; without names, its position in the optimizer is its name."""
    found: list[Entry] = []
    for group in param_groups:
        names = group.get("param_names") or [f"param.{len(found) + i}" for i in range(len(group["params"]))]
        found += [Entry(model_name(name), p, group) for name, p in zip(names, group["params"], strict=True)]
    return found


@cache
def model_name(name: str) -> str:
    """A parameter's name without the prefixes of torch.compile, DDP, checkpointing and PeftModel: its noise stays the
    same, and so does its name in the files of a posterior."""
    for wrapper in ("_orig_mod.", "_checkpoint_wrapped_module."):
        name = name.replace(wrapper, "")
    return name.removeprefix("module.").removeprefix("base_model.model.")


def total_norm(grads: list[torch.Tensor]) -> float:
    """Euclidean norm of all gradients together, over all shards; not finite as soon as one element is not.

    A collective where some are DTensors: then it is finite on all ranks or on none, so that all take a step or none
    does, even if only one rank holds the parameter with the infinite gradient.
    """
    here = [local(grad) for grad in grads]
    here = [grad.float() if grad.dtype == torch.float64 else grad for grad in here]  # else the norm refuses to narrow
    norms = torch._foreach_norm(here, dtype=torch.float32) if grads else []
    norm = math.sqrt(sum_over_shards(zip(grads, norms, strict=True), squared=True))
    finite = math.isfinite(norm)
    return math.nan if not all_ranks_agree(finite, grads) and finite else norm
