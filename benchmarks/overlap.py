"""Time of a run whose rollouts overlap with its updates, compared with one where they take turns.

    python benchmarks/overlap.py [--rounds 5] [--steps 10] [--wait 2] [--engine vllm]

Both sides train the same new model with the same problems in one process, in turns. Replies end by chance, so their
lengths have a long tail, and the reward of a step takes `wait` seconds on average, log-normal with sigma 1, as a
sandbox or a judge may. Ratios are computed within a round; shown are medians with the range. Nothing can be faster than
rollouts and reward alone, or updates alone: the bound is computed from the times of the side without overlap.
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
random_numbers = random.Random()
def reward(completions, **_):
    time.sleep(WAIT * random_numbers.lognormvariate(-0.5, 1))
    return [float(bool(c) and c[0] < "P") for c in completions]
"""


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
    for name, default in {"rounds": 5, "steps": 10, "rollouts": 64, "prompts": 2}.items():
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
            *("sampling.max_new_tokens=192", f"engine.kind={options.engine}", f"run.steps={options.steps}"),
            *("run.checkpoint_every=0", "optimizer.lr=1"),
        ]
        seconds: dict[int, list[float]] = {0: [], 1: []}
        bounds = []
        import slow  # type: ignore[import-not-found]

        for round_ in range(options.rounds):
            for lag in (0, 1) if round_ % 2 else (1, 0):
                slow.random_numbers.seed(round_)
                name = f"{round_}-{lag}"
                run = rlvr.assemble(load(TrainConfig, "", [*common, f"overlap.lag={lag}", f"run.folder={name}"]))
                run.policy.model.generation_config.eos_token_id = list(range(0, 256, 128))
                with run.folder:
                    began = time.perf_counter()
                    rlvr.train(run)
                    seconds[lag].append(time.perf_counter() - began)
                run.engine.close()
                if not lag:
                    rows = read_metrics(Path(name))
                    made = sum(row["time/rollout"] + row["time/reward"] for row in rows)
                    learned = sum(row["time/update"] for row in rows)
                    bounds.append((made + learned) / max(made, learned))
        print(f"in turns: {shown(seconds[0])} s, with overlap: {shown(seconds[1])} s")
        print(f"in turns / with overlap: {shown([a / b for a, b in zip(*seconds.values(), strict=True)])}")
        print(f"bound: {shown(bounds)}")


if __name__ == "__main__":
    main()
