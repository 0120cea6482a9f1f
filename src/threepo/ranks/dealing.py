"""Work of a step dealt to ranks: draws and requests, completions to grade, rows to train on.

Every rank knows all of them, so who does what is computed and not negotiated. The results are put together in one
order, whatever the number of ranks.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from threepo.config import EngineConfig, SamplingConfig, VLLMConfig, VLLMEngineConfig
from threepo.errors import UserError
from threepo.models.packing import AnyRow, pack
from threepo.models.policy import Policy
from threepo.posterior.policy_optimizer import WeightSource
from threepo.ranks.sharding import Gathered
from threepo.ranks.world import World
from threepo.rollout.engines import RolloutEngine, build_engine
from threepo.types import Completion, Draw, Problem, Request, Verdict

Grade = Callable[[Sequence[Completion]], list[Verdict]]
_SENDER_KNOWS = Problem("", "")
"""Stands for a completion's problem on the way between ranks, because all of them have it."""


def deal_bundles(rows: Sequence[AnyRow], token_budget: int, policy: Policy, world: World) -> list[list[AnyRow]]:
    """This rank's share of the rows, in bundles that go through the model together.

    The longest rows come first, each to the rank that has the fewest tokens so far. Every rank gets as many bundles as
    the one that has most, so its last ones may be empty.
    """
    shares: list[list[AnyRow]] = [[] for _ in range(world.size)]
    tokens = [0] * world.size
    for row in sorted(rows, key=lambda row: (-len(row.tokens), row.index)):
        rank = tokens.index(min(tokens))
        shares[rank].append(row)
        tokens[rank] += len(row.tokens)
    padding = not policy.scorer.packed_rows
    bundles = [list(pack(share, token_budget, policy.device, padding=padding)) for share in shares]
    own = bundles[world.rank]
    return own + [[]] * (max(map(len, bundles)) - len(own))


def divide_grading(grade: Grade, world: World) -> Grade:
    """A grader that lets every rank grade some problems, each with all its completions."""

    def grade_share(completions: Sequence[Completion]) -> list[Verdict]:
        problems = [completion.problem.id for completion in completions]
        return world.deal(problems, lambda mine: grade([completions[i] for i in mine]))

    return grade_share


def refuse_engine(settings: EngineConfig, world: World) -> None:
    """Raise `UserError` for an engine that several ranks cannot have: every rank has the one on its own device."""
    if world.size == 1 or not isinstance(settings, VLLMEngineConfig):
        return
    own, local = settings.vllm, int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
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


def build_shared_engine(settings: EngineConfig, policy: Policy, world: World) -> RolloutEngine:
    """The engines of all ranks as one; alone, the engine itself."""
    if isinstance(settings, VLLMEngineConfig) and settings.servers:
        from threepo.ranks.vllm_servers import VLLMServers  # an engine is only imported for use

        return VLLMServers(policy, settings, world)
    if world.size == 1:
        return build_engine(settings, policy)
    each, engine = settings.tensor_parallel, None
    if isinstance(settings, VLLMEngineConfig) and policy.device.type == "cuda":
        first = torch.cuda.current_device()
        settings = replace(settings, vllm=replace(settings.vllm, gpus=tuple(range(first, first + each))))
    with world.together(), _naming(world):
        if world.rank % each == 0:
            engine = build_engine(settings, policy)
    return RankedEngine(engine, world, each)


@contextmanager
def _naming(world: World) -> Iterator[None]:
    """Say of which rank's engine an error is."""
    try:
        yield
    except UserError as error:
        raise UserError(f"rank {world.rank}: {error}") from error


class RankedEngine:
    """The engines of all ranks as one `RolloutEngine`: each rank's engine holds only the draws that it serves.

    With as many engines as draws or more, engines share a draw and split its requests; with fewer, one has several.
    """

    def __init__(self, engine: RolloutEngine | None, world: World, each: int) -> None:
        """`each` neighbouring ranks share an engine, which the first of them has; the others have None."""
        self._engine, self._world = engine, world
        self._owners = range(0, world.size, each)
        """The ranks that have an engine."""
        self._draws: list[Draw | None] = []

    def prepare(self, draws: int, tokens: int) -> None:
        """See `RolloutEngine.prepare`. Ranks of a machine take turns: each finds the memory that the others left."""
        own = int(os.environ.get("LOCAL_RANK", 0))
        for turn in range(max(self._world.gather(own)) + 1):
            with self._world.together(), _naming(self._world):
                if self._engine and turn == own:
                    self._engine.prepare(self._rounds(draws), tokens)

    def load(self, posterior: WeightSource, draws: Sequence[Draw | None], step: int) -> None:
        """See `RolloutEngine.load`. Every rank makes its own draws, of weights that all gather tensor by tensor."""
        self._draws = list(dict.fromkeys(draws))
        mine = [draw for i, draw in enumerate(self._draws) if self._world.rank in self._servers(i)]
        gathered = Gathered(posterior, self._draws[0], len(mine), self._rounds(len(self._draws)))
        with self._world.together(), _naming(self._world):
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
            with _naming(self._world):
                made = self._engine.generate([requests[i] for i in mine], sampling, seed)
            return [replace(completion, problem=_SENDER_KNOWS) for completion in made]

        completions = self._world.assign(owners, complete)
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
