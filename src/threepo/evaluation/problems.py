"""Sets of problems to evaluate on, and the graders of problems. Nothing heavy is imported here."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from threepo.config import DataConfig, RewardConfig
from threepo.config.sources import is_file
from threepo.data.finite import FiniteProblems
from threepo.data.source import OpenedSource, open_heldout
from threepo.rewards.grading import Grader, lack, load_grader, refuse_ignored

Source = TypeVar("Source", bound=OpenedSource)


@dataclass(frozen=True)
class ProblemSet(OpenedSource):
    """Problems to evaluate on, with their verifier: a benchmark, or held-out problems of [data]."""

    label: str
    """The name of its results."""
    source: str
    """Where the problems come from."""
    template: str
    """The text around each prompt; empty where the problems have templates of their own, or none."""


def heldout_set(data: DataConfig) -> ProblemSet:
    """The held-out problems of [data]."""
    opened, source = open_heldout(data), data.eval or data.train
    return ProblemSet(opened.problems, opened.verifier, data_label(data), source, data.prompt_template)


def data_label(data: DataConfig) -> str:
    """The name of the results on held-out problems of [data]."""
    source = data.eval or data.train
    return Path(source.removesuffix(".gz")).stem if is_file(source) else source


def with_grader(source: Source, reward: RewardConfig, data: DataConfig) -> tuple[Source, Grader]:
    """The source with the grader that [reward] names.

    A problem that lacks what the grader needs is a broken row: `data.broken_rows` says whether it is left out or a
    `UserError`.
    """
    refuse_ignored(reward, source.verifier)
    problems, finite = source.problems, isinstance(source.problems, FiniteProblems)
    if data.broken_rows == "skip" and isinstance(problems, FiniteProblems):
        problems = problems.without(lambda problem: lack(reward, source.verifier, problem))
    grader = load_grader(reward, source.verifier, problems.known(), rows=finite)
    return replace(source, problems=problems), grader
