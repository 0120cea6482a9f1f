"""vLLM as users start it: compiled, with CUDA graphs. Its other tests set enforce_eager, to start faster."""

import importlib.util

import pytest

from gpu.conftest import Figure
from rollout.asked import differences, requests_for
from rollout.faults import faulty_engine, pushes_until_found
from rollout.test_vllm import SAMPLING, engine_for, tiny
from rollout.test_weight_faults import late
from threepo.posterior.ivon import IVON
from threepo.types import Draw

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")


def test_engine_and_trainer_agree_push_after_push(figure: Figure) -> None:
    """A graph that reads where weights lay before would show from the second push on."""
    policy = tiny("tiny-qwen2", tied=True)
    optimizer = IVON(policy.model.named_parameters(), ess=1e5)
    engine = engine_for(policy, "bfloat16", enforce_eager=False)
    for step in range(3):
        draws = [None, *(Draw(0, step, index) for index in range(2))]
        engine.load(optimizer, draws, step)
        found = differences(policy, optimizer, engine.generate(requests_for(policy, draws), SAMPLING, seed=1))
        figure(f"step {step}, nats at most", max(gap for (draw, other), gap in found.items() if draw == other))
        for (draw, other), gap in found.items():
            assert (gap < 0.15) == (draw == other), gap
    engine.close()


def test_wrong_weights_are_found_at_the_first_push(figure: Figure) -> None:
    faults = ("nothing", "idle", "swapped", "norm", "q_proj", "lm_head", "element", "cache")
    with faulty_engine("bfloat16", "graphs") as (policy, engine, file):
        results = {fault: pushes_until_found(policy, engine, file, fault, 1e9) for fault in faults}
    assert late(results, figure) == {"nothing"}
