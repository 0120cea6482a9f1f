"""IVON once more, from the published equations (Shen et al., 2024; method.md 1), in float64, one scalar at a time.

Shares no code with threepo. Noise comes from outside, so that any implementation can be followed.
"""

import math
from collections.abc import Sequence


class ReferenceIVON:
    """One float64 number per weight, in plain Python lists."""

    def __init__(
        self,
        weights: Sequence[float],
        *,
        lr: float,
        ess: float,
        hess_init: float,
        beta1: float,
        beta2: float,
        weight_decay: float,
        clip_radius: float,
        estimator: str,
        debias: bool,
        rescale_lr: bool,
        noise_scale: float = 1.0,
    ) -> None:
        self.m = list(weights)
        self.h = [hess_init] * len(self.m)
        self.g = [0.0] * len(self.m)
        self.t = 0
        self.lr = lr * (hess_init + weight_decay) if rescale_lr else lr
        self.ess, self.delta, self.xi = ess, weight_decay, clip_radius
        self.beta1, self.beta2 = beta1, beta2
        self.estimator, self.debias, self.noise_scale = estimator, debias, noise_scale

    def sigma(self, i: int) -> float:
        return self.noise_scale / math.sqrt(self.ess * (self.h[i] + self.delta))

    def perturbed(self, z: Sequence[float]) -> list[float]:
        return [self.m[i] + self.sigma(i) * z[i] for i in range(len(self.m))]

    def step(self, noises: Sequence[Sequence[float]], grads: Sequence[Sequence[float]]) -> None:
        """`noises[j][i]` is z of weight i in draw j, `grads[j][i]` the gradient taken there."""
        self.t += 1
        draws = len(noises)
        for i in range(len(self.m)):
            sigma = self.sigma(i)
            mean_grad = sum(grad[i] for grad in grads) / draws
            if self.estimator == "price":
                mean_product = sum(sigma * z[i] * grad[i] for z, grad in zip(noises, grads, strict=True)) / draws
                f = mean_product / sigma**2  # ess * (h + delta) * mean_product where noise_scale is 1
            else:
                f = self.ess * sum(grad[i] ** 2 for grad in grads) / draws
            self.g[i] = self.beta1 * self.g[i] + (1 - self.beta1) * mean_grad
            correction = 0.5 * (1 - self.beta2) ** 2 * (self.h[i] - f) ** 2 / (self.h[i] + self.delta)
            self.h[i] = self.beta2 * self.h[i] + (1 - self.beta2) * f + correction
            momentum = self.g[i] / (1 - self.beta1**self.t) if self.debias else self.g[i]
            move = (momentum + self.delta * self.m[i]) / (self.h[i] + self.delta)
            self.m[i] -= self.lr * max(-self.xi, min(self.xi, move))
