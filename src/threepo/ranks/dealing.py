"""Division of a step's work among ranks: draws and requests, completions to grade, rows to train on.

Every rank knows all of the work, so each computes its share without negotiation. Results are put together in one order,
which does not depend on the number of ranks.
"""

import os
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from threepo.config import DataConfig, EnvironmentConfig
from threepo.config.engine import EngineConfig, SamplingConfig, VLLMEngineConfig
from threepo.errors import UserError
from threepo.models.packing import AnyRow, pack
from threepo.models.policy import Policy
from threepo.posterior.policy_optimizer import WeightSource
from threepo.ranks.sharding import GatheredWeights, source_sums
from threepo.ranks.world import World
from threepo.rollout.bit_sums import Sums
from threepo.rollout.engines import ConversingEngine, RolloutEngine, build_engine, rows_by_draw
from threepo.rollout.episodes import Failures, with_episodes
from threepo.types import Completion, Draw, Problem, Request, Verdict

Grade = Callable[[Sequence[Completion]], list[Verdict]]
_SENDER_KNOWS = Problem("", "")
"""Stands for a completion's problem on its way between ranks, all of which have the problem."""


def deal_bundles(rows: Sequence[AnyRow], token_budget: int, policy: Policy, world: World) -> Iterator[list[AnyRow]]:
    """This rank's share of the rows, in bundles that go through the model together.

    The longest rows come first, each to the rank that has the fewest tokens so far. Every rank gets as many bundles as
    the one that has most, so its last ones may be empty. Copies of the weights add up their gradients after the last.
    """
    shares: list[list[AnyRow]] = [[] for _ in range(world.size)]
    tokens = [0] * world.size
    for row in sorted(rows, key=lambda row: (-len(row.tokens), row.index)):
        rank = tokens.index(min(tokens))
        shares[rank].append(row)
        tokens[rank] += len(row.tokens)
    padding = not policy.scorer.packed_rows
    bundles = [list(pack(share, token_budget, policy.device, padding=padding)) for share in shares]
    own, most = bundles[world.rank], max(map(len, bundles))
    for number, bundle in enumerate(own + [[]] * (most - len(own)), start=1):
        policy.add_up_copies(number == most)
        yield bundle


def divide_grading(grade: Grade, world: World) -> Grade:
    """A grader that lets every rank grade some problems, each with all its completions."""

    def grade_share(completions: Sequence[Completion]) -> list[Verdict]:
        numbers: dict[str, int] = {}
        owners = [numbers.setdefault(c.problem.id, len(numbers)) % world.size for c in completions]
        return world.deal(owners, lambda mine: grade([completions[i] for i in mine]) if mine else [])

    return grade_share


def refuse_engine(settings: EngineConfig, world: World) -> None:
    """Raise `UserError` for settings of engines that do not fit several ranks, each with an engine on its device."""
    own, local = settings.processes, int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
    if world.size == 1:
        return
    own.only_if(False, "several ranks have a replica each, on their own GPUs; remove it", "replicas", "gpus")
    fix = f"neighbouring ranks share a replica: the {local} ranks of a node cannot be divided so; set it to a divisor"
    own.check("tensor_parallel", local % own.tensor_parallel == 0, fix)


def build_shared_engine(
    settings: EngineConfig,
    policy: Policy,
    world: World,
    environment: EnvironmentConfig | None = None,
    data: DataConfig | None = None,
) -> RolloutEngine:
    """The engines of all ranks as one; alone, the engine itself. With an environment, each rank plays its episodes."""

    def with_environment(engine: ConversingEngine, judges: bool = False) -> RolloutEngine:
        return with_episodes(engine, policy, environment, data, judges) if environment and data else engine

    if isinstance(settings, VLLMEngineConfig) and settings.vllm.servers:
        from threepo.ranks.vllm_servers import VLLMServers  # an engine is only imported for use

        servers = VLLMServers(policy, settings, world)
        with world.together(), _named_errors(world):
            own = with_environment(servers)
        return DealtEngine(own, world, [i % world.size for i in range(len(settings.vllm.servers))], environment)
    if world.is_alone:
        return with_environment(build_engine(settings, policy), judges=True)
    each = settings.processes.tensor_parallel if world.size > 1 else 1
    sums = None
    if isinstance(settings, VLLMEngineConfig):
        sums = partial(source_sums, policy, dtype=getattr(torch, settings.dtype), world=world)
        if policy.device.type == "cuda" and world.size > 1:
            first = torch.cuda.current_device()
            settings = replace(settings, vllm=replace(settings.vllm, gpus=tuple(range(first, first + each))))
    with world.together(), _named_errors(world):
        engine = with_environment(build_engine(settings, policy)) if world.rank % each == 0 else None
    return SharedEngine(engine, world, each, sums, environment)


def servers_of(draw: int, draws: int, servers: int) -> list[int]:
    """The servers that generate with draw number `draw`.

    With as many servers as draws or more, several share a draw; with fewer, a server has several draws.
    """
    return [server for server in range(servers) if server % draws == draw % servers]


