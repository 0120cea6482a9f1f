"""Problems from a user's own source, a problem in each row, with named columns."""

from pathlib import Path
from typing import Any

from threepo.config import DataConfig
from threepo.data.finite import FiniteProblems, collect
from threepo.data.rows import BrokenRow, Row, chat_messages, open_rows
from threepo.errors import UserError
from threepo.types import Problem

RESERVED = ("prompts", "completions", "completion_ids")
"""Arguments of reward functions that threepo fills itself; no column may have these names."""


def column_problems(source: str, settings: DataConfig) -> FiniteProblems:
    """The problems of a source; `UserError` names the source, the row and the fault."""
    opened = open_rows(source)
    rows = list(opened)
    names = list(dict.fromkeys(name for row in rows if not isinstance(row, BrokenRow) for name in row))
    for name in set(RESERVED) & set(names) - {settings.prompt_column}:
        raise UserError(
            f"{opened.name}: has a column {name!r}, which is an argument that threepo itself gives to reward "
            f"functions; rename the column"
        )
    if settings.tests_column not in (*names, "tests"):
        raise UserError(
            f"{opened.name}: no column {settings.tests_column!r}; it has {', '.join(map(repr, names))}; set "
            f"data.tests_column"
        )

    def problem(row: Row, number: int) -> Problem:
        answer, own_id = row.get(settings.answer_column), row.get("id")
        columns = {name: row.get(name) for name in names if name != settings.prompt_column}
        if settings.answer_column in names:
            columns.setdefault("answer", answer)
        if settings.tests_column in names:
            columns["tests"] = row.get(settings.tests_column)
        return Problem(
            id=f"{Path(source).name}:{number}" if own_id is None else str(own_id),
            prompt=_prompt(row, settings.prompt_column),
            answer="" if answer is None else str(answer),
            columns=columns,
        )

    return collect(opened.name, rows, problem, settings)


def _prompt(row: Row, column: str) -> str | tuple[Any, ...]:
    if column not in row:
        raise BrokenRow(f"no column {column!r}; it has {', '.join(map(repr, row))}; set data.prompt_column")
    prompt = row[column]
    if prompt == "":
        raise BrokenRow("its prompt is empty")
    return prompt if isinstance(prompt, str) else chat_messages(prompt, "prompt, if it is not text,")
