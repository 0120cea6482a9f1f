"""What a GPU does with models of published shapes: its ceilings, the kernels, optimizers, and whole steps of methods.

    make bench-gpu, or python benchmarks/gpu.py [--parts ceilings kernels ...] [--shapes 0.5B 1.5B] [--out FILE]

Models have random weights, so nothing is downloaded. Figures are printed as they come, and kept as JSON in the file,
whose parts are not measured again for the same commit, machine and options. Ratios of optimizers are within a round;
steps are taken one contender after another, the first one again at the end. Times are of device events or, for steps,
of the wall clock. `floor_ms` is the time in which a copy of the device moves as many bytes.
"""

import argparse
import gc
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from optimizer import BYTES_PERTURB, BYTES_STEP, TENSORS, contenders, milliseconds
from step import Ours, methods, write_prompts, write_recipe
from threepo.config import TrainConfig
from threepo.config.recipes import load
from threepo.files import write_json
from threepo.lab.plan import plan
from threepo.models import attention, fused_scores, logprobs
from threepo.models.loading import make_tokenizer
from threepo.models.packing import flatten
from threepo.models.policy import compile_blocks
from threepo.posterior import kernels
from threepo.posterior.noise import noise_key
from threepo.posterior.noise_structures import Noise
from threepo.posterior.operations import AddNoiseTimes, Perturb, Scalars
from threepo.types import Draw, Row, integers

SHAPES = {
    "0.5B": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
             "num_key_value_heads": 2, "tie_word_embeddings": True},
    "1.5B": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
             "num_key_value_heads": 2, "tie_word_embeddings": True},
    "3B": {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16,
           "num_key_value_heads": 2, "tie_word_embeddings": True},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "tie_word_embeddings": True},
}  # fmt: skip
"""Those of Qwen2.5, and one to try this program on a CPU."""
RECOMPUTED = ("1.5B", "3B")
"""Shapes whose steps need gradient checkpointing on a card of 80 GB."""
BYTES = {"threepo.IVON": BYTES_PERTURB + BYTES_STEP + 2 * 12, "AdamW fused": 28}
"""Bytes that a step moves for each float32 parameter, IVON's draw included; the draw is made twice."""
GB = 1e9
found: dict[str, Any] = {}


def say(key: str, **figures: Any) -> None:
    """Keep figures, and print them."""
    found[key] = figures
    print(key, " ".join(f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}"
                        for name, value in figures.items()), flush=True)  # fmt: skip


def median_ms(work: Callable[[], object], device: str, rounds: int = 9) -> float:
    """Median milliseconds of a call, after two to warm up."""
    taken = [milliseconds(work, device) for _ in range(rounds + 2)]
    return float(statistics.median(taken[2:]))


def copy_rate(options: argparse.Namespace) -> float:
    """Bytes a millisecond that a copy reads and writes."""
    source = torch.randn(options.elements, device=options.device)
    target = torch.ones_like(source)
    moved: int = 8 * options.elements
    return moved / median_ms(lambda: target.copy_(source), options.device)


def ceilings(options: argparse.Namespace) -> None:
    """What the device can do at most: bytes of a copy, products in bfloat16 and float32."""
    device = options.device
    say("copy", gb_s=copy_rate(options) / 1e6)
    n = options.square
    for dtype in (torch.bfloat16, torch.float32):
        a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
        say(f"product {dtype}", tflops=2 * n**3 / median_ms(lambda a=a, b=b: a @ b, device) / 1e9)  # type: ignore[misc]


