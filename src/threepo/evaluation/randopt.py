"""RandOpt (arXiv 2603.12228; docs/evaluation.md): draws are compared on training problems, and the best ones vote.

They are compared a few at a time, as many as will vote in the end, so that memory never holds more of them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from threepo.config import EvaluationConfig
from threepo.data.finite import content, warn_of_shared
from threepo.data.source import open_training
from threepo.evaluation.examination import Examination, examine, with_grader
from threepo.evaluation.records import Part, parts_of
from threepo.models.policy import Policy
from threepo.ranks.dealing import divide_grading
from threepo.ranks.world import World
from threepo.types import Purpose


@dataclass(frozen=True)
class Choice:
    """Result of a search, by the numbers of the draws."""

    scores: Mapping[int, float]
    """The share of right completions on the selection problems, for every draw."""
    best: tuple[int, ...]
    """The chosen draws, the best first; of equals, the lower number."""


def choose(rows: Sequence[Mapping[str, Any]], count: int) -> Choice:
    """The best `count` draws, by rows of their graded completions."""
    by_draw: dict[int, list[bool]] = {}
    for row in rows:
        by_draw.setdefault(row["draw_index"] - Purpose.EVALUATION, []).append(row["correct"])
    scores = {number: fmean(by_draw[number]) for number in sorted(by_draw)}
    return Choice(scores, tuple(sorted(scores, key=lambda number: -scores[number])[:count]))


@dataclass(frozen=True)
class Search:
    """Every draw on the selection problems, with one completion each."""

    label: str
    """Name of the completions in the evaluation's folder."""
    exam: Examination
    draws: int
    best: int

    def parts(self, folder: Path, part_size: int) -> list[Part]:
        """The parts of the search, ordered by the draws that generate them: as many at a time as are chosen."""
        parts: list[Part] = []
        for first in range(0, self.draws, self.best):
            numbers = range(first, min(first + self.best, self.draws))
            exam = replace(self.exam, numbers=numbers, samples=len(numbers))
            parts += parts_of(folder, self.label, exam, part_size, len(parts))
        return parts


def search_for(config: EvaluationConfig, policy: Policy, world: World, exams: Iterable[Examination]) -> Search:
    """Return the search that `eval.best_draws` asks for; its problems are the first of data.train.

    Warns of problems of `exams` that are among them.
    """
    with world.together():
        source, grader = with_grader(open_training(config.data), config.reward, config.data)
    selection = replace(config, eval=replace(config.eval, problems=config.eval.selection_problems))
    exam = examine(source, divide_grading(grader, world), policy, selection)
    trained = list(map(content, exam.problems))
    for heldout in exams:
        what = f"{heldout.problem_set.label}, with draws that are chosen on {source.source}"
        warn_of_shared(what, trained, list(map(content, heldout.problems)))
    return Search(f"{source.source}.selection", exam, config.eval.draws, config.eval.best_draws)
