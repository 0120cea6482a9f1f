"""RandOpt (arXiv 2603.12228; docs/evaluation.md): draws are compared on training problems, and the best ones vote."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from threepo.config import EvalConfig, EvaluationConfig
from threepo.data.finite import warn_of_shared_problems
from threepo.data.source import open_training
from threepo.evaluation.examination import Examination, examine, with_grader
from threepo.evaluation.records import parts_of
from threepo.models.policy import Policy
from threepo.ranks.dealing import divide_grading
from threepo.ranks.world import World
from threepo.types import Purpose


def selection(config: EvaluationConfig, policy: Policy, world: World, exams: Iterable[Examination]) -> Examination:
    """The questions that the draws are compared on, from data.train; warns of problems of `exams` among them."""
    with world.together():
        source, grader = with_grader(open_training(config.data), config.reward, config.data)
    settings = replace(config, eval=replace(config.eval, problems=config.eval.selection_problems))
    source = replace(source, label=f"{source.source}.selection")
    exam = examine(source, divide_grading(grader, world), policy, settings)
    for heldout in exams:
        what = f"{heldout.label}, with draws that are chosen on {source.source}"
        warn_of_shared_problems(what, exam.problems, heldout.problems, bool(config.environment.factory))
    return exam


def parts_by_draws(folder: Path, exam: Examination, settings: EvalConfig) -> dict[Path, Examination]:
    """One completion of every draw on every problem, in parts; memory never holds more draws than will be chosen."""
    parts: dict[Path, Examination] = {}
    every = range(settings.draws)
    for first in every[:: settings.best_draws]:
        numbers = every[first : first + settings.best_draws]
        asked = replace(exam, numbers=numbers, samples=len(numbers))
        parts |= parts_of(folder, asked, settings.part_size, len(parts))
    return parts


def best_draws(rows: Sequence[Mapping[str, Any]], count: int) -> dict[str, Any]:
    """Scores of all draws by number, and the best `count`, best first and of equals the lower number first."""
    by_draw: dict[int, list[bool]] = {}
    for row in rows:
        by_draw.setdefault(row["draw_index"] - Purpose.EVALUATION, []).append(row["correct"])
    scores = {number: fmean(by_draw[number]) for number in sorted(by_draw)}
    return {"scores": scores, "best": sorted(scores, key=lambda number: -scores[number])[:count]}
