"""Time and memory of one optimizer step, IVON's draw included, next to ivon-opt, AdamW and SGD.

    python benchmarks/optimizer.py [--sizes 1 33.5 200] [--rounds 9] [--device cpu]

Gradients are given, not computed: the time covers perturbing the weights, restoring them and stepping. All
contenders take turns in one process. Ratios to AdamW (fused) are computed within a round, and the table shows medians
with their range. `floor` is the smallest possible time: making the draw twice, in place, and moving the other bytes
that IVON must move at the speed of a copy. Peak memory is measured in a separate process for each contender.
"""

import argparse
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch

from threepo import IVON
from threepo.posterior import kernels, native
from threepo.posterior.noise import noise_key
from threepo.posterior.noise_structures import Noise
from threepo.posterior.operations import Perturb, Scalars
from threepo.types import Draw

TENSORS = 32
"""The parameters are split into this many tensors."""
BYTES_PERTURB = 8 + 8
"""Per float32 parameter, besides the draw (which reads mean and Hessian and writes weights): copying and restoring."""
BYTES_STEP = 4 + 8 + 8
"""Per float32 parameter: read the gradient for its norm; read momentum and gradient; write momentum and Hessian."""

Step = Callable[[], object]


@contextmanager
def without_compiled_kernels() -> Iterator[None]:
    """Use torch only, as without a C compiler."""
    before, native.takes = native.takes, lambda *_: False
    try:
        yield
    finally:
        native.takes = before


def parameters(size: int, dtype: torch.dtype, device: str) -> list[torch.nn.Parameter]:
    """`size` elements in TENSORS tensors."""
    made = [torch.randn(size // TENSORS, device=device) * 0.02 for _ in range(TENSORS)]
    return [torch.nn.Parameter(tensor.to(dtype)) for tensor in made]


def contenders(size: int, dtype: torch.dtype, device: str) -> dict[str, Callable[[], Step]]:
    """For each name, a function that makes its step, so that one contender can be measured alone."""
    grads = [(torch.randn(size // TENSORS, device=device) * 1e-6).to(dtype) for _ in range(TENSORS)]

    def give(params: list[torch.nn.Parameter]) -> None:
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad

    def torch_optimizer(kind: Callable[..., torch.optim.Optimizer], **settings: object) -> Step:
        params = parameters(size, dtype, device)
        optimizer = kind(params, **settings)

        def step() -> None:
            give(params)
            optimizer.step()

        return step

    def ours(compiled: bool, draws: int = 1) -> Step:
        params = parameters(size, dtype, device)
        optimizer = IVON(params, lr=0.0)

        def step() -> None:
            with nullcontext() if compiled else without_compiled_kernels():
                for _ in range(draws):
                    draw = optimizer.next_draw()
                    with optimizer.perturbed(draw):
                        give(params)
                    optimizer.observe(draw)
                optimizer.step()

        return step

    def peer() -> Step:
        import ivon

        params = parameters(size, dtype, device)
        optimizer = ivon.IVON(params, lr=1e-9, ess=1e9, hess_init=1e-3, clip_radius=1e-3)

        def step() -> None:
            with optimizer.sampled_params(train=True):
                give(params)
            optimizer.step()

        return step

    return {
        "threepo.IVON": lambda: ours(True),
        "threepo.IVON, 4 draws": lambda: ours(True, 4),
        "threepo.IVON, plain torch": lambda: ours(False),
        "ivon-opt": peer,
        "AdamW fused": lambda: torch_optimizer(torch.optim.AdamW, lr=1e-9, fused=True),
        "AdamW foreach": lambda: torch_optimizer(torch.optim.AdamW, lr=1e-9, foreach=True),
        "SGD": lambda: torch_optimizer(torch.optim.SGD, lr=1e-9),
    }


def milliseconds(work: Step, device: str) -> float:
    """The time of one call."""
    if device == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        work()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1e3


def floor_parts(size: int, device: str) -> dict[str, Step]:
    """The steps from which the floor is computed."""
    source, target = torch.randn(size, device=device), torch.ones(size, device=device)
    hessian, unit = torch.ones(size, device=device), Scalars(weight_decay=0.0, ess=1.0, fixed_root=0.0, noise_scale=1.0)
    draw = Perturb(target, target, hessian, Noise(noise_key(Draw(0, 0, 0), "w")), unit)
    return {"copy": lambda: target.copy_(source), "draw": lambda: kernels.run([draw])}


def table(size: int, dtype: torch.dtype, device: str, rounds: int, skip: set[str]) -> None:
    """Measure one size and dtype, and print rows in Markdown."""
    steps = {name: make() for name, make in contenders(size, dtype, device).items() if name not in skip}
    parts = floor_parts(size, device)
    taken: dict[str, list[float]] = {name: [] for name in (*steps, *parts)}
    works: dict[str, Step] = {**steps, **parts}
    for turn in range(rounds + 1):
        for name, work in works.items():
            spent = milliseconds(work, device)
            if turn:  # the first round warms up
                taken[name].append(spent)
    for name in steps:
        ratios = sorted(own / base for own, base in zip(taken[name], taken["AdamW fused"], strict=True))
        print(
            f"| {size / 1e6:g} M {str(dtype).removeprefix('torch.')} | {name} | {statistics.median(taken[name]):.1f} "
            f"| {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) |"
        )
    if dtype == torch.float32:
        copy, draw = (statistics.median(taken[part]) for part in ("copy", "draw"))
        moved = copy / 8 * (BYTES_PERTURB + BYTES_STEP)
        parts_text = f"copy {copy:.1f}, draw {draw:.1f}"
        print(f"| {size / 1e6:g} M float32 | floor for IVON | {moved + 2 * draw:.1f} | {parts_text} |")


def peak(name: str, size: int) -> None:
    """Print the peak memory of three steps, besides parameters and gradients, in bytes each; in a new process."""
    make = contenders(size, torch.float32, "cpu")[name]
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    base = resident("VmRSS")
    step = make()
    for _ in range(3):
        step()
    print(f"{(resident('VmHWM') - base) / size - 4:.1f}")  # without parameters; gradients existed before


def resident(what: str) -> int:
    """Bytes of memory that this process has now (VmRSS) or had at its peak (VmHWM); Linux."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what))
    return int(line.split()[1]) * 1024


def main() -> None:
    """Measure, and print tables in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=float, nargs="+", default=[1, 33.5, 200], help="million parameters")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--skip", nargs="*", default=[], help="contenders to leave out")
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        peak(options.peak, int(options.sizes[0] * 1e6))
        return
    machine = torch.cuda.get_device_name() if options.device == "cuda" else platform.processor() or platform.machine()
    kernel = kernels.backend(torch.empty(1, device=options.device)).__name__.rpartition(".")[2]
    threads = torch.get_num_threads()
    print(f"{machine}, {threads} threads, torch {torch.__version__}, {kernel} kernels, {options.rounds} rounds\n")
    print("| parameters | optimizer | ms a step | ratio to AdamW fused (range) |\n| --- | --- | --- | --- |")
    for size in options.sizes:
        for dtype in (torch.float32, torch.bfloat16):
            table(int(size * 1e6) // TENSORS * TENSORS, dtype, options.device, options.rounds, set(options.skip))
    if options.device == "cpu":
        print("\n| optimizer | peak bytes a float32 parameter, besides parameters and gradients |\n| --- | --- |")
        for name in contenders(TENSORS, torch.float32, "cpu"):
            command = [sys.executable, __file__, "--peak", name, "--sizes", "33.5"]
            print(f"| {name} | {subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()} |")


if __name__ == "__main__":
    main()
