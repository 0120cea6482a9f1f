"""problems.json in a run's folder: a resumed run goes on with the problems that it began with, or not at all."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from threepo.config import DataConfig
from threepo.data.digest import problems_digest
from threepo.data.source import ProblemSource
from threepo.errors import UserError
from threepo.evaluation.examination import Examination
from threepo.files import read_json
from threepo.run_folder import PROBLEMS
from threepo.types import Problem

ProblemRecord = dict[str, dict[str, Any]]
"""Under `train` and `eval`: the source, the number and a digest of the problems."""


def problem_record(data: DataConfig, training: ProblemSource, examination: Examination | None) -> ProblemRecord:
    """The problems that are left to train on, and those that are evaluated on while training.

    Endless problems are functions of the recipe, so one example shows whether the code that generates them has changed.
    """
    record = {"train": _record(data.train, training.known())}
    if examination:
        record["eval"] = _record(data.eval or data.train, examination.problems)
    return record


def refuse_changed(run: Path, now: ProblemRecord) -> None:
    """Raise `UserError` if the run in this folder began with other problems than it would go on with."""
    if not (run / PROBLEMS).is_file():
        return  # a run of an older version, which kept no record
    began: Mapping[str, Any] = read_json(run / PROBLEMS)
    for part, then in began.items():
        if part in now and then["digest"] != now[part]["digest"]:
            raise UserError(
                f"data.{part}: the problems of {now[part]['source']} have changed since the run began "
                f"({now[part]['problems']} now, {then['problems']} then); put the old ones back, or start a new run "
                f"(with model.path = {str(run)!r} it goes on from what this one has learnt)"
            )


def _record(source: str, problems: Sequence[Problem]) -> dict[str, Any]:
    prompts = [problem.prompt for problem in problems]
    return {"source": source, "problems": len(problems), "digest": problems_digest(problems, prompts)}
