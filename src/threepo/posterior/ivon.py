"""IVON: improved variational online Newton (Shen et al., 2024), with noise that is addressed instead of stored.

    optimizer = threepo.IVON(model.named_parameters(), lr=1.0, ess=1e9)
    for batch in data:
        draw = optimizer.next_draw()
        with optimizer.perturbed(draw):       # weights = mean + sigma * z(draw)
            loss(model, batch).backward()     # may be called several times: gradient accumulation
        optimizer.observe(draw)               # several draws before a step are averaged
        optimizer.step()

The parameters hold the mean. The optimizer holds the Hessian and the momentum, in float32, in `state[p]`; the step
count is in `param_groups`, so `state_dict` has all there is. The mean is restored bitwise, also after an exception.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from threepo.errors import UserError
from threepo.posterior import kernels
from threepo.posterior.noise import noise_key
from threepo.posterior.policy_optimizer import named_in_groups, total_norm
from threepo.types import Draw

Parameters = Iterable[torch.Tensor] | Iterable[tuple[str, torch.Tensor]] | Iterable[dict[str, Any]]
STATE = ("hessian", "momentum")


@dataclass
class _Observations:
    """Gradients seen since the last step: sums over draws, per parameter."""

    draws: list[Draw | None] = field(default_factory=list)
    grad: dict[torch.Tensor, torch.Tensor] = field(default_factory=dict)
    second: dict[torch.Tensor, torch.Tensor] = field(default_factory=dict)
    """Sum of noise * gradient, or of squared gradients; filled from the second draw on."""
    carried: dict[torch.Tensor, torch.Tensor] = field(default_factory=dict)
    """The last draw's gradient, where each draw is to add to the one before."""
    rejected: int = 0


