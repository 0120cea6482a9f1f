"""The file from which inference servers make draws: mean and Hessian, written once a step, whatever the draws.

It is a safetensors file with the tensors `mean NAME` and `hessian NAME`. Its metadata say which names of the model a
mean has (a tied head has the embedding's), and what turns Hessians into standard deviations.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import safe_open

from threepo.posterior import kernels
from threepo.posterior.gaussian import distribution
from threepo.posterior.noise_sizes import arm_factor
from threepo.posterior.perturbation import NoisyParameter
from threepo.posterior.policy_optimizer import Weights, WeightSource
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


@torch.no_grad()
def read_draw(
    path: Path, draw: Draw | None, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and value of every tensor of the model under `draw` (None: the mean), one at a time, on `device`.

    What has noise comes in `dtype`, with the bits that the source itself would give; the rest as it was written.
    """
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        groups = {name: group for group in json.loads(metadata["groups"]) for name in group["parameters"]}
        for name, called in json.loads(metadata["names"]).items():
            value = file.get_tensor(f"mean {name}").to(device)
            if draw is not None and (group := groups.get(name)) and arm_factor(draw.arm, name):
                learned = group["noise_shape"] == "learned"
                hessian = file.get_tensor(f"hessian {name}").to(device) if learned else value  # which is not read
                out = torch.empty_like(value, dtype=dtype)
                kernels.run([NoisyParameter.of(name, value, value, hessian, group).under(draw, out)])
                value = out
            yield from ((alias, value) for alias in called)
