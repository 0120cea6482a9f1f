"""Contract 16: which wrong weights the check of a real vLLM finds behind a right checksum, and how soon.

make test-vllm
"""

import importlib.util

import pytest

from rollout.faults import FAULTS, faulty_engine, pushes_until_found
from threepo.errors import UserError
from threepo.posterior.ivon import IVON
from threepo.types import Draw

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed; `make test-vllm` installs it"
)
ROUNDING = {"float32": 1e-5, "bfloat16": 0.045}
"""Differences in log-prob (root mean square, nats) that must be found; 0.045 is a KL divergence of about 0.045^2 / 2 =
1e-3 nats a token."""


@pytest.mark.parametrize("dtype", ROUNDING)
def test_what_moves_a_distribution_is_found_at_the_first_push(dtype: str) -> None:
    with faulty_engine(dtype) as (policy, engine, file):
        results = {fault: pushes_until_found(policy, engine, file, fault, 1e9) for fault in FAULTS}
    assert results.pop("nothing")[1] is None
    assert {
        fault: pushes for fault, (moved, pushes) in results.items() if moved > ROUNDING[dtype] and pushes != 1
    } == {}
    moving = {fault for fault, (moved, _) in results.items() if moved > ROUNDING[dtype]}
    assert moving >= {"idle", "swapped"} | ({"norm", "down_proj", "lm_head", "1.01"} if dtype == "float32" else set())


def test_a_swapped_draw_ends_the_run_and_is_named() -> None:
    with faulty_engine("bfloat16") as (policy, engine, file):
        optimizer = IVON(policy.model.named_parameters())
        for step in range(3):
            engine.load(optimizer, [Draw(0, step, index) for index in range(2)], step)
        file.write_text("swapped")
        words = r"weights of Draw\(seed=0, step=3, index=0, .* they fit Draw\(seed=0, step=3, index=1, .*\) at step 3"
        with pytest.raises(UserError, match=words):
            engine.load(optimizer, [Draw(0, 3, index) for index in range(2)], 3)
