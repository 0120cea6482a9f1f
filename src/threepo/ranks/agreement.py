"""Agreement of ranks: on recipe, versions and code at the start, and on state and rows at every step.

Gradients are sums over ranks, whatever each of them computed. So a rank that runs another recipe, or whose copy of
the weights has changed, would spoil the run without a word. Here the ranks compare what must be equal, and end together
with one line that says what differs and on which rank (`World.agree`). A process on its own compares nothing.

What cannot be seen: a shard that was wrong when it was loaded. Only one rank holds it; but the first rank alone reads
the files, and hands the shards on.
"""

import hashlib
import platform
import struct
import sys
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from threepo.config.records import to_dict
from threepo.posterior.policy_optimizer import PolicyOptimizer, Weights
from threepo.posterior.shards import local
from threepo.ranks.world import World
from threepo.types import Batch, Row

PACKAGES = ("torch", "transformers", "tokenizers", "numpy")
"""Packages whose versions decide what a rank computes."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers of an element's size in bytes."""


def agree_on_setup(config: Any, world: World) -> None:
    """End all world, before a model is loaded, unless they have the same settings, versions of packages and code."""
    if world.size > 1:
        packages = {f"the version of {name}": version(name) for name in PACKAGES}
        own = {"the version of Python": platform.python_version(), "the code of threepo": code_digest()}
        fix = "start all ranks with one recipe, in one environment"
        world.agree(dict(_settings("", to_dict(config))) | packages | own, fix, everywhere=True)


def _settings(name: str, value: Any) -> Iterable[tuple[str, Any]]:
    """Each setting with its full name, such as `optimizer.lr`."""
    if not isinstance(value, Mapping):
        return [(name, value)]
    return [pair for key, item in value.items() for pair in _settings(f"{name}.{key}".lstrip("."), item)]


@cache
def code_digest() -> str:
    """A digest of the package's source files."""
    root = Path(__file__).parents[1]
    files = sorted(path for path in root.rglob("*") if path.suffix in (".py", ".c", ".h"))
    return _hashed(part for path in files for part in (path.relative_to(root).as_posix().encode(), path.read_bytes()))


def reward_code(names: Iterable[str]) -> dict[str, str]:
    """A digest of the module of every reward function `module:function`, which must have been imported."""
    modules = {name: sys.modules.get(name.partition(":")[0]) for name in names if ":" in name}
    files = {name: getattr(module, "__file__", None) for name, module in modules.items()}
    return {f"the code of {name}": _hashed([Path(file).read_bytes()]) for name, file in files.items() if file}


def batch_facts(batch: Batch) -> dict[str, Any]:
    """Facts of a batch that an update uses, by the words of messages."""
    rows = {row.index: row for part in batch.parts.values() for row in part}
    draws = (row.completion.draw for row in rows.values())  # all of this step
    return {
        "the draws of gradients": list(batch.parts),
        "the fitness of draws": list(batch.fitness.values()),
        "the sampling temperature": batch.temperature,
        "the rows of each gradient": _digest("q", [[row.index for row in part] for part in batch.parts.values()]),
        "advantages": _digest("d", [[row.advantage for row in rows.values()]]),
        "the draws of rollouts": _digest("q", [[draw.sign * (draw.index + 1) if draw else 0 for draw in draws]]),
        "the log-probs of rollouts": _digest("d", (row.completion.logprobs for row in rows.values())),
        **row_facts(rows.values()),
    }


def row_facts(rows: Iterable[Row]) -> dict[str, Any]:
    """A digest of the tokens of rows, by the words of messages."""
    return {"the tokens of rows": _digest("q", (row.tokens for row in rows))}


def _digest(kind: str, values: Iterable[Sequence[Any]]) -> str:
    """A digest of lists of numbers, and of their lengths; `array` has the numbers under the letter `kind`."""
    lists = list(values)
    return _hashed([array("q", map(len, lists)).tobytes(), array(kind, chain.from_iterable(lists)).tobytes()])


def _hashed(parts: Iterable[bytes]) -> str:
    found = hashlib.blake2b(digest_size=8)
    for part in parts:
        found.update(struct.pack("<q", len(part)) + part)
    return found.hexdigest()


@dataclass
class StateCheck:
    """Compares what the ranks hold, before an update and before a checkpoint."""

    world: World
    optimizer: PolicyOptimizer
    _last: dict[str, int] = field(default_factory=dict)
    """The sums as the last update left them."""

    def note(self) -> None:
        """Remember the weights as an update, or loading, has left them: until the next one nothing may change them."""
        if self.world.size > 1:
            self._last = bit_sums(self.optimizer, ())

    def agree(
        self, state: Any, facts: Callable[[], Mapping[str, Any]] = dict, reference: Weights | None = None
    ) -> None:
        """End all ranks unless they agree on `facts`, on the fields of `state`, and on the tensors they share."""
        if self.world.size == 1:
            return
        sums, first = bit_sums(self.optimizer, reference=reference), self.optimizer.param_groups[0]
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
def bit_sums(
    optimizer: PolicyOptimizer, kinds: Sequence[str] = ("hessian", "mean"), reference: Weights | None = None
) -> dict[str, int]:
    """Sums of the bits of the weights, of these kinds of optimizer state, and of a reference, as this rank holds them.

    Momenta are left out: where they differ, the weights differ after the next update.
    The bits are added as integers, so that no order of summing and no rounding matters; each tensor's sum has a weight
    of its own, so that two tensors cannot be swapped. Ranks that hold the same shard have the same names here.
    """
    found: dict[str, list[torch.Tensor]] = defaultdict(list)
    states = getattr(optimizer, "state", {})
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        here, state = _shard(p), states.get(p, {})
        for kind, tensor in {"weights": p, **{kind: state[kind] for kind in kinds if kind in state}}.items():
            found[kind + here].append(_bit_sum(local(tensor)))
    for tensor in (reference or {}).values():
        found["the reference" + _shard(tensor)].append(_bit_sum(local(tensor)))
    sums = {}
    for name, totals in found.items():
        stacked = torch.stack(totals)
        sums[name] = int((stacked * torch.arange(1, 2 * len(totals), 2, device=stacked.device)).sum())
    return sums


def _bit_sum(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor summed as integers of 64 bits, which is ten times as fast as of 32; the rest as it is."""
    flat, size = tensor.contiguous().view(-1), tensor.element_size()
    flat = flat.clone() if flat.storage_offset() * size % 8 else flat  # integers begin at whole words
    words = flat.numel() * size // 8
    head, tail = flat[: words * 8 // size], flat[words * 8 // size :]
    total = head.view(torch.int64).sum()
    return total + tail.view(_BITS[size]).sum(dtype=torch.int64) if len(tail) else total


def _shard(tensor: torch.Tensor) -> str:
    """Names the shard of a tensor that this rank holds, for messages; empty if it holds the whole."""
    if not isinstance(tensor, DTensor):
        return ""
    place: Sequence[int] = tensor.device_mesh.get_coordinate() or ()
    shards = [str(place[dim]) for dim, placement in enumerate(tensor.placements) if placement.is_shard()]
    return f" in shard {', '.join(shards)}" if shards else ""
