"""Contract 16: which wrong weights the check of a real vLLM finds, and how soon.

make test-vllm
"""

import importlib.util
import re
from collections.abc import Callable

import pytest

from rollout.faults import ELSEWHERE, FAULTS, HEALTHY, Found, faulty_engine, push_right_weights, pushes_until_found
from threepo.posterior.noise_structures import Structure

NO_VLLM = importlib.util.find_spec("vllm") is None
pytestmark = [
    pytest.mark.skipif(NO_VLLM, reason="vLLM is not installed; `make test-vllm` installs it"),
    pytest.mark.usefixtures("forked_replicas"),
]


Figure = Callable[[str, object], None]
"""Keeps a number under a name, for the report of tests/gpu/checks.py."""


def late(results: dict[str, Found], figure: Figure) -> set[str]:
    """Faults not found at the first push, or at the second if only one of two draws is compared with the model."""
    for fault, found in results.items():
        figure(f"{fault}: nats, pushes", f"{found.moved:.2g}, {found.pushes}")
    return {fault for fault, found in results.items() if found.pushes not in ((1, 2) if fault == "trainer" else (1,))}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_changes_a_bit_is_found_at_the_first_push(dtype: str, record_property: Figure) -> None:
    """At the default noise of IVON, sigma = 1e-3 for a Hessian of 1e-3."""
    with faulty_engine(dtype) as (policy, engine, file):
        results = {fault: pushes_until_found(policy, engine, file, fault, 1e9) for fault in FAULTS}
        push_right_weights(policy, engine, 60)
    unchanged = {"nothing"} | ({"1.0001"} if dtype == "bfloat16" else set())  # rounds to the same numbers
    assert late(results, record_property) == unchanged
    one, other = (rf"Draw\(seed=0, step={HEALTHY}, index={index}, .*\) at step {HEALTHY}" for index in range(2))
    assert re.search(f"weights of {one} .* they fit {other}", results["swapped"].words)
    assert "model.layers.1.self_attn.q_proj" in results["element"].words
    assert "keys and values of other weights" in results["cache"].words
    assert "not written as the trainer's model has them" in results["trainer"].words


@pytest.mark.parametrize("kind", ELSEWHERE)
def test_the_same_with_other_noise_and_engines(kind: str, record_property: Figure) -> None:
    with faulty_engine("bfloat16", kind) as engine:
        structure: Structure = "rank=1" if kind == "low rank" else ""
        results = {fault: pushes_until_found(*engine, fault, 1e9, structure) for fault in ELSEWHERE[kind]}
    assert late(results, record_property) <= {"nothing"}
