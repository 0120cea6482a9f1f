"""A digest of the weights that an evaluation depends on."""

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import torch

from threepo.data.digest import digest
from threepo.models.policy import Policy
from threepo.posterior.gaussian import Posterior

_NOT_THE_MODEL = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")
"""Keys of a model's configuration that change where it is saved or loaded, but not what it computes."""


def weights_digest(policy: Policy, posterior: Posterior | None) -> str:
    """A digest of every weight, of the model's configuration, and of the posterior if draws are made."""
    shape = {key: value for key, value in policy.model.config.to_dict().items() if key not in _NOT_THE_MODEL}
    parts = [json.dumps(shape, sort_keys=True, default=str), *_tensors(policy.model.state_dict())]
    if posterior is not None:
        parts += [repr(posterior.groups), repr((posterior.step, posterior.seed)), *_tensors(posterior.hessian)]
    return digest(parts)


def _tensors(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """A line per tensor; hashing releases the GIL, so threads hash several at the same time."""

    def line(name: str) -> str:
        tensor = tensors[name].detach().cpu().contiguous()
        data = tensor.reshape(-1).view(torch.uint8).numpy().data
        return f"{name} {tensor.dtype} {list(tensor.shape)} {hashlib.blake2b(data, digest_size=16).hexdigest()}"

    with ThreadPoolExecutor() as pool:
        return list(pool.map(line, sorted(tensors)))
