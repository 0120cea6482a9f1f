"""What IVON has observed since its last step: one draw's gradients as they are, or sums over several draws."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from threepo.posterior import kernels
from threepo.posterior.layout import local
from threepo.posterior.noise import noise_key
from threepo.posterior.operations import AddNoiseTimes
from threepo.posterior.policy_optimizer import Entry
from threepo.types import Draw


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
        products = [self._add(entry, grad, draw, cumulative) for entry, grad in found]
        kernels.run([product for product in products if product is not None])
        self.draws.append(draw)

    def _add(self, entry: Entry, grad: torch.Tensor, draw: Draw | None, cumulative: bool) -> AddNoiseTimes | None:
        """Add one gradient. Returns the operation that is left, because one call for all parameters is faster."""
        p = entry[1]
        if local(grad)._is_view() or local(grad).untyped_storage().nbytes() > local(grad).nbytes:
            grad = grad.clone()  # a view of a buffer, such as DDP's, that the next backward writes into
        if cumulative:
            grad = self.carried[p] = self.carried[p] + grad if p in self.carried else grad
        earlier = self.grad.get(p)
        if earlier is None and not self.draws:
            self.grad[p] = grad
            return None
        owned = p in self.second  # then self.grad[p] is our own sum, not the tensor that backward left
        if not owned:
            self.second[p] = torch.zeros_like(p, dtype=torch.float32, requires_grad=False)
            product = None if earlier is None else self._add_second(entry, earlier, self.draws[0])
            if product is not None:
                kernels.run([product])  # at once, because two threads must not add to the same sum
        if earlier is None:
            self.grad[p] = grad.to(torch.float32, copy=True)
        elif owned:
            earlier.add_(grad)
        else:  # the caller may still use the first gradient
            self.grad[p] = earlier.float() + grad
        return self._add_second(entry, grad, draw)

    def _add_second(self, entry: Entry, grad: torch.Tensor, draw: Draw | None) -> AddNoiseTimes | None:
        name, p, group = entry
        if group["estimator"] == "gradsq":
            self.second[p].add_(grad.float().square())
            return None
        return None if draw is None else AddNoiseTimes(self.second[p], grad, noise_key(draw, name))
