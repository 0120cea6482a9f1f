"""A model of the time of a step, relative to GRPO, where every rank is a GPU with a replica of the engine.

It is no measurement: all numbers below are assumed, and a reader should put in those of their own machines. It is there
to compare two ways to serve N draws. In turn: all replicas decode the rows of one draw, then those of the next. A draw
for every replica: what ranks/dealing.py does.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

MEMORY = 0.75 * 4.8e12
"""Bytes a second that decoding reads: three quarters of what an H200 can."""
FLOPS = 990e12
"""Of an H200 in bfloat16, dense."""
SERVING, TRAINING = 0.5, 0.4
"""The shares of them that an engine and training reach."""
DECODING_STEP = 2.5e-3
"""Seconds of a decoding step that are not reading or arithmetic."""
LINK, NETWORK = 350e9, 45e9
"""Bytes a second into a GPU: from others of its node, and of other nodes."""
NODE = 8
"""GPUs of a node."""
PUSH, REST = 0.8, 4.0
"""Seconds to load gathered weights into an engine, and of a step's other work: grading, tokens, log."""
SPREAD = 0.8
"""Of the logarithm of response lengths, which is taken as normal."""
TRIALS = 20
"""Lengths that are drawn, and averaged over."""

ASSUMED = (
    f"H200s, {MEMORY / 1e12:.2g} TB/s of memory, {FLOPS * SERVING / 1e12:.0f} TFLOP/s to decode and "
    f"{FLOPS * TRAINING / 1e12:.0f} to train, {DECODING_STEP * 1e3:g} ms a decoding step on top, {LINK / 1e9:.0f} GB/s "
    f"between GPUs ({NETWORK / 1e9:.0f} between nodes of {NODE}), {PUSH:g} s to load weights, {REST:g} s of other work"
)


@dataclass(frozen=True)
class Work:
    """What a step has to do."""

    weights: int
    cache: int
    """Bytes of keys and values of a token."""
    prompts: int
    rows: int
    """Completions of all prompts."""
    draws: int
    prompt: float
    """Mean tokens; so is `response`."""
    response: float
    longest: int
    """Tokens of a response at most; if `response` is as long, all are."""
    operations: float
    """Of training, for each weight and token: 6 forward and backward, 8 with recomputation, times gradient draws."""
    gpus: int = 1
    """Of a replica, which read and compute together; what they exchange takes no time here."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, one part after the other."""

    generation: float
    update: float
    pushes: float
    rest: float = REST

    @property
    def total(self) -> float:
        """All of them."""
        return self.generation + self.update + self.pushes + self.rest


def step_times(work: Work, ranks: int) -> dict[str, StepTime]:
    """Of GRPO with as many rows, of draws in turn on all replicas, and of a draw for every replica."""
    draws, replicas = work.draws, ranks // work.gpus
    # The rows of each turn of each replica, as ranks/dealing.py deals them: (draw, rows).
    servers = [sum(replica % draws == draw % replicas for replica in range(replicas)) for draw in range(draws)]
    own = [
        [work.rows / draws / servers[draw] for draw in range(draws) if replica % draws == draw % replicas]
        for replica in range(replicas)
    ]
    in_turn = [work.rows / draws / replicas] * draws
    return {
        "GRPO": _step(work, ranks, 1, lambda lengths: _slowest(work, [[work.rows / replicas]] * replicas, lengths)),
        "in turn": _step(
            work, ranks, draws, lambda lengths: sum(_slowest(work, [[n]] * replicas, lengths) for n in in_turn)
        ),
        "own": _step(work, ranks, draws, lambda lengths: _slowest(work, own, lengths), -(-draws // replicas)),
    }


Lengths = Callable[[float], list[float]]
"""Of so many rows."""


def _step(
    work: Work, ranks: int, draws: int, generation: Callable[[Lengths], float], pushes: int | None = None
) -> StepTime:
    generator = random.Random(0)

    def lengths(rows: float) -> list[float]:
        if work.response >= work.longest:
            return [work.longest] * round(rows)
        center = math.log(work.response) - SPREAD**2 / 2
        return [min(generator.lognormvariate(center, SPREAD), work.longest) for _ in range(max(round(rows), 1))]

    prefill = 2 * work.weights * work.prompts * draws * work.prompt / ranks / (FLOPS * SERVING)
    tokens = work.rows * (work.prompt + work.response)
    gathered = (4 if draws == 1 else 8) * work.weights * (ranks - 1) / ranks / (LINK if ranks <= NODE else NETWORK)
    return StepTime(
        prefill + sum(generation(lengths) for _ in range(TRIALS)) / TRIALS,
        work.operations * work.weights * tokens / (ranks * FLOPS * TRAINING),
        (pushes or draws) * (PUSH + gathered),
    )


def _slowest(work: Work, turns: Sequence[Sequence[float]], lengths: Lengths) -> float:
    """Seconds of the replica that decodes longest; each has so many rows in each of its turns."""
    return max(sum(_decoding(work, lengths(rows)) for rows in own) for own in turns)


def _decoding(work: Work, lengths: Sequence[float]) -> float:
    """Seconds to decode rows together. A step reads all weights, and the cache of rows that are not finished."""
    seconds, done = 0.0, 0.0
    for finished, length in enumerate(sorted(lengths)):
        rows, context = len(lengths) - finished, work.prompt + (done + length) / 2
        read = (2 * work.weights + rows * context * work.cache) / (MEMORY * work.gpus)
        seconds += (length - done) * (read + rows * 2 * work.weights / (FLOPS * SERVING * work.gpus) + DECODING_STEP)
        done = length
    return seconds
