"""Work of a step dealt to ranks: draws and requests, completions to grade, rows to train on.

Every rank knows all of them, so who does what is computed and not negotiated. The results are put together in one
order, whatever the number of ranks.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

import torch

from threepo.config import EngineConfig, SamplingConfig, VLLMConfig, VLLMEngineConfig
from threepo.errors import UserError
from threepo.models.policy import Policy
from threepo.posterior.policy_optimizer import WeightSource
from threepo.ranks.group import Ranks
from threepo.ranks.sharding import Gathered
from threepo.rollout.engines import RolloutEngine, build_engine
from threepo.types import Completion, Draw, Problem, Request, Row, Verdict

AnyRow = TypeVar("AnyRow", bound=Row)
Grade = Callable[[Sequence[Completion]], list[Verdict]]
_SENDER_KNOWS = Problem("", "")
"""Stands for a completion's problem on the way between ranks, because all of them have it."""


def deal_rows(rows: Sequence[AnyRow], ranks: int) -> list[list[AnyRow]]:
    """The rows of each rank: the longest first, each to the rank that has the fewest tokens so far."""
    hands: list[list[AnyRow]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    for row in sorted(rows, key=lambda row: (-len(row.tokens), row.index)):
        rank = tokens.index(min(tokens))
        hands[rank].append(row)
        tokens[rank] += len(row.tokens)
    return hands


def dealt_grader(grade: Grade, ranks: Ranks) -> Grade:
    """A grader of which every rank grades some problems, each with all its completions."""

    def grade_some(completions: Sequence[Completion]) -> list[Verdict]:
        number: dict[str, int] = {}
        owners = [number.setdefault(c.problem.id, len(number)) % ranks.size for c in completions]
        return ranks.deal(owners, lambda mine: grade([completions[i] for i in mine]))

    return grade_some if ranks.size > 1 else grade


def refuse_engine(settings: EngineConfig, ranks: Ranks) -> None:
    """Raise `UserError` for an engine that several ranks cannot have: every rank has the one on its own device."""
    if ranks.size == 1 or not isinstance(settings, VLLMEngineConfig):
        return
    own, local = settings.vllm, int(os.environ.get("LOCAL_WORLD_SIZE", ranks.size))
    for name in ("replicas", "gpus"):
        if getattr(own, name) != getattr(VLLMConfig(), name):
            raise UserError(
                f"engine.vllm.{name} = {getattr(own, name)}: several ranks have a replica each, on their own GPUs; "
                f"remove it"
            )
    if own.draw_rank:
        fix = "low-rank draws beside the mean are served from one process; set it to 0"
        raise UserError(f"engine.vllm.draw_rank = {own.draw_rank}: {fix}")
    if local % own.tensor_parallel:
        raise UserError(
            f"engine.vllm.tensor_parallel = {own.tensor_parallel}: neighbouring ranks share a replica, and the "
            f"{local} ranks of a node cannot be divided so; set it to a divisor"
        )


def build_ranked(settings: EngineConfig, policy: Policy, ranks: Ranks) -> RolloutEngine:
    """The engines of all ranks as one; alone, the engine itself."""
    if isinstance(settings, VLLMEngineConfig) and settings.servers:
        from threepo.ranks.vllm_servers import VLLMServers  # an engine is only imported for use

        return VLLMServers(policy, settings, ranks)
    if ranks.size == 1:
        return build_engine(settings, policy)
    each, engine = settings.tensor_parallel, None
    if isinstance(settings, VLLMEngineConfig) and policy.device.type == "cuda":
        first = torch.cuda.current_device()
        settings = replace(settings, vllm=replace(settings.vllm, gpus=tuple(range(first, first + each))))
    with ranks.together(), _naming(ranks):
        if ranks.rank % each == 0:
            engine = build_engine(settings, policy)
    return RankedEngine(engine, ranks, each)


@contextmanager
def _naming(ranks: Ranks) -> Iterator[None]:
    """Say of which rank's engine an error is."""
    try:
        yield
    except UserError as error:
        raise UserError(f"rank {ranks.rank}: {error}") from error


class RankedEngine:
    """The engines of all ranks as one `RolloutEngine`: each rank's engine holds only the draws that it serves.

    With as many engines as draws or more, engines share a draw and split its requests; with fewer, one has several.
    """

    def __init__(self, engine: RolloutEngine | None, ranks: Ranks, each: int) -> None:
        """`each` neighbouring ranks share an engine, which the first of them has; the others have None."""
        self._engine, self._ranks = engine, ranks
        self._owners = range(0, ranks.size, each)
        """The ranks that have an engine."""
        self._draws: list[Draw | None] = []

    def prepare(self, draws: int, tokens: int) -> None:
        """See `RolloutEngine.prepare`. Ranks of a machine take turns: each finds the memory that the others left."""
        own = int(os.environ.get("LOCAL_RANK", 0))
        for turn in range(max(self._ranks.gather(own)) + 1):
            with self._ranks.together(), _naming(self._ranks):
                if self._engine and turn == own:
                    self._engine.prepare(self._rounds(draws), tokens)

    def load(self, posterior: WeightSource, draws: Sequence[Draw | None], step: int) -> None:
        """See `RolloutEngine.load`. Every rank makes its own draws, of weights that all gather tensor by tensor."""
        self._draws = list(dict.fromkeys(draws))
        mine = [draw for i, draw in enumerate(self._draws) if self._ranks.rank in self._servers(i)]
        gathered = Gathered(posterior, self._draws[0], len(mine), self._rounds(len(self._draws)))
        with self._ranks.together(), _naming(self._ranks):
            try:
                if self._engine:
                    self._engine.load(gathered, mine, step)
            finally:  # the other ranks need this one's shards, also if it has no engine or has failed
                gathered.finish()

    def generate(self, requests: Sequence[Request], sampling: SamplingConfig, seed: int) -> list[Completion]:
        """See `RolloutEngine.generate`."""
        owners = [0] * len(requests)
        for i, draw in enumerate(self._draws):
            rows, servers = [k for k, request in enumerate(requests) if request.draw == draw], self._servers(i)
            for k, index in enumerate(rows):  # neighbours stay together: they share a prompt
                owners[index] = servers[k * len(servers) // len(rows)]

        def complete(mine: list[int]) -> list[Completion]:
            if not self._engine:
                return []
            with _naming(self._ranks):
                made = self._engine.generate([requests[i] for i in mine], sampling, seed)
            return [replace(completion, problem=_SENDER_KNOWS) for completion in made]

        completions = self._ranks.deal(owners, complete)
        return [replace(c, problem=request.problem) for c, request in zip(completions, requests, strict=True)]

    def close(self) -> None:
        """See `RolloutEngine.close`."""
        if self._engine:
            self._engine.close()

    def _rounds(self, draws: int) -> int:
        """Most draws that an engine serves."""
        return -(-draws // len(self._owners))

    def _servers(self, index: int) -> list[int]:
        """The ranks that serve the draw of this index."""
        engines, draws = len(self._owners), len(self._draws)
        return [rank for i, rank in enumerate(self._owners) if i % draws == index % engines]
