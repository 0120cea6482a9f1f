"""Wrong weights in a real vLLM, and how many pushes the weight check takes to find them.

In the environment of make test-vllm, the table of docs/certificate.md, and its count of pushes without a fault:

    python tests/rollout/faults.py [float32] [bfloat16]
    python tests/rollout/faults.py healthy
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from rollout.asked import requests_for
from threepo.config import LoRAConfig, ModelConfig, SamplingConfig, TinyConfig
from threepo.config.engine import VLLMConfig, VLLMEngineConfig
from threepo.errors import UserError
from threepo.models.policy import Policy, load_policy
from threepo.posterior.ivon import IVON
from threepo.posterior.noise_structures import Structure
from threepo.posterior.policy_optimizer import WeightSource
from threepo.rollout import vllm
from threepo.rollout.bit_sums import SumCheck
from threepo.rollout.payloads import Tensors
from threepo.rollout.replicas import Replica
from threepo.rollout.vllm import VLLMEngine
from threepo.rollout.vllm_replica import Evidence
from threepo.rollout.weight_check import TOLERANCE, WeightCheck
from threepo.types import Arm, Draw

FAULTS = {
    "nothing": "no fault",
    "idle": "the reload does nothing",
    "swapped": "two draws are swapped",
    "trainer": "the trainer writes one draw in place of the other",
    "norm": "a push without the norms",
    "q_proj": "a push without q_proj",
    "down_proj": "a push without down_proj",
    "lm_head": "a push without the head",
    "embed_tokens": "a push without the embedding",
    "1.01": "one q_proj is 1 % off",
    "1.0001": "one q_proj is 0.01 % off",
    "element": "one number of one q_proj is 1 % off",
    "nan": "one number of one q_proj is NaN",
    "cache": "the prefix cache outlives the push",
}
ELSEWHERE = {
    "low rank": ("idle", "swapped", "down_proj"),
    "adapters": ("nothing", "idle", "swapped", "trainer", "cache", "element"),
    "two replicas": ("nothing", "behind"),
    "two workers": ("nothing", "element", "1.01"),
}
"""Faults by what else the engine or its noise may be."""
FAULTS_ELSEWHERE = {"behind": "one of two replicas is a push behind"}
"""What the file that a replica reads may say, and what it then does."""
HEALTHY, MOST = 12, 4
"""Pushes of two draws without a fault, and pushes with it at most."""
SAMPLING = SamplingConfig(temperature=1.0, max_new_tokens=1)
_PROGRAM = """
from pathlib import Path
from threepo.rollout import replicas, vllm_replica

vllm_replica.real_reload, adapt, push = vllm_replica.reload, vllm_replica.adapt, vllm_replica.Server.push

def fault_now():
    return Path({file!r}).read_text()

def faulty(worker, index):
    fault, mapped = fault_now(), vllm_replica._mapped
    whole = dict(mapped[index])
    if fault == "idle" or (fault == "behind" and index == 1):
        return
    if fault == "swapped":
        index = 1 - index
    tensors = mapped[index]
    name = "model.layers.1.self_attn.q_proj.weight"
    if fault[0] == "1":
        tensors[name] = tensors[name] * float(fault)
    if fault in ("element", "nan"):
        tensors[name] = tensors[name].clone()
        tensors[name][3, 5] *= 1.01 if fault == "element" else float("nan")
    for name in [name for name in tensors if fault in name]:
        del tensors[name]
    # A worker of vLLM's own has its module as it is; here the module has this function in the place of the real one.
    getattr(vllm_replica, "real_reload", vllm_replica.reload)(worker, index)
    if fault != "swapped":
        tensors.update(whole)

def faulty_adapt(worker, slot, settings, index):
    fault, mapped = fault_now(), vllm_replica._mapped[index]
    whole = dict(mapped)
    if fault == "element":
        name = list(whole)[-1]
        mapped[name] = whole[name].clone()
        mapped[name][3, 1] *= 1.01
    if fault != "idle":
        adapt(worker, slot, settings, 1 - index if fault == "swapped" else index)
    mapped.update(whole)

def faulty_push(self, indices, exact):
    if fault_now() == "cache":
        self._engine.reset_prefix_cache = lambda: True
    else:
        vars(self._engine).pop("reset_prefix_cache", None)
    return push(self, indices, exact)

