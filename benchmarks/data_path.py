"""Seconds of a step at 7 B that go into moving data between ranks, engines and the log, from measured rates.

    python benchmarks/data_path.py [--weights 5e7] [--tokens 2048]
    torchrun --nproc-per-node 8 benchmarks/data_path.py

Each stage is timed on this machine, on one core, at a smaller size; the tables scale it to 7.6 billion weights and to
the rows of a step. A rank has a core, a replica of vLLM of its own, and one draw to write. Bytes on the network are
counted, and not timed. With GPUs, the passes over weights are other ones: not yet run.

Under torchrun, the bytes of the first rank go to all ranks, in turns as `World.gather` sends them and as torch's
`all_gather_object` does.
"""

import argparse
import pickle
import random
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from threepo.ranks.agreement import batch_facts
from threepo.ranks.launch import join_world
from threepo.ranks.world import World
from threepo.rollout.bit_sums import bit_sum
from threepo.rollout.memory import SharedTensors
from threepo.run_folder import completion_row, write_parquet
from threepo.types import Batch, Completion, CreditedRow, Draw, Problem, Verdict, integers, numbers

WEIGHTS = 7.6e9
RANKS, ROWS = (8, 64, 512), (512, 8192)
SAMPLE = 128
"""Rows that are measured."""


def seconds(work: Callable[[], object], rounds: int = 5) -> float:
    """The median time of a call, after one that does not count."""
    times = []
    for _ in range(rounds + 1):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def completions(tokens: int) -> list[Completion]:
    """Rows as a math task has them."""
    made = random.Random(0)
    return [
        Completion(
            Problem(f"problem-{i}", "A question of some hundred letters. " * 10, "42"),
            tuple(range(100)),
            Draw(0, 0, i % 8),
            i,
            tokens=integers(made.randrange(150_000) for _ in range(tokens)),
            logprobs=numbers(-made.random() for _ in range(tokens)),
            text="".join(made.choice("abcdefgh \n") for _ in range(4 * tokens)),
            finish_reason="stop",
            policy_step=0,
            verdict=Verdict(True, "right", "42"),
        )
        for i in range(SAMPLE)
    ]


def per_weight(count: int) -> dict[str, float]:
    """Seconds per weight of each pass over the weights."""
    mean = torch.randn(count)
    layout = {"w": ((count,), torch.bfloat16)}
    shared, own = SharedTensors(layout), torch.empty(count, dtype=torch.bfloat16)
    held = shared.tensors["w"]
    return {
        "write the draw": seconds(lambda: held.copy_(mean)) / count,
        "checksum, on either side": seconds(shared.checksum) / count,
        "copy into the engine": seconds(lambda: own.copy_(held)) / count,
        "sums over bits, of one draw in turn": seconds(lambda: bit_sum(held)) / count,
    }


def per_row(tokens: int) -> dict[str, float]:
    """Seconds per row of each pass over the completions, and bytes of a row on the network."""
    rows = completions(tokens)
    packed = pickle.dumps(rows)
    credited = tuple(CreditedRow.of(row, index) for index, row in enumerate(rows))
    batch = Batch({None: credited}, "step", None, 1.0, tokens, seed=0, step=0)

    def log() -> None:
        with tempfile.TemporaryDirectory() as folder:
            write_parquet(Path(folder, "rows.parquet"), [completion_row(0, row) for row in rows])

    return {
        "pack, on the rank that has it": seconds(lambda: pickle.dumps(rows)) / SAMPLE,
        "unpack, on every rank": seconds(lambda: pickle.loads(packed)) / SAMPLE,
        "compare, on every rank": seconds(lambda: batch_facts(batch)) / SAMPLE,
        "log, on the first rank": seconds(log) / SAMPLE,
        "bytes": len(packed) / SAMPLE,
    }


def peak_bytes() -> int:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def share(world: World, size: int = 64_000_000, rounds: int = 5) -> None:
    """Print what it takes until all ranks have the bytes of the first, and by how much the last rank's peak grows."""
    own = bytes(size) if world.rank == 0 else b""
    ways = {
        "World.gather": lambda: world.gather(own),
        "all_gather_object": lambda: dist.all_gather_object([None] * world.size, own, group=world.gloo),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    peaks: dict[str, float] = {}  # the smaller way comes first, so each has a peak of its own
    before = peak_bytes()
    for _ in range(rounds + 1):
        for name, way in ways.items():
            dist.barrier(world.gloo)
            begin = time.perf_counter()
            way()  # type: ignore[no-untyped-call]
            times[name].append(time.perf_counter() - begin)
            peaks.setdefault(name, peak_bytes() - before)
    last = world.gather(peaks)[-1]
    ratios = [a / b for a, b in zip(*times.values(), strict=True)][1:]
    told = ", ".join(
        f"{name} {statistics.median(values[1:]):.2f} s, {last[name] / 1e6:.0f} MB" for name, values in times.items()
    )
    spread = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
    world.console().print(f"{size / 1e6:.0f} MB of one of {world.size} ranks: {told}; ratio {spread}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=float, default=5e7)
    parser.add_argument("--tokens", type=int, default=2048)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with join_world(600) as world:
        if not world.is_alone:
            share(world)
            return
    weights, rows = per_weight(int(options.weights)), per_row(options.tokens)
    print("| stage | rate | 7.6 billion weights |")
    print("| --- | --- | --- |")
    for name, each in weights.items():
        print(f"| {name} | {1e-9 / each:.2f} billion a second | {each * WEIGHTS:.1f} s |")
    print(f"\n| ranks | rows of {options.tokens} tokens | pack | unpack | compare | log | bytes that a rank receives |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for ranks in RANKS:
        for count in ROWS:
            pack, unpack, compare, log, size = (each * count for each in rows.values())
            times = f"{pack / ranks:.3f} s | {unpack:.2f} s | {compare:.2f} s | {log:.2f} s"
            print(f"| {ranks} | {count} | {times} | {size / 1e6:.0f} MB |")


if __name__ == "__main__":
    main()
