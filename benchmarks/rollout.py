"""Tokens per second of the rollout engines: N policies in one batch, compared with one at a time.

    python benchmarks/rollout.py [--rounds 5] [--dtype bfloat16] [--lengths long-tailed] [--layers 4 --width 256]

Everything runs in one process, in turns, with the same weights and prompts. Ratios are computed within a round, and
tables show medians with the range of the ratio. Memory is the growth of the process when a row of the table first
runs: the weights of its draws, its cache, and the activations. Models are new, so each token has a probability of
about 1 in 262. `uniform` lengths have no end-of-sequence token; `long-tailed` ones have five, which gives geometric
lengths. vLLM is measured if it is installed, through the same engine interface; the pushes of all its draws but the
first are part of generating, and count.

    python benchmarks/rollout.py --vllm-replicas 2 [--draws 4]

measures vLLM alone: the draws in turn on one replica, compared with the same draws spread over several replicas, which
share the cores. The time of `load` counts too, because with one replica the pushes of all draws except the first are
part of generating.
"""

import argparse
import copy
import gc
import importlib.util
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from threepo.config import LocalEngineConfig, ModelConfig, SamplingConfig, TinyConfig
from threepo.config.engine import VLLMConfig, VLLMEngineConfig
from threepo.models.policy import Policy, load_policy
from threepo.posterior.ivon import IVON
from threepo.rollout.engines import RolloutEngine
from threepo.rollout.local import LocalEngine
from threepo.types import Draw, Problem, Request