def kernel_rates(options: argparse.Namespace) -> None:
    """Bytes a second of the kernels that make noise, next to a copy's."""
    device, count = options.device, options.elements
    noise, unit = Noise(noise_key(Draw(0, 0, 0), "w")), Scalars(0.0, 1.0, 0.0, 1.0)
    mean, hessian = torch.randn(count, device=device), torch.ones(count, device=device)
    for dtype in (torch.float32, torch.bfloat16):
        out = torch.empty(count, device=device, dtype=dtype)
        size, operation = 8 + out.element_size(), Perturb(out, mean, hessian, noise, unit)
        ms = median_ms(lambda operation=operation: kernels.run([operation]), device)  # type: ignore[misc]
        say(f"perturb to {dtype}", gb_s=size * count / ms / 1e6, g_elements_s=count / ms / 1e6)
    total = torch.zeros(count, device=device)
    ms = median_ms(lambda: kernels.run([AddNoiseTimes(total, mean, noise)]), device)
    say("add noise times", gb_s=12 * count / ms / 1e6)
    ms = median_ms(lambda: torch.randn(count, device=device, out=total), device)
    say("torch.randn", gb_s=4 * count / ms / 1e6, g_elements_s=count / ms / 1e6)


def optimizers(options: argparse.Namespace) -> None:
    """A step of IVON, its draw included, next to others; the gradients are given."""
    copied = copy_rate(options)
    for millions in options.sizes:
        size = int(millions * 1e6) // TENSORS * TENSORS
        memory = torch.cuda.get_device_properties(0).total_memory if options.device == "cuda" else math.inf
        names = ["threepo.IVON", "AdamW fused"]
        if 45 * size > memory:  # bytes of parameters, states and gradients of both
            say(f"optimizer {millions:g} M", left_out="this card cannot hold both")
            continue
        if options.peer and 70 * size < memory:
            names.append("ivon-opt")
        makers = contenders(size, torch.float32, options.device)
        steps = {name: makers[name]() for name in names}
        taken: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(8):
            for name, step in steps.items():
                ms = milliseconds(step, options.device)
                if turn > 1:
                    taken[name].append(ms)
        base = taken["AdamW fused"]
        for name, own in taken.items():
            ratios = sorted(a / b for a, b in zip(own, base, strict=True))
            say(f"optimizer {millions:g} M {name}", ms=statistics.median(own), ratio=statistics.median(ratios),
                low=ratios[0], high=ratios[-1], floor_ms=BYTES.get(name, 0) * size / copied)  # fmt: skip
        del steps, makers
        release(options.device)


def release(device: str) -> None:
    """Give memory back."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def write_model(folder: Path, shape: str, device: str) -> int:
    """Save a model with random weights, and a tokenizer; returns its number of weights."""
    tokenizer = make_tokenizer()
    config = Qwen2Config(vocab_size=151_936, max_position_embeddings=32_768, pad_token_id=tokenizer.pad_token_id,
                         eos_token_id=tokenizer.eos_token_id, bos_token_id=None, **SHAPES[shape])  # fmt: skip
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


@contextmanager
def prepared(shape: str, options: argparse.Namespace) -> Iterator[tuple[Path, int]]:
    """A folder with model, prompts and recipe."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        weights = write_model(folder / "model", shape, options.device)
        write_prompts(folder / "prompts.jsonl", options.prompts)
        write_recipe(folder / "recipe.toml", folder / "model", folder / "prompts.jsonl")
        release(options.device)
        yield folder, weights


