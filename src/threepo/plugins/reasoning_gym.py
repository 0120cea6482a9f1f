"""Problems of any reasoning-gym data set, for example `reasoning-gym:chain_sum(min_terms=2, max_terms=3)`.

Only the full score of 1.0 counts as right: reasoning-gym gives a partial score to an answer that merely contains the
right one, which a policy would learn to exploit.

Some of its scorers run an answer as Python, such as `9**9**9`, so they are called in processes that can be killed.
"""

from functools import cached_property, lru_cache
from typing import Any

from threepo.config import DataConfig
from threepo.config.sources import split_settings
from threepo.data.source import InstalledSource, ProblemSet
from threepo.data.task import Endless, Split, hashed_seed, split_of
from threepo.errors import UserError
from threepo.types import Problem, Verdict, final_answer, judge
from threepo.workers import WorkerPool

PREFIX = "reasoning-gym:"
TIMEOUT_S, MEMORY_MIB = 10.0, 4096
"""Of one answer; on Linux, the memory counts all addresses, of which libraries reserve many."""
_CHUNK = 256
_PER_CHUNK: dict[Split, int] = {"train": 192, "heldout": 8}
"""Problems taken from each chunk of generated items: fewer than the split's share of it (7/8, 1/8)."""


class ReasoningGymProblems(Endless):
    """Endless problems of one data set; the i-th is a function of (spec, split, seed, i).

    `spec` is the name of the data set, with its settings in parentheses.
    """

    def __init__(self, spec: str, split: Split, seed: int) -> None:
        self.spec, self.split, self.seed = spec, split, seed
        self._source = f"{PREFIX}{spec}"
        self._name, self._settings = split_settings(self._source)
        self._chunk = lru_cache(maxsize=4)(self._make_chunk)
        self._chunk(0)  # raises an error here already

    def _make_chunk(self, number: int) -> list[dict[str, Any]]:
        """The generated items of this split."""
        try:
            import reasoning_gym
        except ImportError as error:
            install = "needs the package; in a clone, pip install '.[reasoning-gym]'"
            raise UserError(f"data: {self._source}: {install}") from error
        seed = hashed_seed(f"{self.spec}/{self.seed}/{number}")  # item i of reasoning-gym uses seed + i
        try:
            dataset = reasoning_gym.create_dataset(self._name, **self._settings, seed=seed, size=_CHUNK)
        except (ValueError, TypeError, AssertionError) as error:
            raise UserError(f"data: {self._source}: {error}") from error
        items, reason = [], ""
        for index in range(_CHUNK):
            try:
                items.append(dataset[index])
            except RuntimeError as error:  # of a generator that gives up, as of mazes
                if type(error) is not RuntimeError:
                    raise
                reason = f": {error}"
        found = [item for item in items if split_of(item["question"]) == self.split]
        if not found:
            raise UserError(f"data: {self._source} has too few different items for a {self.split} split{reason}")
        return found

    def problem(self, index: int) -> Problem:
        """Problem number `index`."""
        number, position = divmod(index, _PER_CHUNK[self.split])
        items = self._chunk(number)
        item = items[position % len(items)]
        return Problem(
            id=f"{self._source}/{self.split}/{self.seed}/{index}",
            prompt=item["question"],
            answer="" if item["answer"] is None else str(item["answer"]),
            columns={"entry": item},
        )

    def verify(self, problem: Problem, completion: str) -> Verdict:
        """The verdict of reasoning-gym's own scorer on the text in <answer> tags, or else after the last </think>."""
        _, opened, inside = completion.rpartition("</answer>")[0].rpartition("<answer>")
        given = inside.partition("</answer>")[0].strip() if opened else final_answer(completion)
        if not given:
            return judge(given, False)
        (outcome,) = self._pool.map([(self._name, self._settings, given, problem.columns["entry"])])
        if outcome.failure:  # the scorer failed on this text, or met a limit
            return Verdict(correct=False, status="error", answer=given, detail=outcome.failure)
        return judge(given, outcome.value)

    @cached_property
    def _pool(self) -> WorkerPool:
        return WorkerPool("threepo.plugins.reasoning_gym_scorer:is_right", timeout_s=TIMEOUT_S, memory_mib=MEMORY_MIB)


def _open(name: str, split: Split, settings: DataConfig) -> ProblemSet:
    gym = ReasoningGymProblems(name.removeprefix(PREFIX), split, settings.seed)
    return ProblemSet(gym, gym.verify, name)


SOURCE = InstalledSource(_open, endless=True)
