"""Tokens per second of episodes, compared with the same number of generated tokens in single answers.

    python benchmarks/episodes.py [--rounds 5] [--turns 8] [--engine vllm] [--wait 0.05] [--answer-steps 4]

Both sides run in one process, in turns, with the same new model: episodes of so many replies of about sixteen tokens,
each answered by an observation of sixteen characters; and single answers as long as all replies together. Ratios are
computed within a round; shown are medians with the range. The environment does nothing, so that the time of its
processes is seen: to start them, and for an answer; or it waits for so many seconds on average, with a long tail
(log-normal, sigma 1). Then a third side waits for each answer at once, with answer_steps = 0.
"""

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

from threepo.environment import Turn

if TYPE_CHECKING:
    from threepo.rollout.engines import RolloutEngine
    from threepo.types import Request


class Silent:
    """Answers sixteen characters, so many times, after `wait` seconds on average."""

    def __init__(self, turns: int, wait: float) -> None:
        self.left, self.wait = turns, wait

    def step(self, reply: str) -> Turn:
        """An answer that depends on nothing."""
        self.left -= 1
        if self.wait:
            time.sleep(self.wait * random.lognormvariate(-0.5, 1))
        return Turn("sixteen letters.", done=not self.left)


def speed(engine: "RolloutEngine", requests: "Sequence[Request]", tokens: int) -> float:
    """Generated tokens per second."""
    from threepo.config import SamplingConfig

    began = time.perf_counter()
    made = engine.generate(requests, SamplingConfig(max_new_tokens=tokens), seed=0)
    return sum(len(completion.logprobs) for completion in made) / (time.perf_counter() - began)


def shown(values: Sequence[float], form: str = ",.0f") -> str:
    """The median, and the range."""
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def main() -> None:
    """Measure and print."""
    # Here, so that the processes of environments import as little as those of most users.
    from threepo.config import DataConfig, EnvironmentConfig, LocalEngineConfig, ModelConfig, TinyConfig
    from threepo.config.engine import VLLMConfig, VLLMEngineConfig
    from threepo.models.policy import load_policy
    from threepo.posterior.ivon import IVON
    from threepo.rollout.engines import build_engine
    from threepo.rollout.environments import Environments
    from threepo.rollout.episodes import EpisodeEngine
    from threepo.types import Draw, Problem, Request

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"rounds": 5, "turns": 8, "rows": 64, "draws": 4, "layers": 4, "width": 256}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--engine", choices=("local", "vllm"), default="local")
    parser.add_argument("--wait", type=float, default=0.0)
    parser.add_argument("--answer-steps", type=int, default=1)
    options = parser.parse_args()
    shape = TinyConfig(
        hidden_size=options.width,
        intermediate_size=3 * options.width,
        layers=options.layers,
        heads=options.width // 64,
        kv_heads=max(1, options.width // 128),
        context=4096,
    )
    policy = load_policy(ModelConfig(path="tiny-qwen2", tiny=shape), seed=1)
    policy.tokenizer.eos_token = None
    kinds = {
        "local": LocalEngineConfig(),
        "vllm": VLLMEngineConfig(vllm=VLLMConfig(kv_cache_memory_bytes=1 << 30, enforce_eager=True)),
    }
    draws = [Draw(0, 0, i) for i in range(options.draws)]
    problems = [Problem(f"p{i}", f"{i:06d}") for i in range(options.rows // 16)]
    requests = [
        Request(problem, tuple(policy.tokenizer(problem.prompt)["input_ids"]), draws[k * len(draws) // 16], k)
        for problem in problems
        for k in range(16)
    ]
    environment = EnvironmentConfig(
        factory="episodes:Silent",
        settings={"turns": options.turns, "wait": options.wait},
        max_turns=options.turns,
        max_tokens=2048,
        workers=options.rows if options.wait else 0,
        answer_steps=options.answer_steps,
    )
    engine = build_engine(kinds[options.engine], policy)
    with closing(Environments(environment)) as environments, closing(engine):

        def episodes(settings: EnvironmentConfig) -> EpisodeEngine:
            return EpisodeEngine(engine, policy, settings, DataConfig(train="x"), environments)

        playing = {"episodes": episodes(environment)}
        if options.wait:
            playing["episodes, waiting at once"] = episodes(replace(environment, answer_steps=0))
        engine.load(IVON(policy.model.named_parameters()), draws, 0)
        sides: dict[str, list[float]] = {"single answers": [], **{name: [] for name in playing}}
        for round_ in range(options.rounds + 1):  # the first one warms up
            policy.model.generation_config.eos_token_id = list(range(0, 256, 16))
            speeds = {name: speed(side, requests, 256) for name, side in playing.items()}
            policy.model.generation_config.eos_token_id = None
            speeds["single answers"] = speed(engine, requests, 16 * options.turns)
            for name, values in sides.items() if round_ else ():
                values.append(speeds[name])
    for name, values in sides.items():
        print(f"{name}: {shown(values)} tokens/s")
    for name in list(sides)[:1] + list(sides)[2:]:
        ratios = [a / b for a, b in zip(sides["episodes"], sides[name], strict=True)]
        print(f"episodes / {name}: {shown(ratios, '.2f')}")
    with closing(Environments(environment)) as environments:
        began = time.perf_counter()
        environments.begin(options.rows)
        forked = time.perf_counter()
        environments.call(dict.fromkeys(range(options.rows), ("reset", problems[0], 0)))
        reset = time.perf_counter()
        environments.call(dict.fromkeys(range(options.rows), ("step", "")))
        ended = time.perf_counter()
    each = [1e3 * seconds / options.rows for seconds in (forked - began, reset - forked, ended - reset)]
    print("environments, ms each: {:.2f} to start, {:.2f} to reset, {:.2f} for a step".format(*each))


if __name__ == "__main__":
    main()
