"""IVON: improved variational online Newton (Shen et al., 2024), with noise that is addressed instead of stored.

One step, with mean m, diagonal Hessian h, momentum g, noise z, and delta = weight_decay (method.md 1):

    theta = m + sigma z,  sigma = 1 / sqrt(ess (h + delta))                       `perturbed`
    x = gradient at theta,  f = x z / sigma, both averaged over draws             `observe`
    g = beta1 g + (1 - beta1) x                                                   `step`
    h = beta2 h + (1 - beta2) f + (1 - beta2)^2 / 2 (h - f)^2 / (h + delta)
    m = m - lr (h0 + delta) clip((g / (1 - beta1^t) + delta m) / (h + delta), xi)

The parameters hold m; `state[p]` holds h and g in float32, and a float32 m if the parameter has lower precision;
`param_groups` holds counts. z is made again wherever it is needed. `step_scalars` makes the numbers of a step; the
last three lines are `_update` of torch_kernels.py, which the compiled kernels follow bit for bit.

A run may give its draws arms: places and sizes of their noise (method.md 3.11). Without them, each `reach` and `arm`
below is 1 for a parameter with noise.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch.distributed.tensor import DTensor

from threepo.errors import UserError
from threepo.posterior import ivon_settings, ivon_state, kernels
from threepo.posterior.ivon_state import GradientDraws, Observations
from threepo.posterior.noise_sizes import arm_factor
from threepo.posterior.noise_structures import Structure
from threepo.posterior.operations import Scalars, Update
from threepo.posterior.perturbation import NoisyParameter, Perturbable, eager, sigma_scalars
from threepo.posterior.policy_optimizer import Entry, named_in_groups, total_norm
from threepo.posterior.shards import like_parameter, sum_over_shards
from threepo.types import Draw, Purpose

Parameters = Iterable[torch.Tensor] | Iterable[tuple[str, torch.Tensor]] | Iterable[dict[str, Any]]

MOST_NORM = 1e18
"""Gradients of this norm or more are skipped, so that sums, squares and products with noise are finite in float32."""


class IVON(Perturbable, torch.optim.Optimizer):
    """A diagonal Gaussian over the weights, learned by natural-gradient variational inference.

    Args:
        params: `model.named_parameters()`, so that noise is addressed by name; or parameters or groups of them, whose
            noise is addressed by position. A group may have its own value of any setting below except `seed`;
            `noise_scale=0` makes a group without noise. Plain tensors of any dtype, memory layout and device, and
            DTensors (FSDP2, tensor parallelism): one draw is one draw over all shards, and replicas share it. bfloat16
            and float16 parameters, whose steps would be lost to rounding, get a float32 mean in the state: copy weights
            that you set after the first step into `state[p]["mean"]`, too.
        lr: learning rate.
        rescale_lr: multiply it by `hess_init + weight_decay`.
        ess: effective sample size, lambda. sigma = noise_scale / sqrt(ess * (hessian + weight_decay)).
        hess_init: initial Hessian h0.
        betas: decay rates of momentum and Hessian.
        weight_decay: delta, the precision of the prior.
        clip_radius: xi; the preconditioned step is clipped to [-xi, xi] in every coordinate. It is infinite unless set,
            as in ivon-opt; recipes and trainers have the paper's 1e-3, which goes with its learning rates.
        estimator: "price" (noise times gradient) or "gradsq" (squared gradient) for the Hessian.
        debias: divide the momentum by 1 - beta1^t, where t counts the parameter's own updates.
        noise_scale: multiplies sigma; 0 switches noise off and freezes the Hessian.
        noise_shape: "learned": sigma follows the Hessian. "isotropic": one sigma for all weights, made of `hess_init`.
        noise_structure: "rank=2": matrices have noise U V^T / sqrt(2) of rank 2; "tied": parameters of one shape share
            their noise; empty: all numbers are independent.
        learn_hessian: False keeps the Hessian as it is.
        seed: noise seed of the draws that `next_draw` makes.
        model: the module that DTensor parameters belong to; only needed for them. FSDP2 modules in it are resharded
            whenever weights change, because a copy gathered by an earlier forward pass would be stale.

    There is no gradient-norm clipping: it would change the statistics that the Hessian is learned from (method.md 1.4).
    If a gradient is not finite, or its norm is MOST_NORM or more, `step` only counts it, in `skipped_steps`. With a
    float16 gradient scaler call `scaler.unscale_(optimizer)`, `observe`, and this optimizer's own `step`, because
    `scaler.step` would hide the skipped step.

    Examples:
        >>> weight = torch.nn.Parameter(torch.ones(3))
        >>> optimizer = threepo.IVON([("weight", weight)], lr=1.0, ess=1e9)
        >>> draw = optimizer.next_draw()
        >>> with optimizer.perturbed(draw):  # weights = mean + sigma * z(draw)
        ...     weight.square().sum().backward()  # may be called several times: gradient accumulation
        >>> optimizer.observe(draw)  # several draws before a step are averaged
        True
        >>> optimizer.step()
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
        clip_radius: float = math.inf,
        estimator: Literal["price", "gradsq"] = "price",
        debias: bool = True,
        rescale_lr: bool = True,
        noise_scale: float = 1.0,
        noise_shape: Literal["learned", "isotropic"] = "learned",
        noise_structure: Structure = "",
        learn_hessian: bool = True,
        seed: int = 0,
        model: torch.nn.Module | None = None,
    ) -> None:
        defaults = {"lr": lr, "ess": ess, "hess_init": hess_init, "betas": tuple(betas), "weight_decay": weight_decay}
        defaults |= {"clip_radius": clip_radius, "estimator": estimator, "debias": debias, "rescale_lr": rescale_lr}
        defaults |= {"noise_scale": noise_scale, "noise_shape": noise_shape, "noise_structure": noise_structure}
        defaults |= {"learn_hessian": learn_hessian, "seed": seed}
        defaults |= {"step": 0, "draws_made": 0, "skipped_steps": 0}
        self._model = model
        self._forget_this_step()
        super().__init__(params, defaults)
        for group in self.param_groups:
            ivon_settings.warn_of_small_moves(group, stacklevel=2)
        self.trainable()  # makes the state, so that memory runs out here if it does

    def _forget_this_step(self) -> None:
        self._observed = Observations()
        self._evaluated = 0
        """Draws that were made for something else than training."""
        self._drawn = GradientDraws()
        self._norm = 0.0
        """Norm of the last step's gradient."""
        self._clipped: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Each parameter that the last step moved, with the number of its local coordinates that were clipped."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore after pickling, deep copies and loading; torch keeps only state and param_groups."""
        super().__setstate__(state)
        self._forget_this_step()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with settings of their own."""
        super().add_param_group(param_group)
        ivon_settings.check(self.param_groups[-1])
        if self._model is None and any(isinstance(p, DTensor) for p in self.param_groups[-1]["params"]):
            raise UserError("IVON params: some are DTensors; IVON needs the module they belong to: set model=model")
        names = Counter(name for name, _, _ in named_in_groups(self.param_groups))
        if twice := [name for name, count in names.items() if count > 1]:
            raise UserError(f"IVON params: two are named {twice[0]!r} and would share their noise; rename one")

    @property
    def seed(self) -> int:
        """Noise seed of the draws that `next_draw` makes."""
        return int(self.param_groups[0]["seed"])

    # Drawing weights

    def next_draw(self) -> Draw:
        """A draw that was not made before: addressed by the step count and the draws since the last step."""
        group = self.param_groups[0]
        group["draws_made"] += 1
        return Draw(self.seed, group["step"], group["draws_made"] - 1)

    @contextmanager
    def perturbed(self, draw: Draw) -> Iterator[None]:
        """Put mean + sigma * z(draw) into the parameters for the body; restore the mean bitwise in any case."""
        with super().perturbed(draw), self._drawn.noting(draw, lambda: (p for _, p, _ in self.trainable())):
            yield

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients that the parameters hold, or set them to 0."""
        super().zero_grad(set_to_none)
        self._drawn.draws.clear()

    @contextmanager
    def sampled_params(self, train: bool = False) -> Iterator[None]:
        """A fresh draw for the body, observed after it when `train`; for code written for ivon-opt.

        Without `train` it is no draw of training, which an evaluation must not change.
        """
        if train:
            draw = self.next_draw()
        else:
            draw = Draw(self.seed, self.param_groups[0]["step"], self._evaluated, Purpose.EVALUATION)
            self._evaluated += 1
        with self.perturbed(draw):
            yield
        if train:
            self.observe(draw)

    def noisy(self) -> list[NoisyParameter]:
        """The parameters that draws perturb: those that are trained, in groups whose noise_scale is not 0."""
        return [
            NoisyParameter.of(name, p, self.state[p].get("mean", p), self.state[p]["hessian"], group)
            for name, p, group in self.trainable()
            if group["noise_scale"]
        ]

    # Learning

    @eager
    @torch.no_grad()
    def observe(
        self, draw: Draw | None, divisor: float = 1.0, *, cumulative: bool = False, weight: float = 1.0
    ) -> bool:
        """Take the parameters' gradients, divided by `divisor`, as the gradient at `draw` (None: at the mean).

        The gradients are moved out of the parameters, not copied. With `cumulative`, the gradients of earlier draws are
        added to each (method.md 7). `weight` says how much of the step's batch this gradient is of; the Hessian of a
        parameter that some draws leave alone learns in proportion to the others (method.md 3.11). Returns False if the
        gradient is not finite or its norm is MOST_NORM or more; the next `step` is then skipped.
        """
        self.refuse_while_perturbed("gradients are observed")
        if draw is not None and self._drawn.draws - {draw}:
            others = ", ".join(map(repr, self._drawn.draws - {draw}))
            fix = "pass the draw of `perturbed(draw)`; observe its gradients, or call zero_grad(), before the next"
            raise RuntimeError(f"observe({draw!r}): gradients are of other draws, {others}; {fix}")
        entries = [entry for entry in self.trainable() if entry.p.grad is not None]
        if not entries:
            raise RuntimeError("no parameter has a gradient: run backward inside `with optimizer.perturbed(draw)`")
        grads = [like_parameter(p.grad, p) for _, p, _ in entries if p.grad is not None]
        for _, p, _ in entries:
            p.grad = None
        self._drawn.draws.clear()
        norm = total_norm(grads) / divisor
        if self._observed.rejected or not norm < MOST_NORM:
            self._observed = Observations(rejected=True)
            return False
        if divisor != 1.0:
            grads = [grad.float() / divisor for grad in grads]
        self._observed.norm = norm
        self._observed.add(zip(entries, grads, strict=True), draw, cumulative, weight)
        return True

    def gradients(self) -> dict[torch.Tensor, torch.Tensor]:
        """Gradient of every parameter observed since the last step, as a sum over draws."""
        return dict(self._observed.grad)

    def discard(self) -> None:
        """Forget the gradients observed since the last step, and count a skipped step."""
        self._forget_this_step()  # the count of draws is kept: this step's draws must not be made again
        self.zero_grad(set_to_none=True)
        self.param_groups[0]["skipped_steps"] += 1

    @eager
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, divisor: float | None = None) -> Any:
        """Update mean, momentum and Hessian from the gradients observed since the last step.

        The gradient is the observed sum over `divisor`, by default the number of draws. A closure is evaluated at one
        draw of its own. Raises if nothing was observed; if a gradient was not finite, it only counts a skipped step.
        """
        loss = None
        if closure is not None:
            with self.sampled_params(train=True), torch.enable_grad():
                loss = closure()
        self.refuse_while_perturbed("the mean is updated")
        if self._observed.rejected:
            self.discard()
            return loss
        seen, self._observed = self._observed, Observations()
        if not seen.draws:
            first = "run backward inside `with optimizer.perturbed(draw)`, then call optimizer.observe(draw)"
            raise RuntimeError(f"step() without a gradient: {first}")
        if divisor is not None and not divisor > 0:  # a tensor of 0 tokens would make the weights NaN
            raise RuntimeError(f"step(divisor={divisor!r}): must be above 0; call discard() if nothing was kept")
        to_mean = 1.0 / (len(seen.draws) if divisor is None else divisor)
        for group in self.param_groups:
            group["step"] += 1  # a group that was added later counts its own
        for p, state in self.state.items():
            if p not in seen.grad:
                state["missed_steps"] += 1
        self.param_groups[0]["draws_made"] = 0
        self._norm = to_mean * (seen.norm if len(seen.draws) == 1 else total_norm(list(seen.grad.values())))
        self._reshard()
        moved = [entry for entry in self.trainable() if entry.p in seen.grad]
        counts = kernels.run(self._updates(moved, seen, to_mean))
        self._clipped = [(entry.p, count) for entry, count in zip(moved, counts, strict=True)]
        return loss

    def _updates(self, entries: list[Entry], seen: Observations, to_mean: float) -> Iterator[Update]:
        """Every parameter's step; `to_mean` times the sum of its gradients is their mean."""
        first = seen.draws[0]
        for entry in entries:
            name, p, group = entry
            state = self.state[p]
            mean, out = (state["mean"], p) if "mean" in state else (p, None)
            second, arm = seen.second.pop(p, None), 1.0
            if second is None:  # all gradients are of the first draw: the update multiplies them with its noise
                arm = arm_factor(first.arm, name) if first else 0.0
                if not arm and len(seen.draws) > 1:  # it had no noise there, and no gradient at the others
                    second, arm = torch.zeros_like(state["hessian"]), 1.0
            updates = group["step"] - int(state["missed_steps"])  # of its momentum, this one included
            scalars = step_scalars(group, updates, len(seen.draws), to_mean, seen.reach(name), arm)
            needs_noise = second is None and scalars.estimator == "price"
            yield Update(
                mean,
                out,
                state["hessian"],
                state["momentum"],
                grad=seen.grad.pop(p),
                second=second,
                noise=entry.noise(first) if first and needs_noise else None,
                scalars=scalars,
            )

    # State

    def step_metrics(self) -> dict[str, float]:
        """Gradient norm and share of clipped coordinates of the last step (0 if it was skipped); steps skipped so far.

        With sharded parameters every rank must call it, because the share is summed over the shards.
        """
        share = sum_over_shards(self._clipped) / max(sum(p.numel() for p, _ in self._clipped), 1)
        metrics = {"optimizer/grad_norm": self._norm, "posterior/clipped_share": share}
        return metrics | {"optimizer/skipped_steps": float(self.skipped_steps)}

    def state_dict(self) -> dict[str, Any]:
        """All state. Refused while weights are perturbed or gradients are observed but not used."""
        self.refuse_while_perturbed("a checkpoint is taken")
        if self._observed.draws or self._observed.rejected:
            raise RuntimeError("gradients are observed but not used: call step() before taking a checkpoint")
        return super().state_dict()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load state, and keep it in float32 for parameters of any dtype (torch would cast it to the parameters' own).

        Gradients observed before are forgotten. `UserError` if the parameters' names (where both sides have them) or
        shapes differ.
        """
        self.refuse_while_perturbed("state is loaded")
        matched = ivon_state.matched(state_dict, self.param_groups)
        super().load_state_dict(state_dict)
        for saved, p in matched:
            for name, value in saved.items():
                device = "cpu" if name == "missed_steps" else p.device
                self.state[p][name] = value.detach().to(device, torch.float32, copy=True)
        # accelerate saves and loads an optimizer without state, before it exchanges the parameters for their shards.
        for _, p, _ in named_in_groups(self.param_groups):
            if "mean" in self.state.get(p, {}):
                p.copy_(self.state[p]["mean"])
        if self.state:
            self.trainable()

    def trainable(self) -> list[Entry]:
        """Names, parameters and groups of all that is trained now; a parameter unfrozen later gets its state here."""
        trainable = [entry for entry in named_in_groups(self.param_groups) if entry.p.requires_grad]
        for _, p, group in trainable:
            ivon_state.fill(self.state[p], p, group)
            if not group["step"] and not self._perturbed:
                ivon_state.follow(self.state[p], p)
        return trainable


def step_scalars(
    group: Mapping[str, Any], updates: int, draws: int, to_mean: float, reach: float, arm: float
) -> Scalars:
    """The numbers of a parameter's `updates`-th update from sums over draws, which `to_mean` turns into means.

    `reach` is the share of the step's gradients that was taken under noise of this parameter: the Hessian learns from
    those only, and as much less (method.md 3.11). `arm` is a factor of the noise that the sums do not have in them yet.
    """
    beta1, beta2 = group["betas"]
    scalars = sigma_scalars(group)._replace(
        beta1=beta1,
        grad_weight=(1 - beta1) * to_mean,
        momentum_factor=1 / (1 - beta1**updates) if group["debias"] else 1.0,
        clip_radius=group["clip_radius"],
        step_size=ivon_settings.step_size(group),
    )
    price = group["estimator"] == "price"
    had_noise = group["noise_scale"] > 0 and (reach > 0 if price else reach == 1)
    if not (group["learn_hessian"] and had_noise):
        return scalars
    weight = (1 - beta2) * reach
    of_price = to_mean / group["noise_scale"] / (reach * arm)  # the kernels multiply by noise_scale / sigma
    of_gradsq = group["ess"] * (draws * to_mean**2)  # ess times the mean of (draws * to_mean * gradient)^2
    return scalars._replace(
        estimator=group["estimator"],
        beta2=beta2 if reach == 1 else 1 - weight,
        estimate_weight=weight,
        retraction_weight=0.5 * weight**2,
        estimate_factor=of_price if price else of_gradsq,
    )