class IVON(torch.optim.Optimizer):
    """A diagonal Gaussian over the weights, learned by natural-gradient variational inference.

    Args:
        params: `model.named_parameters()`, so that noise is addressed by name; or parameters or groups of them,
            which are then addressed by position. Groups may set their own lr, ess, weight_decay or noise_scale.
        lr: learning rate; multiplied by `hess_init + weight_decay` when `rescale_lr` is set.
        ess: effective sample size, lambda. sigma = noise_scale / sqrt(ess * (hessian + weight_decay)).
        hess_init: initial Hessian h0.
        betas: decay rates of momentum and Hessian.
        weight_decay: delta, the precision of the prior.
        clip_radius: xi; the preconditioned step is clipped to [-xi, xi] in every coordinate.
        estimator: "price" (noise times gradient) or "gradsq" (squared gradient) for the Hessian.
        debias: divide the momentum by 1 - beta1^t.
        rescale_lr: see `lr`.
        noise_scale: multiplies sigma; 0 switches noise off and freezes the Hessian.
        seed: noise seed of the draws that `next_draw` makes.

    There is no gradient-norm clipping: it would change the statistics that the Hessian is learned from (method.md 1.4).
    A gradient that is not finite is dropped and counted in `skipped_steps`.
    """

    def __init__(
        self,
        params: Parameters,
        lr: float = 1.0,
        ess: float = 1e9,
        *,
        hess_init: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.9999),
        weight_decay: float = 1e-8,
        clip_radius: float = 1e-3,
        estimator: Literal["price", "gradsq"] = "price",
        debias: bool = True,
        rescale_lr: bool = True,
        noise_scale: float = 1.0,
        seed: int = 0,
    ) -> None:
        defaults = {
            "lr": lr,
            "ess": ess,
            "hess_init": hess_init,
            "betas": tuple(betas),
            "weight_decay": weight_decay,
            "clip_radius": clip_radius,
            "estimator": estimator,
            "debias": debias,
            "rescale_lr": rescale_lr,
            "noise_scale": noise_scale,
            "step": 0,
        }
        self.seed = seed
        self.skipped_steps = 0
        self._means: dict[torch.Tensor, torch.Tensor] = {}
        self._observed = _Observations()
        self._draws_made = 0
        self._last = {"optimizer/grad_norm": 0.0, "posterior/clipped_share": 0.0}
        super().__init__(params, defaults)
        self._trainable()  # makes the state, so that memory runs out here if it does

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with settings of their own."""
        super().add_param_group(param_group)
        _check_group(self.param_groups[-1])

    # Drawing weights

    def next_draw(self) -> Draw:
        """A draw that was not made before: addressed by the step count and the draws since the last step."""
        draw = Draw(self.seed, self.param_groups[0]["step"], self._draws_made)
        self._draws_made += 1
        return draw

    @contextmanager
    def perturbed(self, draw: Draw) -> Iterator[None]:
        """Put mean + sigma * z(draw) into the parameters for the body; restore the mean bitwise in any case."""
        if self._means:
            raise RuntimeError("the weights are perturbed already: leave the `with perturbed(...)` block first")
        try:
            with torch.no_grad():
                for name, p, group in self._trainable():
                    if group["noise_scale"]:
                        self._means[p] = p.detach().clone()
                        self._write(p, name, p, group, draw)
            yield
        finally:
            with torch.no_grad():
                for perturbed, mean in self._means.items():
                    perturbed.copy_(mean)
            self._means.clear()

    def at(self, draw: Draw | None) -> AbstractContextManager[None]:
        """`perturbed(draw)`, or the mean as it stands when `draw` is None."""
        return nullcontext() if draw is None else self.perturbed(draw)

    @contextmanager
    def sampled_params(self, train: bool = False) -> Iterator[None]:
        """A fresh draw for the body, observed on leaving it when `train`; for code written for ivon-opt."""
        draw = self.next_draw()
        with self.perturbed(draw):
            yield
        if train:
            self.observe(draw)

    @torch.no_grad()
    def weights(self, draw: Draw | None) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and value of every parameter under `draw` (None: the mean), in the dtype of the parameter.

        Tensors are made one at a time, and the model is left alone.
        """
        self._refuse_while_perturbed("weights are read")
        for name, p, group in named_in_groups(self.param_groups):
            if draw is None or not group["noise_scale"] or not p.requires_grad:
                yield name, p.detach()
            else:
                value = torch.empty_like(p)
                self._write(value, name, p, group, draw)
                yield name, value

    def _write(self, out: torch.Tensor, name: str, p: torch.Tensor, group: dict[str, Any], draw: Draw) -> None:
        kernels.write_perturbed(out, p, self.state[p]["hessian"], noise_key(draw, name), _scale(group))

    # Learning

    @torch.no_grad()
    def observe(self, draw: Draw | None, divisor: float = 1.0, *, cumulative: bool = False) -> bool:
        """Take the parameters' gradients, divided by `divisor`, as the gradient at `draw` (None: at the mean).

        The gradients are moved out of the parameters, not copied. With `cumulative`, each draw's gradient has those
        before it added (method.md 7). Returns False, and counts it, if a gradient is not finite.
        """
        trainable = [(name, p, group) for name, p, group in self._trainable() if p.grad is not None]
        if not trainable:
            raise RuntimeError("no parameter has a gradient: run backward inside `with optimizer.perturbed(draw)`")
        seen = self._observed
        finite = math.isfinite(total_norm([p.grad for _, p, _ in trainable if p.grad is not None]))
        for name, p, group in trainable:
            assert p.grad is not None
            grad = p.grad.float()  # sums over draws are kept in float32; this copies nothing that is float32 already
            p.grad = None
            if not finite:
                continue
            if divisor != 1.0:
                grad.div_(divisor)
            if cumulative:
                grad = grad.add_(seen.carried[p]) if p in seen.carried else grad
                seen.carried[p] = grad.clone()
            self._add(name, p, group, grad, draw)
        if finite:
            seen.draws.append(draw)
        else:
            seen.rejected += 1
        return finite

    def discard(self) -> None:
        """Forget the gradients observed since the last step, and count a skipped step."""
        self._observed = _Observations()  # the count of draws goes on: the step's address has not changed
        self.zero_grad(set_to_none=True)
        self.skipped_steps += 1

    def _add(self, name: str, p: torch.Tensor, group: dict[str, Any], grad: torch.Tensor, draw: Draw | None) -> None:
        seen = self._observed
        earlier = seen.grad.get(p)
        if earlier is None and not seen.draws:
            seen.grad[p] = grad
            return
        second = seen.second.get(p)
        if second is None:
            second = seen.second[p] = torch.zeros_like(p, dtype=torch.float32)
            if earlier is not None:
                self._add_second(second, name, group, earlier, seen.draws[0])
        self._add_second(second, name, group, grad, draw)
        seen.grad[p] = grad if earlier is None else earlier.add_(grad)

    def _add_second(
        self, second: torch.Tensor, name: str, group: dict[str, Any], grad: torch.Tensor, draw: Draw | None
    ) -> None:
        if group["estimator"] == "gradsq":
            second.addcmul_(grad, grad)
        elif draw is not None:
            kernels.add_noise_times(second, grad, noise_key(draw, name))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, divisor: float | None = None) -> Any:
        """Update mean, momentum and Hessian from the gradients observed since the last step.

        The gradient is the observed sum over `divisor`; left out, that is the number of draws, a true mean. A closure
        is evaluated at one draw of its own. Without an observation this raises; if all were rejected, it does nothing
        but count.
        """
        loss = None
        if closure is not None:
            with self.sampled_params(train=True), torch.enable_grad():
                loss = closure()
        self._refuse_while_perturbed("the mean is updated")
        seen, self._observed = self._observed, _Observations()
        if not seen.draws:
            if not seen.rejected:
                raise RuntimeError(
                    "step() without a gradient: run backward inside `with optimizer.perturbed(draw)`, then call "
                    "optimizer.observe(draw)"
                )
            self.discard()
            return loss
        scale = 1.0 / (divisor or len(seen.draws))
        self._draws_made = 0
        for group in self.param_groups:
            group["step"] += 1
        clipped, count = 0, 0
        for name, p, group in self._trainable():
            if p in seen.grad:
                clipped += int(self._update(name, p, group, seen, scale))
                count += p.numel()
        self._last = {
            "optimizer/grad_norm": total_norm(list(seen.grad.values())) * scale,
            "posterior/clipped_share": clipped / max(count, 1),
        }
        return loss

    def _update(
        self, name: str, p: torch.Tensor, group: dict[str, Any], seen: _Observations, scale: float
    ) -> torch.Tensor:
        state, (beta1, beta2) = self.state[p], group["betas"]
        learns = group["noise_scale"] > 0 and None not in seen.draws
        second_scale = scale if group["estimator"] == "price" else len(seen.draws) * scale**2
        numbers = kernels.StepNumbers(
            scale=_scale(group),
            step_size=group["lr"] * (group["hess_init"] + group["weight_decay"] if group["rescale_lr"] else 1.0),
            beta1=beta1,
            beta2=beta2,
            clip_radius=group["clip_radius"],
            debias=1 - beta1 ** group["step"] if group["debias"] else 1.0,
            grad_factor=scale,
            second_factor=second_scale,
            estimator=group["estimator"] if learns else "none",
        )
        first = seen.draws[0]
        key = noise_key(first, name) if first is not None else None
        statistics = kernels.Statistics(seen.grad[p], seen.second.get(p), key)
        return kernels.update(p, state["hessian"], state["momentum"], statistics, numbers)

    # State

    def step_metrics(self) -> dict[str, float]:
        """Gradient norm and share of clipped coordinates of the last step, and the count of skipped steps."""
        return {**self._last, "optimizer/skipped_steps": float(self.skipped_steps)}

    def state_dict(self) -> dict[str, Any]:
        """All state, with the mean in the parameters; refused while weights are perturbed or a step is half done."""
        self._refuse_while_perturbed("a checkpoint is taken")
        if self._observed.draws:
            raise RuntimeError("gradients are observed but not used: call step() before taking a checkpoint")
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load state, and keep it in float32 whatever the parameters' dtype (torch would cast it to theirs)."""
        super().load_state_dict(state_dict)
        order = [p for group in self.param_groups for p in group["params"]]
        for index, saved in state_dict["state"].items():
            p = order[index]
            for key in STATE:
                self.state[p][key] = saved[key].detach().to(p.device, torch.float32, copy=True)

    def _trainable(self) -> list[tuple[str, torch.nn.Parameter, dict[str, Any]]]:
        """Names, parameters and groups of all that is trained now; what was unfrozen since gets its state here."""
        trainable = [entry for entry in named_in_groups(self.param_groups) if entry[1].requires_grad]
        for _, p, group in trainable:
            if p not in self.state:
                self.state[p]["hessian"] = torch.full_like(p, group["hess_init"], dtype=torch.float32)
                self.state[p]["momentum"] = torch.zeros_like(p, dtype=torch.float32)
        return trainable

    def _refuse_while_perturbed(self, what: str) -> None:
        if self._means:
            raise RuntimeError(f"{what} while the weights are perturbed: leave the `with perturbed(...)` block first")


def _scale(group: dict[str, Any]) -> kernels.Scale:
    return kernels.Scale(group["ess"], group["weight_decay"], group["noise_scale"])


def _check_group(group: dict[str, Any]) -> None:
    for name in ("lr", "ess", "hess_init", "clip_radius"):
        if not group[name] > 0:
            raise UserError(f"IVON {name} = {group[name]!r}: must be greater than 0")
    for name in ("weight_decay", "noise_scale"):
        if not group[name] >= 0:
            raise UserError(f"IVON {name} = {group[name]!r}: must be 0 or more")
    if not all(0 <= beta < 1 for beta in group["betas"]):
        raise UserError(f"IVON betas = {group['betas']!r}: both must lie in [0, 1)")
    if group["estimator"] not in ("price", "gradsq"):
        raise UserError(f"IVON estimator = {group['estimator']!r}: must be 'price' or 'gradsq'")