def update(options: argparse.Namespace) -> None:
    """Forward and backward passes of packed rows: tokens a second, share of the card's products, chunks of the head."""
    for shape in options.shapes:
        with prepared(shape, options) as (folder, weights):
            run = Ours(methods([1], options.rollouts)["GRPO"], folder, "update", options)._run
            length = options.row_tokens  # all but the first count
            rows = [Row(i, integers(range(3, 3 + length)), ((1, length),)) for i in range(options.tokens // length)]
            micro = flatten(rows, run.policy.device)

            def both(run: Any = run, micro: Any = micro) -> None:
                run.policy.logprobs(micro).logprobs.sum().backward()

            def say_update(what: str, both: Any = both, tokens: int = options.tokens, shape: str = shape) -> None:
                if options.device == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                ms = median_ms(both, options.device, 3)
                peak = torch.cuda.max_memory_allocated() / GB if options.device == "cuda" else 0.0
                rate, tflops = tokens / ms * 1e3, 6 * weights * tokens / ms / 1e9
                say(f"update {shape} {what}", ms=ms, tokens_s=rate, tflops=tflops, gb=peak)

            with patch.object(fused_scores, "serves", lambda device: False):
                say_update("scored by torch")
            lengths = range(length // 16, 2 * length, length // 16)
            uneven = [Row(i, integers(range(3, 3 + n)), ((1, n),)) for i, n in enumerate(lengths)]
            mixed = partial(both, micro=flatten(uneven, run.policy.device))
            for turn in range(2):
                say_update(f"rows of all lengths {turn}", mixed, tokens=sum(lengths))
                with patch.object(attention, "for_any_lengths", lambda *_: None):
                    say_update(f"rows of all lengths, in tiles {turn}", mixed, tokens=sum(lengths))
            for chunk in options.chunks:
                with patch.object(logprobs, "FUSED_CHUNK" if options.device == "cuda" else "CPU_CHUNK", 1 << chunk):
                    say_update(f"chunk 2^{chunk}")
            if options.profile:
                profile(both, f"update {shape}", options)
            compile_blocks(run.policy.model)
            begin = time.perf_counter()
            both()
            synchronize(options.device)
            say(f"update {shape} compiling", s=time.perf_counter() - begin)
            say_update("compiled layers")
            del run, micro, both
            release(options.device)


def profile(work: Callable[[], object], name: str, options: argparse.Namespace) -> None:
    """Print where the time of a call goes."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if options.device == "cuda" else [])
    with profiler(activities=kinds) as profiled:
        work()
        synchronize(options.device)
    by = "self_cuda_time_total" if options.device == "cuda" else "self_cpu_time_total"
    table = profiled.key_averages().table(sort_by=by, row_limit=18, max_name_column_width=60)
    print(f"== {name}\n{table}", flush=True)


def steps(options: argparse.Namespace, engine: str = "") -> None:
    """Whole steps of GRPO and of C3PO with N draws, with their peak memory next to the plan's."""
    asked = options
    for shape in asked.shapes:
        more = ["model.gradient_checkpointing=true"] if shape in RECOMPUTED else []
        options = argparse.Namespace(**{**vars(asked), "set": [*asked.set, *more]})
        with prepared(shape, options) as (folder, _):
            named = methods(options.draws, options.rollouts)
            names = ["GRPO", *(f"C3PO, N = {n}" for n in options.draws)]
            base = 0.0
            for turn, name in enumerate([*names, "GRPO"]):
                run = None
                release(options.device)
                try:
                    run = Ours(named[name], folder, f"{turn}", options)
                    run.step()
                    peaks, timings = [], []
                    for _ in range(options.rounds):
                        if options.device == "cuda":
                            torch.cuda.reset_peak_memory_stats()
                        synchronize(options.device)
                        timings.append(run.step())
                        if options.device == "cuda":
                            peaks.append(torch.cuda.max_memory_allocated() / (1 << 30))
                except Exception as error:
                    say(f"step{engine} {shape} {name} {turn} failed", why=f"{type(error).__name__}: {str(error)[:300]}")
                    continue
                finally:
                    if run:
                        run.close()
                parts = ("total", "rollout", "update")
                seconds = [statistics.median(getattr(t, part) for t in timings) for part in parts]
                base = base or (seconds[0] if name == "GRPO" else math.nan)
                tokens = timings[-1].tokens
                say(f"step{engine} {shape} {name} {turn}", s=seconds[0], rollout=seconds[1], update=seconds[2],
                    ratio=seconds[0] / base, tokens_s=tokens / seconds[0], gib=max(peaks, default=0.0))  # fmt: skip
            print("\n".join(planned(folder, options)), flush=True)


def planned(folder: Path, options: argparse.Namespace) -> list[str]:
    """The memory that --dry-run prints for GRPO and C3PO."""
    lines = []
    for name, draws in (("grpo", 0), *(("c3po", n) for n in options.draws)):
        settings = [f"method.preset={name}", f"method.draws={draws}",
                    f"model.compute_dtype={options.dtype}", f"engine.dtype={options.dtype}",
                    f"data.prompts_per_step={options.prompts}", f"sampling.max_new_tokens={options.new_tokens}",
                    f"method.rollouts_per_prompt={options.rollouts}", "data.max_prompt_tokens=16",
                    *options.set]  # fmt: skip
        made = plan(replace(load(TrainConfig, str(folder / "recipe.toml"), settings)))
        lines += [f"plan {name}, N = {draws}: {line}" for part in ("trainer", "engine") for line in made[part]]
    return lines


def steps_with_vllm(options: argparse.Namespace) -> None:
    """The same with vLLM on the trainer's card."""
    if find_spec("vllm") is None:
        say("vllm", left_out="vLLM is not installed")
        return
    settings = ["engine.kind=vllm", "engine.vllm.gpu_memory_utilization=0.35"]
    own = {**vars(options), "set": [*options.set, *settings]}
    steps(argparse.Namespace(**own), " with vLLM")


PARTS = {
    "ceilings": ceilings,
    "kernels": kernel_rates,
    "optimizers": optimizers,
    "update": update,
    "steps": steps,
    "vllm": steps_with_vllm,
}


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", choices=tuple(PARTS), default=list(PARTS))
    parser.add_argument("--shapes", nargs="*", choices=tuple(SHAPES), default=["0.5B", "1.5B"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--elements", type=int, default=1 << 30, help="of the tensors of ceilings and kernels")
    parser.add_argument("--square", type=int, default=8192)
    parser.add_argument("--sizes", type=float, nargs="*", default=[100, 494, 1540, 7616], help="million weights")
    parser.add_argument("--peer", action="store_true", help="ivon-opt too")
    parser.add_argument(
        "--chunks", type=int, nargs="*", default=[24, 26, 28], help="log2 of the head's logits at a time"
    )
    parser.add_argument("--tokens", type=int, default=16_384, help="of a micro-batch of update")
    parser.add_argument("--row-tokens", type=int, default=1024)
    parser.add_argument("--draws", type=int, nargs="*", default=[1, 2, 4, 8, 16])
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--rollouts", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--set", nargs="*", default=[], help="settings of the runs, as on threepo's command line")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.threads, options.clock = torch.get_num_threads(), "wall"
    options.set = [*options.set, f"model.device={options.device}"]
    return options


def main() -> None:
    """Measure the parts, one after another; a part that fails leaves the others."""
    options = parse()
    on_gpu = options.device == "cuda"
    machine = {"device": torch.cuda.get_device_name() if on_gpu else "cpu", "torch": torch.__version__}
    git = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    machine["commit"] = git.stdout.strip()
    asked = {key: value for key, value in vars(options).items() if key not in ("parts", "out", "profile")}
    machine["options"] = json.dumps(asked, sort_keys=True)
    if options.out and options.out.is_file():
        kept = json.loads(options.out.read_text())
        if kept.get("machine") == machine and machine["commit"] and "dirty" not in machine["commit"]:
            found.update({key: figures for key, figures in kept.items() if "failed" not in key})
    say("machine", **machine)
    for part in options.parts:
        if f"{part} took" in found:
            continue
        before = sum("failed" in key for key in found)
        begin = time.perf_counter()
        try:
            PARTS[part](options)
        except Exception as error:
            say(f"{part} failed", reason=f"{type(error).__name__}: {str(error)[:500]}")
        if sum("failed" in key for key in found) == before:
            say(f"{part} took", s=time.perf_counter() - begin)
        if options.out:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            write_json(options.out, found)
    sys.exit(any("failed" in key for key in found))


if __name__ == "__main__":
    main()
