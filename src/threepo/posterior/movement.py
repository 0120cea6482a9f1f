"""Measure how far training moves the mean weights, on the weights themselves, whatever the optimizer."""

import math

import torch

from threepo.posterior.noise_sizes import layer_kind, scaled_by
from threepo.posterior.policy_optimizer import PolicyOptimizer, named_in_groups
from threepo.posterior.shards import sampled


class Movement:
    """Compares the trained weights with those that it saw last, on an even subsample of every parameter.

    Between two looks it keeps the subsample, not the weights. With sharded parameters every rank must make one and
    call it, and all get the same numbers, which do not depend on the sharding.
    """

    def __init__(self, optimizer: PolicyOptimizer) -> None:
        parameters = {name: p for name, p, _ in named_in_groups(optimizer.param_groups)}
        self._optimizer = optimizer
        self._trained = {name: p for name, p in parameters.items() if p.requires_grad and p.numel()}
        bases = {name: parameters.get(scaled_by(name), p) for name, p in self._trained.items()}
        adapted = {name: base for name, base in bases.items() if base is not self._trained[name]}
        self._bases = dict(zip(adapted, sampled((base, base) for base in adapted.values()), strict=True))
        """Samples of the frozen weights that an adapter's B adapts, by the name of B."""
        self._seen = self._look()

    def _look(self) -> list[torch.Tensor]:
        states = getattr(self._optimizer, "state", {})
        return sampled((p, states.get(p, {}).get("mean", p)) for p in self._trained.values())

    def metrics(self) -> dict[str, float]:
        """Root mean square of the movement since the last call, and of that over the weights; and by kind of layer."""
        before, self._seen = self._seen, self._look()
        squares: dict[str, list[float]] = {}  # kind -> [sum of movement^2, sum of weight^2, number of weights]
        for (name, p), then, now in zip(self._trained.items(), before, self._seen, strict=True):
            total = squares.setdefault(layer_kind(name), [0.0, 0.0, 0])
            total[0] += float((now.double() - then).square().mean()) * p.numel()
            total[1] += float(self._bases.get(name, now).square().mean()) * p.numel()
            total[2] += p.numel()
        moved, weights, count = (sum(column) for column in zip(*squares.values(), strict=True))
        ratio = math.sqrt(moved / weights) if weights else math.inf
        kinds = {f"update/rms/{kind}": math.sqrt(square / n) for kind, (square, _, n) in squares.items()}
        return {"update/rms": math.sqrt(moved / count), "update/rms_to_weights": ratio, **kinds}
