"""The tensors of one IVON step: a parameter with its state, and what was observed of it. All of one shape."""

from typing import NamedTuple

import torch

from threepo.posterior.noise import Key


class State(NamedTuple):
    """What a step updates in place."""

    mean: torch.Tensor
    copy: torch.Tensor | None
    """A second home of the new mean, rounded to its own dtype; then `mean` is float32."""
    hessian: torch.Tensor
    """float32, like the momentum."""
    momentum: torch.Tensor

    def part(self, where: slice) -> "State":
        """Some elements of flat tensors."""
        copy = None if self.copy is None else self.copy[where]
        return State(self.mean[where], copy, self.hessian[where], self.momentum[where])


class Seen(NamedTuple):
    """Sums over the draws since the last step."""

    grad: torch.Tensor
    second: torch.Tensor | None
    """Sum of z * grad (price) or grad^2 (gradsq), float32; None: one draw only, so it is made from `grad`."""
    key: Key | None
    """Noise key of that one draw."""

    def part(self, where: slice) -> "Seen":
        """Some elements of flat tensors."""
        return Seen(self.grad[where], None if self.second is None else self.second[where], self.key)
