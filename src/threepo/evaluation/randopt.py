"""RandOpt (arXiv 2603.12228; docs/evaluation.md): the best of many draws, by training problems, answer and vote.

The draws are compared a few at a time, as many as will answer in the end, so that no more of them are ever in memory.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from threepo.config import EvaluationConfig
from threepo.data.finite import content, warn_of_shared
from threepo.data.source import open_training
from threepo.evaluation.examination import Examination, examine, with_grader
from threepo.evaluation.records import Portion, joined
from threepo.models.policy import Policy
from threepo.ranks.dealing import dealt_grader
from threepo.ranks.group import Ranks
from threepo.types import Purpose


@dataclass(frozen=True)
class Choice:
    """Draws by their numbers."""

    scores: Mapping[int, float]
    """The share of completions of the selection problems that are right, of every draw."""
    best: tuple[int, ...]
    """The chosen draws, the best first; of equals, the lower number."""


def choose(rows: Sequence[Mapping[str, Any]], count: int) -> Choice:
    """The best `count` draws, by their graded completions."""
    numbers = sorted({row["draw_index"] for row in rows})
    scores = {
        number - Purpose.EVALUATION: fmean(row["correct"] for row in rows if row["draw_index"] == number)
        for number in numbers
    }
    return Choice(scores, tuple(sorted(scores, key=lambda number: (-scores[number], number))[:count]))


@dataclass(frozen=True)
class Search:
    """Every draw on the selection problems, with one completion each."""

    label: str
    """Of the completions in the evaluation's folder."""
    exam: Examination
    draws: int
    best: int

    def portions(self) -> list[Portion]:
        """Portions of completions, each generated under one set of weights, in turn."""
        portions, first_part = [], 0
        for first in range(0, self.draws, self.best):
            numbers = range(first, min(first + self.best, self.draws))
            settings = replace(self.exam.settings, samples=len(numbers), draws=len(numbers), best_draws=0)
            exam = replace(self.exam, numbers=numbers, settings=settings)
            portions.append(Portion(self.label, exam, first_part))
            first_part += len(exam.parts())
        return portions

    def choice(self, folder: Path) -> Choice:
        """The draws that did best, once all have answered."""
        parts = sum(len(portion.exam.parts()) for portion in self.portions())
        return choose(joined(folder, self.label, parts), self.best)


def search_for(config: EvaluationConfig, policy: Policy, ranks: Ranks, exams: Mapping[str, Examination]) -> Search:
    """Builds the search that `eval.best_draws` asks for; its problems are the first of data.train.

    Warns of problems of `exams` that are among them.
    """
    with ranks.together():
        source, grader = with_grader(open_training(config.data), config.reward, config.data)
    selection = replace(config, eval=replace(config.eval, problems=config.eval.selection_problems))
    exam = examine(source, dealt_grader(grader, ranks), policy, selection)
    for label, heldout in exams.items():
        trained, tested = (list(map(content, found.problems)) for found in (exam, heldout))
        warn_of_shared(f"{label}, with draws that are chosen on {source.source}", trained, tested)
    return Search(f"{source.source}.selection", exam, config.eval.draws, config.eval.best_draws)
