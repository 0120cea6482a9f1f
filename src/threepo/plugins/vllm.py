"""The weight-transfer backend `threepo` of vLLM's servers: a server gets the address of a draw and makes its weights.

    --weight-transfer-config '{"backend": "threepo"}'      (docs/engines.md has the whole command)

vLLM finds it by its entry point and imports it in all processes; it does nothing in servers that do not name it. A
server makes each draw from the file that the update names, which is in the machine's page cache once for all workers.
Between two draws it keeps only tensors that have changed since the last full push.
"""

import json
import socket
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch
from vllm.distributed import get_tp_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload.inplace import reload_weights

from threepo.models.parts import cut
from threepo.posterior.draw_file import PushedWeights
from threepo.rollout.bit_sums import SumCheck, added_up, bit_sum, sums_in_engine
from threepo.rollout.vllm_replica import fill_with_nan
from threepo.types import Arm, Draw, Purpose


@dataclass
class Address(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Body of a request to `/update_weights`."""

    path: str
    """The file of a full push (posterior/draw_file.py)."""
    changes: list[list[str]] = field(default_factory=list)
    """The files of each push of changes since."""
    draw: tuple[int, int, int, Purpose, Literal[1, -1], tuple[str, float] | None] | None = None
    """The fields of a `Draw`, in their order; null: the mean."""
    sums: dict[str, int] = field(default_factory=dict)
    """The sums that tensors of this draw must have, as the trainer makes them of its model (rollout/bit_sums.py)."""


class AddressedWeights(WeightTransferEngine):  # type: ignore[misc]
    """A worker's end of the transfer: every worker makes the whole draw and keeps its own part."""

    init_info_cls, update_info_cls = WeightTransferInitInfo, Address
    _pushed: PushedWeights | None = None
    _sum_check: SumCheck | None = None

    def init_transfer_engine(self, init_info: WeightTransferInitInfo) -> None:
        """Do nothing: there is no connection to set up."""

    def start_weight_update(self) -> None:
        """Do nothing: `receive_weights` does all."""

    def finish_weight_update(self) -> None:
        """Do nothing: `receive_weights` has done all."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive the weights and wait for the device."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():  # the base class synchronizes also where there is none, which fails
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: Address) -> None:
        """Make the draw and load it into the model, NaN before the first (rollout/vllm_replica.py says why)."""
        draw = None
        if update_info.draw is not None:
            seed, step, index, purpose, sign, arm = update_info.draw
            draw = Draw(seed, step, index, purpose, sign, Arm(*arm) if arm else None)
        path, dtype = Path(update_info.path), self.model_config.dtype
        changes = [[Path(file) for file in files] for files in update_info.changes]
        if not all(file.is_file() for file in (path, *chain(*changes))):
            raise FileNotFoundError(f"{socket.gethostname()} does not see engine.vllm.weights_folder = {path.parent}")
        if self._pushed is None:
            fill_with_nan(self.model)
            self._pushed = PushedWeights()
        self._pushed.follow(path, changes)
        made: dict[str, int] = {}
        weights = _summed(self._pushed.draw(draw, dtype, self.device), dtype, made)
        known = cut(weights, json.loads(self._pushed.metadata["parts"]))
        reload_weights(self.vllm_config, self.model, known, None, is_checkpoint_format=True)
        wrong = [name for name, value in update_info.sums.items() if made.get(name) != value]
        _refuse(wrong, f"are not the trainer's own of {draw or 'the mean'}")
        group = get_tp_group()
        parts: list[Any] = [None] * group.world_size
        torch.distributed.all_gather_object(parts, sums_in_engine(self.model, dtype), group=group.cpu_group)
        self._sum_check = self._sum_check or SumCheck(group.world_size)
        wrong = self._sum_check.differing(made, added_up(parts))
        _refuse(wrong, f"of vLLM are not those of {draw or 'the mean'}")

    def shutdown(self) -> None:
        """Do nothing: no resources are held."""


def _refuse(wrong: Sequence[str], fault: str) -> None:
    """Raise `RuntimeError` if there are wrong tensors; names the first of them."""
    if wrong:
        raise RuntimeError(f"{len(wrong)} tensors {fault}: {', '.join(wrong[:4])}")


def _summed(
    weights: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype, sums: dict[str, int]
) -> Iterator[tuple[str, torch.Tensor]]:
    """These weights, whose sums in `dtype` are put into `sums` as they pass."""
    for name, value in weights:
        if value.is_floating_point():
            sums[name] = bit_sum(value.to(dtype))
        yield name, value


def register() -> None:
    """Register the backend in this process; vLLM may call this more than once."""
    if "threepo" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("threepo", AddressedWeights)
