"""Time of a run whose rollouts overlap with its updates, compared with one where they take turns.

    python benchmarks/overlap.py [--rounds 5] [--steps 8] [--wait 2] [--engine vllm]

All sides train the same new model with the same problems in one process, in turns. Replies end by chance, so their
lengths have a long tail, and a prompt's reward takes `wait` seconds on average, log-normal with sigma 1, as a sandbox
or a judge may: the same for a prompt on all sides, and those of several prompts at the same time. Ratios are computed
within a round; shown are medians with the range. Nothing can be faster than engine and trainer that never wait, one
after the other on a CPU, beside one another with a device each: the bounds are computed from the side that takes turns.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

REWARD = """
import random, time
def reward(prompts, completions, **_):
    time.sleep(max(WAIT * random.Random(prompt).lognormvariate(-0.5, 1) for prompt in prompts))
    return [float(bool(c) and c[0] < "P") for c in completions]
"""
SIDES = {
    "in turns": ("overlap.lag=0",),
    "lag 1": ("overlap.lag=1",),
    "stream, lag 2": ("overlap.lag=2", "overlap.stream=true"),
}


def shown(values: Sequence[float]) -> str:
    """The median, and the range."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    """Measure and print."""
    from threepo.config import TrainConfig
    from threepo.config.recipes import load
    from threepo.run_folder import read_metrics
    from threepo.training import rlvr

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"rounds": 5, "steps": 8, "rollouts": 8, "prompts": 4, "tokens": 128}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--wait", type=float, default=2.0)
    parser.add_argument("--engine", choices=("local", "vllm"), default="local")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        sys.path.insert(0, folder)
        Path("slow.py").write_text(REWARD.replace("WAIT", str(options.wait)))
        common = [
            *("model.path=tiny-qwen2", "model.tiny.hidden_size=256", "model.tiny.intermediate_size=768"),
            *("model.tiny.layers=4", "model.tiny.heads=4", "model.tiny.kv_heads=2", "model.tiny.tied=false"),
            *("data.train=sorting", f"data.prompts_per_step={options.prompts}", "reward.function=slow:reward"),
            *("method.preset=c3po", f"method.rollouts_per_prompt={options.rollouts}", "optimizer.ess=1e8"),
            *(f"sampling.max_new_tokens={options.tokens}", f"engine.kind={options.engine}"),
            *(f"run.steps={options.steps}", "run.checkpoint_every=0", "optimizer.lr=1"),
        ]
        seconds: dict[str, list[float]] = {side: [] for side in SIDES}
        one, two = [], []
        for round_ in range(options.rounds):
            for side, settings in list(SIDES.items())[:: 1 if round_ % 2 else -1]:
                name = f"{round_}-{side}"
                run = rlvr.assemble(load(TrainConfig, "", [*common, *settings, f"run.folder={name}"]))
                run.policy.model.generation_config.eos_token_id = list(range(0, 256, 128))
                with run.folder:
                    began = time.perf_counter()
                    rlvr.train(run)
                    seconds[side].append(time.perf_counter() - began)
                run.engine.close()
                if side == "in turns":
                    rows = read_metrics(Path(name))
                    made = sum(row["time/rollout"] for row in rows)
                    learned = sum(row["time/update"] for row in rows)
                    one.append(seconds[side][-1] / (made + learned))
                    two.append(seconds[side][-1] / max(made, learned))
        for side, taken in seconds.items():
            ratios = [turns / own for turns, own in zip(seconds["in turns"], taken, strict=True)]
            print(f"{side}: {shown(taken)} s, {shown(ratios)} times as fast as in turns")
        print(f"without any waiting, one after the other: {shown(one)}, beside one another: {shown(two)}")


if __name__ == "__main__":
    main()
