"""The program of test_verl.py, run by torchrun: verl's engines on the same batches; results go into FOLDER.

verl_program.py FOLDER: FOLDER/model has a model.
"""

import faulthandler
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine import EngineRegistry, FSDPEngineWithLMHead

from threepo.errors import UserError
from threepo.plugins.verl import IVONEngine
from threepo.plugins.verl_check import AT_ROLLOUT_DRAWS
from threepo.posterior.gaussian import Posterior
from threepo.types import Arm

IVON = {"ess": 1e5, "hess_init": 0.1, "clip_radius": 0.1, "seed": 3}
LENGTHS = (12, 7, 9, 15)
WRITTEN_BY = (0, 0, 1, 0)
"""The draw that wrote each row; the second of two ranks has none of draw 1."""
ARMS = (None, Arm("mlp", 4.0), None, Arm("all", 2.0))
"""The arm of each draw where arms are chosen; then each writes one row, and the first of two ranks has the mean's."""


def rows() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(20, 40, (n,), generator=generator) for n in LENGTHS]


def engine(folder: Path, kind: type = IVONEngine, **settings: Any) -> Any:
    """An engine with the model of `folder`; `settings` as override_optimizer_config."""
    os.environ["VERL_ENGINE_VENDOR"] = "threepo" if kind is IVONEngine else "none"
    shard = {"param_dtype": "fp32", "reduce_dtype": "fp32"}
    made = (EngineRegistry.new if kind is IVONEngine else lambda *_, **known: kind(**known))(
        "language_model",
        "fsdp2",
        model_config=HFModelConfig(
            path=str(folder / "model"), use_remove_padding=False, override_config={"attn_implementation": "sdpa"}
        ),
        engine_config=FSDPEngineConfig(strategy="fsdp2", use_torch_compile=False, mixed_precision=shard),
        optimizer_config=FSDPOptimizerConfig(
            lr=1.0,
            total_training_steps=10,
            lr_scheduler_type="cosine",
            override_optimizer_config=settings,
        ),
        checkpoint_config=CheckpointConfig(),
    )
    assert type(made) is kind
    made.initialize()
    return made


def batch(written_by: Sequence[int] = WRITTEN_BY, masked: int | None = None) -> TensorDict:
    """This rank's rows, all but the first token counted, and none of the draw `masked`; small micro-batches."""
    draws = written_by[dist.get_rank() :: dist.get_world_size()]
    mine = rows()[dist.get_rank() :: dist.get_world_size()]

    def nested(tensors: list[torch.Tensor]) -> torch.Tensor:
        return torch.nested.as_nested_tensor(tensors, layout=torch.jagged)

    data = TensorDict(
        {
            "input_ids": nested(mine),
            "position_ids": nested([torch.arange(len(row)) for row in mine]),
            "loss_mask": nested(
                [
                    torch.cat([torch.full((len(row) - 1,), float(draw != masked)), torch.zeros(1)])
                    for row, draw in zip(mine, draws, strict=True)
                ]
            ),
        },
        batch_size=[len(mine)],
    )
    tu.assign_non_tensor_stack(data, "extra_fields", [{"draw": draw} for draw in draws])
    tu.assign_non_tensor(
        data,
        temperature=1.0,
        use_dynamic_bsz=True,
        max_token_len_per_gpu=16,
        use_remove_padding=False,
        use_fused_kernels=False,
        pad_token_id=0,
        calculate_entropy=False,
    )
    return data


def loss(model_output: Any, data: TensorDict, dp_group: Any = None) -> tuple[torch.Tensor, dict[str, Any]]:
    """Mean negative log-likelihood over the tokens of all ranks, as verl's losses are."""
    tokens, ranks = tu.get_non_tensor_data(data, "batch_num_tokens", None), tu.get_non_tensor_data(data, "dp_size", 1)
    counted = model_output["log_probs"].values() * data["loss_mask"].values()
    return -counted.sum() / tokens * ranks, {}


