"""Seconds of a step at 7 B that go into moving data between ranks, engines and the log, from measured rates.

    python benchmarks/data_path.py [--weights 5e7] [--tokens 2048]
    torchrun --nproc-per-node 8 benchmarks/data_path.py

Each stage is timed on this machine, on one core, at a smaller size; the tables scale it to 7.6 billion weights and to
the rows of a step. A rank has a core, a replica of vLLM of its own, and one draw to write. Bytes on the network are
counted, and not timed. With GPUs, the passes over weights are other ones: not yet run. The last table compares with the
path of 25 November 2026: the trainer loaded each draw into a model of its own, and compared no sums over bits; rows
were tuples, compared by digests, and the first rank wrote the log before it went on.

Under torchrun, the bytes of the first rank go to all ranks, in turns as `World.gather` sends them and as torch's
`all_gather_object` does.
"""

import argparse
import hashlib
import marshal
import pickle
import random
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
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
WRITE, CHECKSUM, COPY = "write the draw", "checksum, on either side (before)", "copy into the engine"
SUMS = "sums over bits, of one draw in turn, on either side"
PACK, UNPACK = "pack, on the rank that has it", "unpack, on every rank"
COMPARE, LOG = "compare, on every rank", "log, on the first rank"
BEFORE = " before"


Times = Mapping[str, list[float]]
"""Seconds of each stage, one for each round."""


def in_turns(stages: Mapping[str, Callable[[], object]], rounds: int = 5) -> Times:
    """The times of calls that take turns, after a round that does not count."""
    times: dict[str, list[float]] = {name: [] for name in stages}
    for _ in range(rounds + 1):
        for name, work in stages.items():
            begin = time.perf_counter()
            work()
            times[name].append(time.perf_counter() - begin)
    return {name: values[1:] for name, values in times.items()}


def scaled(times: Times, factor: float) -> Times:
    return {name: [value * factor for value in values] for name, values in times.items()}


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


def per_weight(count: int) -> Times:
    """Seconds per weight of each pass over the weights."""
    mean = torch.randn(count)
    layout = {"w": ((count,), torch.bfloat16)}
    shared, own = SharedTensors(layout), torch.empty(count, dtype=torch.bfloat16)
    held = shared.tensors["w"]
    stages: dict[str, Callable[[], object]] = {
        WRITE: lambda: held.copy_(mean),
        CHECKSUM: lambda: held.view(torch.int64).sum(),
        COPY: lambda: own.copy_(held),
        SUMS: lambda: bit_sum(held),
    }
    return scaled(in_turns(stages), 1 / count)


def per_row(tokens: int) -> tuple[Times, float]:
    """Seconds per row of each pass over the completions, with " before" for rows of tuples; bytes on the network."""
    rows = completions(tokens)
    as_tuples: list[Any] = [{"tokens": (*row.tokens,), "logprobs": (*row.logprobs,)} for row in rows]
    tuples = [replace(row, **own) for row, own in zip(rows, as_tuples, strict=True)]
    packed, packed_tuples = pickle.dumps(rows), pickle.dumps(tuples)
    credited = tuple(CreditedRow.of(row, index) for index, row in enumerate(rows))
    batch = Batch({None: credited}, "step", None, 1.0, tokens, seed=0, step=0)

    def log(told: list[dict[str, object]]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            write_parquet(Path(folder, "rows.parquet"), told)

    def digests() -> None:
        for column in ([row.tokens for row in tuples], [row.logprobs for row in tuples]):
            hashlib.blake2b(marshal.dumps(column, 2), digest_size=8).hexdigest()

    stages: dict[str, Callable[[], object]] = {
        PACK: lambda: pickle.dumps(rows),
        PACK + BEFORE: lambda: pickle.dumps(tuples),
        UNPACK: lambda: pickle.loads(packed),
        UNPACK + BEFORE: lambda: pickle.loads(packed_tuples),
        COMPARE: lambda: batch_facts(batch),
        COMPARE + BEFORE: digests,
        LOG: lambda: log([completion_row(0, row) for row in rows]),
        LOG + BEFORE: lambda: log([completion_row(0, row) | {"tokens": list(row.tokens)} for row in tuples]),
    }
    return scaled(in_turns(stages), 1 / SAMPLE), len(packed) / SAMPLE


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
    weights, (rows, size) = per_weight(int(options.weights)), per_row(options.tokens)
    print("| stage | rate | 7.6 billion weights |\n| --- | --- | --- |")
    for name, times in weights.items():
        each = statistics.median(times)
        print(f"| {name} | {1e-9 / each:.2f} billion a second | {each * WEIGHTS:.1f} s |")
    columns = "pack, over all ranks | unpack | compare | log | bytes that a rank receives"
    print(f"\n| rows of {options.tokens} tokens | {columns} |")
    print("| --- | --- | --- | --- | --- | --- |")
    for count in ROWS:
        told = " | ".join(f"{statistics.median(rows[name]) * count:.2f} s" for name in (PACK, UNPACK, COMPARE, LOG))
        print(f"| {count} | {told} | {size * count / 1e6:.0f} MB |")
    print("\n| ranks | rows | seconds of a step before | now | ratio |\n| --- | --- | --- | --- | --- |")
    for ranks in RANKS:
        for count in ROWS:
            print(f"| {ranks} | {count} | {compared(weights, rows, ranks, count)} |")


def compared(weights: Times, rows: Times, ranks: int, count: int) -> str:
    """Seconds of a step on the first rank, before and now, and the ratio with its spread over rounds.

    The log is a part of the step before, and not now, when a thread writes it while the next step runs.
    """
    now = total(weights, {WRITE: 1, COPY: 1, SUMS: 2}, WEIGHTS)
    # Copied into the engine, and into the trainer's own model.
    before = total(weights, {WRITE: 1, CHECKSUM: 2, COPY: 2}, WEIGHTS)
    shares = {PACK: 1 / ranks, UNPACK: 1.0, COMPARE: 1.0}
    now = now + total(rows, shares, count)
    before = before + total(rows, {name + BEFORE: share for name, share in (shares | {LOG: 1.0}).items()}, count)
    ratios = now / before
    spread = f"{np.median(ratios):.2f} ({ratios.min():.2f} to {ratios.max():.2f})"
    return f"{np.median(before):.1f} | {np.median(now):.1f} | {spread}"


def total(times: Times, passes: Mapping[str, float], size: float) -> np.ndarray:
    """Seconds of so many passes of each stage over `size` weights or rows, in each round."""
    return np.sum([np.array(times[name]) * count * size for name, count in passes.items()], axis=0)  # type: ignore[no-any-return]


if __name__ == "__main__":
    main()