def server_of_each(
    requests: Sequence[Request], draws: Sequence[Draw | None], servers: int, own: Container[int]
) -> list[int]:
    """The server of each request among `own`, which have all its draws; see `servers_of`.

    Servers that share a draw split its requests, of which neighbours share a prompt.
    """
    chosen = [0] * len(requests)
    for index, rows in enumerate(rows_by_draw(requests, draws)):
        serving = [server for server in servers_of(index, len(draws), servers) if server in own]
        for k, row in enumerate(rows):
            chosen[row] = serving[k * len(serving) // len(rows)]
    return chosen


@contextmanager
def _named_errors(world: World) -> Iterator[None]:
    """Name this rank, if there are others, in a `UserError` of the body, which comes from its engine."""
    try:
        yield
    except UserError as error:
        if world.size > 1:
            raise UserError(f"rank {world.rank}: {error}") from error
        raise


class DealtEngine:
    """Engines of all ranks as one `RolloutEngine`: they load together, and each generates with its own servers."""

    def __init__(
        self,
        engine: RolloutEngine | None,
        world: World,
        owners: Sequence[int],
        environment: EnvironmentConfig | None = None,
    ) -> None:
        """`owners`: the rank of every server. A rank without a server may have None.

        `environment`: of the episodes that the engines play, and do not judge.
        """
        self._engine, self._world, self._owners = engine, world, owners
        self._failures = Failures(environment) if environment and environment.factory else None
        self._draws: list[Draw | None] = []

    def prepare(self, draws: int, tokens: int) -> None:
        """See `RolloutEngine.prepare`."""
        assert self._engine
        self._engine.prepare(draws, tokens)

    def load(self, posterior: WeightSource, draws: Sequence[Draw | None], step: int) -> int | None:
        """See `RolloutEngine.load`."""
        assert self._engine
        self._begin(draws)
        return self._engine.load(posterior, draws, step)

    def generate(self, requests: Sequence[Request], sampling: SamplingConfig, seed: int) -> list[Completion]:
        """See `RolloutEngine.generate`."""

        def complete(mine: list[int]) -> list[Completion]:
            if not self._engine:
                return []
            with _named_errors(self._world):
                completions = self._engine.generate([requests[i] for i in mine], sampling, seed)
            return [replace(completion, problem=_SENDER_KNOWS) for completion in completions]

        servers = len(self._owners)
        owners = [self._owners[i] for i in server_of_each(requests, self._draws, servers, range(servers))]
        dealt = self._world.deal(owners, complete)
        completions = [replace(c, problem=request.problem) for c, request in zip(dealt, requests, strict=True)]
        if self._failures:
            with self._world.together():
                self._failures.add(completions)
        return completions

    def close(self) -> None:
        """See `RolloutEngine.close`."""
        if self._engine:
            self._engine.close()

    def _begin(self, draws: Sequence[Draw | None]) -> None:
        """Note the draws of a load, whose failed episodes are counted."""
        self._draws = list(dict.fromkeys(draws))
        if self._failures:
            self._failures.restart()


class SharedEngine(DealtEngine):
    """Engines of all ranks as one `RolloutEngine`: each is a server, and loads only the draws that it serves."""

    def __init__(
        self,
        engine: RolloutEngine | None,
        world: World,
        each: int,
        sums: Callable[[Any, Draw | None], Sums] | None = None,
        environment: EnvironmentConfig | None = None,
    ) -> None:
        """`each` neighbouring ranks share an engine, which the first of them has; the others have None.

        `sums`: makes those with which an engine compares what it has written; all ranks call it.
        """
        super().__init__(engine, world, range(0, world.size, each), environment)
        self._sums = sums

    def prepare(self, draws: int, tokens: int) -> None:
        """See `RolloutEngine.prepare`. Ranks of a machine take turns: each finds the memory that the others left."""
        own = int(os.environ.get("LOCAL_RANK", 0))
        for turn in range(max(self._world.gather(own)) + 1):
            with self._world.together(), _named_errors(self._world):
                if self._engine and turn == own:
                    self._engine.prepare(self._rounds(draws), tokens)

    def load(self, posterior: WeightSource, draws: Sequence[Draw | None], step: int) -> int | None:
        """See `RolloutEngine.load`. Every rank makes its own draws, of weights that all gather tensor by tensor.

        The ranks that write one draw, the next at each step, compare it with the shards of all at that draw.
        """
        self._begin(draws)
        if not self._engine:
            torch.cuda.empty_cache()  # a worker of this rank's engine may be asleep on its GPU, and wake at the push
        mine = [draw for index, draw in enumerate(self._draws) if self._world.rank in self._ranks_of(index)]
        turn, rounds = self._draws[step % len(self._draws)], self._rounds(len(self._draws))
        sums = {turn: self._sums(posterior, turn)} if self._sums else {}
        gathered, written = GatheredWeights(posterior, self._draws[0], len(mine), rounds, sums), None
        with self._world.together(), _named_errors(self._world):
            try:
                if self._engine:
                    written = self._engine.load(gathered, mine, step)
            finally:  # the other ranks need this one's shards, also if it has no engine or has failed
                gathered.finish()
        shares = [share for share in self._world.gather(written) if share is not None]
        return sum(shares) if shares else None

    def _rounds(self, draws: int) -> int:
        """The most draws that an engine serves."""
        return -(-draws // len(self._owners))

    def _ranks_of(self, index: int) -> list[int]:
        """The ranks whose engines serve the draw of this index."""
        return [self._owners[server] for server in servers_of(index, len(self._draws), len(self._owners))]
