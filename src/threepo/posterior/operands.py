"""What IVON's kernels are given: the tensors of one job, all of one shape, and where they lie in the whole."""

from typing import NamedTuple

import torch

from threepo.posterior.noise import Key
from threepo.posterior.scalars import Scale, StepNumbers


class Place(NamedTuple):
    """Where elements lie in the flat whole tensor: in rows of `row`, whose beginnings are `stride` apart.

    The i-th of them is element start + i // row * stride + i % row of the whole. A tensor that is cut along its columns
    is one place, not one for each row.
    """

    start: int
    row: int = 1 << 62
    """Left out: all is one row."""
    stride: int = 1 << 62


def _flat(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.view(-1)


class State(NamedTuple):
    """What a step updates in place."""

    mean: torch.Tensor
    copy: torch.Tensor | None
    """A second home of the new mean, rounded to its own dtype; then `mean` is float32."""
    hessian: torch.Tensor
    """float32, like the momentum."""
    momentum: torch.Tensor

    def flat(self) -> "State":
        """The same memory in one dimension; all must be contiguous."""
        return State(*(_flat(tensor) for tensor in self))  # type: ignore[arg-type]

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

    def flat(self) -> "Seen":
        """The same memory in one dimension; all must be contiguous."""
        return Seen(self.grad.view(-1), _flat(self.second), self.key)

    def part(self, where: slice) -> "Seen":
        """Some elements of flat tensors."""
        return Seen(self.grad[where], None if self.second is None else self.second[where], self.key)


class Perturb(NamedTuple):
    """out = mean + sigma * z, added in float32 (float64 if `mean` is) and rounded once to the dtype of `out`."""

    out: torch.Tensor
    """May be `mean`."""
    mean: torch.Tensor
    hessian: torch.Tensor
    key: Key
    scale: Scale
    place: Place = Place(0)

    def part(self, where: slice, place: Place) -> "Perturb":
        """The same of some elements of the flat tensors."""
        return Perturb(
            self.out.view(-1)[where],
            self.mean.view(-1)[where],
            self.hessian.view(-1)[where],
            self.key,
            self.scale,
            place,
        )


class AddNoiseTimes(NamedTuple):
    """total += z * grad."""

    total: torch.Tensor
    """float32."""
    grad: torch.Tensor
    key: Key
    place: Place = Place(0)

    def part(self, where: slice, place: Place) -> "AddNoiseTimes":
        """The same of some elements of the flat tensors."""
        return AddNoiseTimes(self.total.view(-1)[where], self.grad.view(-1)[where], self.key, place)


class Update(NamedTuple):
    """One IVON step in place (Shen et al., 2024; method.md 1.2, 1.3)."""

    state: State
    seen: Seen
    numbers: StepNumbers
    place: Place = Place(0)

    def part(self, where: slice, place: Place) -> "Update":
        """The same of some elements of the flat tensors."""
        return Update(self.state.flat().part(where), self.seen.flat().part(where), self.numbers, place)
