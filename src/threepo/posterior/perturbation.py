"""Draws of the weights around a mean that a model holds.

IVON, AdamW with noise of a given size, and a loaded model with its posterior share this: they say which parameters have
noise, and how much. `at` puts a draw into the model and restores the mean bitwise; `weights` makes the weights of a
draw outside the model.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple

import torch

from threepo.posterior import kernels
from threepo.posterior.noise_sizes import arm_factor
from threepo.posterior.noise_structures import Noise, Structure, noise_of
from threepo.posterior.operations import Perturb, Scalars
from threepo.posterior.policy_optimizer import Weights, named_in_groups
from threepo.posterior.shards import device_of, drop_gathered_copies, is_spread, like_parameter, local, whole
from threepo.types import Draw

eager = torch._disable_dynamo  # type: ignore[attr-defined]
"""For methods that `torch.compile` must leave alone: it would keep what they assign to the optimizer for itself."""


@dataclass(frozen=True)
class NoiseGroup:
    """The noise of some parameters: sigma = noise_scale / sqrt(ess * (hessian + weight_decay))."""

    ess: float
    weight_decay: float
    noise_scale: float
    hess_init: float
    parameters: tuple[str, ...]
    noise_shape: Literal["learned", "isotropic"] = "learned"
    """`isotropic`: sigma is made of hess_init instead of the Hessian."""
    noise_structure: Structure = ""


def sigma_scalars(group: Mapping[str, Any]) -> Scalars:
    """Numbers that turn a group's Hessians into standard deviations; `group` has the fields of `NoiseGroup`."""
    isotropic = group["noise_shape"] == "isotropic"
    root = math.sqrt(group["ess"] * (group["hess_init"] + group["weight_decay"])) if isotropic else 0.0
    return Scalars(group["weight_decay"], group["ess"], root, group["noise_scale"])


class NoisyParameter(NamedTuple):
    """A parameter that draws perturb."""

    name: str
    p: torch.Tensor
    mean: torch.Tensor
    """`p` itself, or its master of higher precision."""
    hessian: torch.Tensor
    """Same shape as the parameter; whole or sharded. Any tensor will do where noise is isotropic."""
    scalars: Scalars
    structure: Structure

    @classmethod
    def of(
        cls, name: str, p: torch.Tensor, mean: torch.Tensor, hessian: torch.Tensor, group: Mapping[str, Any]
    ) -> "NoisyParameter":
        """A parameter whose noise is set by `group`, which has the fields of `NoiseGroup`."""
        return cls(name, p, mean, hessian, sigma_scalars(group), group["noise_structure"])

    def noise(self, draw: Draw) -> Noise:
        """The parameter's noise in a draw."""
        return noise_of(draw, self.name, self.mean.shape, self.structure)

    @property
    def is_copied(self) -> bool:
        """True if `under` makes a copy in float32 on the mean's device, so that parameters have to take turns."""
        if self.scalars.fixed_root:
            return self.mean.dtype != torch.float32
        return local(self.hessian).device != local(self.mean).device

    def under(self, draw: Draw, out: torch.Tensor, gather: bool = False) -> Perturb:
        """The operation that writes the parameter's value under `draw` into `out`, which is whole with `gather`."""
        take: Callable[[torch.Tensor], torch.Tensor] = whole if gather else torch.Tensor.detach
        mean, scalars = take(self.mean), self.scalars
        if draw.arm:
            scalars = scalars._replace(noise_scale=scalars.noise_scale * arm_factor(draw.arm, self.name))
        if scalars.fixed_root:
            hessian = mean.float()  # is not read
        elif is_spread(self.hessian):
            hessian = take(self.hessian)
        else:  # one that was read from a file is whole; it follows the mean, wherever that lies
            hessian = like_parameter(self.hessian.to(mean.device), mean)
        return Perturb(out, mean, hessian, self.noise(draw), scalars)

    def gathered(self) -> torch.Tensor:
        """The mean, whole, in the parameter's dtype. Gathers what `under` does, as other ranks may be at a draw."""
        mean = whole(self.mean.detach())
        if not self.scalars.fixed_root and is_spread(self.hessian):
            whole(self.hessian)
        return mean.to(self.p.dtype)


