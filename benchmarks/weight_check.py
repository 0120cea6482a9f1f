"""What the weight check adds to a push of draws into vLLM: pushes with it and without it, in turns.

    python benchmarks/weight_check.py [--rounds 10] [--dtype bfloat16] [--layers 6 --width 256] [--draws 4]

A push writes all draws and loads each into one replica in turn, and decodes one token of one row under each. The table
has medians in seconds and the ratio within a round, with its range, and for comparison the seconds of decoding alone.
Needs vLLM.
"""

import argparse
import platform
import statistics
import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import torch

from threepo.config import ModelConfig, SamplingConfig, TinyConfig
from threepo.config.engine import VLLMConfig, VLLMEngineConfig
from threepo.models.policy import load_policy
from threepo.posterior.ivon import IVON
from threepo.rollout import vllm
from threepo.rollout.vllm import VLLMEngine
from threepo.types import Draw, Problem, Request

_PROGRAM = """
from pathlib import Path
from threepo.rollout import replicas, vllm_replica

push = vllm_replica.Server.push

def maybe_unchecked(self, indices, exact):
    if not Path({file!r}).exists():
        return push(self, indices, exact)
    self._loaded = list(indices)
    read = [self._load(slot, index) for slot, index in enumerate(indices)]
    self._engine.reset_prefix_cache()
    return [vllm_replica.Evidence(checksum, {{}}, vllm_replica.Logprobs([], [])) for checksum in read]

vllm_replica.Server.push = maybe_unchecked
replicas.serve_requests(vllm_replica.Server)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"rounds": 10, "layers": 6, "width": 256, "draws": 4, "rows": 64, "tokens": 64}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    options = parser.parse_args()
    heads = options.width // 64
    wide = 3 * options.width
    shape = TinyConfig(
        hidden_size=options.width, intermediate_size=wide, layers=options.layers, heads=heads, kv_heads=heads
    )
    policy = load_policy(ModelConfig(path="tiny-llama", tiny=shape), seed=1)
    optimizer = IVON(policy.model.named_parameters())
    size = sum(p.numel() for p in policy.model.parameters())
    machine = f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    print(f"{size / 1e6:.1f} M parameters, {options.draws} draws, {options.dtype}, {machine}")
    with TemporaryDirectory() as folder:
        file = Path(folder) / "unchecked"
        own = VLLMConfig(kv_cache_memory_bytes=1 << 28, enforce_eager=True)
        with patch.object(vllm, "_PROGRAM", _PROGRAM.format(file=str(file))):
            engine = VLLMEngine(policy, VLLMEngineConfig(dtype=options.dtype, vllm=own))
        seconds: dict[str, list[float]] = {"checked": [], "unchecked": [], "decoding": []}
        for step in range(options.rounds + 1):  # the first is not counted
            draws = [Draw(0, step, index) for index in range(options.draws)]
            for kind in ("checked", "unchecked"):
                with ExitStack() as stack:
                    if kind == "unchecked":
                        file.touch()
                        stack.callback(file.unlink)
                        for owner, name in (
                            (engine, "_check"),
                            (engine, "_check_written"),
                            (engine._weight_check, "expect"),
                            (engine._payload, "logprobs"),
                            (engine._payload, "sums"),
                        ):
                            stack.enter_context(patch.object(owner, name))
                    seconds[kind].append(_seconds(engine, optimizer, draws, step, 1, 1))
            seconds["decoding"].append(_seconds(engine, None, draws[-1:], step, options.rows, options.tokens))
        engine.close()
    medians = {kind: statistics.median(found[1:]) for kind, found in seconds.items()}
    ratios = sorted(a / b for a, b in zip(seconds["checked"][1:], seconds["unchecked"][1:], strict=True))
    print(f"| with the check | without | ratio | decoding {options.rows} x {options.tokens} tokens |")
    print("| --- | --- | --- | --- |")
    found = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
    print(f"| {medians['checked']:.3f} | {medians['unchecked']:.3f} | {found} | {medians['decoding']:.3f} |")


def _seconds(engine: VLLMEngine, optimizer: IVON | None, draws: list[Draw], step: int, rows: int, tokens: int) -> float:
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
