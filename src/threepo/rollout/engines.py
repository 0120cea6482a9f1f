"""The interface of rollout engines. config/engine.py has a record for each, which names its class."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pkgutil import resolve_name
from typing import Any, NamedTuple, Protocol

from threepo.config.engine import EngineConfig, SamplingConfig
from threepo.models.policy import Policy
from threepo.posterior.noise import Key, address_key
from threepo.posterior.policy_optimizer import WeightSource
from threepo.types import Completion, Draw, Request, integers, numbers


class RolloutEngine(Protocol):
    """Owns copies of weights, and stamps every completion with the step and the draw that generated it."""

    def prepare(self, draws: int, tokens: int) -> None:
        """Raise `UserError` unless memory holds the weights of so many draws, and a row of so many tokens for each."""

    def load(self, posterior: WeightSource, draws: Sequence[Draw | None], step: int) -> int | None:
        """Replace the loaded weights by the weights under these draws (None: the mean) at training step `step`.

        Returns the bytes that it has written for other processes to read; None if there are none.
        """

    def generate(self, requests: Sequence[Request], sampling: SamplingConfig, seed: int) -> list[Completion]:
        """Completions of the requests, in their order. Each request must name a loaded draw.

        A row's random numbers are a function of (seed, step, problem, rollout, turn), so its completion does not depend
        on the other rows of the batch.
        """

    def close(self) -> None:
        """Free the engine's memory and end its processes; it cannot be used afterwards."""


Follow = Callable[[Sequence[tuple[int, Completion]]], Mapping[int, Request]]
"""Gets finished replies, each with the index of its conversation, and returns the next requests of those that go on.

The prompt of a next request begins with the prompt and the tokens of the reply. Several threads may call it.
"""


class Talk(NamedTuple):
    """The limits of conversations, and how they go on."""

    follow: Follow
    longest: int
    """Most tokens of a conversation, its first prompt included."""
    answer_steps: float
    """Steps of decoding between a reply and the next one, in which others go on; an engine may wait instead.
    Infinite: no reply has a next one."""


class ConversingEngine(RolloutEngine, Protocol):
    """A `RolloutEngine` that also goes on after a reply."""

    longest: int
    """Most tokens of a row that it takes."""

    def converse(self, requests: Sequence[Request], sampling: SamplingConfig, seed: int, talk: Talk) -> None:
        """Generate as `generate` does, and go on with what `talk.follow` returns, until nothing is left."""


def ask_once(
    engine: ConversingEngine, requests: Sequence[Request], sampling: SamplingConfig, seed: int
) -> list[Completion]:
    """`RolloutEngine.generate` by conversations that end with their first reply."""
    found: dict[int, Completion] = {}

    def keep(replies: Sequence[tuple[int, Completion]]) -> Mapping[int, Request]:
        found.update(replies)
        return {}

    engine.converse(requests, sampling, seed, Talk(keep, engine.longest, answer_steps=math.inf))
    return [found[row] for row in range(len(requests))]


@contextmanager
def answering_threads(conversations: int) -> Iterator[ThreadPoolExecutor]:
    """Threads that call `Talk.follow`. An error does not wait for them: their environments are ended after it."""
    threads = ThreadPoolExecutor(conversations or 1)
    try:
        yield threads
    finally:
        threads.shutdown(wait=False, cancel_futures=True)


def row_key(seed: int, step: int, request: Request) -> Key:
    """The random address of a completion: its token t uses the t-th uniform number of this key."""
    turn = (request.turn,) if request.turn else ()
    return address_key("threepo-sample", seed, step, request.problem.id, request.rollout, *turn)


def rows_by_draw(requests: Sequence[Request], loaded: Sequence[Draw | None]) -> list[list[int]]:
    """The indices of the requests of each loaded draw."""
    rows: dict[Draw | None, list[int]] = {draw: [] for draw in loaded}
    for index, request in enumerate(requests):
        if request.draw not in rows:
            raise RuntimeError(f"{request.draw} is not loaded into the engine; loaded: {loaded}")
        rows[request.draw].append(index)
    return list(rows.values())


def completion_of(
    policy: Policy, request: Request, tokens: Sequence[int], logprobs: Sequence[float], step: int
) -> Completion:
    """The completion of a request, from its generated tokens, a stop token included, and their log-probs."""
    stopped = tokens[-1] in policy.stop_tokens
    written = tokens[:-1] if stopped else tokens
    return Completion(
        **vars(request),  # problem, prompt_tokens, draw, rollout and turn
        tokens=integers(tokens),
        logprobs=numbers(logprobs),
        text=continued_text(policy.tokenizer, request.prompt_tokens, written),
        finish_reason="stop" if stopped else "length",
        policy_step=step,
        opening=policy.opening(request.prompt_tokens),
    )


def continued_text(tokenizer: Any, prompt: Sequence[int], tokens: Sequence[int]) -> str:
    """The text of tokens after a prompt, without special tokens: some tokenizers lose a blank that begins a text."""
    last = list(prompt[-8:])  # a blank alone would be lost, too
    before, text = (tokenizer.decode(ids, skip_special_tokens=True) for ids in (last, [*last, *tokens]))
    whole = before and text.startswith(before)  # not where a character has tokens on both sides
    return text.removeprefix(before) if whole else str(tokenizer.decode(tokens, skip_special_tokens=True))


def build_engine(settings: EngineConfig, policy: Policy) -> ConversingEngine:
    """The rollout engine that `settings.kind` names; the caller closes it."""
    engine: ConversingEngine = resolve_name(settings.code)(policy, settings)
    return engine