class Perturbable:
    """Draws around the mean that a model's parameters hold. A class that inherits it says what `noisy` are.

    A draw covers all shards of a sharded parameter, and replicas share it.
    """

    param_groups: list[dict[str, Any]]
    """Groups of parameters, as a torch optimizer has them, with the settings of their noise."""
    fixed_noise: Mapping[str, Any] = {}
    """Fields of `NoiseGroup` that are the same for all groups, and no settings of theirs."""
    _model: torch.nn.Module | None = None
    """FSDP2 modules in it are resharded whenever weights change: a copy gathered by an earlier pass would be stale."""
    _perturbed = False
    _means: dict[torch.Tensor, torch.Tensor] = {}  # noqa: RUF012 - replaced, never written into

    @property
    def skipped_steps(self) -> int:
        """Steps not taken, because a gradient was not finite or `discard` was called."""
        return int(self.param_groups[0]["skipped_steps"])

    def named(self) -> list[tuple[str, torch.Tensor]]:
        """Every parameter with its name."""
        return [(name, p) for name, p, _ in named_in_groups(self.param_groups)]

    def noise_groups(self) -> tuple[NoiseGroup, ...]:
        """The noise of every group that has trained parameters."""
        entries, found = named_in_groups(self.param_groups), []
        for group in self.param_groups:
            names = tuple(name for name, p, own in entries if own is group and p.requires_grad)
            settings = {"parameters": names, **group, **self.fixed_noise}
            if names:
                found.append(NoiseGroup(**{field.name: settings[field.name] for field in fields(NoiseGroup)}))
        return tuple(found)

    @property
    def has_noise(self) -> bool:
        """True if there is anything that draws perturb."""
        return any(group["noise_scale"] and p.requires_grad for _, p, group in named_in_groups(self.param_groups))

    def noisy(self) -> list[NoisyParameter]:
        """The parameters that draws perturb."""
        raise NotImplementedError

    def at(self, draw: Draw | None) -> AbstractContextManager[None]:
        """`perturbed(draw)`, or the mean as it stands when `draw` is None."""
        return nullcontext() if draw is None else self.perturbed(draw)

    @contextmanager
    def perturbed(self, draw: Draw) -> Iterator[None]:
        """Put mean + sigma * z(draw) into the parameters for the body; restore the mean bitwise in any case."""
        self.refuse_while_perturbed("another draw is made")
        noisy = under_arm(self.noisy(), draw)
        self._perturbed, self._means = True, {}
        try:
            self._reshard()
            with torch.no_grad():
                for entry in noisy:
                    # All copies are made before anything is perturbed, so that an interrupt can always be undone.
                    own = entry.mean is not entry.p
                    self._means[entry.p] = entry.mean if own else entry.p.detach().clone()
                kernels.run(entry.under(draw, entry.p) for entry in noisy if not entry.is_copied)
                for entry in noisy:
                    if entry.is_copied:
                        kernels.run([entry.under(draw, entry.p)])
            torch.clear_autocast_cache()  # it may hold copies of the weights before
            yield
        finally:
            self.restore()

    @eager
    @torch.no_grad()
    def restore(self) -> None:
        """Put the mean back. `perturbed` does so at its end; call it only if a KeyboardInterrupt came just then."""
        self._reshard()
        if self._means:
            torch._foreach_copy_([local(p) for p in self._means], [local(mean) for mean in self._means.values()])
        self._perturbed, self._means = False, {}
        torch.clear_autocast_cache()

    @torch.no_grad()
    def weights(
        self, draw: Draw | None, into: Weights | None = None, *, gather: bool = False
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and value of every parameter under `draw` (None: the mean); see `WeightSource.weights`.

        With `into`, values are made all at once, unless they are gathered or `is_copied`; without it, one at a time,
        in the parameter's dtype.
        """
        self.refuse_while_perturbed("weights are read")
        noisy = self.noisy() if draw or (gather and self.has_noise) else []
        yield from weights_under(self.named(), noisy, draw, into, gather)

    def _reshard(self) -> None:
        if self._model is not None:
            drop_gathered_copies(self._model)

    def refuse_while_perturbed(self, what: str) -> None:
        """Raise RuntimeError, which says `what` is done, while a draw is in the parameters."""
        if self._perturbed:
            fix = "leave the `with perturbed(...)` block first, or call restore() if an interrupt cut its end off"
            raise RuntimeError(f"{what} while the weights are perturbed: {fix}")


def under_arm(noisy: Sequence[NoisyParameter], draw: Draw) -> list[NoisyParameter]:
    """The parameters that have noise in this draw; its arm may leave most as they are."""
    return [entry for entry in noisy if arm_factor(draw.arm, entry.name)]


@torch.no_grad()
def weights_under(
    named: Iterable[tuple[str, torch.Tensor]],
    noisy: Sequence[NoisyParameter],
    draw: Draw | None,
    into: Weights | None = None,
    gather: bool = False,
) -> Iterator[tuple[str, torch.Tensor]]:
    """See `Perturbable.weights`."""
    entries = {entry.name: entry for entry in noisy}
    at_once: list[tuple[str, Perturb]] = []
    for name, p in named:  # if gathered, in the same order whatever the draw: each rank may have a draw of its own
        entry = entries.get(name)
        if entry and draw and arm_factor(draw.arm, name):
            if into and name in into:
                out = into[name]
            else:
                out = torch.empty(p.shape, dtype=p.dtype, device=device_of(p)) if gather else torch.empty_like(p)
            operation = entry.under(draw, out, gather)
            if into and not gather and not entry.is_copied:
                at_once.append((name, operation))
            else:
                kernels.run([operation])
                yield name, out
        elif gather:
            yield name, entry.gathered() if entry else whole(p.detach())
        else:
            yield name, p.detach()
    kernels.run(operation for _, operation in at_once)
    yield from ((name, operation.out) for name, operation in at_once)
