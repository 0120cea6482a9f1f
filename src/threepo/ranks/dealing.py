"""What each rank does of the work of a step: draws and requests, completions to grade, rows to train on.

Every rank knows all of them, so who does what is computed and not negotiated. The results are put together in one
order, whatever the number of ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from threepo.config import EngineConfig, SamplingConfig
from threepo.models.policy import Policy
from threepo.posterior.policy_optimizer import WeightSource
from threepo.ranks.group import Ranks
from threepo.ranks.sharding import Gathered
from threepo.rollout.engines import RolloutEngine, build_engine
from threepo.types import Completion, Draw, Problem, Request, SupervisedRow, TrainingRow, Verdict

Row = TypeVar("Row", TrainingRow, SupervisedRow)
Grade = Callable[[Sequence[Completion]], list[Verdict]]
_SENDER_KNOWS = Problem("", "")
"""Stands for a completion's problem on the way between ranks, because all of them have it."""


def deal_rows(rows: Sequence[Row], ranks: int) -> list[list[Row]]:
    """The rows of each rank: the longest first, each to the rank that has the fewest tokens so far."""
    hands: list[list[Row]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    for row in sorted(rows, key=lambda row: (-len(row.input_tokens), row.index)):
        rank = tokens.index(min(tokens))
        hands[rank].append(row)
        tokens[rank] += len(row.input_tokens)
    return hands


def dealt_grader(grade: Grade, ranks: Ranks) -> Grade:
    """A grader of which every rank grades some problems, each with all its completions."""

    def grade_some(completions: Sequence[Completion]) -> list[Verdict]:
        number: dict[str, int] = {}
        owners = [number.setdefault(c.problem.id, len(number)) % ranks.size for c in completions]
        return ranks.deal(owners, lambda mine: grade([completions[i] for i in mine]))

    return grade_some if ranks.size > 1 else grade


def build_ranked(settings: EngineConfig, policy: Policy, ranks: Ranks) -> RolloutEngine:
    """The engines of all ranks as one; alone, the engine itself."""
    if settings.vllm.servers:
        from threepo.ranks.vllm_servers import VLLMServers  # an engine is only imported for use

        return VLLMServers(policy, settings, ranks)
    engine = build_engine(settings, policy)
    return RankedEngine(engine, ranks) if ranks.size > 1 else engine


class RankedEngine:
    """The engines of all ranks as one `RolloutEngine`: each rank's engine holds only the draws that it serves.

    With as many ranks as draws or more, ranks share a draw and split its requests; with fewer, a rank has several.
    """

    def __init__(self, engine: RolloutEngine, ranks: Ranks) -> None:
        self._engine, self._ranks = engine, ranks
        self._draws: list[Draw | None] = []

    def prepare(self, draws: int, tokens: int) -> None:
        """See `RolloutEngine.prepare`."""
        with self._ranks.together():
            self._engine.prepare(-(-draws // self._ranks.size), tokens)

    def load(self, posterior: WeightSource, draws: Sequence[Draw | None], step: int) -> None:
        """See `RolloutEngine.load`. Every rank makes its own draws, of weights that all gather tensor by tensor."""
        self._draws = list(dict.fromkeys(draws))
        gathered = Gathered(posterior, self._draws[0])
        mine = [draw for i, draw in enumerate(self._draws) if self._ranks.rank in self._servers(i)]
        with self._ranks.together():
            try:
                self._engine.load(gathered, mine, step)
            finally:  # the other ranks need this one's shards, also if it serves fewer draws or has failed
                gathered.gather_until(-(-len(self._draws) // self._ranks.size))

    def generate(self, requests: Sequence[Request], sampling: SamplingConfig, seed: int) -> list[Completion]:
        """See `RolloutEngine.generate`."""
        owners = [0] * len(requests)
        for i, draw in enumerate(self._draws):
            rows, servers = [k for k, request in enumerate(requests) if request.draw == draw], self._servers(i)
            for k, index in enumerate(rows):  # neighbours stay together: they share a prompt
                owners[index] = servers[k * len(servers) // len(rows)]

        def complete(mine: list[int]) -> list[Completion]:
            made = self._engine.generate([requests[i] for i in mine], sampling, seed)
            return [replace(completion, problem=_SENDER_KNOWS) for completion in made]

        completions = self._ranks.deal(owners, complete)
        return [replace(c, problem=request.problem) for c, request in zip(completions, requests, strict=True)]

    def close(self) -> None:
        """See `RolloutEngine.close`."""
        self._engine.close()

    def _servers(self, index: int) -> list[int]:
        """The ranks that serve the draw of this index."""
        size, draws = self._ranks.size, len(self._draws)
        return [rank for rank in range(size) if rank % draws == index % size]
