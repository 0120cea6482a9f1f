"""Time of a whole training step of each method and of TRL's GRPOTrainer, on the same work.

    python benchmarks/step.py [--draws 1 2 4 8 16] [--lengths long-tailed] [--dtype bfloat16] [--memory]
        [--set engine.max_batch_rows=256 ...]

The work: a new model of the given shape, P prompts of 5 to 7 byte tokens, G completions each of at most
`--new-tokens`, a reward that is the parity of the tokens' sum, one optimizer step. All contenders take turns in one
process, so a slower machine slows all of them. Ratios are computed within a round and per generated token, because
sampled lengths change the work of a step by some percent. Tables show medians with their range. The learning rate is
almost zero, so that lengths stay comparable.

`--lengths uniform`: the end-of-sequence token is never sampled, and every row has all its tokens. `long-tailed`: it
has a nearly constant probability (within a factor of two), so lengths are nearly geometric with a mean of a quarter of
the longest, and about one row in sixty is cut. The probability comes from the weights (see `write_model`), so it is
the same for all contenders.

`--clock cpu` counts the processor seconds of this process instead of wall-clock seconds. With `--threads 1` this is the
time that a step takes on a free core, even if others use the machine.

`--memory` measures the peak resident size of two steps, and its growth since before the first step, in a separate
process for each contender.

TRL is left out if it is not installed, with a note. `trl_step.py` has its settings.
"""

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import torch

from threepo.config import Method, TinyConfig, TrainConfig
from threepo.config.method import B3PO, C3PO, C3PO_REPLAY, GRPO, M3PO
from threepo.config.presets import PRESETS
from threepo.config.recipes import load
from threepo.methods.arms import outcomes
from threepo.models.loading import make_model, make_tokenizer
from threepo.training import rlvr

TRL = "TRL GRPOTrainer"
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
NEVER = -30.0
"""Logit of a token that is never sampled."""


@dataclass(frozen=True)
class Timing:
    """One training step."""

    total: float
    """Seconds; `rollout` and `update` are parts of it."""
    rollout: float
    """Generation and grading."""
    update: float
    tokens: int
    """Generated tokens."""

    @property
    def a_token(self) -> float:
        """Seconds per token."""
        return self.total / self.tokens


def parity(completion_ids: Sequence[Sequence[int]], **_: object) -> list[float]:
    """A reward of 1 for about half of any model's completions; called by TRL and by threepo."""
    return [float(sum(ids) % 2) for ids in completion_ids]


def write_model(folder: Path, shape: TinyConfig, stop: float) -> None:
    """Save a tiny Qwen2 whose end-of-sequence token has the mean probability `stop`, and its tokenizer.

    Coordinate 0 of the residual stream is constant: it is the same in all embeddings, and no block writes to it.
    Because the head is tied, coordinate 0 of the end-of-sequence embedding is then a bias of its logit.
    """
    model, tokenizer = make_model("tiny-qwen2", shape, 0), make_tokenizer()
    end, size = tokenizer.eos_token_id, len(tokenizer)
    with torch.no_grad():
        table = model.get_input_embeddings().weight
        table[:, 0] = 0.5
        for name, p in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                p[0] = 0
        probe = torch.randint(2, size, (8, 32), generator=torch.Generator().manual_seed(0))
        constant = model.base_model(probe).last_hidden_state[..., 0].mean()
        if not stop:
            table[end, 0] += NEVER / constant
        for _ in range(4 if stop else 0):  # in steps, because the sum of the other logits is measured
            found = model(probe).logits.softmax(dim=-1)[..., end].mean()
            table[end, 0] += (math.log(stop / (1 - stop)) - found.logit()) / constant
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_prompts(path: Path, count: int) -> None:
    """Save distinct prompts of 5 to 7 tokens as a .jsonl file."""
    prompts = [f"{i:04d}" + "?" * (1 + i % 3) for i in range(count)]
    path.write_text("".join(json.dumps({"prompt": prompt, "answer": ""}) + "\n" for prompt in prompts))


