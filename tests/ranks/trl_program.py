"""The program of test_trl_on_ranks.py, run on each rank: two steps of some methods, most with a table of completions.

trl_program.py FOLDER [ddp | fsdp2]: writes what each run ended with.
trl_program.py FOLDER (ddp | fsdp2) vllm: with a vLLM for each rank, whose log-probs each rank compares with its own.
"""

import faulthandler
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from accelerate import state
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor

sys.path.append(str(Path(__file__).parents[1] / "plugins"))

from trl_models import MICRO_BATCHES, NOISY, PROMPTS, ROLLOUTS, VLLM, WIDE, Checked, ToldThreepo, make

import threepo
from threepo.config import Method
from threepo.plugins.trl import ThreepoTrainer
from threepo.posterior.shards import whole

FSDP2 = {
    "fsdp": True,
    "fsdp_config": {
        "version": 2,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": ["Qwen2DecoderLayer"],
        "reshard_after_forward": True,
    },
}
MADE = state.AcceleratorState.__init__


def with_fsdp(self: Any, *arguments: Any, fsdp_plugin: Any = None, **more: Any) -> None:
    """accelerate asks for FSDP on accelerators only; here it is told that gloo's ranks have it too."""
    MADE(self, *arguments, fsdp_plugin=fsdp_plugin, **more)
    if fsdp_plugin is not None:
        self.fsdp_plugin, self.distributed_type = fsdp_plugin, DistributedType.FSDP
        state.PartialState._shared_state["distributed_type"] = DistributedType.FSDP


def ended(kind: type[ThreepoTrainer], folder: Path, method: Method, resume: Path | None = None, **more: Any) -> Any:
    """A trainer after its two steps."""
    rows = PROMPTS * ROLLOUTS // MICRO_BATCHES // int(os.environ.get("WORLD_SIZE", "1"))
    settings = {"per_device_train_batch_size": rows, "max_steps": 2, "save_strategy": "steps", "save_steps": 1, **more}
    trainer = make(kind, folder, method=method, ivon=NOISY, **settings)
    trainer.train(resume_from_checkpoint=resume and str(resume))
    return trainer


def sharded(trainer: Any) -> bool:
    """True if FSDP2 has the parameters."""
    return isinstance(next(trainer.model.parameters()), DTensor)


def trained(folder: Path, method: Method, resume: Path | None = None, told: bool = True, **more: Any) -> dict[str, Any]:
    """A trainer's final weights and IVON state, whole, and its log."""
    trainer = ended(ToldThreepo if told else ThreepoTrainer, folder, method, resume, **more)
    optimizer = trainer.policy_optimizer
    tensors = {
        f"{what}/{name}": whole(value.detach())
        for name, p in optimizer.named()
        for what, value in (("mean", p), *((key, optimizer.state[p][key]) for key in ("hessian", "momentum")))
    }
    return {
        "tensors": tensors,
        "log": [entry for entry in trainer.state.log_history if "loss" in entry],
        "sharded": sharded(trainer),
        "stale states": len(optimizer.state) - len(optimizer.named()),
    }


def checked(folder: Path, **more: Any) -> None:
    """Write what this rank's comparisons with vLLM's log-probs were."""
    with patch("trl_models.SHAPE", WIDE):
        trainer = ended(Checked, folder, threepo.C3PO, engine=VLLM, **more)
    found = {"own": trainer.own[True], "others": trainer.others, "sharded": sharded(trainer)}
    torch.save(found, folder / f"checked-{os.environ['RANK']}.pt")


if __name__ == "__main__":
    faulthandler.dump_traceback_later(150, exit=True)
    torch.set_num_threads(1)
    folder, (how, *engine) = Path(sys.argv[1]), sys.argv[2:] or ["ddp"]
    more = FSDP2 if how == "fsdp2" else {}
    with patch.object(state.AcceleratorState, "__init__", with_fsdp if more else MADE):
        if engine:
            checked(folder, **more)
            sys.exit()
        found = {
            "c3po": trained(folder, threepo.C3PO, **more),
            "m3po": trained(folder / "m3po", threepo.M3PO, **more),
            "arms": trained(folder / "arms", threepo.C3PO_REPLAY, arms={"choice": "thompson", "sizes": [1, 4]}, **more),
            "resumed": trained(folder / "resumed", threepo.C3PO, folder / "checkpoint-1", **more),
            "generated": trained(folder / "generated", threepo.C3PO, told=False, **more),
            "neftune": trained(
                folder / "neftune", threepo.C3PO, told=False, noise={"size": 0.0}, neftune_noise_alpha=50.0, **more
            ),
            "by an engine": trained(folder / "engine", threepo.C3PO, told=False, engine={"kind": "local"}, **more),
        }
    if os.environ.get("RANK", "0") == "0":
        torch.save(found, folder / "found.pt")