vllm_replica.reload, vllm_replica.adapt, vllm_replica.Server.push = faulty, faulty_adapt, faulty_push
replicas.serve_requests(vllm_replica.Server)
"""


@contextmanager
def faulty_engine(dtype: str, kind: str = "") -> Iterator[tuple[Policy, VLLMEngine, Path]]:
    """A policy, an engine of a kind of `ELSEWHERE` or with "graphs", and the file that says its replicas' fault."""
    shape = TinyConfig(hidden_size=64, intermediate_size=96, layers=2, heads=2, kv_heads=1, tied=False)
    policy = load_policy(ModelConfig(path="tiny-llama", tiny=shape), seed=2)
    with TemporaryDirectory() as folder, torch.no_grad():
        policy.model.get_output_embeddings().weight *= 6
        file = Path(folder) / "fault"
        file.write_text("nothing")
        several = {"two replicas": {"replicas": 2}, "two workers": {"tensor_parallel": 2}}.get(kind, {})
        if several and torch.cuda.device_count() == 1:
            pytest.skip("needs two GPUs")
        if kind == "adapters":
            policy.save(Path(folder) / "base")
            policy = load_policy(ModelConfig(path=f"{folder}/base", lora=LoRAConfig(rank=4)), seed=2)
            several = {"adapters": 2}
        with patch.object(vllm, "_PROGRAM", _PROGRAM.format(file=str(file))):
            own = VLLMConfig(kv_cache_memory_bytes=1 << 28, enforce_eager=kind != "graphs", **several)
            engine = VLLMEngine(policy, VLLMEngineConfig(dtype=dtype, vllm=own))  # type: ignore[arg-type]
        try:
            yield policy, engine, file
        finally:
            engine.close()


class Found(NamedTuple):
    """How a fault was found."""

    moved: float
    """How far it moves log-probs (root mean square, nats)."""
    pushes: int | None
    """Pushes with the fault until it was found; None: `MOST` do not suffice."""
    words: str = ""
    """The error."""


def pushes_until_found(
    policy: Policy, engine: VLLMEngine, file: Path, fault: str, ess: float, structure: Structure = ""
) -> Found:
    """Push two draws a step into an engine; from step `HEALTHY` on with a fault."""
    optimizer = IVON(policy.model.named_parameters(), ess=ess, noise_structure=structure)
    dtype = next(iter(engine._payload.layout.values()))[1]
    engine._weight_check, moved = WeightCheck(TOLERANCE[dtype]), [0.0]
    engine._sum_check = SumCheck(engine._sum_check._times[-1])
    check, write = engine._check, engine._payload.write

    def checked(index: int, evidence: Evidence) -> None:
        if step == HEALTHY:
            pairs = zip(evidence.logprobs, engine._weight_check._expected[index], strict=True)
            moved.extend(float((torch.tensor(found) - wanted).square().mean().sqrt()) for found, wanted in pairs)
        check(index, evidence)

    def written(posterior: WeightSource, draw: Draw | None, tensors: Tensors) -> None:
        if step >= HEALTHY and fault == "trainer" and draw == draws[0]:
            draw = draws[1]
        write(posterior, draw, tensors)

    with ExitStack() as patched:
        patched.enter_context(patch.object(engine, "_check", checked))
        patched.enter_context(patch.object(engine, "_closed_on_error", nullcontext))
        patched.enter_context(patch.object(Replica, "close", lambda _: None))  # also after an error
        patched.enter_context(patch.object(engine._payload, "write", written))
        try:
            for step in range(HEALTHY + MOST):
                file.write_text(fault if step >= HEALTHY else "nothing")
                draws = [Draw(0, step, index) for index in range(2)]
                engine.load(optimizer, draws, step)
                engine.generate(requests_for(policy, draws[1:], 1), SAMPLING, 0)
        except UserError as error:
            return Found(float(torch.tensor(moved).max()), step - HEALTHY + 1, str(error))
        finally:
            file.write_text("nothing")
    return Found(float(torch.tensor(moved).max()), None)


def push_right_weights(policy: Policy, engine: VLLMEngine, pushes: int) -> None:
    """Push a draw, the mean and a draw of an arm a step, while the weights train; the first false alarm is raised."""
    optimizer = IVON(policy.model.named_parameters(), ess=1e9)
    for step in range(-(-pushes // 3)):
        for p in policy.model.parameters():
            p.add_(1e-4 * torch.randn(p.shape).sign().to(p.device))
        draws = [Draw(0, step, 0), None, Draw(0, step, 1, arm=Arm("attention", 4.0))]
        engine.load(optimizer, draws, step)
        engine.generate(requests_for(policy, draws, 1), SAMPLING, 0)


def main() -> None:
    if sys.argv[1:] == ["healthy"]:
        for dtype in ("float32", "bfloat16"):
            with faulty_engine(dtype) as (policy, engine, _):
                push_right_weights(policy, engine, 1000)
            print(f"{dtype}: 1,000 pushes of right weights, no error", flush=True)
        return
    for dtype in sys.argv[1:] or ("float32", "bfloat16"):
        for kind, faults in {"": tuple(FAULTS), **ELSEWHERE}.items():
            structure = "rank=1" if kind == "low rank" else ""
            with faulty_engine(dtype, kind) as engine:
                for fault in faults:
                    found = [pushes_until_found(*engine, fault, ess, structure) for ess in (1e8, 1e9, 1e10)]
                    cells = [f"{x.moved:.2g}: {x.pushes or '-'} {_named(x.words)}" for x in found]
                    words = {**FAULTS, **FAULTS_ELSEWHERE}[fault]
                    print(f"| {dtype} {kind} | {words} |", " | ".join(cells), "|", flush=True)


def _named(words: str) -> str:
    """What found it, in a word."""
    signs = {"after a fixed prompt": "after", "fixed prompt": "prompt", "after a reload": "sums", "written": "written"}
    return next((name for sign, name in signs.items() if sign in words), words)


if __name__ == "__main__":
    main()