def write_recipe(path: Path, model: Path, prompts: Path) -> None:
    """Save the settings that all threepo runs share."""
    path.write_text(
        f"[model]\npath = '{model}'\n[data]\ntrain = '{prompts}'\n[reward]\nfunction = 'step:parity'\n"
        "[optimizer]\nlr = 1e-30\n"
    )


def methods(draws: Sequence[int], rollouts: int) -> dict[str, Method]:
    """Contenders by name. M3PO needs at least two completions of a prompt per draw; else it is left out."""
    found = {"GRPO": GRPO, "B3PO": B3PO}
    for n in draws:
        if n < rollouts:
            found[f"M3PO, M = {n}"] = replace(M3PO, draws=n)
        found |= {f"C3PO, N = {n}": replace(C3PO, draws=n), f"C3PO-replay, N = {n}": replace(C3PO_REPLAY, draws=n)}
        found[f"fixed replay, N = {n}"] = replace(PRESETS["fixed_replay"].method, draws=n)
        if n > 1:
            found[f"auto, N = {n}"] = replace(PRESETS["auto"].method, draws=n)
    return {name: replace(method, rollouts_per_prompt=rollouts) for name, method in found.items()}


class Ours:
    """A threepo run that takes one step at a time."""

    def __init__(self, method: Method, folder: Path, name: str, options: argparse.Namespace) -> None:
        settings = [
            f"run.folder={folder / name.replace(' ', '')}",
            f"run.threads={options.threads}",
            f"model.compute_dtype={options.dtype}",
            f"engine.dtype={options.dtype}",
            f"data.prompts_per_step={options.prompts}",
            f"sampling.max_new_tokens={options.new_tokens}",
            f"method.preset={method.name}",
            *options.set,
        ]
        self._run = rlvr.assemble(replace(load(TrainConfig, str(folder / "recipe.toml"), settings), method=method))
        self._now = CLOCKS[options.clock]
        self._step = 0

    def step(self) -> Timing:
        """One step: generate, grade, update."""
        begin = self._now()
        run = self._run
        rollouts = rlvr.begin_rollouts(run, self._step)()
        between = self._now()
        rlvr.learn(run, rollouts, self._step)
        run.bandit.count(outcomes(rollouts.generated))
        end = self._now()
        self._step += 1
        tokens = sum(len(c.tokens) for c in rollouts.completions)
        return Timing(end - begin, between - begin, end - between, tokens)

    def close(self) -> None:
        """Free what the engine holds."""
        self._run.engine.close()


def measure(names: Sequence[str], folder: Path, options: argparse.Namespace, rounds: int) -> dict[str, list[Timing]]:
    """`rounds` steps of every contender, in turns. If TRL is one of them, its trainer runs the loop and comes first."""
    chosen = {name: method for name, method in methods(options.draws, options.rollouts).items() if name in names}
    runs = {name: Ours(method, folder, name, options) for name, method in chosen.items()}
    timings: dict[str, list[Timing]] = {name: [] for name in names}

    def take_turns() -> None:
        for name, run in runs.items():
            timings[name].append(run.step())

    if TRL in names:
        from trl_step import train  # TRL may not be installed

        timings[TRL] = train(folder, parity, options, rounds, take_turns)
    else:
        for _ in range(rounds):
            take_turns()
    return timings


