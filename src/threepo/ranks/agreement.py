"""Checks that ranks agree: on recipe, versions and code at the start, and on state and rows at every step.

Gradients are summed over ranks, so a rank that runs another recipe, or whose copy of the weights has changed, would
spoil the run unnoticed. Here the ranks compare what must be equal, and end together with one line that says what
differs and on which rank (`World.agree`). A process on its own compares nothing.
"""

import hashlib
import marshal
import platform
import sys
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from threepo.config.records import flat, to_dict
from threepo.posterior.policy_optimizer import PolicyOptimizer, Weights
from threepo.posterior.shards import local
from threepo.ranks.world import World
from threepo.rollout.bit_sums import MODULUS, bit_sum
from threepo.types import Batch, Row

PACKAGES = ("torch", "transformers", "tokenizers", "numpy")
"""Packages whose versions decide what a rank computes."""


def agree_on_setup(config: Any, world: World) -> None:
    """End all ranks, before a model is loaded, unless they have the same settings, versions of packages and code."""
    if world.size > 1:
        facts = dict(flat(to_dict(config)))
        facts |= {f"the version of {name}": version(name) for name in PACKAGES}
        facts |= {"the version of Python": platform.python_version(), "the code of threepo": code_digest()}
        world.agree(facts, "start all ranks with one recipe, in one environment", everywhere=True)


@cache
def code_digest() -> str:
    """Digest of the package's source files."""
    root = Path(__file__).parents[1]
    files = sorted(path for path in root.rglob("*") if path.suffix in (".py", ".c", ".h"))
    return _digest([(path.relative_to(root).as_posix(), path.read_bytes()) for path in files])


def code_of(names: Iterable[str]) -> dict[str, str]:
    """Digests of the modules of a user's code `module:name`, which must have been imported."""
    modules = {name: sys.modules.get(name.partition(":")[0]) for name in names}
    files = {name: getattr(module, "__file__", None) for name, module in modules.items()}
    return {f"the code of {name}": _digest(Path(file).read_bytes()) for name, file in files.items() if file}


def batch_facts(batch: Batch) -> dict[str, Any]:
    """The facts of a batch on which an update depends, by the words of error messages."""
    rows = list({row.index: row for part in batch.parts.values() for row in part}.values())
    return {
        "the draws of gradients": list(batch.parts),
        "the fitness of draws": list(batch.fitness.values()),
        "the sampling temperature": batch.temperature,
        "the rows of each gradient": _digest([[row.index for row in part] for part in batch.parts.values()]),
        "advantages": _digest([row.advantage for row in rows]),
        "the draws of rollouts": _digest([repr(row.completion.draw) for row in rows]),
        "the log-probs of rollouts": _digest([_checksum(row.completion.logprobs) for row in rows]),
        **row_facts(rows),
    }


def row_facts(rows: Iterable[Row]) -> dict[str, Any]:
    """Digest of the tokens of rows, by the words of error messages."""
    return {"the tokens of rows": _digest([_checksum(row.tokens) for row in rows])}


def _checksum(values: Sequence[float]) -> int:
    """A checksum of the numbers of a row, which another token always changes; four times as quick as a digest."""
    return zlib.crc32(np.asarray(values).data)


def _digest(value: Any) -> str:
    """A short digest of nested lists of numbers and texts."""
    # In version 2 the bytes follow from the values alone; later ones write which objects are the same.
    return hashlib.blake2b(marshal.dumps(value, 2), digest_size=8).hexdigest()


@dataclass
class StateCheck:
    """Compares the state of the ranks before an update and before a checkpoint."""

    world: World
    optimizer: PolicyOptimizer
    _last: dict[str, int] = field(default_factory=dict)
    """Sums of bits after the last update."""

    def note(self) -> None:
        """Remember the weights after an update or after loading: nothing may change them until the next update."""
        if self.world.size > 1:
            self._last = state_sums(self.optimizer, ())

    def agree(
        self, state: Any, facts: Callable[[], Mapping[str, Any]] = dict, reference: Weights | None = None
    ) -> None:
        """End all ranks unless they agree on `facts`, on the fields of `state`, and on the tensors they share."""
        if self.world.size == 1:
            return
        sums, first = state_sums(self.optimizer, reference=reference), self.optimizer.param_groups[0]
        changed = sorted(name for name, value in self._last.items() if sums[name] != value)
        known = {
            **{f"the train state's {name}": value for name, value in asdict(state).items()},
            **{f"the optimizer's {name}": first.get(name) for name in ("lr", "ess", "step", "skipped_steps")},
            **facts(),
            "what has changed since the last update": ", ".join(changed) or "nothing",
            **{f"the sum of the bits of {name}": value for name, value in sums.items()},
        }
        self.world.agree(known, "resume from the last checkpoint, and look for a fault in that rank's machine or code")


@torch.no_grad()
def state_sums(
    optimizer: PolicyOptimizer, kinds: Sequence[str] = ("hessian", "mean"), reference: Weights | None = None
) -> dict[str, int]:
    """Sum the bits of this rank's weights, of these kinds of optimizer state, and of a reference, by name.

    Each tensor's sum has its own factor, so that two swapped tensors are noticed. Ranks that hold the same shard have
    the same names here. Momenta are left out: if they differ, so do the weights after the next update.
    """
    held: dict[str, list[torch.Tensor]] = defaultdict(list)
    states = getattr(optimizer, "state", {})
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        state = states.get(p, {})
        for kind, tensor in {"weights": p, **{kind: state[kind] for kind in kinds if kind in state}}.items():
            held[kind + shard_name(p)].append(local(tensor))
    for tensor in (reference or {}).values():
        held["the reference" + shard_name(tensor)].append(local(tensor))
    return {
        name: sum((2 * i + 1) * bit_sum(tensor) for i, tensor in enumerate(tensors)) % MODULUS
        for name, tensors in held.items()
    }


def shard_name(tensor: torch.Tensor) -> str:
    """Name this rank's shard of a tensor, for messages; empty if the rank holds the whole tensor."""
    if not isinstance(tensor, DTensor):
        return ""
    place: Sequence[int] = tensor.device_mesh.get_coordinate() or ()
    shards = [str(place[dim]) for dim, placement in enumerate(tensor.placements) if placement.is_shard()]
    return f" in shard {', '.join(shards)}" if shards else ""
