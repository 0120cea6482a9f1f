"""Tables of numbers: rows by header, shown by a terminal, a Markdown file or a page."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from rich.table import Column, Table
from rich.text import Text

MISSING = "-"
TableRow = Mapping[str, str]
"""Cells by the header of their column; those without a header in it are missing."""


def number(value: float | None, form: str = ".3g") -> str:
    """A number in a format, or the sign for a missing one."""
    return MISSING if value is None else format(value, form)


def percent(value: float | None, form: str = ".1f") -> str:
    """A share in per cent, without the sign."""
    return number(None if value is None else 100 * value, form)


Ends = Sequence[float | None]
"""Lower and upper end of an interval."""


def with_interval(value: float | None, interval: Ends, form: str, scale: float = 1, unit: str = "") -> str:
    """A number with its interval, as far as they are known: 0.5 [0.4, 0.6]."""
    if value is None:
        return MISSING
    ends = ", ".join(format(scale * end, form.removeprefix("+")) for end in interval if end is not None)
    return f"{scale * value:{form}}{unit}" + f" [{ends}]" * (None not in interval)


def bold(text: str) -> str:
    """A cell that stands out, written as in Markdown."""
    return f"**{text}**"


def table(title: str, *sections: Sequence[TableRow], columns: Sequence[str] = ()) -> Table:
    """A table of sections of rows, with the given columns, or else all that a row has; the first holds names."""
    heads = columns or list(dict.fromkeys(chain.from_iterable(chain.from_iterable(sections))))
    found = Table(*(Column(head, justify="right" if i else "left") for i, head in enumerate(heads)), title=title)
    for section in sections:
        for row in section:
            found.add_row(*(_cell(row.get(head, MISSING)) for head in heads))
        found.add_section()
    return found


def _cell(text: str) -> Text:
    """A cell as it is, since names of runs may have brackets; only `bold` is markup."""
    return Text(text[2:-2], "bold") if text.startswith("**") else Text(text)


def cells(table: Table) -> dict[str, Any]:
    """The texts of a table: its title, its columns' headers, and its rows."""
    columns: list[list[Any]] = [list(column.cells) for column in table.columns]
    texts = ([bold(cell.plain) if cell.style else cell.plain for cell in column] for column in columns)
    rows = list(zip(*texts, strict=True))
    return {"title": table.title, "columns": [column.header for column in table.columns], "rows": rows}


def markdown(table: Table) -> str:
    """A table in Markdown, without its title."""
    texts = cells(table)
    lines = [texts["columns"], ["---"] * len(texts["columns"]), *texts["rows"]]
    escaped = [" | ".join(cell.replace("|", "\\|") for cell in line) for line in lines]
    return "\n".join(f"| {line} |" for line in escaped)
