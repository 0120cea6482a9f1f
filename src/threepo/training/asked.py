"""What a run asks, kept in its folder as problems.json: a resumed run goes on with the same problems, or not at all."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from threepo.config import DataConfig
from threepo.data.digest import problems_digest
from threepo.data.source import ProblemSource
from threepo.errors import UserError
from threepo.evaluation.evaluate import Examination
from threepo.files import read_json
from threepo.run_folder import PROBLEMS
from threepo.types import Problem

Asked = dict[str, dict[str, Any]]
"""By what the problems are for: source, number and digest of them."""


def asked(data: DataConfig, training: ProblemSource, examination: Examination | None) -> Asked:
    """The problems that are left to train on, and those that are evaluated on while training.

    Problems without end are functions of the recipe; an example of them tells when what makes them has changed.
    """
    record = {"train": _record(data.train, training.known())}
    if examination:
        record["eval"] = _record(data.eval or data.train, examination.problems)
    return record


def refuse_changed(run: Path, now: Asked) -> None:
    """Raise `UserError` if the run in this folder began with other problems than it would go on with."""
    if not (run / PROBLEMS).is_file():
        return  # begun by a version that kept no record: nobody can tell
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