def table(timings: dict[str, list[Timing]], memory: Callable[[str], str], to: str = "") -> str:
    """A table of medians over rounds, in Markdown, with ratios to TRL, to GRPO, and to the contender `to`."""
    ratio_to = [name for name in timings if name in (TRL, "GRPO", to)]
    ratios_to = [f"time a token to {name}'s" for name in ratio_to]
    head = ["trainer", "s/step", "rollout", "update", "tokens/s", *ratios_to, "memory"]
    lines = [" | ".join(head), " | ".join("---" for _ in head)]
    for name, own in timings.items():
        seconds = [statistics.median(getattr(t, part) for t in own) for part in ("total", "rollout", "update")]
        cells = [
            name,
            *(f"{value:.2f}" for value in seconds),
            f"{statistics.median(t.tokens / t.total for t in own):,.0f}",
        ]
        for other in ratio_to:
            ratios = sorted(a.a_token / b.a_token for a, b in zip(own, timings[other], strict=True))
            shown = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
            cells.append("1.00" if other == name else shown)
        lines.append(" | ".join([*cells, memory(name)]))
    return "\n".join(f"| {line} |" for line in lines)


def resident(field: str) -> float:
    """MiB of this process: `VmRSS` now, `VmHWM` at its peak.

    `ru_maxrss` is not used, because a child process inherits its parent's: all contenders would have the same figure.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def report_memory(name: str, folder: Path, options: argparse.Namespace) -> None:
    """Print the peak resident size of one contender over two steps, and its growth, in MiB."""
    before = resident("VmRSS")
    measure([name], folder, options, 2)
    peak = resident("VmHWM")
    print(f"{peak:,.0f} MiB, {peak - before:,.0f} of them for it")


def memory_of(name: str) -> str:
    """The output of `report_memory` in a separate process with the arguments of this one."""
    command = [sys.executable, __file__, *sys.argv[1:], "--memory-of", name]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--draws", type=int, nargs="*", default=[1, 2, 4, 8, 16], help="N of C3PO, M of M3PO")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--rollouts", type=int, default=16, help="completions of a prompt")
    parser.add_argument("--new-tokens", type=int, default=64, help="longest completion")
    parser.add_argument("--lengths", choices=("uniform", "long-tailed"), default="uniform")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--width", type=int, default=256, help="of the model; the MLP is three times as wide")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--only", nargs="*", help="names as in the table, or without their draws; all where left out")
    parser.add_argument("--set", nargs="*", default=[], help="settings of threepo's runs, as on its command line")
    parser.add_argument("--trl-accumulation", type=int, default=8, help="micro-batches of TRL's one optimizer step")
    parser.add_argument("--to", default="", help="a contender to divide by as well, as in the table")
    parser.add_argument("--clock", choices=tuple(CLOCKS), default="wall")
    parser.add_argument("--memory", action="store_true", help="measure peak memory too")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Measure, and print a table in Markdown."""
    options = parse()
    torch.set_num_threads(options.threads)
    shape = TinyConfig(hidden_size=options.width, intermediate_size=3 * options.width, layers=options.layers)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_model(folder / "model", shape, 4 / options.new_tokens if options.lengths == "long-tailed" else 0.0)
        write_prompts(folder / "prompts.jsonl", options.prompts)
        write_recipe(folder / "recipe.toml", folder / "model", folder / "prompts.jsonl")
        if options.memory_of:
            report_memory(options.memory_of, folder, options)
            return
        names = [TRL, *methods(options.draws, options.rollouts)]
        if find_spec("trl") is None:
            print("TRL is not installed and so left out: pip install trl datasets\n")
            names.remove(TRL)
        if options.only is not None:
            names = [name for name in names if {name, name.split(",")[0]} & set(options.only)]
        if options.to and options.to not in names:
            sys.exit(f"--to {options.to}: must be one of {', '.join(names)}")
        timings = measure(names, folder, options, options.rounds + 1)
    timings = {name: timing[1:] for name, timing in timings.items()}  # the first round warms up
    machine = platform.processor() or platform.machine()
    print(f"{machine}, {options.threads} threads, {options.clock} time, torch {torch.__version__}, ", end="")
    print(f"{options.dtype}, {options.lengths} lengths, {options.rounds} rounds\n")
    print(table(timings, memory_of if options.memory else lambda _: "not measured", options.to))


if __name__ == "__main__":
    main()
