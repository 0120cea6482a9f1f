"""Optimizers of torch as policy optimizers: they learn a point, around which there may be noise of a given size."""

import math
from collections.abc import Iterable
from typing import Any

import torch

from threepo.posterior.noise_structures import Structure, check_structure
from threepo.posterior.perturbation import NoisyParameter, Perturbable
from threepo.posterior.policy_optimizer import named_in_groups, total_norm
from threepo.posterior.shards import local, sum_over_shards
from threepo.types import Draw


class Point(Perturbable, torch.optim.Optimizer):
    """Adds to a torch optimizer what a policy optimizer needs; a class inherits this first, then the optimizer.

    Args:
        params: as of torch; a group may have its own `noise_scale`.
        max_grad_norm: gradients are scaled down to that total norm; 0 leaves them.
        noise_scale: sigma of the noise that draws add, at `ess` = 1: sigma = noise_scale / sqrt(ess), where the group's
            `ess` is 1 until a schedule changes it. 0: there are no draws.
        noise_structure: as of IVON.
        seed: noise seed of the posterior that checkpoints save.
        model: the module that DTensor parameters belong to; only needed for them, and for draws.
        settings: the settings of the torch optimizer.

    A step whose gradient is not finite is skipped and counted.
    """

    fixed_noise = {"weight_decay": 0.0, "hess_init": 1.0, "noise_shape": "isotropic"}  # noqa: RUF012 - not written into
    _observed = 0
    _norm = 0.0
    _sums: dict[torch.Tensor, torch.Tensor] = {}  # noqa: RUF012 - replaced, never written into
    """Sums of the gradients that were divided when they were observed."""

    def __init__(
        self,
        params: Any,
        max_grad_norm: float = 1.0,
        *,
        noise_scale: float = 0.0,
        noise_structure: Structure = "",
        seed: int = 0,
        model: torch.nn.Module | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(params, **settings)
        self._model = model
        own = {"max_grad_norm": max_grad_norm, "noise_scale": noise_scale, "noise_structure": noise_structure}
        own |= {"ess": 1.0, "seed": seed}
        for group in self.param_groups:
            check_structure(group.get("noise_structure", noise_structure))
            group.update(own | {"step": 0, "skipped_steps": 0} | {key: group[key] for key in own if key in group})

    def noisy(self) -> list[NoisyParameter]:
        """The parameters that draws perturb. Refused if there are none: a draw would be the mean."""
        found = [
            NoisyParameter.of(name, p, p, p, group | self.fixed_noise)
            for name, p, group in named_in_groups(self.param_groups)
            if p.requires_grad and group["noise_scale"]
        ]
        if not found:
            raise RuntimeError("this optimizer has no posterior to draw weights from: use IVON, or give noise_scale")
        return found

    def observe(
        self, draw: Draw | None, divisor: float | None = None, *, cumulative: bool = False, weight: float = 1.0
    ) -> bool:
        """Add the gradients to the step's sum, wherever they were taken.

        Without a divisor they stay in the parameters, where backward adds the next ones. With a divisor they are taken
        out, because the next ones have another. All gradients of a step must have a divisor, or none.
        """
        held = self._held()
        finite = math.isfinite(total_norm(list(held.values())))
        if divisor is not None:
            sums = dict(self._sums)
            for p, grad in held.items():
                grad.div_(divisor)
                sums[p] = sums[p].add_(grad) if p in sums else grad
                p.grad = None
            self._sums = sums
        self._observed += 1
        return finite

    @torch.no_grad()
    def step(self, closure: Any = None, *, divisor: float | None = None) -> Any:
        """Divide the gradients, clip their norm, and step; then clear them. Takes no closure."""
        assert closure is None
        self.refuse_while_perturbed("the mean is updated")
        for p, grad in self._sums.items():
            p.grad = grad
        grads, most = list(self._held().values()), self.param_groups[0]["max_grad_norm"]
        torch._foreach_mul_(grads, 1.0 / (divisor or max(self._observed, 1)))
        norm = total_norm(grads)
        if not math.isfinite(norm):
            self.discard()
            return
        if 0 < most < norm:
            torch._foreach_mul_(grads, most / norm)
        self._reshard()
        super().step()
        self._forget(norm)
        for group in self.param_groups:
            group["step"] += 1

    def gradients(self) -> dict[torch.Tensor, torch.Tensor]:
        """Gradient of every parameter observed since the last step, as a sum."""
        return self._held() | self._sums

    def discard(self) -> None:
        """Clear the gradients, and count a skipped step."""
        self._forget()
        self.param_groups[0]["skipped_steps"] += 1

    def _forget(self, norm: float = 0.0) -> None:
        self._observed, self._norm, self._sums = 0, norm, {}
        self.zero_grad(set_to_none=True)

    def step_metrics(self) -> dict[str, float]:
        """Norm of the last gradient before clipping (0 if the step was skipped), and the count of skipped steps."""
        return {"optimizer/grad_norm": self._norm, "optimizer/skipped_steps": float(self.skipped_steps)}

    def _held(self) -> dict[torch.Tensor, torch.Tensor]:
        return {p: p.grad for _, p in self.named() if p.grad is not None}


class PointAdamW(Point, torch.optim.AdamW):
    """AdamW."""


class PointSGD(Point, torch.optim.SGD):
    """Plain steps: learning rate times gradient."""

    @torch.no_grad()
    def move(self, gradients: Iterable[tuple[NoisyParameter, torch.Tensor]]) -> None:
        """Step along gradients that come one at a time, each with its parameter, and keep none of them."""
        self.refuse_while_perturbed("the mean is updated")
        rates = {p: group["lr"] for group in self.param_groups for p in group["params"]}
        squares = []
        for entry, grad in gradients:
            entry.p.add_(grad, alpha=-rates[entry.p])
            squares.append((entry.p, torch.linalg.vector_norm(local(grad))))
            del grad
        self._reshard()
        self._norm = math.sqrt(sum_over_shards(squares, squared=True))
        for group in self.param_groups:
            group["step"] += 1
