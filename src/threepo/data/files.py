"""Problems from a user's own file: JSONL or parquet, one problem per row, with named columns."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from threepo.config import DataConfig
from threepo.errors import UserError
from threepo.types import Problem

SUFFIXES = (".jsonl", ".parquet")


@dataclass(frozen=True)
class FileProblems:
    """A finite list of problems; training goes through it epoch by epoch, each in its own order."""

    path: Path
    problems: tuple[Problem, ...]
    seed: int

    @classmethod
    def read(cls, path: Path, settings: DataConfig) -> "FileProblems":
        """Read every row; `UserError` names the file, the row and what is wrong with it."""
        if not path.is_file():
            raise UserError(f"data file {path}: no such file")
        rows = _read_jsonl(path) if path.suffix == ".jsonl" else _read_parquet(path)
        if not rows:
            raise UserError(f"data file {path}: holds no problems")
        problems = tuple(_problem(path, number, row, settings) for number, row in enumerate(rows, start=1))
        seen: dict[str, int] = {}
        for number, problem in enumerate(problems, start=1):
            if problem.id in seen:
                raise UserError(f"data file {path}: rows {seen[problem.id]} and {number} share the id {problem.id!r}")
            seen[problem.id] = number
        return cls(path, problems, settings.seed)

    def batch(self, step: int, size: int) -> list[Problem]:
        """The problems of one training step: a function of (seed, step). An epoch drops its incomplete last batch."""
        steps_per_epoch = len(self.problems) // size
        if steps_per_epoch == 0:
            raise UserError(
                f"data file {self.path}: holds {len(self.problems)} problems, fewer than "
                f"data.prompts_per_step = {size}; lower it"
            )
        epoch, position = divmod(step, steps_per_epoch)
        order = list(range(len(self.problems)))
        Random(f"epoch/{self.seed}/{epoch}").shuffle(order)
        return [self.problems[i] for i in order[position * size : (position + 1) * size]]

    def first(self, count: int) -> Sequence[Problem]:
        """The first `count` problems of the file, in its order."""
        return self.problems[:count]


def _read_jsonl(path: Path) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"data file {path}, line {number}: not valid JSON: {error}") from error
        if not isinstance(row, dict):
            raise UserError(f"data file {path}, line {number}: must be an object with named columns, not {line[:40]}")
        rows.append(row)
    return rows


def _read_parquet(path: Path) -> list[dict[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        rows: list[dict[str, Any]] = pyarrow.parquet.read_table(path).to_pylist()
    except pyarrow.ArrowInvalid as error:
        raise UserError(f"data file {path}: not a valid parquet file: {error}") from error
    return rows


def _problem(path: Path, number: int, row: dict[str, Any], settings: DataConfig) -> Problem:
    if settings.prompt_column not in row:
        raise UserError(
            f"data file {path}, row {number}: no column {settings.prompt_column!r}; it has "
            f"{', '.join(map(repr, row))}; set data.prompt_column"
        )
    prompt = row[settings.prompt_column]
    if isinstance(prompt, list) and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in prompt):
        prompt = tuple(prompt)
    elif not isinstance(prompt, str):
        raise UserError(f"data file {path}, row {number}: the prompt must be text or a list of chat messages")
    columns = {key: value for key, value in row.items() if key != settings.prompt_column}
    answer = row.get(settings.answer_column)
    return Problem(
        id=str(row.get("id", f"{path.name}:{number}")),
        prompt=prompt,
        answer="" if answer is None else str(answer),
        columns=columns,
    )