STOPS = (10, 60, 110, 160, 210)
GROUP = 16
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def make_policy(options: argparse.Namespace) -> Policy:
    """A new model of the chosen size, with the chosen end-of-sequence tokens."""
    heads = options.width // 64
    shape = TinyConfig(
        hidden_size=options.width,
        intermediate_size=3 * options.width,
        layers=options.layers,
        heads=heads,
        kv_heads=max(1, heads // 2),
        context=4096,
    )
    policy = load_policy(ModelConfig(path="tiny-qwen2", tiny=shape), seed=1)
    policy.tokenizer.eos_token = None
    policy.model.generation_config.eos_token_id = list(STOPS) if options.lengths == "long-tailed" else None
    return policy


def requests_for(policy: Policy, draws: list[Draw | None], rows: int) -> list[Request]:
    """`rows` requests: prompts of six tokens, sixteen rollouts each, spread over the draws."""
    problems = [Problem(id=f"p{i}", prompt=f"{i:06d}") for i in range(rows // GROUP)]
    return [
        Request(problem, tuple(policy.tokenizer(problem.prompt)["input_ids"]), draws[g * len(draws) // GROUP], g)
        for problem in problems
        for g in range(GROUP)
    ]


def with_engine(
    engine: RolloutEngine, policy: Policy, optimizer: IVON, draws: int, options: argparse.Namespace
) -> Callable[[], tuple[int, float]]:
    """A measurement of an engine: generated tokens, and seconds (including loading with --vllm-replicas)."""
    addresses: list[Draw | None] = [Draw(0, 0, i) for i in range(draws)] or [None]
    requests = requests_for(policy, addresses, options.rows)
    sampling = SamplingConfig(max_new_tokens=options.tokens)

    def measure() -> tuple[int, float]:
        begin = time.perf_counter()
        engine.load(optimizer, addresses, 0)
        if not options.vllm_replicas:
            begin = time.perf_counter()
        completions = engine.generate(requests, sampling, seed=0)
        return sum(len(c.tokens) for c in completions), time.perf_counter() - begin

    return measure


def with_transformers(policy: Policy, models: int, options: argparse.Namespace) -> Callable[[], tuple[int, float]]:
    """The same rows through `generate`, spread over several models that run in turn."""
    copies = [copy.deepcopy(policy.model).to(DTYPES[options.dtype]) for _ in range(models)]
    ids = torch.tensor([request.prompt_tokens for request in requests_for(policy, [None], options.rows)])
    stops = list(STOPS) if options.lengths == "long-tailed" else None
    settings: dict[str, Any] = {
        "do_sample": True,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "max_new_tokens": options.tokens,
        "eos_token_id": stops,
        "pad_token_id": policy.tokenizer.pad_token_id,
    }

    def measure() -> tuple[int, float]:
        made, begin = 0, time.perf_counter()
        for model, mine in zip(copies, ids.chunk(models), strict=True):
            with torch.inference_mode():
                out = model.generate(mine, attention_mask=torch.ones_like(mine), **settings)[:, mine.shape[1] :]
            made += int((out != policy.tokenizer.pad_token_id).sum()) if stops else out.numel()
        return made, time.perf_counter() - begin

    return measure


def placements(policy: Policy, options: argparse.Namespace) -> dict[str, Callable[[], tuple[int, float]]]:
    """Draws in turn on one vLLM replica, and spread over several."""
    from threepo.rollout.vllm import VLLMEngine

    optimizer = IVON(policy.model.named_parameters(), ess=1e8)
    found = {}
    for replicas in (1, options.vllm_replicas):
        settings = VLLMEngineConfig(dtype=options.dtype, vllm=VLLMConfig(replicas=replicas))
        engine = VLLMEngine(policy, settings)
        for draws in options.draws:
            name = f"vLLM, {draws} draws, " + (f"{replicas} replicas" if replicas > 1 else "in turn")
            found[name] = with_engine(engine, policy, optimizer, draws, options)
    return found


def contestants(policy: Policy, options: argparse.Namespace) -> dict[str, Callable[[], tuple[int, float]]]:
    """Measurements by their names in the table; ratios are to the first."""
    if options.vllm_replicas:
        return placements(policy, options)
    optimizer = IVON(policy.model.named_parameters(), ess=1e8)
    found = {}
    for draws in (0, *options.draws):
        name = f"threepo, {draws} draws" if draws else "threepo, the mean"
        settings = LocalEngineConfig(dtype=options.dtype, max_batch_rows=options.rows)
        found[name] = with_engine(LocalEngine(policy, settings), policy, optimizer, draws, options)
    for models in (1, 4) if not options.alone else ():
        name = f"transformers generate, {models} in turn" if models > 1 else "transformers generate"
        found[name] = with_transformers(policy, models, options)
    if importlib.util.find_spec("vllm") and not options.alone:
        from threepo.rollout.vllm import VLLMEngine

        os.environ.setdefault("OMP_NUM_THREADS", str(options.threads))  # replicas inherit it
        engine = VLLMEngine(policy, VLLMEngineConfig(dtype=options.dtype, max_batch_rows=options.rows))
        for draws in (0, 4):
            name = f"vLLM, {draws} draws in turn" if draws else "vLLM, the mean"
            found[name] = with_engine(engine, policy, optimizer, draws, options)
    return found


def peak_growth(measure: Callable[[], tuple[int, float]]) -> float:
    """MiB by which the resident memory of this process rises while something runs for the first time (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = resident("VmRSS")
    measure()
    return (resident("VmHWM") - before) / 1024


def resident(field: str) -> int:
    """A line of /proc/self/status in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def matmul_peak(dtype: torch.dtype) -> float:
    """Floating-point operations per second of a large matrix product."""
    a, b = torch.randn(2, 2048, 2048).to(dtype).unbind()
    seconds = []
    for _ in range(8):
        begin = time.perf_counter()
        a @ b
        seconds.append(time.perf_counter() - begin)
    return float(2 * 2048**3 / min(seconds))


def main() -> None:
    """Measure, and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--lengths", choices=("uniform", "long-tailed"), default="uniform")
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=0, help="most new tokens of a row (64, or 256 if long-tailed)")
    parser.add_argument("--draws", type=int, nargs="*", help="1 2 4 8 16, or 4 with --vllm-replicas")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256, help="a multiple of 64")
    parser.add_argument("--alone", action="store_true", help="without transformers and vLLM")
    parser.add_argument("--vllm-replicas", type=int, default=0, help="vLLM alone: in turn, and on so many replicas")
    options = parser.parse_args()
    if options.draws is None:
        options.draws = [4] if options.vllm_replicas else [1, 2, 4, 8, 16]
    options.tokens = options.tokens or (256 if options.lengths == "long-tailed" else 64)
    torch.set_num_threads(options.threads)
    policy = make_policy(options)
    measures = contestants(policy, options)
    memory = {name: peak_growth(measure) for name, measure in measures.items()}  # and warms up
    rounds = []
    for _ in range(options.rounds):
        rounds.append({name: measure() for name, measure in measures.items()})
        gc.collect()
    parameters = sum(p.numel() for p in policy.model.parameters())
    peak = matmul_peak(DTYPES[options.dtype])
    print(
        f"{platform.processor() or platform.machine()}, {options.threads} threads, torch {torch.__version__}, "
        f"{options.dtype}, {parameters:,} parameters, {options.rows} rows of up to {options.tokens} new tokens "
        f"({options.lengths}), {options.rounds} rounds; matrix products at most {peak / 1e9:.0f} GFLOP/s\n"
    )
    print("| engine | tokens/s | share of that | seconds to the first row's (range) | peak MiB |")
    print("| --- | --- | --- | --- | --- |")
    first = next(iter(measures))
    for name in measures:
        speed = statistics.median(tokens / seconds for tokens, seconds in (r[name] for r in rounds))
        # Per token, because lengths are random and differ between engines.
        ratios = sorted(r[name][1] / r[name][0] / (r[first][1] / r[first][0]) for r in rounds)
        print(
            f"| {name} | {speed:,.0f} | {speed * 2 * parameters / peak:.0%} "
            f"| {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) | {memory[name]:.0f} |"
        )


if __name__ == "__main__":
    main()
