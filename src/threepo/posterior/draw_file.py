"""The files from which inference servers make draws: mean and Hessian, written once a step, whatever the draws.

A full push is a safetensors file with the tensors `mean NAME` and `hessian NAME`. Its metadata say which names of the
model a mean has (a tied head has the embedding's), and what turns Hessians into standard deviations.

A push of changes has, for each of these tensors, the elements that differ from the last push: `at TENSOR`, their places
in the flat tensor, and `to TENSOR`, their new values. In float32 all weights change at every step. So they are rounded,
means to bfloat16 and Hessians to four significant bits, where few change; both sides know these to the bit, and a draw
is made of them (`RoundedWeights`). It does not depend on which pushes were full.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from threepo.posterior import kernels
from threepo.posterior.gaussian import distribution
from threepo.posterior.noise_sizes import arm_factor
from threepo.posterior.perturbation import NoisyParameter, under_arm, weights_under
from threepo.posterior.policy_optimizer import Weights, WeightSource
from threepo.posterior.shards import local
from threepo.types import Draw


def file_contents(
    source: WeightSource, saved: Weights, sources: Mapping[str, str], noisy: bool
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tensors and metadata of the file; sharded where the source's are.

    `saved` has what the model saves, for tensors that the source lacks. `sources` has the parameter of every name in
    the model's state dict. Without `noisy`, only the mean can be read from the file.
    """
    means, posterior = distribution(source)
    called = {sources[name]: name for name in means}  # the noise of a tied weight goes by the name in the optimizer
    names: dict[str, list[str]] = {}
    for name, parameter in sources.items():
        names.setdefault(called.get(parameter, parameter), []).append(name)
    tensors = {f"mean {name}": means[name] if name in means else saved[name] for name in names}
    hessian = posterior.hessian if posterior else {}
    groups = [group for group in posterior.groups if noisy and group.noise_scale] if posterior else []
    learned = [name for group in groups if group.noise_shape == "learned" for name in group.parameters]
    tensors |= {f"hessian {name}": hessian[name] for name in learned if name in hessian}
    return tensors, {"names": json.dumps(names), "groups": json.dumps([asdict(group) for group in groups])}


Round = Callable[[torch.Tensor], torch.Tensor]
"""Rounds a tensor to numbers that bfloat16 has; the result is new, and in float32."""


def roundings(source: WeightSource, tensors: Iterable[str]) -> dict[str, Round]:
    """Returns how tensors of a file are rounded for pushes of changes; those that are not trained stay as they are."""
    means, _ = distribution(source)
    kinds = {f"mean {name}": round_mean for name in means} | {f"hessian {name}": round_hessian for name in means}
    return {name: kinds[name] for name in tensors if name in kinds}


def round_mean(mean: torch.Tensor) -> torch.Tensor:
    """Round to the nearest number that bfloat16 has; the result is in float32."""
    return mean.detach().bfloat16().float()


def round_hessian(hessian: torch.Tensor) -> torch.Tensor:
    """Round to the nearest number of four significant bits, in float32; sigma changes by about 3 % at most.

    By Dekker's splitting (Numer. Math. 18, 1971). Hessians are far from the largest number.
    """
    scaled = hessian.detach() * ((1 << 20) + 1)
    return scaled - (scaled - hessian)


class RoundedWeights:
    """The draws of a source as they are made of its rounded mean and Hessian; a `WeightSource`."""

    def __init__(self, source: WeightSource) -> None:
        self._source: Any = source  # an optimizer, or fixed weights

    @torch.no_grad()
    def weights(
        self, draw: Draw | None, into: Weights | None = None, *, gather: bool = False
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """See `WeightSource.weights`; in float32, one at a time."""
        for name, mean, noisy in self._parameters(draw):
            yield from weights_under([(name, mean)], noisy, draw, into, gather)

    @torch.no_grad()
    def moved(self, draw: Draw) -> tuple[int, int]:
        """The number of this rank's weights that a draw changes in bfloat16, and of those that have noise."""
        differing = noisy = 0
        for name, mean, entries in self._parameters(draw):
            if under_arm(entries, draw):
                [(_, value)] = weights_under([(name, mean)], entries, draw)
                differing += int((local(value).bfloat16() != local(mean)).sum())
                noisy += local(mean).numel()
        return differing, noisy

    def _parameters(self, draw: Draw | None) -> Iterator[tuple[str, torch.Tensor, list[NoisyParameter]]]:
        """Name and rounded mean of every parameter, and a list of its noise, which is empty if it has none."""
        self._source.refuse_while_perturbed("weights are read")
        noisy = {entry.name: entry for entry in self._source.noisy()} if draw else {}
        for name, mean in distribution(self._source)[0].items():
            rounded, own = round_mean(mean), []
            if entry := noisy.get(name):
                hessian = rounded if entry.scalars.fixed_root else round_hessian(entry.hessian)
                own = [entry._replace(p=rounded, mean=rounded, hessian=hessian)]
            yield name, rounded, own


class PushedWeights:
    """Holds what a server has been told of the trainer's weights.

    Tensors that have changed since the last full push are in memory.
    """

    def __init__(self) -> None:
        self._full, self._read = Path(), list[Sequence[Path]]()
        self.metadata: dict[str, str] = {}
        self._changed: dict[str, torch.Tensor] = {}

    def follow(self, full: Path, changes: Sequence[Sequence[Path]]) -> None:
        """Read a full push and the pushes of changes after it, as far as they are not known.

        Each of `changes` is a push, of which every file has some of the elements.
        """
        if self._full != full or self._read != list(changes[: len(self._read)]):
            with safe_open(full, framework="pt") as file:
                self.metadata = file.metadata()
            self._full, self._read, self._changed = full, [], {}
        for push in changes[len(self._read) :]:
            with safe_open(full, framework="pt") as file:
                for path in push:
                    self._change(path, file)
            self._read.append(push)

    @torch.no_grad()
    def draw(self, draw: Draw | None, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and value of every tensor of the model under `draw` (None: the mean), one at a time, on `device`.

        What has noise comes in `dtype`, with the bits that the source itself would give; the rest as it was written.
        """
        groups = {name: group for group in json.loads(self.metadata["groups"]) for name in group["parameters"]}
        with safe_open(self._full, framework="pt") as file:
            for name, called in json.loads(self.metadata["names"]).items():
                value = self._tensor(f"mean {name}", file).to(device)
                if draw is not None and (group := groups.get(name)) and arm_factor(draw.arm, name):
                    mean, learned = value.float(), group["noise_shape"] == "learned"
                    hessian = self._tensor(f"hessian {name}", file).to(device).float() if learned else mean
                    value = torch.empty_like(mean, dtype=dtype)
                    kernels.run([NoisyParameter.of(name, mean, mean, hessian, group).under(draw, value)])
                    del mean, hessian  # of an embedding some gigabytes, which would wait here while vLLM loads it
                yield from ((alias, value) for alias in called)

    def _change(self, path: Path, full: Any) -> None:
        """Take in a file of changes; `full` is the open file of the full push before it."""
        with safe_open(path, framework="pt") as file:
            self.metadata |= file.metadata() or {}
            read = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        for name in (key.removeprefix("at ") for key in read if key.startswith("at ")):
            if name not in self._changed:
                self._changed[name] = full.get_tensor(name).clone()
            self._changed[name].view(-1)[read[f"at {name}"].long()] = read[f"to {name}"]

    def _tensor(self, name: str, full: Any) -> torch.Tensor:
        """A tensor as it is now, not to be written into."""
        return self._changed[name] if name in self._changed else full.get_tensor(name)