def step(engine: Any, written_by: Sequence[int] = WRITTEN_BY) -> dict[str, Any]:
    """Log-probs before an update, its loss over all ranks and its metrics, the learning rate after it."""
    with engine.eval_mode():
        before = engine.infer_batch(batch(written_by))["model_output"]["log_probs"].values()
    with engine.train_mode():
        outputs = engine.train_batch(batch(written_by), loss)
    total = torch.tensor(sum(outputs["loss"]))
    dist.all_reduce(total)
    rate = engine.lr_scheduler_step()
    return {"logprobs": before, "loss": float(total) / dist.get_world_size(), "lr": rate, **outputs["metrics"]}


def pushed(engine: Any) -> dict[str, torch.Tensor]:
    """The weights that this rank would send to its rollout replica."""
    return {name: value.clone() for name, value in engine.get_per_tensor_param()[0]}


def trained(engine: Any, written_by: Sequence[int] = WRITTEN_BY) -> dict[str, Any]:
    """Two steps and the weights after them."""
    return {"steps": [step(engine, written_by) for _ in range(2)], "mean": pushed(engine)}


def main(folder: Path) -> None:
    """All that is asked of the engines, so that torchrun starts once."""
    found: dict[str, Any] = {}
    b3po = engine(folder, method="b3po", **IVON)
    found["b3po"] = trained(b3po)

    b3po.save_checkpoint(str(folder / "checkpoint"))
    other = engine(folder, method="b3po", **IVON)
    other.load_checkpoint(str(folder / "checkpoint"))
    found["went_on"], found["resumed"] = (step(e) | pushed(e) for e in (b3po, other))
    louder = engine(folder, method="b3po", **IVON | {"ess": 123.0})
    louder.load_checkpoint(str(folder / "checkpoint"))
    louder.checkpoint_manager.checkpoint_load_contents = ["model", "extra"]
    with pytest.raises(UserError, match="leaves out IVON's posterior"):
        louder.load_checkpoint(str(folder / "checkpoint"))
    found["louder"] = louder.optimizer.param_groups[0]["ess"]

    c3po = engine(folder, method="c3po", draws=2, **IVON)
    c3po.replica = dist.get_rank()
    found["draw"] = pushed(c3po)
    with c3po.eval_mode():
        found["at_fresh"] = c3po.infer_batch(batch())["model_output"]["log_probs"].values()
        for name, c3po.replica in (("at_pushed_mean", None), ("at_pushed_draws", dist.get_rank())):
            of_push = batch()
            tu.assign_non_tensor(of_push, **{AT_ROLLOUT_DRAWS: True})
            found[name] = c3po.infer_batch(of_push)["model_output"]["log_probs"].values()
    c3po.arms = ARMS[1::2]
    found["draw_with_arm"] = pushed(c3po)

    for method in ("m3po", "c3po_replay"):
        found[method] = trained(engine(folder, method=method, draws=2, **IVON))
        masked = engine(folder, method=method, draws=2, **IVON)
        with masked.train_mode():
            found[f"{method}, masked"] = masked.train_batch(batch(masked=1), loss)

    armed = engine(folder, method="c3po_auto", draws=len(ARMS), **IVON | {"betas": (0.9, 0.9)})
    armed.arms = ARMS
    found["c3po_auto"] = trained(armed, range(len(ARMS))) | {"hessian": Posterior.of(armed.optimizer).hessian}

    found["no_noise"] = trained(engine(folder, method="b3po", noise_scale=0, **IVON))
    found["verl"] = trained(engine(folder, FSDPEngineWithLMHead))
    torch.save(found, folder / f"found_{dist.get_rank()}.pt")


if __name__ == "__main__":
    faulthandler.dump_traceback_later(150, exit=True)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    main(Path(sys.argv[1]))
    dist.destroy_process_group()
