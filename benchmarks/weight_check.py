"""What the weight check adds to a push of draws into vLLM: pushes with it and without it, in turns.

    python benchmarks/weight_check.py [--rounds 10] [--dtype bfloat16] [--layers 6 --width 256] [--draws 4]
    torchrun --nproc-per-node 2 benchmarks/weight_check.py ...     (a sharded policy, and a replica for each rank)

A push writes all draws and loads each into a replica in turn, and decodes one token of one row under each. The table
has medians in seconds and the ratio within a round, with its range: with all checks, without the comparison of what was
written with the trainer's model, and without any. For comparison, the seconds of decoding alone. Needs vLLM.
"""

import argparse
import os
import platform
import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch

from threepo.config import ModelConfig, ParallelConfig, SamplingConfig, TinyConfig
from threepo.config.engine import VLLMConfig, VLLMEngineConfig
from threepo.posterior.ivon import IVON
from threepo.ranks.dealing import build_shared_engine
from threepo.ranks.launch import join_world
from threepo.ranks.sharding import load_sharded
from threepo.ranks.world import World
from threepo.rollout import vllm
from threepo.rollout.engines import RolloutEngine
from threepo.types import Draw, Problem, Request

KINDS = {
    "checked": "with all checks",
    "unwritten": "without the comparison with the trainer's model",
    "unchecked": "without checks",
}
"""Pushes that take turns."""
_PROGRAM = """
from pathlib import Path
from threepo.rollout import replicas, vllm_replica

push = vllm_replica.Server.push

def maybe_unchecked(self, indices, exact):
    if not Path({file!r}).exists():
        return push(self, indices, exact)
    self._fill(indices)
    return [vllm_replica.Evidence({{}}, vllm_replica.Logprobs([], [])) for _ in indices]

vllm_replica.Server.push = maybe_unchecked
replicas.serve_requests(vllm_replica.Server)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"rounds": 10, "layers": 6, "width": 256, "draws": 4, "rows": 64, "tokens": 64}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    options = parser.parse_args()
    with join_world(600.0) as world:
        measure(options, world)
    sys.stdout.flush()
    os._exit(0)  # device meshes keep gloo's threads, which may end badly together with Python


def measure(options: argparse.Namespace, world: World) -> None:
    """Push in turns, and print the table."""
    heads = options.width // 64
    wide = 3 * options.width
    shape = TinyConfig(
        hidden_size=options.width, intermediate_size=wide, layers=options.layers, heads=heads, kv_heads=heads
    )
    policy = load_sharded(ModelConfig(path="tiny-llama", tiny=shape), ParallelConfig(), world, seed=1)
    optimizer = IVON(policy.model.named_parameters(), model=policy.model)
    size = sum(p.numel() for p in policy.model.parameters())
    machine = f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    said = f"{size / 1e6:.1f} M parameters, {options.draws} draws, {options.dtype}, {world.size} ranks, {machine}"
    with TemporaryDirectory() as folder:
        file = Path(folder) / "unchecked"
        settings = VLLMConfig(kv_cache_memory_bytes=1 << 28, enforce_eager=True)
        with patch.object(vllm, "_PROGRAM", _PROGRAM.format(file=str(file))):
            engine = build_shared_engine(VLLMEngineConfig(dtype=options.dtype, vllm=settings), policy, world)
        own: Any = getattr(engine, "_engine", engine)
        seconds: dict[str, list[float]] = {kind: [] for kind in (*KINDS, "decoding")}
        for step in range(options.rounds + 1):  # the first is not counted
            draws = [Draw(0, step, index) for index in range(options.draws)]
            for kind in KINDS:
                with ExitStack() as stack:
                    if kind != "checked":
                        stack.enter_context(patch.object(own, "_check_written"))
                        if world.size > 1:
                            stack.enter_context(patch.object(engine, "_sums", None))
                    if kind == "unchecked":
                        file.touch()
                        stack.callback(file.unlink)
                        for owner, name in (
                            (own, "_check"),
                            (own._weight_check, "expect"),
                            (own._payload, "logprobs"),
                            (own._payload, "sums"),
                        ):
                            stack.enter_context(patch.object(owner, name))
                    seconds[kind].append(_seconds(engine, optimizer, draws, step, 1, 1))
            seconds["decoding"].append(_seconds(engine, None, draws[-1:], step, options.rows, options.tokens))
        engine.close()
    medians = {kind: statistics.median(found[1:]) for kind, found in seconds.items()}
    if world.rank:
        return
    print(f"{said}\n\n| pushes | seconds | with all checks: ratio |\n| --- | --- | --- |")
    for kind, words in KINDS.items():
        ratios = sorted(a / b for a, b in zip(seconds["checked"][1:], seconds[kind][1:], strict=True))
        found = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        print(f"| {words} | {medians[kind]:.3f} | {found} |")
    print(f"| decoding {options.rows} x {options.tokens} tokens | {medians['decoding']:.3f} | |")


def _seconds(
    engine: RolloutEngine, optimizer: IVON | None, draws: list[Draw], step: int, rows: int, tokens: int
) -> float:
    """Seconds to push the draws, if there is an optimizer, and to decode rows under each."""
    began = time.perf_counter()
    if optimizer:
        engine.load(optimizer, list(draws), step)
    problem = Problem(id="a", prompt="a")
    requests = [Request(problem, (5, 6, 7), draw, row) for draw in draws for row in range(rows)]
    engine.generate(requests, SamplingConfig(max_new_tokens=tokens), seed=step)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
