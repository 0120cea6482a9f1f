"""Problems from a user's own file: JSONL or parquet, one problem per row, with named columns."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from threepo.config import DataConfig
from threepo.data.finite import FiniteProblems, collect
from threepo.data.rows import BrokenRow, Row, iterate_file, without_nulls
from threepo.errors import UserError
from threepo.types import Problem

RESERVED = ("prompts", "completions", "completion_ids")
"""What threepo itself hands to reward functions; no column may have these names."""


def file_problems(path: Path, settings: DataConfig) -> FiniteProblems:
    """The problems of a file; `UserError` names the file, the row and what is wrong with it."""
    source = f"data file {path}"
    rows = list(iterate_file(path))
    names = tuple(dict.fromkeys(name for row in rows if not isinstance(row, BrokenRow) for name in row))
    for name in names:
        if name in RESERVED and name != settings.prompt_column:
            raise UserError(
                f"{source}: has a column {name!r}, the name of what threepo hands to reward functions itself; rename "
                f"the column"
            )
    if settings.tests_column not in (*names, "tests"):
        raise UserError(
            f"{source}: no column {settings.tests_column!r}; it has {', '.join(map(repr, names))}; set "
            f"data.tests_column"
        )

    def problem(row: Row, number: int) -> Problem:
        own_id = row.get("id")
        answer = row.get(settings.answer_column)
        return Problem(
            id=f"{path.name}:{number}" if own_id is None else str(own_id),
            prompt=_prompt(row, settings),
            answer="" if answer is None else str(answer),
            columns=_columns(row, names, settings),
            place=f"{source}, row {number}",
        )

    return collect(source, rows, problem, settings)


def _prompt(row: Row, settings: DataConfig) -> str | tuple[Any, ...]:
    if settings.prompt_column not in row:
        raise BrokenRow(
            f"no column {settings.prompt_column!r}; it has {', '.join(map(repr, row))}; set data.prompt_column"
        )
    prompt = row[settings.prompt_column]
    if isinstance(prompt, str):
        if not prompt:
            raise BrokenRow("its prompt is empty")
        return prompt
    if isinstance(prompt, list) and prompt and all(map(_is_message, prompt)):
        return tuple(map(without_nulls, prompt))
    raise BrokenRow(
        "the prompt must be text or a list of chat messages, one or more, each with its role and content as text"
    )


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("role", "content"))


def _columns(row: Row, names: Sequence[str], settings: DataConfig) -> dict[str, Any]:
    """All columns of the file but the prompt's, None where the row has no such."""
    columns = {name: row.get(name) for name in names if name != settings.prompt_column}
    if settings.answer_column in names:
        columns.setdefault("answer", row.get(settings.answer_column))
    if settings.tests_column in names:
        columns["tests"] = row.get(settings.tests_column)
    return columns
