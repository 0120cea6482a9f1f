"""Wrong weights in a real vLLM behind a right checksum, and how many pushes the weight check takes to find them.

python tests/rollout/faults.py   # in the environment of make test-vllm; prints the table of docs/engines.md
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import torch

from threepo.config import ModelConfig, TinyConfig
from threepo.config.engine import VLLMConfig, VLLMEngineConfig
from threepo.errors import UserError
from threepo.models.policy import Policy, load_policy
from threepo.posterior.ivon import IVON
from threepo.rollout import vllm
from threepo.rollout.vllm import VLLMEngine
from threepo.rollout.weight_check import TOLERANCE, WeightCheck
from threepo.types import Draw

FAULTS = {
    "nothing": "no fault",
    "idle": "the reload does nothing",
    "swapped": "two draws are swapped",
    "norm": "a push without the norms",
    "q_proj": "a push without q_proj",
    "down_proj": "a push without down_proj",
    "lm_head": "a push without the head",
    "1.01": "one q_proj is 1 % off",
    "1.0001": "one q_proj is 0.01 % off",
}
"""What the file that a replica reads may say, and what it then does."""
HEALTHY, MOST = 6, 4
"""Pushes of two draws without a fault, and pushes with it at most."""
_PROGRAM = """
from pathlib import Path
from threepo.rollout import replicas, vllm_replica

reload = vllm_replica.reload

def faulty(worker, index, rehearsed):
    fault, mapped = Path({file!r}).read_text(), vllm_replica._mapped
    checksum, whole = mapped[index].checksum(), dict(mapped[index].tensors)
    if fault == "idle":
        return checksum
    if fault == "swapped":
        index = 1 - index
    tensors = mapped[index].tensors
    if fault[0] == "1":
        name = "model.layers.1.self_attn.q_proj.weight"
        tensors[name] = tensors[name] * float(fault)
    for name in [name for name in tensors if fault in name]:
        del tensors[name]
    reload(worker, index, rehearsed)
    if fault != "swapped":
        tensors.update(whole)
    return checksum

vllm_replica.reload = faulty
replicas.serve_requests(vllm_replica.Server)
"""


@contextmanager
def faulty_engine(dtype: str) -> Iterator[tuple[Policy, VLLMEngine, Path]]:
    """A policy, an engine with one replica, and the file that says which fault the replica has."""
    shape = TinyConfig(hidden_size=64, intermediate_size=96, layers=2, heads=2, kv_heads=1, tied=False)
    policy = load_policy(ModelConfig(path="tiny-llama", tiny=shape), seed=2)
    with TemporaryDirectory() as folder, torch.no_grad():
        policy.model.get_output_embeddings().weight *= 6
        file = Path(folder) / "fault"
        file.write_text("nothing")
        with patch.object(vllm, "_PROGRAM", _PROGRAM.format(file=str(file))):
            own = VLLMConfig(kv_cache_memory_bytes=1 << 28, enforce_eager=True)
            engine = VLLMEngine(policy, VLLMEngineConfig(dtype=dtype, vllm=own))  # type: ignore[arg-type]
        try:
            yield policy, engine, file
        finally:
            engine.close()


def pushes_until_found(
    policy: Policy, engine: VLLMEngine, file: Path, fault: str, ess: float
) -> tuple[float, int | None]:
    """How far a fault moves log-probs (root mean square, nats), and the pushes until the weight check finds it.

    Each push is of two draws, and none of the first `HEALTHY` has the fault; None: `MOST` with it do not suffice.
    """
    optimizer = IVON(policy.model.named_parameters(), ess=ess)
    dtype = next(iter(engine._payload.layout.values()))[1]
    check, moved = WeightCheck(TOLERANCE[dtype]), 0.0
    try:
        for step in range(HEALTHY + MOST):
            file.write_text(fault if step >= HEALTHY else "nothing")
            for index, (expected, measured) in enumerate(pushed(engine, check, optimizer, step)):
                if step == HEALTHY:
                    moved = max(moved, float((torch.tensor(measured) - expected).square().mean().sqrt()))
                check.check(index, measured)
    except UserError:
        return moved, step - HEALTHY + 1
    finally:
        file.write_text("nothing")
    return moved, None


def pushed(
    engine: VLLMEngine, check: WeightCheck, optimizer: IVON, step: int
) -> Iterator[tuple[torch.Tensor, list[float]]]:
    """The log-probs that the trainer expects and those that the engine has, of two draws that are pushed in turn."""
    draws, expected = [Draw(0, step, index) for index in range(2)], []
    engine._share(len(draws))
    for draw, shared in zip(draws, engine._shared, strict=True):
        engine._payload.write(optimizer, draw, shared.tensors)
        expected.append(engine._payload.logprobs(shared.tensors, engine._prompt))
    check.expect(draws, step, expected)
    for index in range(len(draws)):
        ((_, measured),) = engine._replicas[0].call("push", index)
        yield expected[index], measured


def main() -> None:
    for dtype in sys.argv[1:] or ("float32", "bfloat16"):
        with faulty_engine(dtype) as (policy, engine, file):
            for fault, words in FAULTS.items():
                found = [pushes_until_found(policy, engine, file, fault, ess) for ess in (1e8, 1e9, 1e10)]
                cells = [f"{moved:.2g}: {pushes or '-'}" for moved, pushes in found]
                print(f"| {dtype} | {words} |", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
